"""The supervisor's policy, without a process: facts in, decisions out."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.protocol.events import InstanceProgressed, VersionInstalled
from dora_rl.core.protocol.types import Length
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.decisions import (
    ELASTIC_INSTANCES,
    EVALUATOR,
    TRAINER,
    Abandon,
    AnnounceStop,
    Death,
    Decision,
    Drain,
    FailRun,
    Kill,
    Limits,
    RejectBatch,
    Restart,
    Retire,
    RunFacts,
    StopRun,
    Worker,
    rollout,
)
from dora_rl.runtime.control.supervisor import LEAST_SERVICE_S, MOST_RESTARTS, Supervisor

LIMITS = Limits(
    start_timeout_s=300.0,
    train_silence_s=60.0,
    stop_timeout_s=600.0,
    max_train_attempts=2,
    memory_remedy="Free some.",
    trainer_log="run/logs/trainer.log",
)
RUN = RunFacts()
TRAINING = RunFacts(steps=3, training=True)
KILLED = Death("it ended with signal SIGKILL")
ZERO = rollout(0)
WORK = ms.decode(
    ms.encode(ms.Reported.of(InstanceProgressed(0, 0, 5, (Length(0, 1, 5),))))  # as it arrives
)
IDLE = ms.Reported.of(VersionInstalled(0, 0, 0, "digest"))


def supervisor(**changes: Any) -> Supervisor:
    return Supervisor(replace(LIMITS, **changes))


def raised(pid: int) -> Death:
    return Death(f"the worker ended with exit code 1: no such device, says {pid}", own_error=True)


def died_again(
    sup: Supervisor, worker: Worker, deaths: Sequence[Death], now: float = 0.0
) -> list[Decision]:
    """What follows from each death of a worker that is started again and never heard from."""
    found: list[Decision] = []
    for incarnation, death in enumerate(deaths):
        sup.started(now, worker, incarnation)
        found += sup.died(now, worker, death, RUN)
        if isinstance(found[-1], FailRun):
            break
    return found


# Restarts


def test_a_worker_that_dies_is_started_again_under_a_higher_incarnation() -> None:
    sup = supervisor()
    sup.started(0.0, ZERO, 7)
    assert sup.died(1.0, ZERO, KILLED, RUN) == [Restart(ZERO, 8, KILLED.why)]


def test_an_instance_that_is_not_wanted_any_more_has_no_successor() -> None:
    sup, one = supervisor(), rollout(1)
    for worker in (ZERO, one):
        sup.started(0.0, worker, 2)
    sup.resized(1)
    assert sup.died(1.0, one, KILLED, RUN) == [Retire(one, 2, KILLED.why)]
    assert sup.died(1.0, ZERO, KILLED, RUN) == [Restart(ZERO, 3, KILLED.why)]
    sup.resized(2)
    sup.started(2.0, one, 3)
    assert sup.died(3.0, one, KILLED, RUN) == [Restart(one, 4, KILLED.why)]


# Workers that have to go


def serving(worker: Worker) -> Supervisor:
    """With a worker that was started, and serves."""
    sup = supervisor()
    sup.started(0.0, worker, 4)
    sup.heard(1.0, worker, ms.TrainerReady() if worker == TRAINER else IDLE)
    return sup


@pytest.mark.parametrize("worker", [TRAINER, ZERO, EVALUATOR])
def test_who_is_told_to_go_is_drained_once(worker: Worker) -> None:
    sup = serving(worker)
    assert sup.told_to_go(worker, "its node is drained") == [Drain(worker)]
    assert sup.told_to_go(worker, "it was sent SIGTERM") == []
    sup.died(2.0, worker, KILLED, RUN)
    sup.started(3.0, worker, 5)
    assert sup.told_to_go(worker, "again") != []


@pytest.mark.parametrize("worker", [TRAINER, ZERO])
def test_who_does_not_serve_yet_has_nothing_to_hand_over(worker: Worker) -> None:
    sup = supervisor()
    assert sup.told_to_go(worker, "early") == []
    sup.started(0.0, worker, 0)
    assert sup.told_to_go(worker, "early") == [Kill(worker)]


@pytest.mark.parametrize("worker", [TRAINER, ZERO])
def test_going_when_told_to_counts_as_no_failure(worker: Worker) -> None:
    """However often, and however soon after its start; nor is the batch to blame."""
    sup, why = supervisor(max_train_attempts=1), f"{worker} was told to go: spot"
    for incarnation in range(9):
        sup.started(0.0, worker, incarnation)
        if incarnation % 2:
            sup.heard(0.0, worker, ms.TrainerReady() if worker == TRAINER else IDLE)
        sup.told_to_go(worker, "spot")
        restarts = sup.died(0.0, worker, raised(1), TRAINING)
        assert restarts == [Restart(worker, incarnation + 1, why, told_to_go=True)]


def test_one_that_is_told_to_go_and_not_wanted_has_no_successor() -> None:
    sup = serving(ZERO)
    sup.told_to_go(ZERO, "spot")
    sup.resized(0)
    assert sup.died(2.0, ZERO, KILLED, RUN) == [Retire(ZERO, 4, KILLED.why)]


def test_an_instance_on_the_trainers_devices_is_replaced_however_many_others_there_are() -> None:
    sup, elastic = supervisor(), rollout(ELASTIC_INSTANCES)
    sup.started(0.0, elastic, 0)
    sup.resized(1)
    assert sup.died(1.0, elastic, KILLED, RUN) == [Restart(elastic, 1, KILLED.why)]


@pytest.mark.parametrize("worker", [TRAINER, ZERO])
def test_one_that_never_serves_is_started_four_times(worker: Worker) -> None:
    *before, last = died_again(supervisor(), worker, [KILLED] * 9)
    assert before == [Restart(worker, n, KILLED.why) for n in (1, 2, 3)]
    assert last == FailRun(f"{KILLED.why}, 4 times")


@pytest.mark.parametrize("worker", [TRAINER, ZERO])
def test_the_same_error_of_its_own_twice_in_a_row_is_enough(worker: Worker) -> None:
    """Whatever the numbers of processes and addresses in it."""
    first, second = raised(17), raised(4711)
    restart, failed = died_again(supervisor(), worker, [first, second])
    assert restart == Restart(worker, 1, first.why)
    assert failed == FailRun(f"{second.why}, twice in a row before it served")
    between = died_again(supervisor(), worker, [first, KILLED, second])
    assert not any(isinstance(decision, FailRun) for decision in between)


@given(st.lists(st.booleans(), max_size=40))
def test_failed_starts_count_in_a_row(serves: list[bool]) -> None:
    """A worker that served is started for ever; the run fails at the fourth in a row that not."""
    sup = supervisor()
    in_a_row = 0
    for incarnation, served in enumerate(serves):
        sup.started(0.0, ZERO, incarnation)
        if served:
            sup.heard(0.0, ZERO, WORK)
        in_a_row = 0 if served else in_a_row + 1
        (decision,) = sup.died(0.0, ZERO, KILLED, RUN)
        if in_a_row > MOST_RESTARTS:
            assert decision == FailRun(f"{KILLED.why}, {in_a_row} times")
            return
        assert decision == Restart(ZERO, incarnation + 1, KILLED.why)


@pytest.mark.parametrize(
    ("message", "lasted_s", "served"),
    [
        (WORK, 0.0, True),
        (IDLE, LEAST_SERVICE_S, False),
        (IDLE, LEAST_SERVICE_S + 1.0, True),
        (None, 1000.0, False),
    ],
)
def test_to_serve_is_to_lengthen_a_trajectory_or_to_last_after_joining(
    message: ms.FromRollout | None, lasted_s: float, served: bool
) -> None:
    sup = supervisor()
    died_again(sup, ZERO, [KILLED] * MOST_RESTARTS)
    sup.started(0.0, ZERO, 3)
    if message is not None:
        sup.heard(0.0, ZERO, message)
    (decision,) = sup.died(lasted_s, ZERO, KILLED, RUN)
    assert isinstance(decision, Restart) == served


def test_workers_are_counted_apart() -> None:
    sup = supervisor()
    for worker in (ZERO, rollout(1), TRAINER):
        found = died_again(sup, worker, [KILLED] * MOST_RESTARTS)
        assert all(isinstance(decision, Restart) for decision in found)


def test_nobody_waits_for_an_evaluator_that_died() -> None:
    sup = supervisor()
    for _ in range(9):
        sup.started(0.0, EVALUATOR)
        assert sup.died(0.0, EVALUATOR, KILLED, RUN) == [Abandon(EVALUATOR, KILLED.why)]


# What the core gives up


def test_an_expelled_incarnation_is_killed_and_its_reason_is_told() -> None:
    sup = supervisor()
    sup.started(0.0, ZERO, 1)
    assert sup.expelled(0, 0, "silent.") == []  # it is gone already
    assert sup.expelled(5, 1, "silent.") == []
    assert sup.expelled(0, 1, "silent.") == [Kill(ZERO)]
    (decision,) = sup.died(0.0, ZERO, KILLED, RUN)
    assert decision == Restart(ZERO, 2, "rollout instance 0 was given up: silent")


def test_the_first_reason_for_which_one_is_given_up_is_told() -> None:
    """The others follow from it."""
    sup = supervisor()
    sup.started(0.0, ZERO)
    for reason in ("version 3 cannot be installed", "silent"):
        assert sup.expelled(0, 0, reason) == [Kill(ZERO)]
    (decision,) = sup.died(0.0, ZERO, KILLED, RUN)
    why = "rollout instance 0 was given up: version 3 cannot be installed"
    assert decision == Restart(ZERO, 1, why)


def test_one_that_is_given_up_has_not_served_by_lasting() -> None:
    """It joined, and was silent from then on."""
    sup = supervisor()
    for incarnation in range(MOST_RESTARTS + 1):
        sup.started(0.0, ZERO, incarnation)
        sup.heard(0.0, ZERO, IDLE)
        sup.expelled(0, incarnation, "silent")
        (decision,) = sup.died(1000.0, ZERO, KILLED, RUN)
        assert isinstance(decision, FailRun) == (incarnation == MOST_RESTARTS)


def test_a_version_that_nobody_can_install_fails_the_run_though_others_serve() -> None:
    sup = supervisor()
    reason = "version 3 cannot be installed: manifest.json is cut"
    sup.install_failed(reason)
    for incarnation in range(9):
        sup.started(0.0, ZERO, incarnation)
        sup.heard(0.0, ZERO, WORK)
        sup.expelled(0, incarnation, reason)
        (decision,) = sup.died(100.0, ZERO, KILLED, RUN)
        if isinstance(decision, FailRun):
            break
    assert incarnation == MOST_RESTARTS
    assert decision == FailRun(f"rollout instance 0 was given up: {reason}, 4 times")


def test_a_launcher_that_replaces_no_worker_fails() -> None:
    sup = supervisor(replaces_workers=False)
    message = "instance 0 had to be given up: silent"
    assert sup.expelled(0, 0, "silent") == [FailRun(message)]


# Time


def ready(sup: Supervisor, now: float = 0.0, incarnation: int = 0) -> None:
    sup.started(now, TRAINER, incarnation)
    sup.heard(now, TRAINER, ms.TrainerReady())


@given(st.lists(st.floats(0.0, 200.0), max_size=12), st.booleans())
def test_a_trainer_is_killed_for_silence_alone(pauses_s: list[float], serves: bool) -> None:
    """It owes an answer, and has not been heard from for longer than its limit."""
    sup = supervisor()
    sup.started(0.0, TRAINER)
    limit = LIMITS.start_timeout_s
    if serves:
        sup.heard(0.0, TRAINER, ms.TrainerReady())
        assert sup.check(1e9, RUN) == []  # nothing was asked
        sup.asked(0.0, ms.PublishVersion(1))
        limit = LIMITS.train_silence_s
    now = 0.0
    for pause_s in pauses_s:
        now += pause_s
        hung = pause_s > limit
        assert sup.check(now, RUN) == ([Kill(TRAINER)] if hung else [])
        if hung:
            assert sup.check(now + 1.0, RUN) == [Kill(TRAINER)], "until it is dead"
            (decision,) = sup.died(now, TRAINER, KILLED, RUN)
            why = f"the trainer showed no progress for {limit:.0f} s"
            assert decision == Restart(TRAINER, 1, why)
            return
        sup.heard(now, TRAINER, ms.Progressed())
    if serves:
        sup.heard(now, TRAINER, ms.Published(1, "digest", 0))
        assert not sup.trainer_awaited
        assert sup.check(now + 1e9, RUN) == []


def test_a_trainer_is_not_silent_before_it_is_asked() -> None:
    sup = supervisor()
    ready(sup)
    sup.asked(1000.0, ms.Save(1))  # written beside its other work
    assert sup.check(2000.0, RUN) == []
    sup.asked(2000.0, ms.PublishVersion(1))
    assert sup.check(2000.0 + LIMITS.train_silence_s, RUN) == []
    assert sup.check(2001.0 + LIMITS.train_silence_s, RUN) == [Kill(TRAINER)]


@given(st.lists(st.tuples(st.floats(0.0, 400.0), st.booleans()), min_size=1, max_size=8))
def test_an_instance_is_killed_if_it_has_not_joined_in_time(
    instances: list[tuple[float, bool]],
) -> None:
    sup = supervisor()
    for name, (started_at, joined) in enumerate(instances):
        sup.started(started_at, rollout(name))
        if joined:
            sup.heard(started_at, rollout(name), IDLE)
    now = 400.0
    late = [
        Kill(rollout(name))
        for name, (started_at, joined) in enumerate(instances)
        if not joined and now - started_at > LIMITS.start_timeout_s
    ]
    assert sup.check(now, RUN) == late


def test_an_overdue_evaluation_costs_the_evaluator_if_there_is_one() -> None:
    sup = supervisor()
    overdue = RunFacts(evaluation_overdue=True)
    assert sup.check(0.0, overdue) == []
    sup.started(0.0, EVALUATOR)
    assert sup.check(0.0, RUN) == []
    assert sup.check(0.0, overdue) == [Kill(EVALUATOR)]


# The end


def test_a_stop_is_due_once_the_run_has_begun_and_has_a_limit() -> None:
    sup = supervisor()
    sup.ask_to_stop()
    assert sup.check(0.0, RunFacts(begun=False)) == []
    assert sup.check(1000.0, RUN) == [StopRun(None)]
    stopping = RunFacts(stopping=True)
    assert sup.check(1600.0, stopping) == []
    (failed,) = sup.check(1600.5, stopping)
    assert failed == FailRun(
        "the last step and its checkpoint took longer than runtime.stop_timeout_s: `600.0`. "
        "Raise it."
    )
    assert sup.check(1600.5, RunFacts(stopping=True, saved=True)) == []


def test_a_stop_that_nobody_asked_for_has_the_same_limit() -> None:
    sup = supervisor()
    stopping = RunFacts(stopping=True)  # the core has halted, and the last step is saved
    assert sup.check(10.0, stopping) == []
    assert isinstance(sup.check(611.0, stopping)[0], FailRun)


# Memory


def test_a_shortage_stops_the_run_once_and_says_what_helps() -> None:
    sup = supervisor()
    because = "100 MB are left. Free some."
    assert sup.memory_short("100 MB are left") == [AnnounceStop(because)]
    assert sup.memory_short("90 MB are left") == []
    assert (sup.stop_asked, sup.because) == (True, because)
    assert sup.check(0.0, RUN) == [StopRun(because)]


def test_a_shortage_changes_nothing_of_a_stop_that_the_user_asked_for() -> None:
    sup = supervisor()
    sup.ask_to_stop()
    assert sup.memory_short("100 MB are left") == []
    assert sup.check(0.0, RUN) == [StopRun(None)]


def test_the_second_kill_by_the_kernel_stops_the_run_and_the_third_fails_it() -> None:
    sup = supervisor()
    assert sup.killed_out_of_memory("killed") == []
    assert sup.killed_out_of_memory("killed") == [AnnounceStop("killed. Free some.")]
    assert sup.killed_out_of_memory("killed") == [FailRun("killed. Free some.")]


def test_kills_are_only_told_where_memory_is_not_watched() -> None:
    sup = supervisor(watches_memory=False)
    assert [sup.killed_out_of_memory("killed") for _ in range(5)] == [[]] * 5


# Any run


class Cluster:
    """Workers that start, speak and die as drawn; performs decisions as a launcher would."""

    def __init__(self) -> None:
        self.supervisor = supervisor(max_train_attempts=1)
        self.now = 0.0
        self.incarnations: dict[Worker, list[int]] = {}
        self.dead: set[Worker] = set()
        self.failed: str | None = None
        self.stops = 0
        self.log: list[Decision] = []
        for worker in (TRAINER, ZERO, rollout(1)):
            self.start(worker, 0)

    def start(self, worker: Worker, incarnation: int) -> None:
        self.incarnations.setdefault(worker, []).append(incarnation)
        self.dead.discard(worker)
        self.supervisor.started(self.now, worker, incarnation)

    def perform(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            self.log.append(decision)
            match decision:
                case FailRun(message):
                    self.failed = message
                    return
                case Restart(worker, incarnation, _):
                    assert worker in self.dead, "two at once"
                    self.start(worker, incarnation)
                case Kill(worker):
                    self.die(worker, KILLED)
                case RejectBatch():
                    self.perform(self.supervisor.batch_rejected(failed=False))
                case AnnounceStop():
                    self.stops += 1

    def die(self, worker: Worker, death: Death) -> None:
        self.dead.add(worker)
        self.perform(self.supervisor.died(self.now, worker, death, TRAINING))

    def act(self, what: str, worker: Worker, seconds: float) -> None:
        self.now += seconds
        match what:
            case "dies":
                self.die(worker, KILLED)
            case "raises":
                self.die(worker, raised(int(self.now)))
            case "speaks":
                message = ms.TrainerReady() if worker == TRAINER else IDLE
                self.perform(self.supervisor.heard(self.now, worker, message))
            case "expelled" if worker != TRAINER:
                assert worker.instance is not None
                last = self.incarnations[worker][-1]
                self.perform(self.supervisor.expelled(worker.instance, last, "silent"))
            case "short":
                self.perform(self.supervisor.memory_short("little"))
        if self.failed is None:
            self.perform(self.supervisor.check(self.now, TRAINING))


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["dies", "raises", "speaks", "speaks", "expelled", "short", "waits"]),
        st.sampled_from([TRAINER, ZERO, rollout(1)]),
        st.sampled_from([0.0, 1.0, 10.0, 100.0, 301.0]),
    ),
    max_size=40,
)


@given(ACTS)
def test_every_worker_runs_until_the_run_fails(acts: list[tuple[str, Worker, float]]) -> None:
    """Whatever happens: each death is answered once, incarnations grow, one stop is announced."""
    cluster, twin = Cluster(), Cluster()
    for act in acts:
        cluster.act(*act)
        twin.act(*act)
        if cluster.failed is not None:
            break
        assert not cluster.dead
    for incarnations in cluster.incarnations.values():
        assert all(later == sooner + 1 for sooner, later in pairwise(incarnations))
    assert cluster.stops <= 1
    assert cluster.log == twin.log, "decisions are a function of the facts"
