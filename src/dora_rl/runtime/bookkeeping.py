"""What the ledger is told: the core's own records, and the tokens that a resume would need.

A listener that notes which records an event touched. At a commit it reads them from the core and
hands over what is new. A whole trajectory is kept from the moment the core takes it until it is
filtered, fails, or a checkpoint has the step that trained on it.
"""

import json
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import msgspec

from dora_rl.core import commands as cm
from dora_rl.core import events as ev
from dora_rl.core.codec import decode_command, encode_command
from dora_rl.core.commands import Command
from dora_rl.core.events import Event
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.types import GroupId, GroupState, TrajectoryId, TrajectoryState, Version
from dora_rl.runtime import messages as ms
from dora_rl.runtime.listening import Listener
from dora_rl.runtime.shelf import Item
from dora_rl.store.ledger import (
    BatchRow,
    Changes,
    CheckpointRow,
    GroupRow,
    Ledger,
    Position,
    PrefixRow,
    TrajectoryRow,
    VersionRow,
)

_NOWHERE = Position(0, 0, 0.0, "")
_TAKEN, _TRAINED = "taken", "trained"  # states of a batch
PUBLISHED, _DELETED = "published", "deleted"  # of a version
# After these, records may have changed that neither the event nor the commands name.
_SWEEPING = (
    ev.PromptsAvailable,
    ev.WeightsPublished,
    ev.BatchTrained,
    ev.BatchRejected,
    ev.InstanceJoined,
    ev.InstanceFailed,
    ev.InstanceStopped,
    ev.InstallFailed,
    ev.VersionInstalled,
    ev.TimerFired,
    ev.MigrationCompleted,
    ev.MigrationFailed,
)


class Bookkeeper(Listener):
    """Collects what happens to one run, as `Changes` of its ledger."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._state = orchestrator.state
        self._issued = 0  # groups
        self._groups: dict[GroupId, GroupRow] = {}  # of what is not terminal in the ledger
        self._rows: dict[TrajectoryId, TrajectoryRow] = {}
        self._leases: dict[Version, tuple[str, ...]] = {}
        self._ends: dict[GroupId, _End] = {}
        self._batch: cm.Train | None = None
        self._batches: dict[int, cm.Train] = {}  # trained, in no checkpoint yet
        self._prefixed: dict[TrajectoryId, int] = {}  # tokens of saved prefixes
        self._touched: set[TrajectoryId] = set()
        self._sweep = False
        self._changes = Changes(_NOWHERE)
        self.pressing = False
        """Something happened that should be on the disk soon: a version, a checkpoint."""
        self.failed = False
        """The core has given up: what led to it must not last, so that a resume tries again."""

    # What happens

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if isinstance(event, _SWEEPING):
            self._sweep = True
        name = getattr(event, "trajectory", None)
        if name is not None:
            self._touched.add(name)
        match event:
            case ev.TrajectoryFinished() if event.trajectory in self._rows:
                self._update(event.trajectory, fence=event.fence, tokens=event.tokens)
            case ev.WeightsPublished() if event.version in self._state.versions.digests:
                digest = self._state.versions.digests[event.version]
                self._changes.versions.append(VersionRow(event.version, digest, PUBLISHED))
                self.pressing = True
            case ev.BatchTrained():
                self._batch_trained(event.step)
            case ev.BatchRejected():
                for group in event.groups:
                    self._end_group(group, GroupState.FAILED, event.reason)
            case ev.GroupJudged() if event.filtered is not None:
                self._end_group(event.group, GroupState.FILTERED, event.filtered)
        self._admit()
        for command in commands:
            self._command(command)

    def _admit(self) -> None:
        """Groups are known from their first moment: some end before the next commit."""
        records = self._state.ledger
        for group in range(self._issued, records.issued):
            version = records.groups[group].version
            self._groups[group] = GroupRow(group, version, str(GroupState.OPEN), None, None)
            self._changes.groups.append(self._groups[group])
            for name in records.members(group):
                self._rows[name] = TrajectoryRow(
                    trajectory=name,
                    group=group,
                    version=version,
                    digest=self._state.versions.digests.get(version),
                    state=str(TrajectoryState.WAITING),
                    attempts=0,
                    fence=0,
                    tokens=0,
                    reward=None,
                    reason=None,
                    step=None,
                )
                self._touched.add(name)
        self._issued = records.issued

    def _command(self, command: Command) -> None:
        match command:
            case cm.Start():
                self._touched.add(command.trajectory)
                attempts = self._rows[command.trajectory].attempts + 1
                self._update(command.trajectory, attempts=attempts, fence=command.fence)
            case cm.Cancel() | cm.Score():
                self._touched.add(command.trajectory)
            case cm.Fail() if command.trajectory in self._rows:
                self._touched.add(command.trajectory)
                self._update(command.trajectory, reason=command.reason)
            case cm.Train():
                self._batch = command
                content = _encode_batch(command)
                self._changes.batches.append(BatchRow(command.step, _TAKEN, content))
                self._sweep = True
            case cm.Halt() if not command.ok:
                self.failed = True
            case cm.Delete():
                digest = self._state.versions.digests[command.version]
                self._changes.versions.append(VersionRow(command.version, digest, _DELETED))

    def _update(self, name: TrajectoryId, **fields: Any) -> None:
        self._rows[name] = self._rows[name]._replace(**fields)

    def _batch_trained(self, step: int) -> None:
        batch = self._batch
        if batch is None or batch.step != step:
            return  # said again
        self._batch = None
        self._changes.batches.append(BatchRow(step, _TRAINED, _encode_batch(batch)))
        self._batches[step] = batch
        for group in batch.groups:
            self._end_group(group.group, GroupState.TRAINED, None, step)

    def _end_group(
        self, group: GroupId, state: GroupState, reason: str | None, step: int | None = None
    ) -> None:
        records = self._state.ledger
        if group in self._groups and group not in records.groups:  # else the core did not take it
            self._ends[group] = _End(str(state), reason, step)
            self._touched.update(records.members(group))
            self._sweep = True

    def kept(self, item: Item) -> None:
        name = item.trajectory.trajectory
        if item.reward is not None:
            self._update(name, reward=item.reward)
        self._changes.payloads[name] = msgspec.msgpack.encode(item)
        self._forget_prefix(name)

    def saved(self, prefix: ms.Prefix, whole: ms.Prefix) -> None:
        name = prefix.trajectory
        if prefix.start != self._prefixed.get(name, 0):
            self._forget_prefix(name)
            prefix = whole
        self._prefixed[name] = prefix.start + len(prefix.tokens)
        content = msgspec.msgpack.encode(prefix)
        self._changes.prefixes.append(PrefixRow(name, prefix.start, content))

    def checkpointed(self, step: int, name: str) -> None:
        """A checkpoint has all batches before this step: their trajectories may go."""
        self._changes.checkpoints.append(CheckpointRow(step, name))
        for done in [s for s in self._batches if s < step]:
            for group in self._batches.pop(done).groups:
                for trajectory in group.trajectories:
                    self._forget_payload(trajectory)
        self.pressing = True

    @property
    def samplers(self) -> Container[Version]:
        """The versions that may have sampled what no checkpoint has, but for those with a lease."""
        starts = {group.version for batch in self._batches.values() for group in batch.groups}
        if self._state.paradigm.pins_version:
            return starts
        # A trajectory may have gone on with every version since, and leases none of them.
        starts.update(group.version for group in self._state.ledger.groups.values())
        newest = self._state.versions.newest
        return range(min(starts, default=newest), newest + 1)

    def checkpoint_dropped(self, step: int) -> None:
        self._changes.dropped_checkpoints.append(step)

    # What the ledger gets

    @property
    def dirty(self) -> bool:
        return bool(self._touched) or self._sweep or self.pressing

    def changes(self, position: Position) -> Changes:
        """All that is new since the last call."""
        self._read_records()
        changes, self._changes = self._changes, Changes(_NOWHERE)
        self.pressing = False
        changes.position = position
        return changes

    def recall(self, ledger: Ledger) -> None:
        """The journal was read again: everything up to here is in the ledger."""
        for name, content in ledger.payloads():
            item = decode_item(content)
            if name in self._rows:
                self._update(name, reward=item.reward)
        self.changes(_NOWHERE)
        self._batches = {
            row.step: decode_batch(row) for row in batches_to_redo(ledger) if row.state == _TRAINED
        }
        for row in ledger.prefixes():
            prefix = decode_prefix(row.content)
            self._prefixed[row.trajectory] = prefix.start + len(prefix.tokens)

    def _read_records(self) -> None:
        records = self._state.ledger.trajectories
        if self._sweep:
            self._sweep = False
            self._read_groups()
            self._read_leases()
            self._touched.update(
                name
                for name, record in records.items()
                if str(record.state) != self._rows[name].state
            )
        for name in sorted(self._touched):
            if name in records:
                self._read_trajectory(name)
            elif name in self._rows:
                self._end(name)
        self._touched.clear()
        self._ends.clear()

    def _read_groups(self) -> None:
        records = self._state.ledger.groups
        for name, group in records.items():
            step = self._state.trainer.step if group.state is GroupState.TRAINING else None
            row = self._groups[name]._replace(state=str(group.state), step=step)
            if self._groups[name] != row:
                self._groups[name] = row
                self._changes.groups.append(row)
        for name in [name for name in self._groups if name not in records]:
            self._changes.groups.append(self._groups.pop(name)._replace(**self._end_of(name)))

    def _read_leases(self) -> None:
        live = self._state.versions.live
        for version in [version for version in self._leases if version not in live]:
            del self._leases[version]
            self._changes.leases[version] = ()
        for version, record in live.items():
            holders = (
                *(["newest"] if version == self._state.versions.newest else []),
                *(f"group {group}" for group in sorted(record.groups)),
                *(f"instance {instance}" for instance in sorted(record.instances)),
                *(f"pin {holder}" for holder in sorted(record.pins)),
            )
            if self._leases.get(version) != holders:
                self._leases[version] = self._changes.leases[version] = holders

    def _read_trajectory(self, name: TrajectoryId) -> None:
        record = self._state.ledger.trajectories[name]
        self._update(
            name,
            version=record.version,
            digest=self._state.versions.digests.get(record.version),
            state=str(record.state),
            fence=record.fence,
            tokens=record.tokens,
        )
        if record.state is TrajectoryState.FAILED:
            self._forget_payload(name)
            self._forget_prefix(name)
        self._changes.trajectories.append(self._rows[name])

    def _end(self, name: TrajectoryId) -> None:
        """The core has no record of it any more: it is terminal, as its group is."""
        row = self._rows.pop(name)
        if row.reason is None:
            row = row._replace(**self._end_of(row.group))
        else:  # it failed before its group ended
            row = row._replace(state=str(TrajectoryState.FAILED))
        self._changes.trajectories.append(row)
        self._forget_prefix(name)
        if row.state != TrajectoryState.TRAINED:
            self._forget_payload(name)

    def _end_of(self, group: GroupId) -> dict[str, Any]:
        """A group whose end nobody told of has failed with its last member."""
        return self._ends.get(group, _End(str(GroupState.FAILED), None, None))._asdict()

    def _forget_payload(self, name: TrajectoryId) -> None:
        self._changes.payloads.pop(name, None)
        self._changes.dropped_payloads.add(name)

    def _forget_prefix(self, name: TrajectoryId) -> None:
        if self._prefixed.pop(name, None) is not None:
            rows = self._changes.prefixes
            self._changes.prefixes = [row for row in rows if row.trajectory != name]
            self._changes.dropped_prefixes.add(name)


class _End(NamedTuple):
    """How a group ended; named as the columns are."""

    state: str
    reason: str | None
    step: int | None


def batches_to_redo(ledger: Ledger) -> list[BatchRow]:
    """The batches that no checkpoint has, in order of their steps."""
    last = last_checkpoint(ledger)
    return list(ledger.batches(after=-1 if last is None else last.step - 1))


def last_checkpoint(ledger: Ledger) -> CheckpointRow | None:
    rows = list(ledger.checkpoints())
    return rows[-1] if rows else None


def decode_batch(row: BatchRow) -> cm.Train:
    command = decode_command(json.loads(row.content))
    assert isinstance(command, cm.Train)
    return command


def _encode_batch(command: cm.Train) -> bytes:
    return json.dumps(encode_command(command), separators=(",", ":")).encode()


decode_item = msgspec.msgpack.Decoder(Item).decode
decode_prefix = msgspec.msgpack.Decoder(ms.Prefix).decode
