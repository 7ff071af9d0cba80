"""What every launcher shares: the driver, the checkpointer, the evaluator, and the supervisor.

A runtime is the `WorkerLink` of them all. A subclass starts, stops and reaches workers, brings a
clock and a timer, and reports facts; what the supervisor decides is performed here.
"""

from collections.abc import Sequence

from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.events import Event, InstallFailed, StepLimitRaised
from dora_rl.core.protocol.types import InstanceId
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.decisions import (
    EVALUATOR_INSTANCE,
    TRAINER,
    Abandon,
    AnnounceStop,
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
)
from dora_rl.runtime.control.driver import Driver
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.control.memory import remedy
from dora_rl.runtime.control.services import Clock, EnvironmentHost, Scorer, Timer, WorkerLink
from dora_rl.runtime.control.supervisor import Supervisor
from dora_rl.runtime.errors import RunFailed
from dora_rl.runtime.records.checkpointer import Checkpointer
from dora_rl.runtime.records.resume import ask_again, restore_driver, steps_to_redo
from dora_rl.runtime.records.run_files import Ending, RunFiles
from dora_rl.store.rundir import CONFIG
from dora_rl.transports.kv import KvControl


class _InstallFailures(Listener):
    """Reports to the supervisor which versions could not be installed."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if isinstance(event, InstallFailed):
            self._supervisor.install_failed(event.reason)


class Runtime(WorkerLink):
    """Carries one run's messages."""

    def __init__(
        self,
        files: RunFiles,
        *,
        clock: Clock,
        timer: Timer,
        scorer: Scorer,
        environments: EnvironmentHost,
        kv: KvControl | None = None,
        anew: bool = False,
        replaces_workers: bool = True,
        watches_memory: bool = False,
    ) -> None:
        """With `anew`, the run is done at every checkpoint, to be resumed at once.

        `kv` discards what moves between instances, unless it goes through the run directory.
        """
        self._files = files
        self._config = files.config
        self.clock = clock
        self.driver = Driver(
            files.orchestrator,
            files.plan.task,
            files.judge,
            clock=clock,
            timer=timer,
            workers=self,
            scorer=scorer,
            environments=environments,
            weights=files.committer,
            samples=files.samples,
            kv=kv or files.kv,
            listeners=files.listeners,
        )
        self._checkpointer = Checkpointer(self.driver, files, self, anew=anew)
        self.driver.listeners.append(self._checkpointer)
        self._evaluator = files.evaluator(
            self.driver.post, clock=clock, workers=self, scorer=scorer, environments=environments
        )
        if self._evaluator is not None:
            self.driver.listeners.append(self._evaluator)
        runtime, out = files.config.runtime, files.plan.out
        self.supervisor = Supervisor(
            Limits(
                start_timeout_s=runtime.start_timeout_s,
                train_silence_s=runtime.train_silence_s,
                stop_timeout_s=runtime.stop_timeout_s,
                max_train_attempts=files.config.orchestration.max_train_attempts,
                replaces_workers=replaces_workers,
                watches_memory=watches_memory,
                redoes_steps=files.config.run.durable,
                memory_remedy=remedy(out / CONFIG),
                trainer_log=str(out / "logs" / "trainer.log"),
            )
        )
        self.driver.listeners.append(_InstallFailures(self.supervisor))
        self._begun = False  # what was asked of the trainer may be asked again
        self._redoing: dict[int, ms.Redo] = {}  # by step; its records stay until it is taken

    def run(self) -> Ending:
        """Until the core halts, or the run was asked to stop and has saved."""
        raise NotImplementedError

    def stop(self) -> None:
        """Finish the step that is under way, save, and end."""
        raise NotImplementedError

    # What a launcher does for the supervisor

    def start_worker(self, worker: Worker, incarnation: int) -> None:
        """Start a process, or what stands for one, and report it to the supervisor."""
        raise NotImplementedError

    def kill_worker(self, worker: Worker) -> None:
        """End it at once; its death is reported when it is noticed. One that is gone stays so."""
        raise NotImplementedError

    def drain_worker(self, worker: Worker) -> None:
        """Have its work handed over, or saved, and then end it; its death is reported."""
        raise NotImplementedError

    def forget_worker(self, worker: Worker) -> None:
        """It is gone and stays so."""
        raise NotImplementedError

    def expel(self, instance: InstanceId, incarnation: int, reason: str) -> None:
        self._obey(self.supervisor.expelled(instance, incarnation, reason))

    def _redo_steps(self) -> None:
        """Have a trainer that starts from the last checkpoint take the steps since again.

        What it reads for that stays, though a later checkpoint may be committed meanwhile.
        """
        store = self._files.sample_store
        for step in list(self._redoing):  # asked of a trainer that is gone
            self._redone(step)
        for message in steps_to_redo(
            self._files.ledger, self._files.orchestrator.state.trainer.step
        ):
            self._redoing[message.step] = message
            for sample in message.samples:
                store.retain(sample.trajectory.content)
            self.to_trainer(message)

    def _redone(self, step: int) -> None:
        message = self._redoing.pop(step, None)
        for sample in message.samples if message is not None else ():
            self._files.sample_store.release(sample.trajectory.content)

    @property
    def _facts(self) -> RunFacts:
        evaluator = self._evaluator
        return RunFacts(
            begun=self._begun,
            steps=self._files.orchestrator.state.trainer.step,
            training=self.driver.training,
            halted=self.driver.halted is not None,
            stopping=self._checkpointer.stopping,
            saved=self._checkpointer.done,
            evaluation_overdue=evaluator is not None and evaluator.overdue(self.clock.now()),
        )

    def _obey(self, decisions: Sequence[Decision]) -> None:
        """Perform what the supervisor has decided, in its order."""
        for decision in decisions:
            match decision:
                case Kill():
                    self.kill_worker(decision.worker)
                case Drain():
                    self.drain_worker(decision.worker)
                case Restart():
                    self._restart(decision)
                case Retire():
                    self._retire(decision)
                case Abandon():
                    assert self._evaluator is not None
                    self._tell_replaced(decision.why)
                    self._evaluator.lost()
                case RejectBatch():
                    self.driver.reject_batch(decision.why)
                    halted = self.driver.halted
                    failed = halted is not None and not halted.ok
                    self._obey(self.supervisor.batch_rejected(failed=failed))
                case AnnounceStop():
                    for listener in self.driver.listeners:
                        listener.must_end(self.clock.now(), decision.because)
                case StopRun():
                    self._checkpointer.stop(decision.because)
                case FailRun():
                    raise RunFailed(decision.message)

    def _restart(self, decision: Restart) -> None:
        """Another process takes the place of a worker, and gets to where that was."""
        self._tell_replaced(decision.why)
        worker, incarnation = decision.worker, decision.incarnation
        if worker.role is Role.ROLLOUT:
            assert worker.instance is not None
            ended = self._files.orchestrator.state.fleet.ended.get(worker.instance, -1)
            if not decision.told_to_go or ended < incarnation - 1:
                self.driver.lost(worker.instance, incarnation - 1, decision.why)
            self._checkpointer.lost(worker.instance)
            self.start_worker(worker, incarnation)
            return
        assert worker == TRAINER
        self._files.committer.commit()
        self.start_worker(worker, incarnation)
        if self._begun:
            self._ask_for_first_version()
            self.driver.ask_trainer_again()
        self._checkpointer.trainer_lost()

    def _retire(self, decision: Retire) -> None:
        """A worker is gone that has no successor; the core may have dismissed it, or not."""
        instance, incarnation = decision.worker.instance, decision.incarnation
        assert instance is not None
        if self._files.orchestrator.state.fleet.known(instance, incarnation) is not None:
            self.driver.lost(instance, incarnation, decision.why)
        self._checkpointer.lost(instance)
        self.forget_worker(decision.worker)

    def _tell_replaced(self, why: str) -> None:
        for listener in self.driver.listeners:
            listener.replaced(self.clock.now(), why)

    @property
    def _done(self) -> bool:
        examining = self._evaluator is not None and self._evaluator.busy
        return self._checkpointer.done and (self.driver.halted is None or not examining)

    def _begin(self) -> dict[InstanceId, int]:
        """Ask for version 0, or resume a run; the incarnations that instances start with."""
        files = self._files
        if files.plan.resumed:
            restore_driver(self.driver, files.ledger)
            files.take_over()
        self._ask_for_first_version()
        if not files.plan.resumed:
            return {}
        self._raise_total()
        if self._evaluator is not None:
            self._evaluator.take_over(
                files.orchestrator.state.versions,
                files.last_evaluated,
                halted=self.driver.halted is not None,
            )
        return ask_again(self.driver, files.orchestrator)

    def _raise_total(self) -> None:
        """A run that is to take more steps than the core knows of tells it; else it may be over."""
        core, total = self._files.orchestrator, self._config.run.steps
        if total > core.settings.max_steps:
            self.driver.post(StepLimitRaised(total))
        if core.state.halted and self.driver.halted is None:
            self.driver.halted = self._files.halted

    def _ask_for_first_version(self) -> None:
        """It comes from no step: the core waits for it, and does not ask."""
        if self._files.orchestrator.state.versions.newest < 0:
            self.to_trainer(ms.PublishVersion(0))

    # What the workers say

    def _from_rollout(self, instance: InstanceId, message: ms.FromRollout) -> None:
        if isinstance(message, ms.Finished):
            self._files.sample_store.seen(message.trajectory.content)
        if instance == EVALUATOR_INSTANCE:
            assert self._evaluator is not None
            self._evaluator.from_evaluator(message)
            return
        self.driver.from_rollout(instance, message)
        self._checkpointer.from_rollout(instance, message)

    def _from_trainer(self, message: ms.FromTrainer) -> None:
        if isinstance(message, ms.Redone):
            self._redone(message.step)
        self.driver.from_trainer(message)
        self._checkpointer.from_trainer(message)
