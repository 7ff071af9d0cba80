"""What lasts of a run: the commits of its ledger, and the files that may go after one.

The journal and the records that the ledger names are on the disk first, then the ledger vouches for
them, and only then goes what the ledger had still needed. It takes no decision about the run.
"""

import logging
import shutil
import time
from collections.abc import Callable, Container
from pathlib import Path

from dora_rl.core.history.journal import Written
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.types import Version
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.errors import RunFailed
from dora_rl.runtime.records.history import History
from dora_rl.runtime.records.ledger_writer import (
    PUBLISHED,
    LedgerWriter,
    last_checkpoint,
    named_records,
)
from dora_rl.store.errors import damaged
from dora_rl.store.ledger import Ledger, LedgerError, Position, SnapshotRow
from dora_rl.store.rundir import checkpoint_path, checkpoints_in
from dora_rl.store.snapshot_files import SnapshotFiles
from dora_rl.trainer.settings import Behaviour
from dora_rl.transports.errors import RecordLost
from dora_rl.transports.samples.shared_directory import SampleStore
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

_log = logging.getLogger(__name__)


class Committer:
    """Commits what has happened, and deletes what no resume would ask for."""

    def __init__(
        self,
        config: RunConfig,
        ledger: Ledger,
        ledger_writer: LedgerWriter,
        sync: Callable[[], Position],
        history: History,
        samples: SampleStore,
        *,
        out: Path,
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
        self._ledger_writer = ledger_writer
        self._sync = sync
        self._history = history
        self._samples = samples
        self._out = out
        self._snapshots = SnapshotFiles(out)
        self._snapshot_tried = 0  # records, when a snapshot was last loaded, written or failed
        self._weights = weights
        self._checkpoints = checkpoints
        self._committed_at = 0.0
        self._deletions: list[Version] = []

    @property
    def _open(self) -> bool:
        """Whether there is still something to commit to."""
        return self.ours and not self._ledger_writer.failed

    def commit(self) -> None:
        """All that has happened, on the disk: the journal first, then the ledger vouches for it."""
        if not self._open:
            return
        changes = self._ledger_writer.changes(self._sync())
        if self._settings.durable:
            try:
                changes.snapshot = self._take_snapshot(changes.position)
                self._samples.sync()
                self._ledger.commit(changes)
            except BaseException as error:
                # Its writer has handed these changes over: a later commit would be without them.
                self._ledger_writer.failed = True
                if isinstance(error, LedgerError):
                    raise RunFailed(str(error)) from error
                raise
            if changes.snapshot is not None:
                self._snapshots.keep_only(changes.snapshot)
        self._committed_at = time.monotonic()
        self._samples.collect()
        self._delete_versions()

    def commit_if_due(self) -> None:
        """Not before the last commit is a while ago, unless it presses."""
        if self._ledger_writer.pressing or self.commit_in_s() == 0.0:
            self.commit()

    def commit_in_s(self) -> float | None:
        """When the next commit is due, if one is."""
        if not self._open or not self._ledger_writer.dirty:
            return None
        due = self._committed_at + self._settings.commit_every_s
        return max(0.0, due - time.monotonic())

    # Snapshots

    def _take_snapshot(self, position: Position) -> SnapshotRow | None:
        """One of now, if enough has happened since the last; the ledger has yet to name it.

        One that cannot be written costs a resume time and the run nothing.
        """
        new = position.records - self._snapshot_tried
        if new < self._settings.snapshot_every or not self._history.due(new):
            return None
        self._snapshot_tried = position.records
        try:
            return self._history.write(self._snapshots, position)
        except OSError as error:
            _log.warning(
                "no snapshot in `%s`: %s. The next is tried after run.snapshot_every (%d) events; "
                "until then a resume replays more of the journal.",
                self._snapshots.directory,
                error,
                self._settings.snapshot_every,
            )
            return None

    def restore(self) -> Written | None:
        """Load the last snapshot; where in the journal it was taken, if it could be used."""
        row = self._ledger.snapshot()
        since = self._history.restore(self._snapshots, row, self._out)
        if since is not None:
            assert row is not None
            self._snapshot_tried = row.records
        return since

    # Versions

    def delete(self, version: Version) -> None:
        """Delete a version with the next commit, or the first after which nobody needs it."""
        self._deletions.append(version)

    def check_files(self) -> None:
        """A resumed run continues with all that its ledger needs, and whole, or not at all."""
        self._check_names()
        versions = [path_of(self._weights, version) for version in sorted(self._live)]
        step = self.last_checkpoint
        checkpoint = [] if step is None else [checkpoint_path(self._checkpoints, step)]
        for path in versions + checkpoint:
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

    def check_records(self) -> None:
        """Refuse a run of which tokens that the ledger names are missing or damaged."""
        try:
            self._samples.check(named_records(self._ledger))
        except RecordLost as error:
            raise UserError(
                f"{error} `{self._ledger.path}` names it: if that is a copy, or was cut, it is "
                "older than the run. Put both back, with the -wal file, or start a new run."
            ) from error

    def _check_names(self) -> None:
        """A checkpoint is found by its step; a name that leads elsewhere was never ours."""
        for row in self._ledger.checkpoints():
            name = checkpoint_path(self._checkpoints, row.step).name
            if row.name != name:
                said = f"the checkpoint of step {row.step} is named `{row.name}`, not {name}"
                raise damaged(self._ledger.path, said)

    @property
    def _live(self) -> set[Version]:
        return {row.version for row in self._ledger.versions() if row.state == PUBLISHED}

    def _delete_versions(self) -> None:
        """What the ledger still leased until now may go, unless a step would load it."""
        kept: Container[Version] = self._ledger_writer.samplers if self._steps_load else ()
        deletions, self._deletions = self._deletions, [v for v in self._deletions if v in kept]
        for version in deletions:
            if version not in kept:
                delete_version(self._weights, version)
                _log.debug("version %d deleted: its last lease is gone", version)

    # Checkpoints

    @property
    def last_checkpoint(self) -> int | None:
        """Where a trainer begins: the step of the last checkpoint that the ledger has."""
        row = last_checkpoint(self._ledger)
        return None if row is None else row.step

    def checkpointed(self, step: int) -> None:
        """The checkpoint of a step is whole: commit it, and only then let go of older ones."""
        if not self._open:
            return  # the ledger continues from an older one
        self._ledger_writer.checkpointed(step, checkpoint_path(self._checkpoints, step).name)
        # A later one may be whole already; the ledger does not name it yet.
        older = [(s, path) for s, path in checkpoints_in(self._checkpoints) if s < step]
        old = older[: max(0, len(older) + 1 - self._settings.keep_checkpoints)]
        for dropped, _ in old:
            self._ledger_writer.checkpoint_dropped(dropped)
        self.commit()
        for _, path in old:
            shutil.rmtree(path)

    def drop_what_did_not_happen(self, newest: Version) -> None:
        """Checkpoints and versions of steps that were lost with the last incarnation.

        And whatever else the ledger does not name: snapshots, files of records. The versions go
        with the next commit, and so do those that it had yet to delete.
        """
        self._snapshots.keep_only(self._ledger.snapshot())
        self._samples.sweep(named_records(self._ledger))
        if self._weights.is_dir():
            sweep(self._weights, PUBLISHING, DELETED)  # nobody else is at work here
        live = self._live
        for version in published_versions(self._weights):
            if version not in live:
                self.delete(version)
        for step, path in checkpoints_in(self._checkpoints):
            if step > newest:
                shutil.rmtree(path)
