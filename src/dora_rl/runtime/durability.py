"""What lasts of a run: the commits of its ledger, and the files that may go after one.

The journal is on the disk first, then the ledger vouches for it, and only then goes what the
ledger had still needed. It takes no decision about the run.
"""

import shutil
import time
from collections.abc import Callable, Container
from pathlib import Path

from dora_rl.core.errors import UserError
from dora_rl.core.types import Version
from dora_rl.runtime.bookkeeping import PUBLISHED, Bookkeeper, last_checkpoint
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.errors import RunFailed
from dora_rl.store.ledger import Ledger, LedgerError, Position
from dora_rl.store.rundir import checkpoints_in, step_of
from dora_rl.trainer.settings import Behaviour
from dora_rl.weights.errors import WeightsError
from dora_rl.weights.versions import (
    DELETED,
    PUBLISHING,
    check_files,
    delete_version,
    path_of,
    published_versions,
    sweep,
)


class Durability:
    """Commits what has happened, and deletes what no later life of the run would ask for."""

    def __init__(
        self,
        config: RunConfig,
        ledger: Ledger,
        books: Bookkeeper,
        sync: Callable[[], Position],
        *,
        weights: Path,
        checkpoints: Path,
        ours: bool,
    ) -> None:
        """`sync` has the journal on the disk, and says how much of it there is."""
        self.ours = ours
        """The run's files are ours to change; those of a resumed run are not at once."""
        self._settings = config.run
        # Then a step loads the versions that its batch was sampled from, each time it is taken.
        self._steps_load = config.train.behaviour is Behaviour.RECOMPUTE
        self._ledger = ledger
        self._books = books
        self._sync = sync
        self._weights = weights
        self._checkpoints = checkpoints
        self._committed_at = 0.0
        self._deletions: list[Version] = []

    @property
    def _open(self) -> bool:
        """Whether there is still something to commit to."""
        return self.ours and not self._books.failed

    def commit(self) -> None:
        """All that has happened, on the disk: the journal first, then the ledger vouches for it."""
        if not self._open:
            return
        changes = self._books.changes(self._sync())
        if self._settings.durable:
            try:
                self._ledger.commit(changes)
            except LedgerError as error:
                self._books.failed = True
                raise RunFailed(str(error)) from error
        self._committed_at = time.monotonic()
        self._delete_versions()

    def commit_if_due(self) -> None:
        """Not before the last commit is a while ago, unless it presses."""
        if self._books.pressing or self.commit_in_s() == 0.0:
            self.commit()

    def commit_in_s(self) -> float | None:
        """When the next commit is due, if one is."""
        if not self._open or not self._books.dirty:
            return None
        due = self._committed_at + self._settings.commit_every_s
        return max(0.0, due - time.monotonic())

    # Versions

    def delete(self, version: Version) -> None:
        """Delete a version with the next commit, or the first after which nobody needs it."""
        self._deletions.append(version)

    def check_files(self) -> None:
        """A resumed run goes on with all that its ledger needs, and whole, or not at all."""
        versions = [path_of(self._weights, version) for version in sorted(self._live)]
        checkpoint = self.last_checkpoint
        for path in versions if checkpoint is None else [*versions, checkpoint]:
            if not path.is_dir():
                raise UserError(
                    f"`{path}` is missing, though `{self._ledger.path}` still needs it. If that "
                    "is a copy, or was cut, it is older than the run: put it back, with its -wal "
                    "file."
                )
        for path in versions:
            try:
                check_files(path)
            except WeightsError as error:
                raise UserError(f"{error} Put it back from a copy, or start a new run.") from error

    @property
    def _live(self) -> set[Version]:
        return {row.version for row in self._ledger.versions() if row.state == PUBLISHED}

    def _delete_versions(self) -> None:
        """What the ledger still leased until now may go, unless a step would load it."""
        kept: Container[Version] = self._books.samplers if self._steps_load else ()
        deletions, self._deletions = self._deletions, [v for v in self._deletions if v in kept]
        for version in deletions:
            if version not in kept:
                delete_version(self._weights, version)

    # Checkpoints

    @property
    def last_checkpoint(self) -> Path | None:
        """Where a trainer begins: the last checkpoint that the ledger has."""
        row = last_checkpoint(self._ledger)
        return None if row is None else self._checkpoints / row.name

    def checkpointed(self, directory: Path) -> None:
        """A checkpoint is whole: commit it, and only then let go of older ones."""
        if not self._open:
            return  # the ledger goes on from an older one
        step = step_of(directory)
        assert step is not None
        self._books.checkpointed(step, directory.name)
        old = checkpoints_in(self._checkpoints)[: -self._settings.keep_checkpoints]
        for dropped, _ in old:
            self._books.checkpoint_dropped(dropped)
        self.commit()
        for _, path in old:
            shutil.rmtree(path)

    def drop_what_did_not_happen(self, newest: Version) -> None:
        """Checkpoints and versions of steps that were lost with the last life.

        The versions go with the next commit, and so do those that the last life had yet to delete.
        """
        if self._weights.is_dir():
            sweep(self._weights, PUBLISHING, DELETED)  # nobody else is at work here
        live = self._live
        for version in published_versions(self._weights):
            if version not in live:
                self.delete(version)
        for step, path in checkpoints_in(self._checkpoints):
            if step > newest:
                shutil.rmtree(path)
