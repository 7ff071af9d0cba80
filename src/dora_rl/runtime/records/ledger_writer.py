"""What the ledger is told: the trajectories that a resume needs, batches, versions, checkpoints.

A listener that collects them, and hands over at a commit what is new. A whole trajectory is kept,
by reference, from the moment the core takes it until it is filtered, fails, or a checkpoint has the
step that trained on it. Until then its record in the sample transport is retained. What became of a
trajectory is the journal's to tell, and is not kept a second time.
"""

import json
from collections.abc import Container, Iterator, Sequence

import msgspec

from dora_rl.core.history.codec import decode_command, encode_command
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.events import Event
from dora_rl.core.protocol.types import GroupId, TrajectoryId, Version
from dora_rl.core.state.run import State, TrainerPhase
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.control.trajectory_buffer import BufferedTrajectory
from dora_rl.samples import RecordRef
from dora_rl.store.ledger import (
    BatchRow,
    Changes,
    CheckpointRow,
    Ledger,
    Position,
    PrefixRow,
    VersionRow,
)
from dora_rl.transports.samples.shared_directory import SampleStore

_NOWHERE = Position(0, 0, 0.0, "")
_TAKEN, _TRAINED = "taken", "trained"  # states of a batch
PUBLISHED, _DELETED = "published", "deleted"  # of a version


class LedgerWriter(Listener):
    """Collects what happens to one run, as `Changes` of its ledger."""

    def __init__(
        self, orchestrator: Orchestrator, samples: SampleStore, *, durable: bool = True
    ) -> None:
        """Of a run that is not `durable`, no step is ever taken again: nothing stays for that."""
        self._orchestrator = orchestrator
        self._durable = durable
        self._samples = samples
        self._batch: cm.Train | None = None
        self._batches: dict[int, cm.Train] = {}  # trained, in no checkpoint yet
        self._trained: set[GroupId] = set()  # of those batches
        self._whole: dict[TrajectoryId, RecordRef] = {}  # whose payload is kept
        self._prefixes: dict[TrajectoryId, ms.Prefix] = {}  # as saved
        self._changes = Changes(_NOWHERE)
        self._new_prefixes: dict[TrajectoryId, list[PrefixRow]] = {}  # rows of these changes
        self.dirty = False
        """Something happened since the last commit."""
        self.pressing = False
        """Something happened that should be on the disk soon: a version, a checkpoint."""
        self.failed = False
        """The core has given up: what led to it must not last, so that a resume tries again."""

    @property
    def _state(self) -> State:
        return self._orchestrator.state

    # What happens

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if commands or not isinstance(event, ev.InstanceProgressed):
            self.dirty = True
        match event:
            case ev.WeightsPublished() if event.version in self._state.versions.digests:
                digest = self._state.versions.digests[event.version]
                self._changes.versions.append(VersionRow(event.version, digest, PUBLISHED))
                self.pressing = True
            case ev.BatchTrained():
                self._batch_trained(event.step)
            case ev.GroupJudged() if event.filtered is not None:
                self._filtered(event.group)
        for command in commands:
            self._command(command)

    def _command(self, command: Command) -> None:
        match command:
            case cm.Fail():
                self._forget_payload(command.trajectory)
                self._forget_prefix(command.trajectory)
            case cm.Train():
                self._batch = command
                content = _encode_batch(command)
                self._changes.batches.append(BatchRow(command.step, _TAKEN, content))
            case cm.Halt() if not command.ok:
                self.failed = True
            case cm.Delete():
                digest = self._state.versions.digests[command.version]
                self._changes.versions.append(VersionRow(command.version, digest, _DELETED))

    def _batch_trained(self, step: int) -> None:
        batch = self._batch
        if batch is None or batch.step != step:
            return  # a duplicate
        self._batch = None
        self._changes.batches.append(BatchRow(step, _TRAINED, _encode_batch(batch)))
        if not self._durable:
            self._forget_batch(batch)
            return
        self._batches[step] = batch
        self._trained.update(group.group for group in batch.groups)

    def _forget_batch(self, batch: cm.Train) -> None:
        for group in batch.groups:
            for trajectory_id in group.trajectories:
                self._forget_payload(trajectory_id)

    def _filtered(self, group: GroupId) -> None:
        """Unless the core did not take it: it is at work still, or was trained before."""
        records = self._state.work
        if group not in records.groups and group not in self._trained:
            for trajectory_id in records.members(group):
                self._forget_payload(trajectory_id)
                self._forget_prefix(trajectory_id)

    def kept(self, item: BufferedTrajectory) -> None:
        trajectory_id = item.trajectory.id
        self._changes.payloads[trajectory_id] = msgspec.msgpack.encode(item)
        self._retain_payload(item)
        self._forget_prefix(trajectory_id)

    def _retain_payload(self, item: BufferedTrajectory) -> None:
        if item.trajectory.id not in self._whole:  # else its reward has come
            self._whole[item.trajectory.id] = item.trajectory.content
            self._samples.retain(item.trajectory.content)

    def saved(self, prefix: ms.Prefix, whole: ms.Prefix) -> None:
        trajectory_id = prefix.trajectory
        before = self._prefixes.get(trajectory_id)
        if prefix.pieces[0].start == (0 if before is None else before.num_tokens):
            new = prefix.pieces
        else:
            self._forget_prefix(trajectory_id)
            new = whole.pieces
        self._prefixes[trajectory_id] = whole
        for piece in new:
            self._samples.retain(piece.content)
            content = msgspec.msgpack.encode(msgspec.structs.replace(whole, pieces=(piece,)))
            row = PrefixRow(trajectory_id, piece.start, content)
            self._new_prefixes.setdefault(trajectory_id, []).append(row)
        self.dirty = True

    def checkpointed(self, step: int, name: str) -> None:
        """A checkpoint has all batches before this step: they and their trajectories may go."""
        self._changes.checkpoints.append(CheckpointRow(step, name))
        for done in [s for s in self._batches if s < step]:
            self._changes.dropped_batches.append(done)
            batch = self._batches.pop(done)
            self._trained.difference_update(group.group for group in batch.groups)
            self._forget_batch(batch)
        self.pressing = True

    @property
    def samplers(self) -> Container[Version]:
        """The versions that may have sampled what no checkpoint has, but for those with a lease."""
        starts = {group.version for batch in self._batches.values() for group in batch.groups}
        if self._state.paradigm.pins_version:
            return starts
        # A trajectory may have gone on with every version since, and leases none of them.
        starts.update(group.version for group in self._state.work.groups.values())
        newest = self._state.versions.newest
        return range(min(starts, default=newest), newest + 1)

    def checkpoint_dropped(self, step: int) -> None:
        self._changes.dropped_checkpoints.append(step)

    # What the ledger gets

    def changes(self, position: Position) -> Changes:
        """All that is new since the last call."""
        changes, self._changes = self._changes, Changes(_NOWHERE)
        changes.prefixes = [row for rows in self._new_prefixes.values() for row in rows]
        self._new_prefixes = {}
        dropped = set(changes.dropped_batches)
        changes.batches = [row for row in changes.batches if row.step not in dropped]
        self.dirty = self.pressing = False
        changes.position = position
        return changes

    def recall(self, ledger: Ledger) -> None:
        """The core is where the run was last committed: continue from there."""
        rows = batches_to_redo(ledger)
        self._batches = {row.step: decode_batch(row) for row in rows if row.state == _TRAINED}
        self._trained = {g.group for batch in self._batches.values() for g in batch.groups}
        trainer = self._state.trainer
        if trainer.phase is TrainerPhase.TRAINING:
            taken = [row for row in rows if (row.step, row.state) == (trainer.step, _TAKEN)]
            self._batch = decode_batch(taken[0])
        for _, content in ledger.payloads():
            self._retain_payload(decode_buffered(content))
        for trajectory_id, prefix in saved_prefixes(ledger).items():
            self._prefixes[trajectory_id] = prefix
            for piece in prefix.pieces:
                self._samples.retain(piece.content)

    def _forget_payload(self, trajectory_id: TrajectoryId) -> None:
        self._changes.payloads.pop(trajectory_id, None)
        self._changes.dropped_payloads.add(trajectory_id)
        content = self._whole.pop(trajectory_id, None)
        if content is not None:
            self._samples.release(content)

    def _forget_prefix(self, trajectory_id: TrajectoryId) -> None:
        prefix = self._prefixes.pop(trajectory_id, None)
        if prefix is not None:
            for piece in prefix.pieces:
                self._samples.release(piece.content)
            self._new_prefixes.pop(trajectory_id, None)
            self._changes.dropped_prefixes.add(trajectory_id)


def batches_to_redo(ledger: Ledger) -> list[BatchRow]:
    """The batches that no checkpoint has, in order of their steps."""
    last = last_checkpoint(ledger)
    return list(ledger.batches(after=-1 if last is None else last.step - 1))


def last_checkpoint(ledger: Ledger) -> CheckpointRow | None:
    rows = list(ledger.checkpoints())
    return rows[-1] if rows else None


def named_records(ledger: Ledger) -> Iterator[RecordRef]:
    """The records of the sample transport that a resume needs."""
    for _, content in ledger.payloads():
        yield decode_buffered(content).trajectory.content
    for row in ledger.prefixes():
        for piece in decode_prefix(row.content).pieces:
            yield piece.content


def saved_prefixes(ledger: Ledger) -> dict[TrajectoryId, ms.Prefix]:
    """What running trajectories had written, each in all of its pieces."""
    found: dict[TrajectoryId, ms.Prefix] = {}
    for row in ledger.prefixes():
        prefix = decode_prefix(row.content)
        before = found.get(row.trajectory)
        found[row.trajectory] = prefix if before is None else prefix.after(before)
    return found


def decode_batch(row: BatchRow) -> cm.Train:
    command = decode_command(json.loads(row.content))
    assert isinstance(command, cm.Train)
    return command


def _encode_batch(command: cm.Train) -> bytes:
    return json.dumps(encode_command(command), separators=(",", ":")).encode()


decode_buffered = msgspec.msgpack.Decoder(BufferedTrajectory).decode
decode_prefix = msgspec.msgpack.Decoder(ms.Prefix).decode
