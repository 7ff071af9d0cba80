"""The loop of a local run: carries messages between the driver and the processes, keeps time.

It takes no decision about the run. A part that dies or hangs is replaced: a rollout process goes
on with the prefixes that it saved, a trainer from the last checkpoint with the steps since. Every
wait has an end that names the culprit. A run that is short of memory is stopped, to be resumed.
"""

import os
import re
import selectors
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from dora_rl.core.commands import Command
from dora_rl.core.errors import UserError
from dora_rl.core.events import Event, InstallFailed, InstanceProgressed
from dora_rl.core.types import InstanceId
from dora_rl.runtime import messages as ms
from dora_rl.runtime.base import Runtime
from dora_rl.runtime.errors import RunFailed
from dora_rl.runtime.evaluation import EVALUATOR
from dora_rl.runtime.listening import Listener
from dora_rl.runtime.local.channel import Gone
from dora_rl.runtime.local.processes import PartProcess
from dora_rl.runtime.memory import Watch, remedy
from dora_rl.runtime.resuming import steps_to_redo
from dora_rl.runtime.session import Ending, Session
from dora_rl.store.rundir import CONFIG
from dora_rl.tasks.workers.scores import ScoreJob

_LONGEST_WAIT_S = 0.5  # so that an interrupt is noticed soon
_FEWEST_S = 5.0  # an instance that dies sooner than this after it joined did not serve
_MOST_RESTARTS = 3  # in a row, of an instance that never served
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")  # of addresses and processes: they differ each time
_MOST_OOM_KILLS = 1  # of parts; one may be chance, and more would lose the same work over and over


@dataclass(slots=True)
class _Instance:
    """One rollout instance, whichever process it is now."""

    name: InstanceId
    process: PartProcess
    incarnation: int = 0
    joined_at: float | None = None
    served: bool = False  # a trajectory has got longer there
    started_at: float = 0.0
    failures: int = 0  # starts in a row that came to nothing
    error: str | None = None  # of its own, that ended the last of them
    expelled: str | None = None  # why the core wants no more of it


class _Installs(Listener):
    """Counts instances that were given up since they could not install a version."""

    def __init__(self) -> None:
        self._failed: set[str] = set()  # reasons, which name the version
        self._given_up: Counter[str] = Counter()

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if isinstance(event, InstallFailed):
            self._failed.add(event.reason)

    def given_up(self, reason: str | None) -> int:
        """How often by now, for this reason."""
        if reason is None or reason not in self._failed:
            return 0
        self._given_up[reason] += 1
        return self._given_up[reason]


class LocalRuntime(Runtime):
    """Carries a session's messages between processes."""

    def __init__(self, session: Session, memory: Watch | None = None) -> None:
        super().__init__(session)
        self._installs = _Installs()
        self.driver.listeners.append(self._installs)
        self._memory = memory or Watch(self._config.runtime.min_free_memory_mb)
        self._short: str | None = None  # of memory
        self._selector = selectors.DefaultSelector()
        self._instances: dict[InstanceId, _Instance] = {}
        self._trainer: PartProcess | None = None
        self._evaluator: PartProcess | None = None
        self._timer_at: float | None = None
        self._began = time.monotonic()
        self._asked_to_stop = False
        self._stop_by: float | None = None
        self._trainer_ready = False
        self._trainer_served = False  # one was ready, once
        self._trainer_asked: set[tuple[str, int] | None] = set()  # not answered yet
        self._trainer_heard_at = 0.0
        self._trainer_hung: str | None = None
        self._trainer_failures = 0  # deaths since a step was taken

    def stop(self) -> None:
        """Finish the step that is under way, save, and end. Safe to call from a signal."""
        self._asked_to_stop = True

    def run(self) -> Ending:
        (self._session.plan.out / "logs").mkdir(exist_ok=True)
        try:
            self._open_workers()
            for pool in self._pools:
                for fd in pool.filenos():
                    self._selector.register(fd, selectors.EVENT_READ, None)
            self._began = time.monotonic() - self._session.orchestrator.state.now
            self._start_trainer()
            # A trainer that refuses the checkpoint leaves a resumed run as it was.
            while self._session.plan.resumed and not self._trainer_ready:
                self._turn()
            incarnations = self._begin()
            for name in range(self._config.runtime.instances):
                self._start_instance(name, incarnations.get(name, 0))
            while not self._done:
                self._turn()
            return self._saver.ending()
        finally:
            self._end_parts()
            self._close_workers()
            self._selector.close()

    def _turn(self) -> None:
        """Wait for whatever comes next, and let the driver have it."""
        for key, mask in self._selector.select(self._wait_s()):
            if key.data is not None:
                self._serve(key.data, mask)
        if self._scores is not None:
            for outcome in self._scores.poll():
                self._asker(outcome.ticket).scored(outcome)
        if self._episodes is not None:
            for reply in self._episodes.poll():
                self._asker(reply.ticket).answered(reply)
        if self._timer_at is not None and self.now() >= self._timer_at:
            self._timer_at = None
            self.driver.ring()
        if self.driver.halted is not None:
            self._saver.halted()
        self._session.commit_if_due()
        short = self._memory.short(self.now())
        if short is not None:
            self._stop_short(short)
        self._check_waits()

    def _wait_s(self) -> float:
        waits = [_LONGEST_WAIT_S]
        commit_in_s = self._session.commit_in_s()
        if commit_in_s is not None:
            waits.append(commit_in_s)
        if self._timer_at is not None:
            waits.append(self._timer_at - self.now())
        waits += [due for pool in self._pools if (due := pool.due_in_s()) is not None]
        return max(0.0, min(waits))

    def _check_waits(self) -> None:
        if self._asked_to_stop and not self._saver.stopping:
            self._saver.stop(self._short)
        if self._saver.stopping and self._stop_by is None:
            self._stop_by = self.now() + self._config.runtime.stop_timeout_s
        if not self._saver.done and self._stop_by is not None and self.now() > self._stop_by:
            raise RunFailed(
                f"the last step and its checkpoint took longer than runtime.stop_timeout_s: "
                f"`{self._config.runtime.stop_timeout_s}`. Raise it."
            )
        examiner = self._examiner
        if self._evaluator is not None and examiner is not None and examiner.overdue(self.now()):
            self._evaluator.kill()  # its death is handled like any other
        self._check_trainer()
        limit = self._config.runtime.start_timeout_s
        for instance in self._instances.values():
            if instance.joined_at is None and self.now() > instance.started_at + limit:
                instance.process.kill()  # its death is handled like any other

    def _check_trainer(self) -> None:
        """Progress counts, not an open channel."""
        assert self._trainer is not None
        runtime = self._config.runtime
        limit = runtime.train_silence_s if self._trainer_ready else runtime.start_timeout_s
        if self._trainer_asked and self.now() > self._trainer_heard_at + limit:
            self._trainer_hung = f"the trainer showed no progress for {limit:.0f} s"
            self._trainer.kill()  # its death is handled like any other

    # Memory

    def _stop_short(self, why: str) -> None:
        """Stop for want of memory, unless the run stops already."""
        if not self._asked_to_stop:
            self._short = f"{why}. {remedy(self._session.plan.out / CONFIG)}"
            for listener in self.driver.listeners:
                listener.must_end(self.now(), self._short)
            self.stop()

    def _killed_short(self, why: str) -> None:
        """The kernel has killed a part, which is replaced, so that the step can be finished."""
        if self._memory.deaths <= _MOST_OOM_KILLS or not self._memory.bound_mb:
            return
        if self._asked_to_stop:
            raise RunFailed(f"{why}. {remedy(self._session.plan.out / CONFIG)}")
        self._stop_short(why)

    # Processes

    def _setup(self, role: Literal["rollout", "trainer"], threads: int, **more: Any) -> ms.Setup:
        session = self._session
        return ms.Setup(
            role=role,
            config=self._config.model_dump(mode="json", exclude_none=True),
            model=str(session.plan.model.resolve()),
            weights=str(session.weights.resolve()),
            threads=threads,
            driver=os.getpid(),
            **more,
        )

    def _start_trainer(self) -> None:
        """From the last checkpoint on, through the steps that were trained since."""
        self._trainer_ready = False
        self._trainer_heard_at = self.now()
        self._trainer_asked = {_question(ms.TrainerReady())}
        checkpoint = self._session.last_checkpoint
        setup = self._setup(
            "trainer",
            self._config.threads().train,
            checkpoint=None if checkpoint is None else str(checkpoint.resolve()),
        )
        log = self._session.plan.out / "logs" / "trainer.log"
        self._trainer = PartProcess("the trainer", setup, log)
        self._watch(self._trainer)
        step = self._session.orchestrator.state.trainer.step
        for message in steps_to_redo(self._session.ledger, step):
            self.to_trainer(message)

    def _start_instance(
        self, name: InstanceId, incarnation: int, failures: int = 0, error: str | None = None
    ) -> None:
        setup = self._setup(
            "rollout", self._config.threads().rollout, instance=name, incarnation=incarnation
        )
        log = self._session.plan.out / "logs" / f"rollout-{name}.log"
        process = PartProcess(f"rollout instance {name}", setup, log)
        self._instances[name] = _Instance(
            name, process, incarnation, started_at=self.now(), failures=failures, error=error
        )
        self._watch(process)

    def _watch(self, process: PartProcess) -> None:
        self._selector.register(process.channel.socket, selectors.EVENT_READ, process)

    def _serve(self, process: PartProcess, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                process.channel.flush()
                self._watch_writes(process)
            if mask & selectors.EVENT_READ:
                for message in process.channel.receive():
                    self._take(process, message)
        except Gone:
            self._died(process)

    def _take(self, process: PartProcess, message: Any) -> None:
        if isinstance(message, ms.Broken):
            if message.user:
                raise UserError(message.reason)
            return  # its death follows, and its log says more
        if isinstance(message, ms.Tried):
            for listener in self.driver.listeners:
                listener.tried(self.now(), message.trials)
            return
        if process is self._trainer:
            self._hear_trainer(message)
            return
        if process is self._evaluator:
            self._from_rollout(EVALUATOR, message)
            return
        for instance in self._instances.values():
            if instance.process is process:
                if instance.joined_at is None:
                    instance.joined_at = self.now()
                instance.served = instance.served or _shows_work(message)
                self._from_rollout(instance.name, message)
                return

    def _hear_trainer(self, message: ms.FromTrainer) -> None:
        self._trainer_heard_at = self.now()
        match message:
            case ms.Progressed():
                return
            case ms.TrainerReady():
                self._trainer_ready = self._trainer_served = True
            case ms.Redone() if message.failure is not None:
                raise RunFailed(f"step {message.step} could not be taken again: {message.failure}")
            case ms.Trained() | ms.Rejected():
                self._trainer_failures = 0
        self._trainer_asked.discard(_question(message))  # it may be said again
        self._from_trainer(message)

    def _replace_trainer(self, why: str) -> None:
        """Another one gets to where it was, and is asked again for what it was doing."""
        self._trainer_failures += 1
        if not self._trainer_served or not self._config.run.durable:
            raise RunFailed(f"{why}. See {self._session.plan.out / 'logs' / 'trainer.log'}.")
        if self._trainer_failures > self._config.orchestration.max_train_attempts:
            self._trainer_failures = 0
            self.driver.reject_batch(why)
            if self.driver.halted is not None:
                return
        self._tell_replaced(why)
        self._session.commit()
        self._start_trainer()
        self.driver.ask_trainer_again()
        self._saver.trainer_lost()

    def _died(self, process: PartProcess) -> None:
        self._selector.unregister(process.channel.socket)
        process.channel.close()
        deaths = self._memory.deaths
        why = process.death(self._memory.blame)
        process.kill()
        if self._memory.deaths > deaths:
            self._killed_short(why)
        if process is self._trainer:
            self._replace_trainer(self._trainer_hung or why)
            self._trainer_hung = None
            return
        if process is self._evaluator:
            assert self._examiner is not None
            self._evaluator = None
            self._examiner.lost()
            return
        instance = next(i for i in self._instances.values() if i.process is process)
        if instance.expelled:
            why = f"{instance.process.name} was given up: {instance.expelled.rstrip('.')}"
        joined_at = self.now() if instance.joined_at is None else instance.joined_at
        served = instance.served or (not instance.expelled and self.now() - joined_at > _FEWEST_S)
        failures = 0 if served else instance.failures + 1
        # It may well serve other versions until it is asked for the one that it cannot have.
        failures = max(failures, self._installs.given_up(instance.expelled))
        error = _NUMBERS.sub("#", why) if process.failed and not served else None
        if error is not None and error == instance.error:
            raise RunFailed(f"{why}, twice in a row before it served")
        if failures > _MOST_RESTARTS:
            raise RunFailed(f"{why}, {failures} times")
        self._tell_replaced(why)
        self.driver.lost(instance.name, instance.incarnation, why)
        self._saver.lost(instance.name)
        self._start_instance(instance.name, instance.incarnation + 1, failures, error)

    def _tell_replaced(self, why: str) -> None:
        for listener in self.driver.listeners:
            listener.replaced(self.now(), why)

    def _end_parts(self) -> None:
        parts = [instance.process for instance in self._instances.values()]
        parts += [part for part in (self._trainer, self._evaluator) if part is not None]
        for process in parts:
            with suppress(KeyError, ValueError):
                self._selector.unregister(process.channel.socket)
            process.end()

    def _send(self, process: PartProcess, message: ms.Message) -> None:
        with suppress(Gone):  # its death is noticed by whoever reads
            process.channel.send(message)
            self._watch_writes(process)

    def _watch_writes(self, process: PartProcess) -> None:
        events = selectors.EVENT_READ
        if process.channel.unsent:
            events |= selectors.EVENT_WRITE
        with suppress(KeyError, ValueError):
            self._selector.modify(process.channel.socket, events, process)

    # What the driver asks for

    def now(self) -> float:
        return time.monotonic() - self._began

    def set_timer(self, at: float) -> None:
        self._timer_at = at

    def to_rollout(self, instance: InstanceId, message: ms.ToRollout) -> None:
        found = self._instances.get(instance)
        if found is not None:  # else of an earlier life: the core is about to hear that it ended
            self._send(found.process, message)

    def to_every_rollout(self, message: ms.ToRollout) -> None:
        for instance in self._instances.values():
            self._send(instance.process, message)

    def to_evaluator(self, message: ms.ToRollout) -> None:
        if self._evaluator is None:
            threads = self._config.threads().rollout
            setup = self._setup("rollout", threads, instance=EVALUATOR, evaluation=True)
            log = self._session.plan.out / "logs" / "evaluator.log"
            self._evaluator = PartProcess("the evaluator", setup, log)
            self._watch(self._evaluator)
        self._send(self._evaluator, message)

    def to_trainer(self, message: ms.ToTrainer) -> None:
        assert self._trainer is not None
        if not isinstance(message, ms.Save):  # which is written beside its other work
            if not self._trainer_asked:
                self._trainer_heard_at = self.now()
            self._trainer_asked.add(_question(message))
        self._send(self._trainer, message)

    def expel(self, instance: InstanceId, incarnation: int, reason: str) -> None:
        found = self._instances.get(instance)
        if found is not None and found.incarnation == incarnation:
            found.expelled = reason
            found.process.kill()

    def score(self, ticket: int, job: ScoreJob) -> None:
        assert self._scores is not None
        self._scores.submit(ticket, job)


def _shows_work(message: ms.FromRollout) -> bool:
    event = message.event if isinstance(message, ms.Reported) else None
    return isinstance(event, InstanceProgressed) and bool(event.lengths)


def _question(message: ms.ToTrainer | ms.FromTrainer) -> tuple[str, int] | None:
    """What is asked of the trainer, or what its answer answers; the same for both."""
    match message:
        case ms.TrainerReady():
            return "ready", 0
        case ms.TrainOn() | ms.Trained() | ms.Rejected() | ms.TrainingFailed():
            return "train", message.step
        case ms.Redo() | ms.Redone():
            return "redo", message.step
        case ms.PublishVersion() | ms.Published() | ms.NotPublished():
            return "publish", message.version
    return None
