"""One rollout instance: an engine, and what the driver asked of it.

It performs messages in the order given and collects answers in `outbox`; whoever runs it carries
both and calls `step`. A placement is named by its fence. It decides nothing: the core does.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

import msgspec

from dora_rl.core import commands as cm
from dora_rl.core import events as ev
from dora_rl.core.codec import encode_event
from dora_rl.core.errors import UserError
from dora_rl.core.types import (
    Fence,
    InstanceId,
    Length,
    MigrationId,
    Placement,
    TrajectoryId,
    Version,
)
from dora_rl.engines.base import Engine, Failed, FinishReason, Request, Sampled, Sampling
from dora_rl.runtime import messages as ms
from dora_rl.runtime.writing import Parcel, Writing, pack, unpack

_REMEMBERED = 256  # migrations that may still be undone after they were completed here
_TRUNCATED = (FinishReason.MAX_TOKENS, FinishReason.CONTEXT)


class Stage(Enum):
    HERE = auto()  # the engine has it: it generates, or waits for a slot or its environment
    PARKED = auto()  # its KV is in `stash`, the engine does not know it
    KEPT = auto()  # handed over; here until the migration is released or undone


@dataclass(slots=True)
class _Run:
    """One placement."""

    fence: Fence
    writing: Writing
    stage: Stage = Stage.HERE
    paused: bool = False  # a turn has ended: it waits for its environment
    stash: bytes | None = None  # while parked
    reported: int = 0  # tokens, in the last report
    saved: int = 0  # tokens that the driver has

    @property
    def id(self) -> TrajectoryId:
        return self.writing.trajectory

    @property
    def wants_slot(self) -> bool:
        return self.stage is Stage.HERE and not self.paused


@dataclass(slots=True)
class _Usage:
    slots_s: float = 0.0
    busy_s: float = 0.0
    tokens: int = 0
    steps: int = 0
    reread_tokens: int = 0
    at: float | None = None  # when time was last accounted for


@dataclass(slots=True)
class RolloutInstance:
    """Performs messages on an engine. `directory` says where a version's weights are."""

    instance: InstanceId
    incarnation: int
    engine: Engine
    directory: Callable[[Version], Path]
    sampling: Sampling
    seed: int
    clock: Callable[[], float] = time.monotonic
    outbox: list[ms.FromRollout] = field(default_factory=list)
    suspended: bool = False
    _runs: dict[TrajectoryId, _Run] = field(default_factory=dict)
    _successors: dict[Version, Version] = field(default_factory=dict)
    _digests: dict[Version, str] = field(default_factory=dict)
    _outgoing: dict[MigrationId, list[_Run]] = field(default_factory=dict)
    _incoming: dict[MigrationId, list[_Run]] = field(default_factory=dict)
    _reserved: dict[MigrationId, int] = field(default_factory=dict)
    _usage: _Usage = field(default_factory=_Usage)
    _num_running: int = 0
    _slots: int = field(init=False)

    def __post_init__(self) -> None:
        self._slots = self.engine.load().slots

    def join(self) -> None:
        """Say that this instance is up and empty."""
        load = self.engine.load()
        self._report(
            ev.InstanceJoined(
                self.instance,
                self.incarnation,
                load.slots,
                load.kv_budget_tokens,
                max(1, load.version_slots - 1),  # one is free for the version that comes in
            )
        )

    @property
    def busy(self) -> bool:
        """Whether `step` would do something."""
        return not self.suspended and not self.engine.idle

    # Messages

    def handle(self, message: ms.ToRollout) -> None:
        """Perform one message; its answers are in `outbox`, now or later."""
        match message:
            case ms.Perform():
                self._perform(message.command)
            case ms.Begin():
                self._begin(message)
            case ms.Continue():
                self._continue(message)
            case ms.Conclude():
                run = self._run(message.trajectory, message.fence)
                if run is not None and run.stage is Stage.HERE and run.paused:
                    self._finish(run)
            case ms.HandOver():
                self._hand_over(message)
            case ms.TakeOver():
                self._take_over(message)
            case ms.SavePrefixes():
                self.save_prefixes(asked=True)
            case ms.Shutdown():
                self.engine.close()

    def _perform(self, command: cm.Command) -> None:
        match command:
            case cm.Cancel():
                run = self._run(command.trajectory, command.fence)
                if run is not None:
                    self._forget(run)
            case cm.Install():
                self._install(command)
            case cm.Evict():
                self._retire(command.version)
                self._report(ev.VersionEvicted(self.instance, self.incarnation, command.version))
            case cm.Park():
                self._park(command)
            case cm.Unpark():
                for trajectory, fence in command.placements:
                    self._unpark(self._run(trajectory, fence))
            case cm.Reserve():
                self._reserve(command)
            case cm.Release():
                for run in self._outgoing.pop(command.migration, ()):
                    if self._runs.get(run.id) is run:
                        self._forget(run)
            case cm.AbortMigration():
                self._undo(command.migration)
            case cm.Suspend() | cm.Resume():
                self._account()
                self.suspended = isinstance(command, cm.Suspend)
            case _:
                raise AssertionError(f"not for an instance: {command}")

    # Versions

    def _install(self, command: cm.Install) -> None:
        version, evict = command.version, command.evict
        try:
            if version not in self._digests:
                self._digests[version] = self.engine.install(version, self.directory(version))
            if evict is not None and evict != version and evict in self._digests:
                if command.carry:
                    self._carry(evict, version)
                self._retire(evict)
        except (UserError, OSError) as error:
            self._report(
                ev.InstallFailed(self.instance, self.incarnation, version, _one_line(error))
            )
            return
        digest = self._digests[version]
        self._report(ev.VersionInstalled(self.instance, self.incarnation, version, digest))

    def _carry(self, old: Version, new: Version) -> None:
        self.engine.carry(old, new)
        self._successors[old] = new
        for run in self._runs.values():
            if run.writing.version == old:
                run.writing.version = new
                self._usage.reread_tokens += len(run.writing.prompt) + len(run.writing.tokens)

    def _retire(self, version: Version) -> None:
        for run in list(self._runs.values()):
            if run.writing.version == version and run.stage is Stage.KEPT:
                self._forget(run)
        self.engine.retire(version)
        self._digests.pop(version, None)

    # Trajectories

    def _begin(self, message: ms.Begin) -> None:
        here = self._runs.get(message.trajectory)
        if here is not None:
            if here.fence >= message.fence:
                return  # said again
            self._forget(here)  # a copy of an older placement
        version = message.version
        while version not in self._digests and version in self._successors:
            version = self._successors[version]
        writing = Writing(
            message.trajectory, message.group, version, message.prompt, message.episode
        )
        prefix = message.prefix
        if prefix is not None:
            writing.tokens = list(prefix.tokens)
            writing.logprobs = list(prefix.logprobs)
            writing.segments = list(prefix.segments)
            self._usage.reread_tokens += len(prefix.tokens)
        try:
            self.engine.submit(self._request(writing))
        except UserError as error:
            self._failed(message.trajectory, message.fence, error)
            return
        self._add(_Run(message.fence, writing, saved=len(writing.tokens)))

    def _request(self, writing: Writing) -> Request:
        return Request(
            trajectory=writing.trajectory,
            version=writing.version,
            prompt=writing.prompt,
            sampling=self.sampling,
            seed=self.seed,
            prefix=tuple(writing.tokens),
            hold=writing.episode,
            turn_start=writing.turn_start,
        )

    def _continue(self, message: ms.Continue) -> None:
        run = self._run(message.trajectory, message.fence)
        if run is None or run.writing.turn != message.turn:
            return
        if run.stage is not Stage.HERE or not run.paused:
            return  # it is said again when the trajectory is back
        try:
            self.engine.extend(run.id, message.tokens)
        except UserError as error:
            self._failed(run.id, run.fence, error)
            self._forget(run)
            return
        run.writing.observe(message.tokens)
        run.writing.turn += 1
        self._change(run, paused=False)
        self._report(ev.TrajectoryResumed(run.id, run.fence, run.writing.turn))

    def _finish(self, run: _Run) -> None:
        trajectory = run.writing.whole()
        self._forget(run)
        self.outbox.append(ms.Finished(run.fence, trajectory))

    def _failed(self, trajectory: TrajectoryId, fence: Fence, error: Exception | str) -> None:
        # Reasons are counted: the same one must read the same for every trajectory.
        reason = _one_line(error).replace(f"trajectory {trajectory}", "the trajectory")
        self._report(ev.TrajectoryFailed(trajectory, fence, reason))

    def _add(self, run: _Run) -> None:
        self._account()
        self._runs[run.id] = run
        self._num_running += run.wants_slot

    def _change(self, run: _Run, *, stage: Stage | None = None, paused: bool | None = None) -> None:
        self._account()
        self._num_running -= run.wants_slot
        run.stage = run.stage if stage is None else stage
        run.paused = run.paused if paused is None else paused
        self._num_running += run.wants_slot

    def _forget(self, run: _Run) -> None:
        self._account()
        self._num_running -= run.wants_slot
        del self._runs[run.id]
        self.engine.cancel(run.id)

    def _run(self, trajectory: TrajectoryId, fence: Fence) -> _Run | None:
        run = self._runs.get(trajectory)
        return run if run is not None and run.fence == fence else None

    # Work

    def step(self) -> None:
        """One step of the engine; what came of it is in `outbox`."""
        self._account()
        outputs = self.engine.step()
        self._usage.steps += 1
        for output in outputs:
            if isinstance(output, Sampled):
                self._usage.tokens += len(output.tokens)
                run = self._runs[output.trajectory]
                run.writing.take(output)
                if output.finish is not None:
                    self._end_turn(run, output.finish)
            elif isinstance(output, Failed):
                run = self._runs[output.trajectory]
                self._failed(run.id, run.fence, output.reason)
                self._forget(run)
        self._account()

    def _end_turn(self, run: _Run, finish: FinishReason) -> None:
        writing = run.writing
        writing.truncated = finish in _TRUNCATED
        if not writing.episode:
            self._finish(run)
            return
        self._change(run, paused=True)
        room = 0 if writing.truncated else self.sampling.max_tokens - len(writing.tokens)
        said = tuple(writing.tokens[writing.turn_start :])
        self._report(ev.TrajectoryPaused(run.id, run.fence, writing.turn + 1))
        self.outbox.append(ms.TurnEnded(run.id, run.fence, writing.turn, said, room))

    def report(self) -> None:
        """The heartbeat: KV in use, who advanced, and how the slots were used."""
        lengths = []
        for run in self._runs.values():
            if run.stage is not Stage.KEPT and len(run.writing.tokens) != run.reported:
                run.reported = len(run.writing.tokens)
                lengths.append(Length(run.id, run.fence, run.writing.num_sampled))
        kv_tokens = self.engine.load().kv_used_tokens
        self._report(
            ev.InstanceProgressed(self.instance, self.incarnation, kv_tokens, tuple(lengths))
        )
        self._account()
        usage = self._usage
        self.outbox.append(
            ms.Used(
                usage.slots_s,
                usage.busy_s,
                usage.tokens,
                usage.steps,
                usage.reread_tokens,
                self._num_running,
            )
        )

    def _account(self) -> None:
        """Time goes to the state that ends now; colocated training's is not rollout's."""
        now, usage = self.clock(), self._usage
        passed = 0.0 if usage.at is None or self.suspended else now - usage.at
        usage.at = now
        usage.slots_s += passed * self._slots
        usage.busy_s += passed * min(self._num_running, self._slots)

    def save_prefixes(self, *, asked: bool = False) -> None:
        """Tell what every trajectory has written since the last time."""
        # An episode's prefix is of no use without its environment, which is not saved.
        new = [
            run
            for run in self._runs.values()
            if run.stage is not Stage.KEPT
            and len(run.writing.tokens) > run.saved
            and not run.writing.episode
        ]
        prefixes = tuple(run.writing.prefix(run.fence, run.saved) for run in new)
        lengths = tuple(Length(run.id, run.fence, run.writing.num_sampled) for run in new)
        for run in new:
            run.saved = len(run.writing.tokens)
        kv_tokens = self.engine.load().kv_used_tokens
        event = ev.InstanceProgressed(
            self.instance, self.incarnation, kv_tokens, lengths, saved=lengths
        )
        self.outbox.append(ms.Prefixes(prefixes, encode_event(event), asked))

    # Parking and migration

    def _park(self, command: cm.Park) -> None:
        parked = []
        for trajectory, fence in command.placements:
            run = self._run(trajectory, fence)
            if run is None or run.stage is Stage.KEPT:
                continue
            if run.stage is not Stage.PARKED:
                run.stash = self.engine.export_trajectory(trajectory)
                self.engine.cancel(trajectory)
                self._change(run, stage=Stage.PARKED)
            parked.append(Placement(trajectory, fence))
        self._report(ev.TrajectoriesParked(self.instance, self.incarnation, tuple(parked)))

    def _unpark(self, run: _Run | None) -> None:
        if run is None or run.stage is not Stage.PARKED or run.stash is None:
            return
        try:
            self.engine.import_trajectory(run.stash)
        except UserError as error:
            self._failed(run.id, run.fence, error)
            self._forget(run)
            return
        run.stash = None
        self._change(run, stage=Stage.HERE)

    def _reserve(self, command: cm.Reserve) -> None:
        name = command.migration
        taken = self._num_running + sum(self._reserved.values())
        if command.version not in self._digests:
            failure = f"version {command.version} is not here"
        elif taken + len(command.moves) > self._slots:
            failure = "no_room"
        else:
            self._reserved[name] = len(command.moves)
            self._report(ev.MigrationReserved(name))
            return
        self._report(ev.MigrationFailed(name, failure))

    def _hand_over(self, message: ms.HandOver) -> None:
        parcels: list[Parcel] = []
        runs: list[_Run] = []
        for trajectory, fence, new_fence in message.moves:
            run = self._run(trajectory, fence)
            if run is None or run.stage is Stage.KEPT:
                continue
            kv = run.stash
            if kv is None:
                kv = self.engine.export_trajectory(trajectory)
            placement = Placement(trajectory, fence)
            parcels.append(Parcel(placement, new_fence, run.writing, run.paused, kv))
            self._change(run, stage=Stage.KEPT)
            runs.append(run)
        self._outgoing[message.migration] = runs
        try:
            _write(Path(message.file), pack(parcels))
        except OSError as error:
            self._undo(message.migration)
            self.outbox.append(ms.HandedOver(message.migration, failure=_one_line(error)))
            return
        moved = tuple(parcel.placement for parcel in parcels)
        self.outbox.append(ms.HandedOver(message.migration, moved))

    def _take_over(self, message: ms.TakeOver) -> None:
        name = message.migration
        if name in self._incoming:
            return  # said again: what came is remembered, lest an abort leaves it here
        self._reserved.pop(name, None)
        arrived = self._incoming[name] = []
        while len(self._incoming) > _REMEMBERED:
            del self._incoming[next(iter(self._incoming))]
        file = Path(message.file)
        try:
            parcels = unpack(file.read_bytes())
            for parcel in parcels:
                self.engine.import_trajectory(parcel.kv)
                run = _Run(parcel.new_fence, parcel.writing, paused=parcel.paused)
                self._add(run)
                arrived.append(run)
        except (UserError, OSError, msgspec.DecodeError) as error:
            self._undo(name)
            self._report(ev.MigrationFailed(name, _one_line(error)))
        else:
            moved = tuple(parcel.placement for parcel in parcels)
            self._report(ev.MigrationCompleted(name, moved))
        finally:
            file.unlink(missing_ok=True)

    def _undo(self, migration: MigrationId) -> None:
        """The target forgets what came, the source goes on with what it kept."""
        self._reserved.pop(migration, None)
        for run in self._incoming.pop(migration, ()):
            if self._runs.get(run.id) is run:
                self._forget(run)
        for run in self._outgoing.pop(migration, ()):
            if self._runs.get(run.id) is run and run.stage is Stage.KEPT:
                if run.stash is None:
                    self.engine.resume(run.id)
                self._change(run, stage=Stage.HERE if run.stash is None else Stage.PARKED)

    def _report(self, event: ev.Event) -> None:
        self.outbox.append(ms.Reported.of(event))


def _write(file: Path, data: bytes) -> None:
    """All or nothing."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_bytes(data)
    os.replace(partial, file)


def _one_line(error: Exception | str) -> str:
    return " ".join(str(error).split())
