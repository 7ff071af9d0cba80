"""The audit against the core under faults: equal counts, and no failure without a cause or a word.

The audit reads the stream alone; the core's ledger is what it is compared with.
"""

import random
from collections.abc import Callable, Iterator

import pytest

from dora_rl.core.actions import host, settle
from dora_rl.core.actions.finish import end_group, fail
from dora_rl.core.audit import Audit, AuditReport, Promise
from dora_rl.core.handlers import trajectories
from dora_rl.core.protocol.commands import Command, Fail, Start
from dora_rl.core.protocol.errors import IllegalTransition
from dora_rl.core.protocol.settings import OnFailedMember, ParadigmName, Settings
from dora_rl.core.protocol.types import GroupState
from dora_rl.core.state.run import State
from dora_rl.core.state.work import Trajectory, Work
from tests.core.adversary import Adversary, stir

SEEDS = range(40)


def hard_times(paradigm: ParadigmName, rng: random.Random) -> Settings:
    """So few retries and so short waits that failures of every kind are final now and then."""
    return Settings(
        paradigm=paradigm,
        groups_per_step=rng.randint(1, 4),
        group_size=rng.randint(1, 4),
        max_staleness=rng.randint(0, 3),
        version_slots=rng.randint(1, 2),
        max_steps=rng.choice((0, 0, 5)),
        max_retries=rng.randint(0, 2),
        max_losses=rng.randint(0, 2),
        on_failed_member=rng.choice(list(OnFailedMember)),
        turn_s=20.0,
        heartbeat_timeout_s=rng.choice((60.0, 400.0)),
        trajectory_timeout_s=rng.choice((15.0, 60.0, 1800.0)),
        score_timeout_s=rng.choice((10.0, 60.0, 600.0)),
    )


def storm(paradigm: ParadigmName, seed: int) -> Iterator[tuple[Adversary, AuditReport, set[int]]]:
    """Moments of one storm: the world, the audit's report, and the groups started so far."""
    rng = random.Random(seed)
    settings = hard_times(paradigm, rng)
    audit = Audit(settings)
    started: set[int] = set()

    def observe(now: float, event: object, commands: list[Command]) -> None:
        audit.observe(now, event, commands)
        started.update(x.trajectory // settings.group_size for x in commands if type(x) is Start)

    world = Adversary(settings, observe)
    for name in range(rng.randint(2, 5)):
        world.join(name, slots=rng.randint(2, 5), version_slots=2)
    for _ in range(25):
        stir(world, rng, 30, faults=True)
        yield world, audit.report(), started


@pytest.mark.parametrize("paradigm", ParadigmName)
def test_the_audit_counts_what_the_ledger_counts(paradigm: ParadigmName) -> None:
    reasons: set[str] = set()
    for seed in SEEDS:
        for world, report, started in storm(paradigm, seed):
            assert report.ok, "\n".join([f"seed {seed}", *report.summary()])
            work = world.core.state.work
            assert report.trained == work.trained
            assert report.filtered_for == dict(work.filtered)
            assert report.failed_for == dict(work.failed)
            assert report.lost == 0
            # Admission leaves no trace in the stream: what was never started is not seen.
            assert len(started) <= work.issued
            assert report.issued == len(started) * work.group_size
            ended = report.trained + report.filtered + report.failed
            assert report.issued == ended + report.outstanding
            reasons.update(report.failed_for)
    wanted = {"broken", "poison", "timeout", "score timeout", "judge timeout", "sibling failed"}
    assert reasons == wanted


# Breakages of the core that C2 forbids


def fail_without_a_word(patch: pytest.MonkeyPatch) -> None:
    original = State.emit

    def emit(state: State, command: Command) -> None:
        if type(command) is not Fail:
            original(state, command)

    patch.setattr(State, "emit", emit)


def fail_twice(patch: pytest.MonkeyPatch) -> None:
    original = State.emit

    def emit(state: State, command: Command) -> None:
        original(state, command)
        if type(command) is Fail:
            original(state, command)

    patch.setattr(State, "emit", emit)


def fail_what_is_late(patch: pytest.MonkeyPatch) -> None:
    """Age as the reason: the groups of the oldest version go as soon as a newer one is out."""
    original = settle.train

    def train(state: State) -> None:
        for group in list(state.work.groups.values()):
            if group.state is GroupState.OPEN and group.version < state.versions.newest:
                for member in state.work.surviving(group.id):
                    host.cancel(state, state.work.trajectories[member])
                end_group(state, group, failed="too old")
        original(state)

    patch.setattr(settle, "train", train)


def fail_at_the_first_failure(patch: pytest.MonkeyPatch) -> None:
    def attempt_failed(state: State, trajectory: Trajectory, reason: str) -> None:
        host.cancel(state, trajectory)
        fail(state, trajectory, reason)

    patch.setattr(trajectories, "attempt_failed", attempt_failed)


def train_what_failed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Work, "surviving", lambda self, group: tuple(self.members(group)))


@pytest.mark.parametrize(
    "mutate",
    [
        fail_without_a_word,
        fail_twice,
        fail_what_is_late,
        fail_at_the_first_failure,
        train_what_failed,
    ],
)
def test_a_core_that_breaks_c2_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    for seed in SEEDS:
        try:
            for _, report, _ in storm(ParadigmName.MULTI_VERSION, seed):
                (check,) = [x for x in report.checks if x.promise is Promise.NOTHING_LOST]
                if check.breaches:
                    return
        except (IllegalTransition, AssertionError, KeyError):
            continue  # the world or the core itself broke down; that is not what is tested
    pytest.fail(f"{mutate.__name__} went unnoticed in {len(SEEDS)} storms")
