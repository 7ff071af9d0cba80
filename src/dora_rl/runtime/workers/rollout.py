"""One rollout instance: an engine, and what the driver asked of it.

It performs messages in the order given and collects answers in `outbox`; its launcher carries
both and calls `step`. A placement is named by its fence. It decides nothing: the core does.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dora_rl.config.text import one_line
from dora_rl.core.history.codec import encode_event
from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.types import (
    Fence,
    InstanceId,
    Length,
    Placement,
    Version,
)
from dora_rl.engines.base import Engine, Failed, FinishReason, Sampled, Sampling, room
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.workers.migrations import Migrations
from dora_rl.runtime.workers.partial_trajectory import PartialTrajectory
from dora_rl.runtime.workers.placements import PlacedTrajectory, Placements, Stage
from dora_rl.samples import Trajectory, pack
from dora_rl.transports.errors import RecordLost
from dora_rl.transports.kv import KvTransport
from dora_rl.transports.samples import SampleSink, SampleSource
from dora_rl.transports.weights import WeightReceiver

_TRUNCATED = (FinishReason.MAX_TOKENS, FinishReason.CONTEXT)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RolloutInstance:
    """Performs messages on an engine.

    Versions come by `weights`; what it has written goes to `sink`, what others have written
    comes from `source`, and what moves goes by `kv`.
    """

    instance: InstanceId
    incarnation: int
    engine: Engine
    weights: WeightReceiver
    sink: SampleSink
    source: SampleSource
    kv: KvTransport
    sampling: Sampling
    seed: int
    clock: Callable[[], float] = time.monotonic
    elastic: bool = False  # on the trainer's devices: it joins asleep
    outbox: list[ms.FromRollout] = field(default_factory=list)
    _successors: dict[Version, Version] = field(default_factory=dict)
    _kv_tokens: int = 0  # in the last report
    _unsent: deque[tuple[Fence, Trajectory]] = field(default_factory=deque)  # whole, not put yet
    _version_slots: int = field(init=False)
    _here: Placements = field(init=False)
    _migrations: Migrations = field(init=False)

    def __post_init__(self) -> None:
        self._version_slots = self.engine.capabilities.version_slots
        self._here = Placements(self.engine, self.sampling, self.seed, self.clock, self._report)
        self._here.suspended = self.elastic
        self._migrations = Migrations(self._here, self.kv, self.outbox)

    @property
    def suspended(self) -> bool:
        return self._here.suspended

    def join(self) -> None:
        """Say that this instance is up and empty."""
        load = self.engine.load()
        _log.info("joined: %d slots", load.slots)
        self._report(
            ev.InstanceJoined(
                self.instance,
                self.incarnation,
                load.slots,
                load.kv_budget_tokens,
                self.engine.capabilities.version_slots,
                self.elastic,
            )
        )

    @property
    def busy(self) -> bool:
        """Whether `step` would do something."""
        return not self._here.suspended and not self.engine.idle

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
                self._conclude(message)
            case ms.HandOver():
                self._migrations.hand_over(message)
            case ms.TakeOver():
                self._migrations.take_over(message)
            case ms.SavePrefixes():
                self.save_prefixes(asked=True)
            case ms.Shutdown():
                self.engine.close()
                self.sink.close()
                self.weights.close()

    def _perform(self, command: cm.Command) -> None:
        match command:
            case cm.Cancel():
                placed = self._here.get(command.trajectory, command.fence)
                if placed is not None:
                    self._here.forget(placed)
            case cm.Install():
                self._install(command)
            case cm.Evict():
                self._retire(command.version)
                self._report(ev.VersionEvicted(self.instance, self.incarnation, command.version))
                _log.debug("version %d evicted", command.version)
            case cm.Park():
                self._park(command)
            case cm.Unpark():
                for trajectory, fence in command.placements:
                    self._unpark(self._here.get(trajectory, fence))
            case cm.Reserve():
                self._migrations.reserve(command)
            case cm.Release():
                self._migrations.release(command.migration)
            case cm.AbortMigration():
                self._migrations.undo(command.migration)
            case cm.Suspend() | cm.Resume():
                self._here.account()
                self._here.suspended = isinstance(command, cm.Suspend)
            case cm.Sleep():
                self._sleep()
            case cm.Wake():
                self._here.account()
                self._here.suspended = False
                self._report(ev.InstanceWoke(self.instance, self.incarnation))
            case _:
                raise AssertionError(f"not for an instance: {command}")

    # Versions

    def _install(self, command: cm.Install) -> None:
        version, old = command.version, command.evict
        try:
            if version not in self._here.digests:
                self._load(version, old, carry=command.carry)
            if old is not None and old != version:
                if command.carry:
                    self._carry(old, version)
                self._retire(old)
        except (UserError, OSError) as error:
            _log.warning("version %d not installed: %s", version, error)
            self._report(
                ev.InstallFailed(self.instance, self.incarnation, version, one_line(error))
            )
            return
        digest = self._here.digests[version]
        self._report(ev.VersionInstalled(self.instance, self.incarnation, version, digest))
        _log.debug("version %d installed, digest %s, evicts %s", version, digest, command.evict)

    def _load(self, version: Version, old: Version | None, *, carry: bool) -> None:
        """Load a version into a free slot, or else into that of `old`.

        In the latter case the engine must be empty of `old` first. If the load fails, what was
        displaced continues under `old`, or waits for the next attempt where `old` is gone; so does
        what is started on `old` from now on.
        """
        displaced: list[PlacedTrajectory] = []
        if old in self._here.digests and len(self._here.digests) >= self._version_slots:
            self._here.forget_kept(old)
            if carry:
                displaced = self._displace(old)
        try:
            self.engine.install(version, self.weights.receive(version), old)
        finally:
            loads = self.engine.load().versions
            self._here.digests = {here: load.digest for here, load in loads.items()}
            if carry and old is not None and version not in self._here.digests:
                if old in self._here.digests:
                    self._resubmit(displaced, old)
                else:
                    self._successors[old] = version

    def _displace(self, version: Version) -> list[PlacedTrajectory]:
        """Take all trajectories of a version off the engine; what they wrote is here."""
        self._here.forget_kept(version)
        displaced = [r for r in self._here.trajectories.values() if r.partial.version == version]
        for placed in displaced:
            self.engine.cancel(placed.id)
            if placed.stage is Stage.HERE:
                self._here.change(placed, stage=Stage.DISPLACED)
        return displaced

    def _carry(self, old: Version, new: Version) -> None:
        """All trajectories of `old` continue under `new`: what they wrote is read anew.

        For the paradigms that mix versions within a trajectory; `multi_version` never does.
        """
        self._successors[old] = new
        self._resubmit(self._displace(old), new)

    def _resubmit(self, displaced: list[PlacedTrajectory], version: Version) -> None:
        for placed in displaced:
            placed.partial.version = version
            if placed.stage is Stage.PARKED:
                placed.stash = None  # of the other version
            if placed.stage is Stage.DISPLACED and self._here.bring(placed, None):
                self._here.change(placed, stage=Stage.HERE)
                if placed.deferred is not None:
                    message, placed.deferred = placed.deferred, None
                    self.handle(message)

    def _retire(self, version: Version) -> None:
        self._here.forget_kept(version)
        self.engine.evict(version)
        self.weights.release(version)
        self._here.digests.pop(version, None)

    def _sleep(self) -> None:
        """Training gets the devices: no version stays, and nothing runs any more.

        What is parked waits here without its version; it moves to where that is served.
        """
        self._here.account()
        self._here.suspended = True
        for version in list(self._here.digests):
            self._retire(version)
        self._report(ev.InstanceSlept(self.instance, self.incarnation))

    # Trajectories

    def _begin(self, message: ms.Begin) -> None:
        here = self._here.trajectories.get(message.trajectory)
        if here is not None:
            if here.fence >= message.fence:
                return  # a duplicate
            self._here.forget(here)  # a copy of an older placement
        version, before = message.version, None
        while version not in self._here.digests and version in self._successors:
            version, before = self._successors[version], version
        partial = PartialTrajectory(
            message.trajectory, message.group, version, message.prompt, message.episode
        )
        prefix = message.prefix
        if prefix is not None:
            try:
                partial.begin_with(prefix, self.source)
            except RecordLost as error:
                _log.warning("the prefix of trajectory %d is lost: %s", message.trajectory, error)
                self._here.failed(message.trajectory, message.fence, "its prefix is lost")
                return
        placed = PlacedTrajectory(message.fence, partial, saved=len(partial.tokens))
        if before is not None and version not in self._here.digests:
            # It would have been displaced, had it come before the install that failed.
            partial.version, placed.stage = before, Stage.DISPLACED
        self._here.add(placed)
        if placed.stage is Stage.HERE:
            self._here.bring(placed, None, anew=prefix is not None)

    def _continue(self, message: ms.Continue) -> None:
        placed = self._here.get(message.trajectory, message.fence)
        if placed is None or placed.partial.turn != message.turn:
            return
        if placed.stage is Stage.DISPLACED:
            placed.deferred = message
        if placed.stage is not Stage.HERE or not placed.paused:
            return  # it is repeated when the trajectory is back
        try:
            self.engine.extend(placed.id, message.tokens)
        except UserError as error:
            # Not refused for good: an environment may answer otherwise.
            self._here.failed(placed.id, placed.fence, str(error))
            self._here.forget(placed)
            return
        placed.partial.observe(message.tokens)
        placed.partial.turn += 1
        self._here.change(placed, paused=False)
        self._report(ev.TrajectoryResumed(placed.id, placed.fence, placed.partial.turn))

    def _conclude(self, message: ms.Conclude) -> None:
        placed = self._here.get(message.trajectory, message.fence)
        if placed is not None and placed.stage is Stage.DISPLACED:
            placed.deferred = message
        if placed is not None and placed.stage is Stage.HERE and placed.paused:
            placed.partial.truncated |= message.truncated
            self._finish(placed)

    def _finish(self, placed: PlacedTrajectory) -> None:
        trajectory = placed.partial.whole()
        self._here.forget(placed)
        self._unsent.append((placed.fence, trajectory))
        self._send_finished()

    def _send_finished(self) -> None:
        """Report what is whole, in order; what finds no room now is put with the next report."""
        while self._unsent:
            fence, trajectory = self._unsent[0]
            try:
                content = self.sink.put(pack(trajectory))
            except OSError as error:
                _log.warning("trajectory %d is not put yet: %s", trajectory.id, error)
                return
            self._unsent.popleft()
            self.outbox.append(ms.Finished(fence, trajectory.by_reference(content)))

    # Work

    def step(self) -> None:
        """One step of the engine; what came of it is in `outbox`."""
        self._here.account()
        outputs = self.engine.step()
        self._here.usage.steps += 1
        for output in outputs:
            if isinstance(output, Sampled):
                self._here.usage.tokens += len(output.tokens)
                placed = self._here.trajectories[output.trajectory]
                placed.partial.take(output)
                if output.finish is not None:
                    self._end_turn(placed, output.finish)
            elif isinstance(output, Failed):
                placed = self._here.trajectories[output.trajectory]
                self._here.failed(placed.id, placed.fence, output.reason)
                self._here.forget(placed)
        self._here.account()

    def _end_turn(self, placed: PlacedTrajectory, finish: FinishReason) -> None:
        partial = placed.partial
        partial.truncated = finish in _TRUNCATED
        if not partial.episode:
            self._finish(placed)
            return
        self._here.change(placed, paused=True)
        left = 0 if partial.truncated else self._room(partial)
        said = tuple(partial.tokens[partial.turn_start :])
        self._report(ev.TrajectoryPaused(placed.id, placed.fence, partial.turn + 1))
        self.outbox.append(ms.TurnEnded(placed.id, placed.fence, partial.turn, said, left))

    def _room(self, partial: PartialTrajectory) -> int:
        prompt, response = len(partial.prompt), len(partial.tokens)
        return room(self.sampling.max_tokens, self.engine.context, prompt, response)

    def report(self) -> None:
        """The heartbeat: KV in use, who advanced, and how the slots were used."""
        self._send_finished()
        lengths = []
        for placed in self._here.trajectories.values():
            if placed.stage is not Stage.KEPT and len(placed.partial.tokens) != placed.reported:
                placed.reported = len(placed.partial.tokens)
                lengths.append(Length(placed.id, placed.fence, placed.partial.num_sampled))
        load = self.engine.load()
        self._kv_tokens = load.kv_used_tokens
        self._report(
            ev.InstanceProgressed(self.instance, self.incarnation, self._kv_tokens, tuple(lengths))
        )
        self._here.account()
        usage = self._here.usage
        self.outbox.append(
            ms.Used(
                usage.slots_s,
                usage.busy_s,
                usage.tokens,
                usage.steps,
                usage.reread_tokens,
                self._here.num_running,
                self.weights.traffic.sent_bytes,
                self.weights.traffic.whole_bytes,
                load.proposed_tokens,
                load.accepted_tokens,
            )
        )

    def still_alive(self) -> ms.Reported:
        """A heartbeat without news: KV as last reported, nobody advanced.

        It touches neither the engine nor `outbox`, so that another thread may ask for it while
        an operation is under way.
        """
        return ms.Reported.of(
            ev.InstanceProgressed(self.instance, self.incarnation, self._kv_tokens, ())
        )

    def save_prefixes(self, *, asked: bool = False) -> None:
        """Tell what every trajectory has written since the last time."""
        # An episode's prefix is of no use without its environment, which is not saved.
        new = [
            placed
            for placed in self._here.trajectories.values()
            if placed.stage is not Stage.KEPT
            and len(placed.partial.tokens) > placed.saved
            and not placed.partial.episode
        ]
        prefixes, lengths = [], []
        try:
            for placed in new:
                prefixes.append(placed.partial.prefix(placed.fence, placed.saved, self.sink))
                lengths.append(Length(placed.id, placed.fence, placed.partial.num_sampled))
                placed.saved = len(placed.partial.tokens)
        except OSError as error:
            _log.warning("not all prefixes are saved this time: %s", error)
        self._kv_tokens = self.engine.load().kv_used_tokens
        saved = tuple(lengths)
        event = ev.InstanceProgressed(
            self.instance, self.incarnation, self._kv_tokens, saved, saved=saved
        )
        self.outbox.append(ms.Prefixes(tuple(prefixes), encode_event(event), asked))

    # Parking and migration

    def _park(self, command: cm.Park) -> None:
        parked = []
        for trajectory, fence in command.placements:
            placed = self._here.get(trajectory, fence)
            if placed is None or placed.stage is Stage.KEPT:
                continue
            if placed.stage is not Stage.PARKED:
                try:
                    if self.engine.capabilities.kv_export:
                        placed.stash = self.engine.export_trajectory(trajectory)
                except UserError:
                    continue  # it continues; the core misses it in the answer, and asks again
                self.engine.cancel(trajectory)
                self._here.change(placed, stage=Stage.PARKED)
            parked.append(Placement(trajectory, fence))
        self._report(ev.TrajectoriesParked(self.instance, self.incarnation, tuple(parked)))

    def _unpark(self, placed: PlacedTrajectory | None) -> None:
        if placed is None or placed.stage is not Stage.PARKED:
            return
        if self._here.bring(placed, placed.stash):
            placed.stash = None
            self._here.change(placed, stage=Stage.HERE)

    def _report(self, event: ev.Event) -> None:
        self.outbox.append(ms.Reported.of(event))
