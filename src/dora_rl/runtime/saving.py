"""Checkpoints, and how a run ends so that it can be resumed.

A checkpoint is taken when a version has been published, before the next step is trained. Asked
to stop, the run finishes the step that is under way, holds back the next one, has every
instance report what its trajectories have written, saves, and is done.
"""

import shutil
from collections.abc import Sequence
from enum import Enum, auto
from pathlib import Path

import msgspec

from dora_rl.core.commands import Command
from dora_rl.core.events import Event, WeightsPublished
from dora_rl.core.state import TrainerPhase
from dora_rl.runtime import messages as ms
from dora_rl.runtime.driver import Driver, Outside
from dora_rl.runtime.errors import RunFailed
from dora_rl.runtime.leftover import RESUME_FILE, Leftover, what_stays
from dora_rl.runtime.listening import Listener
from dora_rl.runtime.session import Ending, Session

_STEP = "step-"


class _Phase(Enum):
    RUNNING = auto()
    ASKED = auto()  # to stop, after the step that is under way
    PREFIXES = auto()  # the next step is held back; instances report
    SAVING = auto()  # the last checkpoint is being written
    DONE = auto()


class Saver(Listener):
    """Takes the checkpoints of one run, and ends it."""

    def __init__(self, driver: Driver, session: Session, outside: Outside) -> None:
        self._driver = driver
        self._session = session
        self._outside = outside
        self._phase = _Phase.RUNNING
        self._awaited: set[int] = set()
        self._interrupted = False
        self._version = max(0, session.orchestrator.state.versions.newest)

    @property
    def done(self) -> bool:
        return self._phase is _Phase.DONE

    @property
    def interrupted(self) -> bool:
        return self._interrupted

    @property
    def stopping(self) -> bool:
        return self._phase is not _Phase.RUNNING

    def ending(self) -> Ending:
        halted = self._driver.halted
        if halted is not None:
            return Ending(halted.ok, halted.reason)
        return Ending(True, f"stopped after {self._version} steps", interrupted=True)

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
            self._save()

    def stop(self, instances: Sequence[int]) -> None:
        """The user asks to stop; `instances` are those that run."""
        if self._phase is not _Phase.RUNNING:
            return
        self._phase = _Phase.ASKED
        self._awaited = set(instances)
        self._interrupted = True
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
        if isinstance(message, ms.Prefixes):
            self._reported(instance)

    def from_trainer(self, message: ms.FromTrainer) -> None:
        if not isinstance(message, ms.Saved):
            return
        if message.failure is not None:
            raise RunFailed(f"no checkpoint in `{message.directory}`: {message.failure}")
        self._retain()
        if self._phase is _Phase.SAVING:
            if self._interrupted:
                self._write_leftover(Path(message.directory).name)
            self._phase = _Phase.DONE

    # Inside

    def _hold(self) -> None:
        self._driver.hold()
        self._phase = _Phase.PREFIXES
        self._outside.to_every_rollout(ms.SavePrefixes())
        self._when_reported()

    def _reported(self, instance: int) -> None:
        self._awaited.discard(instance)
        self._when_reported()

    def _when_reported(self) -> None:
        if self._phase is _Phase.PREFIXES and not self._awaited:
            self._driver.freeze()
            self._phase = _Phase.SAVING
            self._save()

    def _save(self) -> None:
        directory = self._session.checkpoints / f"{_STEP}{self._version}"
        if directory.exists():  # this step was saved before
            self.from_trainer(ms.Saved(str(directory)))
            return
        self._session.checkpoints.mkdir(exist_ok=True)
        self._outside.to_trainer(ms.Save(str(directory)))

    def _retain(self) -> None:
        """Delete the oldest checkpoints; what is not named by a step is not ours."""
        found = [
            (int(path.name.removeprefix(_STEP)), path)
            for path in self._session.checkpoints.glob(f"{_STEP}*")
            if path.name.removeprefix(_STEP).isdecimal()
        ]
        for _, path in sorted(found)[: -self._session.config.run.keep_checkpoints]:
            shutil.rmtree(path)

    def _write_leftover(self, checkpoint: str) -> None:
        leftover = Leftover(
            checkpoint=checkpoint,
            now=self._session.orchestrator.state.now,
            items=self._driver.shelf.items(),
            prefixes=tuple(self._driver.prefixes.values()),
            config=what_stays(self._session.config),
            task=self._session.plan.task.fingerprint,
        )
        self._session.directory.write_bytes(RESUME_FILE, msgspec.msgpack.encode(leftover))
