"""What lasts of a run: the commits of its ledger, and the files that may go after one.

The journal and the records that the ledger names are on the disk first, then the ledger vouches for
them, and only then goes what the ledger had still needed. It takes no decision about the run.

    committer.commit()          # all that has happened lasts when this returns
    committer.commit_if_due()   # begins a commit, or ends one that is under way; waits for no disk

A large fleet writes to hundreds of files between two commits. Threads sync them, and then tell the
ledger, while the driver continues; what it hears meanwhile belongs to the next commit. The ledger
is used by one thread at a time: whoever reads it completes a commit that is under way first.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from dora_rl.store.ledger import Changes, Ledger, LedgerError, Position, SnapshotRow
from dora_rl.store.rundir import checkpoint_path, checkpoints_in
from dora_rl.store.snapshot_files import SnapshotFiles
from dora_rl.trainer.settings import Behaviour
from dora_rl.transports.errors import RecordLost
from dora_rl.transports.samples.shared_directory import SampleStore, sync_path
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
_SYNCS_AT_ONCE = 8  # a disk, and a file server all the more, syncs several files in the time of one
_LOOK_S = 0.01  # between two looks whether a commit under way is synced


class Flushed(NamedTuple):
    """How far the journal is written, and the descriptors of files that are not on the disk yet."""

    position: Position
    files: Sequence[int]


class _Commit(NamedTuple):
    """One commit under way: what the ledger is told, and what goes once it was."""

    changes: Changes
    written: "Future[None]"
    records: list[Any]  # files of the sample transport
    versions: list[Version]


class Committer:
    """Commits what has happened, and deletes what no resume would ask for."""

    def __init__(
        self,
        config: RunConfig,
        ledger: Ledger,
        ledger_writer: LedgerWriter,
        flush: Callable[[], Flushed],
        history: History,
        samples: SampleStore,
        *,
        out: Path,
        weights: Path,
        checkpoints: Path,
        ours: bool,
    ) -> None:
        """`flush` has the journal written, and says how much of it there is."""
        self.ours = ours
        """The run's files are ours to change; those of a resumed run are not at once."""
        self._settings = config.run
        # Then a step loads the versions that its batch was sampled from, each time it is taken.
        self._steps_load = config.train.behaviour is Behaviour.RECOMPUTE
        self._ledger = ledger
        self._ledger_writer = ledger_writer
        self._flush = flush
        self._history = history
        self._samples = samples
        self._out = out
        self._snapshots = SnapshotFiles(out)
        self._snapshot_tried = 0  # records, when a snapshot was last loaded, written or failed
        self._weights = weights
        self._checkpoints = checkpoints
        self._committed_at = 0.0
        self._deletions: list[Version] = []
        self._threads: ThreadPoolExecutor | None = None  # that sync, from the first commit on
        self._thread = ThreadPoolExecutor(1, "commit")
        self._under_way: _Commit | None = None

    @property
    def _open(self) -> bool:
        """Whether there is still something to commit to."""
        return self.ours and not self._ledger_writer.failed

    def commit(self) -> None:
        """All that has happened, on the disk: the journal first, then the ledger vouches for it."""
        self.complete()
        if self._open:
            self._begin()
            self.complete()

    def commit_if_due(self) -> None:
        """Not before the last commit is a while ago, unless it presses.

        It waits for no file to be synced: that a commit is due again ends it, if it can be.
        """
        if self._under_way is not None and self._under_way.written.done():
            self.complete()
        if self._under_way is None and self._open and self._due_in_s() == 0.0:
            self._begin()

    def commit_in_s(self) -> float | None:
        """When `commit_if_due` is to be called, if it is."""
        if self._under_way is not None:
            return _LOOK_S
        return self._due_in_s() if self._open else None

    def _due_in_s(self) -> float | None:
        if self._ledger_writer.pressing:
            return 0.0
        if not self._ledger_writer.dirty:
            return None
        due = self._committed_at + self._settings.commit_every_s
        return max(0.0, due - time.monotonic())

    def _begin(self) -> None:
        """Take what is new, and have its files synced; the ledger is told when it is complete."""
        flushed = self._flush()
        changes = self._ledger_writer.changes(flushed.position)
        try:
            if self._settings.durable:
                changes.snapshot = self._take_snapshot(changes.position)
                files = [partial(os.fsync, file) for file in flushed.files]
                files += [partial(sync_path, path) for path in self._samples.take_unsynced()]
                written = self._thread.submit(self._write, files, changes)
            else:
                written = Future()
                written.set_result(None)
        except BaseException:
            self._lost()
            raise
        # What goes with this commit is not needed by now: what the next one drops is, until then.
        deletions, self._deletions = self._deletions, []
        self._under_way = _Commit(changes, written, self._samples.unneeded(), deletions)

    def _write(self, files: Sequence[Callable[[], None]], changes: Changes) -> None:
        """On a thread of its own: all files on the disk, then the ledger."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_SYNCS_AT_ONCE, "sync")
        for sync in [self._threads.submit(file) for file in files]:
            sync.result()
        self._ledger.commit(changes)

    def complete(self) -> None:
        """End the commit that is under way, if one is: waits until the ledger has it."""
        commit, self._under_way = self._under_way, None
        if commit is None:
            return
        if self._settings.durable:
            try:
                commit.written.result()
            except BaseException as error:
                self._lost()
                if isinstance(error, LedgerError):
                    raise RunFailed(str(error)) from error
                raise
            if commit.changes.snapshot is not None:
                self._snapshots.keep_only(commit.changes.snapshot)
        self._committed_at = time.monotonic()
        self._samples.delete(commit.records)
        self._delete_versions(commit.versions)

    def _lost(self) -> None:
        """Its writer has handed these changes over: a later commit would be without them."""
        self._ledger_writer.failed = True

    def close(self) -> None:
        """No commit follows; one that is under way is completed, while the files are open."""
        try:
            self.complete()
        finally:
            self._thread.shutdown()
            if self._threads is not None:
                self._threads.shutdown()

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

    def _delete_versions(self, versions: Sequence[Version]) -> None:
        """What the ledger leased until this commit may go, unless a step would load it."""
        kept: Container[Version] = self._ledger_writer.samplers if self._steps_load else ()
        for version in versions:
            if version in kept:
                self._deletions.append(version)
            else:
                delete_version(self._weights, version)
                _log.debug("version %d deleted: its last lease is gone", version)

    # Checkpoints

    @property
    def last_checkpoint(self) -> int | None:
        """Where a trainer begins: the step of the last checkpoint that the ledger has."""
        self.complete()
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
