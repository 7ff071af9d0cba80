"""Checkpoints, and how a run ends so that it can be resumed.

A checkpoint is taken when a version has been published, before the next step is trained. Asked
to stop, the run finishes the step that is under way, holds back the next one, has every
instance report what its trajectories have written, saves, and is done. A run that must be a
function of its seed, killed or not, does the same at every checkpoint, and is resumed at once.
"""

import logging
import time
from collections.abc import Callable, Sequence
from enum import Enum, auto
from pathlib import Path

from dora_rl.core.protocol.commands import Command, Halt
from dora_rl.core.protocol.events import Event, WeightsPublished
from dora_rl.core.state.run import TrainerPhase
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.driver import Driver
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.control.services import WorkerLink
from dora_rl.runtime.errors import RunFailed
from dora_rl.runtime.records.run_files import Ending, RunFiles
from dora_rl.store.rundir import checkpoint_path

_log = logging.getLogger(__name__)


class _Phase(Enum):
    RUNNING = auto()
    ASKED = auto()  # to stop, after the step that is under way
    PREFIXES = auto()  # the next step is held back; instances report
    SAVING = auto()  # the last checkpoint is being written
    DONE = auto()


class Checkpointer(Listener):
    """Takes the checkpoints of one run, and ends it."""

    def __init__(
        self, driver: Driver, files: RunFiles, workers: WorkerLink, *, anew: bool = False
    ) -> None:
        """With `anew`, the run is done at every checkpoint, to be resumed at once."""
        self._driver = driver
        self._anew = anew and files.config.run.durable  # else there is nothing to resume
        self._files = files
        self._workers = workers
        self._phase = _Phase.RUNNING
        self._awaited: set[int] = set()
        self._interrupted = False
        self._because: str | None = None  # it had to stop, though nobody asked for it
        self._asked_for: dict[int, float] = {}  # steps that the trainer is saving, since when
        self._then: Callable[[], object] | None = None  # what a save was asked for
        self._then_from = 0  # the step that is to be saved for it, or a later one
        self._version = max(0, files.orchestrator.state.versions.newest)

    @property
    def done(self) -> bool:
        return self._phase is _Phase.DONE

    @property
    def stopping(self) -> bool:
        return self._phase is not _Phase.RUNNING

    def ending(self) -> Ending:
        halted = self._driver.halted
        if halted is not None:
            return Ending(halted.ok, halted.reason)
        if self._interrupted:
            said = f"stopped after {self._version} steps"
            if self._because is not None:
                return Ending(False, f"{said}, all is saved: {self._because}")
            return Ending(False, said, interrupted=True)
        return Ending(True, f"checkpoint at step {self._version}", paused=True)

    # What happens

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Called by the driver before the commands are performed."""
        if not isinstance(event, WeightsPublished):
            return
        self._version = event.version
        every = self._files.config.run.checkpoint_every
        if self._phase is _Phase.ASKED:
            self._hold()
        elif self._then is not None and self._phase is _Phase.RUNNING:
            self._save()
        elif every and event.version and event.version % every == 0:
            if self._anew and not any(isinstance(command, Halt) for command in commands):
                self._hold()
            elif self._phase is _Phase.RUNNING:
                self._save()

    def stop(self, because: str | None = None) -> None:
        """The user asks to stop, or it must be for a cause."""
        if self._phase is not _Phase.RUNNING:
            return
        self._phase = _Phase.ASKED
        self._interrupted = True
        self._because = because
        _log.info("stop asked: %s", because or "by the user")
        if self._files.orchestrator.state.trainer.phase is TrainerPhase.IDLE:
            self._hold()

    def save_soon(self, then: Callable[[], object]) -> None:
        """Save as soon as a step can be saved, and call; a run that ends by then does not call."""
        if self._phase is not _Phase.RUNNING:
            return
        idle = self._files.orchestrator.state.trainer.phase is TrainerPhase.IDLE
        self._then, self._then_from = then, self._version if idle else self._version + 1
        if idle and self._version:
            self._save()
        elif idle:
            self._call_then(0)  # nothing was trained

    def stopped_before(self, because: str | None = None) -> Ending:
        """How a resumed run ends that is to stop before it continues: there is nothing to save."""
        self._phase = _Phase.DONE
        self._interrupted = True
        self._because = because
        return self.ending()

    def halted(self) -> None:
        """The core has ended the run: save what was trained."""
        if self._phase in (_Phase.SAVING, _Phase.DONE):
            return
        halted = self._driver.halted
        if halted is not None and halted.ok:
            self._phase = _Phase.SAVING
            self._save()
        else:
            self._phase = _Phase.DONE

    def lost(self, instance: int) -> None:
        """An instance that will not report any more."""
        self._reported(instance)

    def from_rollout(self, instance: int, message: ms.FromRollout) -> None:
        if isinstance(message, ms.Prefixes) and message.asked:
            self._reported(instance)

    def from_trainer(self, message: ms.FromTrainer) -> None:
        if not isinstance(message, ms.Saved):
            return
        step = message.step
        if step not in self._asked_for:
            return  # a duplicate: a later one may have taken its place by now
        if message.failure is not None:
            raise RunFailed(f"no checkpoint in `{self._directory(step)}`: {message.failure}")
        self._saved(step)

    def trainer_lost(self) -> None:
        """Whatever it was saving is not saved."""
        self._asked_for.clear()
        self._then = None
        if self._phase is _Phase.SAVING:
            self._save()

    # Inside

    def _hold(self) -> None:
        self._driver.hold()
        self._phase = _Phase.PREFIXES
        self._awaited = set(self._files.orchestrator.state.fleet.instances)
        self._workers.to_every_rollout(ms.SavePrefixes())
        self._when_reported()

    def _reported(self, instance: int) -> None:
        if self._phase is _Phase.PREFIXES:
            self._awaited.discard(instance)
            self._when_reported()

    def _when_reported(self) -> None:
        if not self._awaited:
            self._driver.freeze()
            self._phase = _Phase.SAVING
            self._save()

    def _directory(self, step: int) -> Path:
        return checkpoint_path(self._files.checkpoints, step)

    def _save(self) -> None:
        step = self._version
        if self._directory(step).exists():  # this step was saved before
            self._saved(step)
            return
        if step in self._asked_for:  # the last step is one of those to be saved
            return
        self._asked_for[step] = time.monotonic()
        self._files.checkpoints.mkdir(exist_ok=True)
        self._workers.to_trainer(ms.Save(step))

    def _saved(self, step: int) -> None:
        asked_at = self._asked_for.pop(step, None)
        if asked_at is not None:
            took_s = time.monotonic() - asked_at
            _log.info("checkpoint written: `%s`, %.2f s", self._directory(step), took_s)
        self._files.committer.checkpointed(step)
        if self._phase is _Phase.SAVING and step == self._version:
            self._phase = _Phase.DONE
        self._call_then(step)

    def _call_then(self, step: int) -> None:
        then = self._then
        if then is not None and step >= self._then_from and self._phase is _Phase.RUNNING:
            self._then = None
            then()
