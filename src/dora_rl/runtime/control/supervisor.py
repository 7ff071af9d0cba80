"""The supervisor: which worker is killed or started again, and when a run must stop or fail.

A state machine over facts. A launcher reports what it sees (a worker was started, was heard from,
died of this; memory is short; so late is it) and performs the decisions that come back, in their
order. Nothing here starts a process, reads a clock or sends a message, so that every launcher has
the same policy and a test needs no worker:

    supervisor.started(0.0, rollout(0), incarnation=0)
    supervisor.check(301.0, …)                      # [Kill(rollout(0))]: it has not joined
    supervisor.died(301.1, rollout(0), death, run)  # [Restart(rollout(0), incarnation=1, why=…)]

Every wait has an end: a start, the trainer's silence, a stop. A `Kill` is decided anew at every
check until the death is reported; what follows from it is decided there and nowhere else.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from dora_rl.core.protocol.events import InstanceProgressed
from dora_rl.core.protocol.types import InstanceId
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
    Role,
    RunFacts,
    StopRun,
    Worker,
    rollout,
)

MOST_RESTARTS = 3  # in a row, of a worker that never served
MOST_OOM_KILLS = 1  # one may be chance, and more would lose the same work over and over
LEAST_SERVICE_S = 5.0  # an instance that dies sooner than this after it joined did not serve
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")  # of addresses and processes: they differ each time


@dataclass(slots=True)
class _Starts:
    """The consecutive failed starts of one worker, whichever process it is now."""

    failures: int = 0
    error: str | None = None  # of its own, that ended the last of them

    def died(self, death: Death, *, served: bool, failures: int = 0) -> FailRun | None:
        """Count a death; fails the run if another start would come to the same.

        `failures` are those, at least, that are known otherwise.
        """
        why = death.why
        self.failures = max(0 if served else self.failures + 1, failures)
        error = _NUMBERS.sub("#", why) if death.own_error and not served else None
        if error is not None and error == self.error:
            return FailRun(f"{why}, twice in a row before it served")
        if self.failures > MOST_RESTARTS:
            return FailRun(f"{why}, {self.failures} times")
        self.error = error
        return None


@dataclass(slots=True)
class _Rollout:
    """One incarnation of a rollout instance."""

    incarnation: int
    started_at: float
    joined_at: float | None = None
    served: bool = False  # a trajectory has got longer there
    expelled: str | None = None  # why the core wants no more of it
    leaving: str | None = None  # why its process has to go


_Question: TypeAlias = tuple[str, int]
_READY: _Question = ("ready", 0)


@dataclass(slots=True)
class _Trainer:
    """One incarnation of the trainer."""

    incarnation: int
    heard_at: float
    ready: bool = False
    asked: set[_Question] = field(default_factory=lambda: {_READY})  # not answered yet
    hung: str | None = None  # why it was killed
    leaving: str | None = None  # why its process has to go


class Supervisor:
    """The policy of one run over its workers."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._starts: dict[Worker, _Starts] = {}
        self._rollouts: dict[Worker, _Rollout] = {}
        self._joining: dict[Worker, _Rollout] = {}  # of them, those that have said nothing yet
        self._instances: int | None = None  # that are wanted, if that is known
        self._trainer: _Trainer | None = None
        self._evaluator_runs = False
        self._evaluator_leaving = False
        self._trainer_deaths = 0  # since a step was taken
        self._restart_pending: Restart | None = None  # until the batch is rejected
        self._failed_installs: set[str] = set()  # reasons, which name the version
        self._given_up: Counter[str] = Counter()  # instances, by the install that failed
        self._oom_kills = 0
        self._stop_by: float | None = None
        self.stop_asked = False
        """Whether the run is to stop, by whomever."""
        self.because: str | None = None
        """Why it must stop, if nobody asked for it."""

    @property
    def trainer_ready(self) -> bool:
        return self._trainer is not None and self._trainer.ready

    @property
    def trainer_awaited(self) -> bool:
        """Whether the trainer owes an answer."""
        return self._trainer is not None and bool(self._trainer.asked)

    # Workers that are well

    def started(self, now: float, worker: Worker, incarnation: int = 0) -> None:
        """A process was started for this worker; the one before it is dead."""
        match worker.role:
            case Role.TRAINER:
                self._trainer = _Trainer(incarnation, now)
            case Role.ROLLOUT:
                self._rollouts[worker] = self._joining[worker] = _Rollout(incarnation, now)
            case Role.EVALUATOR:
                self._evaluator_runs, self._evaluator_leaving = True, False

    def asked(self, now: float, message: ms.ToTrainer) -> None:
        """The trainer was sent a message; its answer is awaited from now on."""
        question, trainer = _question(message), self._trainer
        if question is None or trainer is None:  # such as a save, written beside its other work
            return
        if not trainer.asked:
            trainer.heard_at = now
        trainer.asked.add(question)

    def heard(self, now: float, worker: Worker, message: ms.Message) -> Sequence[Decision]:
        """The worker's process has sent a message."""
        match worker.role:
            case Role.TRAINER:
                return self._heard_trainer(now, message)
            case Role.ROLLOUT:
                record = self._rollouts[worker]
                if record.joined_at is None:
                    record.joined_at = now
                    del self._joining[worker]
                record.served = record.served or _shows_work(message)
        return ()

    def _heard_trainer(self, now: float, message: ms.Message) -> Sequence[Decision]:
        trainer = self._trainer
        assert trainer is not None
        trainer.heard_at = now
        match message:
            case ms.TrainerReady():
                trainer.ready = True
            case ms.Redone() if message.failure is not None:
                step = message.step + 1
                return [FailRun(f"step {step} could not be taken again: {message.failure}")]
            case ms.Trained() | ms.Rejected():
                self._trainer_deaths = 0
        question = _question(message)
        if question is not None:
            trainer.asked.discard(question)  # it may be a duplicate
        return ()

    def resized(self, instances: int) -> None:
        """So many rollout instances are wanted: those of higher numbers have no successors."""
        self._instances = instances

    # Workers that are not

    def install_failed(self, reason: str) -> None:
        """An instance could not install a version; the reason names the version."""
        self._failed_installs.add(reason)

    def expelled(
        self, instance: InstanceId, incarnation: int, reason: str
    ) -> Sequence[Kill | FailRun]:
        """The core wants no more of this incarnation."""
        if not self._limits.replaces_workers:
            return [FailRun(f"instance {instance} had to be given up: {reason}")]
        worker = rollout(instance)
        record = self._rollouts.get(worker)
        if record is None or record.incarnation != incarnation:
            return []
        record.expelled = record.expelled or reason  # it is expelled again until it is dead
        return [Kill(worker)]

    def told_to_go(self, worker: Worker, why: str) -> Sequence[Drain | Kill]:
        """The worker's process will be ended by others, such as with its node; once is enough.

        One that does not serve yet has nothing to hand over. Whoever takes its place counts as no
        failed start.
        """
        match worker.role:
            case Role.TRAINER:
                record: _Trainer | _Rollout | None = self._trainer
                serves = self.trainer_ready
            case Role.ROLLOUT:
                record = self._rollouts.get(worker)
                serves = record is not None and record.joined_at is not None
            case Role.EVALUATOR:
                first = self._evaluator_runs and not self._evaluator_leaving
                self._evaluator_leaving = True
                return [Drain(worker)] if first else []
        if record is None or record.leaving is not None:
            return []
        record.leaving = f"{worker} was told to go: {why}"
        return [Drain(worker) if serves else Kill(worker)]

    def died(self, now: float, worker: Worker, death: Death, run: RunFacts) -> Sequence[Decision]:
        """The worker's process is gone."""
        match worker.role:
            case Role.TRAINER:
                return self._trainer_died(death, run)
            case Role.ROLLOUT:
                return [self._rollout_died(now, worker, death)]
            case Role.EVALUATOR:
                self._evaluator_runs = False
                return [Abandon(worker, death.why)]

    def _rollout_died(self, now: float, worker: Worker, death: Death) -> Restart | Retire | FailRun:
        record = self._rollouts.pop(worker)
        self._joining.pop(worker, None)
        assert worker.instance is not None
        if self._instances is not None and self._instances <= worker.instance < ELASTIC_INSTANCES:
            return Retire(worker, record.incarnation, death.why)
        if record.leaving is not None:
            return Restart(worker, record.incarnation + 1, record.leaving, told_to_go=True)
        if record.expelled:
            reason = f"{worker} was given up: {record.expelled.rstrip('.')}"
            death = Death(reason, death.own_error)
        joined_at = now if record.joined_at is None else record.joined_at
        lasted = not record.expelled and now - joined_at > LEAST_SERVICE_S
        # It may well serve other versions until it is asked for the one that it cannot have.
        failures = self._given_up_for(record.expelled)
        failed = self._starts_of(worker).died(
            death, served=record.served or lasted, failures=failures
        )
        return failed or Restart(worker, record.incarnation + 1, death.why)

    def _given_up_for(self, reason: str | None) -> int:
        """How many instances were given up, by now, since this version cannot be installed."""
        if reason is None or reason not in self._failed_installs:
            return 0
        self._given_up[reason] += 1
        return self._given_up[reason]

    def _trainer_died(self, death: Death, run: RunFacts) -> Sequence[Decision]:
        trainer = self._trainer
        assert trainer is not None
        why = trainer.hung or death.why
        trainer.hung = None
        if run.halted and run.saved:  # only an evaluation may still be under way
            self._trainer = None
            return []
        if not self._limits.redoes_steps and run.steps > 0:
            return [FailRun(f"{why}. See {self._limits.trainer_log}.")]
        if trainer.leaving is not None:
            return [Restart(TRAINER, trainer.incarnation + 1, trainer.leaving, told_to_go=True)]
        # Until it has taken again what was trained before, it has not seen the batch.
        redoing = any(kind == "redo" for kind, _ in trainer.asked)
        arrived = trainer.ready and not redoing
        failed = self._starts_of(TRAINER).died(Death(why, death.own_error), served=arrived)
        if failed is not None:
            return [failed]
        restart = Restart(TRAINER, trainer.incarnation + 1, why)
        if not arrived:
            return [restart]
        self._trainer_deaths += 1
        if self._trainer_deaths > self._limits.max_train_attempts:
            if not run.training:
                return [FailRun(f"{why}, {self._trainer_deaths} times")]
            self._trainer_deaths = 0
            self._restart_pending = restart
            return [RejectBatch(why)]
        return [restart]  # also after the core has halted: the last checkpoint is not complete

    def batch_rejected(self, *, failed: bool) -> Sequence[Restart]:
        """The core has heard of the rejection; `failed` if it has ended the run for it.

        A run that the rejection has ended well, since it was the last batch, is saved by a trainer.
        """
        restart, self._restart_pending = self._restart_pending, None
        assert restart is not None, "a rejection was decided"
        if failed:
            self._trainer = None
            return []
        return [restart]

    def _starts_of(self, worker: Worker) -> _Starts:
        return self._starts.setdefault(worker, _Starts())

    # Memory

    def memory_short(self, why: str) -> Sequence[AnnounceStop]:
        """Too little memory is left: the run stops, unless it stops already."""
        if self.stop_asked:
            return []
        self.because = f"{why}. {self._limits.memory_remedy}"
        self.stop_asked = True
        return [AnnounceStop(self.because)]

    def killed_out_of_memory(self, why: str) -> Sequence[AnnounceStop | FailRun]:
        """The kernel has killed a worker; that it died is reported as well.

        It is replaced, so that the step can be finished; but not over and over.
        """
        self._oom_kills += 1
        if self._oom_kills <= MOST_OOM_KILLS or not self._limits.watches_memory:
            return []
        if self.stop_asked:
            return [FailRun(f"{why}. {self._limits.memory_remedy}")]
        return self.memory_short(why)

    # Time

    def ask_to_stop(self) -> None:
        """The user wants the run to stop; safe to call from a signal's handler."""
        self.stop_asked = True

    def check(self, now: float, run: RunFacts) -> list[Decision]:
        """Time has passed: whatever has waited too long, and a stop that is due."""
        decisions: list[Decision] = []
        stop = self.stop_asked and run.begun and not run.stopping
        if stop:
            decisions.append(StopRun(self.because))
        limit = self._limits.stop_timeout_s
        if (stop or run.stopping) and self._stop_by is None:
            self._stop_by = now + limit
        if not run.saved and self._stop_by is not None and now > self._stop_by:
            message = "the last step and its checkpoint took longer than runtime.stop_timeout_s: "
            return [*decisions, FailRun(f"{message}`{limit}`. Raise it.")]
        if self._evaluator_runs and run.evaluation_overdue:
            decisions.append(Kill(EVALUATOR))
        return [*decisions, *self._silent_trainer(now), *self._late_rollouts(now)]

    def _silent_trainer(self, now: float) -> list[Kill]:
        """Progress counts, not an open channel."""
        trainer, limits = self._trainer, self._limits
        if trainer is None or not trainer.asked:
            return []
        limit = limits.train_silence_s if trainer.ready else limits.start_timeout_s
        if now <= trainer.heard_at + limit:
            return []
        trainer.hung = f"{TRAINER} showed no progress for {limit:.0f} s"
        return [Kill(TRAINER)]

    def _late_rollouts(self, now: float) -> list[Kill]:
        limit = self._limits.start_timeout_s
        return [
            Kill(worker)
            for worker, record in self._joining.items()
            if now > record.started_at + limit
        ]

    def nothing_left(self) -> Sequence[FailRun]:
        """No event is left in the queue of a logical clock: none can come any more."""
        return [FailRun("deadlock: the event queue is empty and the orchestrator has not halted")]


def _shows_work(message: ms.Message) -> bool:
    event = message.event if isinstance(message, ms.Reported) else None
    return isinstance(event, InstanceProgressed) and bool(event.lengths)


def _question(message: ms.Message) -> _Question | None:
    """What is asked of the trainer, or what its answer answers; the same for both."""
    match message:
        case ms.TrainerReady():
            return _READY
        case ms.TrainOn() | ms.Trained() | ms.Rejected() | ms.TrainingFailed():
            return "train", message.step
        case ms.Redo() | ms.Redone():
            return "redo", message.step
        case ms.PublishVersion() | ms.Published() | ms.NotPublished():
            return "publish", message.version
    return None
