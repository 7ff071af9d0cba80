"""Checkpoints, and how a run ends so that it can be resumed.

A checkpoint is taken when a version has been published, before the next step is trained. Asked
to stop, the run finishes the step that is under way, holds back the next one, has every
instance report what its trajectories have written, saves, and is done. A run that must be a
function of its seed, killed or not, does the same at every checkpoint, and goes on anew.
"""

from collections.abc import Sequence
from enum import Enum, auto
from pathlib import Path

from dora_rl.core.commands import Command, Halt
from dora_rl.core.events import Event, WeightsPublished
from dora_rl.core.state import TrainerPhase
from dora_rl.runtime import messages as ms
from dora_rl.runtime.driver import Driver, Outside
from dora_rl.runtime.errors import RunFailed
from dora_rl.runtime.listening import Listener
from dora_rl.runtime.session import Ending, Session
from dora_rl.store.rundir import checkpoint_path


class _Phase(Enum):
    RUNNING = auto()
    ASKED = auto()  # to stop, after the step that is under way
    PREFIXES = auto()  # the next step is held back; instances report
    SAVING = auto()  # the last checkpoint is being written
    DONE = auto()


class Saver(Listener):
    """Takes the checkpoints of one run, and ends it."""

    def __init__(
        self, driver: Driver, session: Session, outside: Outside, *, anew: bool = False
    ) -> None:
        """With `anew`, the run is done at every checkpoint, to be resumed at once."""
        self._driver = driver
        self._anew = anew and session.config.run.durable  # else there is nothing to resume
        self._session = session
        self._outside = outside
        self._phase = _Phase.RUNNING
        self._awaited: set[int] = set()
        self._interrupted = False
        self._because: str | None = None  # it had to stop, though nobody asked for it
        self._asked_for: set[Path] = set()  # what the trainer is saving
        self._version = max(0, session.orchestrator.state.versions.newest)

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
            return Ending(True, said, interrupted=True)
        return Ending(True, f"checkpoint at step {self._version}", paused=True)

    # What happens

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Called by the driver before the commands are performed."""
        if not isinstance(event, WeightsPublished):
            return
        self._version = event.version
        every = self._session.config.run.checkpoint_every
        if self._phase is _Phase.ASKED:
            self._hold()
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
        if self._session.orchestrator.state.trainer.phase is TrainerPhase.IDLE:
            self._hold()

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
        directory = Path(message.directory)
        if directory not in self._asked_for:
            return  # said again: a later one may have taken its place by now
        if message.failure is not None:
            raise RunFailed(f"no checkpoint in `{directory}`: {message.failure}")
        self._saved(directory)

    def trainer_lost(self) -> None:
        """Whatever it was saving is not saved."""
        self._asked_for.clear()
        if self._phase is _Phase.SAVING:
            self._save()

    # Inside

    def _hold(self) -> None:
        self._driver.hold()
        self._phase = _Phase.PREFIXES
        self._awaited = set(self._session.orchestrator.state.fleet.instances)
        self._outside.to_every_rollout(ms.SavePrefixes())
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

    @property
    def _directory(self) -> Path:
        return checkpoint_path(self._session.checkpoints, self._version)

    def _save(self) -> None:
        if self._directory.exists():  # this step was saved before
            self._saved(self._directory)
            return
        if self._directory in self._asked_for:  # the last step is one of those to be saved
            return
        self._asked_for.add(self._directory)
        self._session.checkpoints.mkdir(exist_ok=True)
        self._outside.to_trainer(ms.Save(str(self._directory)))

    def _saved(self, directory: Path) -> None:
        self._asked_for.discard(directory)
        self._session.checkpointed(directory)
        if self._phase is _Phase.SAVING and directory == self._directory:
            self._phase = _Phase.DONE
