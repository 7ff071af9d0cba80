"""The workers of `bench control`: a fleet and a trainer in one process, which compute nothing.

    python -m dora_rl.benchmarks.control_fleet ORDER

Each instance has its own socket to the driver and says what a rollout worker of a large model
would, as often and at the length it would: reports, saved prefixes, finished trajectories, answers
to every command. Records of trajectories are real, and short. It ends with its standard input, and
writes down when each message was sent.
"""

import heapq
import math
import random
import selectors
import socket
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from dora_rl.core.history.codec import encode_event
from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol import events as ev
from dora_rl.core.protocol.types import (
    Fence,
    GroupId,
    InstanceId,
    Length,
    MigrationId,
    Placement,
    Segment,
    TrajectoryId,
    Version,
)
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.launchers.local.channel import Channel, Gone
from dora_rl.samples import Trajectory, pack, pack_tokens
from dora_rl.transports.samples.shared_directory import SampleWriter

TOKENS_PER_S = 30.0  # of one trajectory among 64 on an instance of a large model
INSTALL_S = 10.0
TRANSFER_S = 2.0
ANSWER_S = 0.05  # evictions, reservations, parking
TRAIN_S = 20.0
PUBLISH_S = 5.0
SIGMA = 0.6  # of the lognormal law of lengths, over groups
LONGEST = 3  # times the mean
SPREAD = 0.4  # of the members of a group around its length: they answer the same question
SHORTEST = 64
KV_TOKENS = 4_000_000  # of an instance: ample, pressure is not what is measured
_WRITTEN = 8  # tokens of a record
_ALPHABET = 10  # of them


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the fleet is; file descriptors are its ends of sockets."""

    instances: tuple[int, ...]
    trainer: int
    slots: int
    tokens: int
    report_period_s: float
    save_every_s: float
    pace: float
    """Installs, moves, training and publications take this many times as long."""
    samples: str
    checkpoints: str
    sent: str
    """Where it writes when each instance has sent each of its messages."""


@dataclass(slots=True)
class _Run:
    """A trajectory on an instance: `written` tokens at `since`, more from then on if it runs."""

    fence: Fence
    group: GroupId
    version: Version
    total: int
    written: float
    since: float
    running: bool = True
    reported: int = 0
    saved: int = 0

    def tokens(self, now: float) -> int:
        grown = (now - self.since) * TOKENS_PER_S if self.running else 0.0
        return min(self.total, int(self.written + grown))

    def stop(self, now: float) -> None:
        self.written, self.since, self.running = float(self.tokens(now)), now, False

    def go_on(self, now: float) -> None:
        self.since, self.running = now, True


@dataclass(slots=True)
class _Instance:
    id: InstanceId
    channel: Channel
    samples: SampleWriter
    sent: "array[float]" = field(default_factory=lambda: array("d"))
    versions: set[Version] = field(default_factory=set)
    runs: dict[TrajectoryId, _Run] = field(default_factory=dict)
    reserved: dict[MigrationId, int] = field(default_factory=dict)
    leaving: dict[MigrationId, dict[TrajectoryId, _Run]] = field(default_factory=dict)
    busy_s: float = 0.0
    accounted: float = 0.0
    steps: int = 0


class Fleet:
    """All instances and the trainer."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0
        self._selector = selectors.DefaultSelector()
        self._began = time.monotonic()
        self._over = False
        self._trainer = Channel(socket.socket(fileno=order.trainer))
        self._parcels: dict[MigrationId, tuple[ms.HandOver, dict[TrajectoryId, _Run]]] = {}
        root = Path(order.samples)
        self._instances = [
            _Instance(i, Channel(socket.socket(fileno=fd)), SampleWriter(root, i, 0))
            for i, fd in enumerate(order.instances)
        ]

    # Time

    @property
    def now(self) -> float:
        return time.monotonic() - self._began

    def _after(self, seconds: float, happening: Callable[[], None]) -> None:
        self._scheduled += 1
        heapq.heappush(self._agenda, (self.now + seconds, self._scheduled, happening))

    def run(self) -> None:
        """Until standard input ends, or the driver is gone."""
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, self._end)
        self._selector.register(
            self._trainer.socket, selectors.EVENT_READ, partial(self._hear, None)
        )
        self._tell_driver(ms.TrainerReady())
        order = self._order
        for instance in self._instances:
            hear = partial(self._hear, instance)
            self._selector.register(instance.channel.socket, selectors.EVENT_READ, hear)
            self._say(
                instance, ev.InstanceJoined(instance.id, 0, order.slots, KV_TOKENS, version_slots=1)
            )
            # Spread over the period, as those of a real fleet are.
            share = (instance.id + 1) / len(self._instances)
            self._after(share * order.report_period_s, partial(self._report, instance))
            self._after(share * order.save_every_s, partial(self._save, instance))
        while not self._over:
            self._turn()

    def _turn(self) -> None:
        wait_s = 0.5
        if self._agenda:
            wait_s = min(wait_s, max(0.0, self._agenda[0][0] - self.now))
        for key, _ in self._selector.select(wait_s):
            key.data()
        while self._agenda and self._agenda[0][0] <= self.now:
            heapq.heappop(self._agenda)[2]()

    def _end(self) -> None:
        self._over = True

    def write_sent(self) -> None:
        with open(self._order.sent, "wb") as file:
            for instance in self._instances:
                file.write(len(instance.sent).to_bytes(8, "little"))
                file.write(instance.sent.tobytes())

    # Messages

    def _hear(self, instance: _Instance | None) -> None:
        channel = self._trainer if instance is None else instance.channel
        for message in channel.receive():
            if instance is None:
                self._train(message)
            else:
                self._perform(instance, message)

    def _send(self, instance: _Instance, message: ms.FromRollout) -> None:
        instance.sent.append(time.monotonic())
        instance.channel.send(message)

    def _say(self, instance: _Instance, event: ev.Event) -> None:
        self._send(instance, ms.Reported.of(event))

    def _tell_driver(self, message: ms.FromTrainer) -> None:
        self._trainer.send(message)

    # The trainer

    def _train(self, message: ms.Message) -> None:
        pace = self._order.pace
        match message:
            case ms.PublishVersion():
                published = ms.Published(message.version, digest(message.version), PUBLISH_S)
                self._after(PUBLISH_S * pace, partial(self._tell_driver, published))
            case ms.TrainOn():
                tokens = sum(sample.trajectory.num_sampled for sample in message.samples)
                trained = ms.Trained(message.step, tokens, TRAIN_S, {"loss": 0.0})
                self._after(TRAIN_S * pace, partial(self._tell_driver, trained))
            case ms.Save():
                (Path(self._order.checkpoints) / f"step-{message.step}").mkdir(parents=True)
                self._tell_driver(ms.Saved(message.step))

    # Instances

    def _perform(self, instance: _Instance, message: ms.Message) -> None:
        match message:
            case ms.Begin():
                self._begin(instance, message)
            case ms.HandOver():
                self._hand_over(instance, message)
            case ms.TakeOver():
                take_over = partial(self._take_over, instance, message.migration)
                self._after(TRANSFER_S * self._order.pace, take_over)
            case ms.SavePrefixes():
                self._save_now(instance, asked=True)
            case ms.Perform():
                self._command(instance, message.command)

    def _command(self, instance: _Instance, command: cm.Command) -> None:
        match command:
            case cm.Cancel():
                run = instance.runs.get(command.trajectory)
                if run is not None and run.fence == command.fence:
                    self._drop(instance, command.trajectory)
            case cm.Install():
                installed = partial(self._installed, instance, command)
                self._after(INSTALL_S * self._order.pace, installed)
            case cm.Evict():
                instance.versions.discard(command.version)
                evicted = ev.VersionEvicted(instance.id, 0, command.version)
                self._after(ANSWER_S, partial(self._say, instance, evicted))
            case cm.Park():
                placements = tuple(self._parked(instance, command.placements))
                parked = ev.TrajectoriesParked(instance.id, 0, placements)
                self._after(ANSWER_S, partial(self._say, instance, parked))
            case cm.Unpark():
                for trajectory, fence in command.placements:
                    run = instance.runs.get(trajectory)
                    if run is not None and run.fence == fence and not run.running:
                        self._run(instance, trajectory, run)
            case cm.Reserve():
                instance.reserved[command.migration] = len(command.moves)
                reserved = ev.MigrationReserved(command.migration)
                self._after(ANSWER_S, partial(self._say, instance, reserved))
            case cm.Release():
                instance.leaving.pop(command.migration, None)
            case cm.AbortMigration():
                self._undo(instance, command.migration)

    def _installed(self, instance: _Instance, command: cm.Install) -> None:
        if command.evict is not None:
            instance.versions.discard(command.evict)
        instance.versions.add(command.version)
        installed = ev.VersionInstalled(instance.id, 0, command.version, digest(command.version))
        self._say(instance, installed)

    # Trajectories

    def _begin(self, instance: _Instance, message: ms.Begin) -> None:
        written = 0 if message.prefix is None else message.prefix.num_tokens
        saved = written
        first = message.trajectory < len(self._instances) * self._order.slots
        total = self._length(message.group, message.trajectory, found_running=first)
        if first and not written:
            # As if the run had long been under way: the first groups are caught at all ages.
            written = int(total * random.Random(~message.group).random())
        run = _Run(message.fence, message.group, message.version, total, written, self.now)
        run.saved, run.reported = saved, written
        self._run(instance, message.trajectory, run)

    def _length(self, group: GroupId, trajectory: TrajectoryId, *, found_running: bool) -> int:
        """Who looks at a fleet at some moment finds long ones more often, by their length."""
        mean = self._order.tokens
        mu = math.log(mean) + (SIGMA**2 / 2 if found_running else -(SIGMA**2) / 2)
        drawn = random.Random(group).lognormvariate(mu, SIGMA)
        share = 1 + SPREAD * (random.Random(trajectory).random() - 0.5)
        return max(SHORTEST, int(min(drawn, LONGEST * mean) * share))

    def _run(self, instance: _Instance, trajectory: TrajectoryId, run: _Run) -> None:
        self._account(instance)
        instance.runs[trajectory] = run
        run.go_on(self.now)
        left_s = (run.total - run.written) / TOKENS_PER_S
        self._after(left_s, partial(self._finish, instance, trajectory, run, run.since))

    def _finish(
        self, instance: _Instance, trajectory: TrajectoryId, run: _Run, since: float
    ) -> None:
        here = instance.runs.get(trajectory)
        if here is not run or not run.running or run.since != since:
            return  # it was cancelled, moved or parked meanwhile
        self._drop(instance, trajectory)
        tokens = tuple((trajectory + i) % _ALPHABET for i in range(_WRITTEN))
        whole = Trajectory(
            id=trajectory,
            group=run.group,
            version=run.version,
            prompt=(),
            tokens=tokens,
            logprobs=(0.0,) * _WRITTEN,
            segments=(Segment(run.version, digest(run.version), run.total),),
            truncated=False,
        )
        content = instance.samples.put(pack(whole))
        named = msgspec.structs.replace(
            whole.by_reference(content), num_tokens=run.total, num_sampled=run.total
        )
        self._send(instance, ms.Finished(run.fence, named))

    def _drop(self, instance: _Instance, trajectory: TrajectoryId) -> None:
        self._account(instance)
        del instance.runs[trajectory]

    def _parked(self, instance: _Instance, placements: tuple[Placement, ...]) -> list[Placement]:
        self._account(instance)
        parked = []
        for placement in placements:
            run = instance.runs.get(placement.trajectory)
            if run is not None and run.fence == placement.fence:
                run.stop(self.now)
                parked.append(placement)
        return parked

    # Moves

    def _hand_over(self, instance: _Instance, message: ms.HandOver) -> None:
        self._account(instance)
        taken = {}
        for trajectory, fence, _ in message.moves:
            run = instance.runs.get(trajectory)
            if run is not None and run.fence == fence:
                run.stop(self.now)
                taken[trajectory] = instance.runs.pop(trajectory)
        instance.leaving[message.migration] = taken
        self._parcels[message.migration] = message, taken
        moved = tuple(Placement(trajectory, run.fence) for trajectory, run in taken.items())
        self._send(instance, ms.HandedOver(message.migration, moved))

    def _take_over(self, instance: _Instance, migration: MigrationId) -> None:
        if instance.reserved.pop(migration, None) is None:
            return  # it was aborted
        message, taken = self._parcels.pop(migration)
        fences = {move.trajectory: move.new_fence for move in message.moves}
        moved = []
        for trajectory, run in taken.items():
            moved.append(Placement(trajectory, run.fence))
            arrived = _Run(
                fences[trajectory], run.group, run.version, run.total, run.written, self.now
            )
            arrived.reported = int(run.written)  # and all of it is saved anew, by this instance
            self._run(instance, trajectory, arrived)
        self._say(instance, ev.MigrationCompleted(migration, tuple(moved)))

    def _undo(self, instance: _Instance, migration: MigrationId) -> None:
        instance.reserved.pop(migration, None)
        self._parcels.pop(migration, None)
        for trajectory, run in instance.leaving.pop(migration, {}).items():
            self._run(instance, trajectory, run)

    # Reports

    def _account(self, instance: _Instance) -> None:
        now = self.now
        running = sum(run.running for run in instance.runs.values())
        instance.busy_s += running * (now - instance.accounted)
        instance.accounted = now

    def _report(self, instance: _Instance) -> None:
        self._after(self._order.report_period_s, partial(self._report, instance))
        now, lengths = self.now, []
        for trajectory, run in instance.runs.items():
            tokens = run.tokens(now)
            if tokens != run.reported:
                run.reported = tokens
                lengths.append(Length(trajectory, run.fence, tokens))
        kv = self._kv(instance)
        self._say(instance, ev.InstanceProgressed(instance.id, 0, kv, tuple(lengths)))
        self._account(instance)
        instance.steps += 1
        busy_s, slots_s = instance.busy_s, now * self._order.slots
        tokens = int(busy_s * TOKENS_PER_S)
        running = sum(run.running for run in instance.runs.values())
        self._send(instance, ms.Used(slots_s, busy_s, tokens, instance.steps, 0, running))

    def _kv(self, instance: _Instance) -> int:
        now = self.now
        return sum(run.tokens(now) for run in instance.runs.values())

    def _save(self, instance: _Instance) -> None:
        self._after(self._order.save_every_s, partial(self._save, instance))
        self._save_now(instance, asked=False)

    def _save_now(self, instance: _Instance, *, asked: bool) -> None:
        now, prefixes, lengths = self.now, [], []
        for trajectory, run in instance.runs.items():
            tokens = run.tokens(now)
            if tokens <= run.saved:
                continue
            content = instance.samples.put(pack_tokens((0,) * _WRITTEN, (0.0,) * _WRITTEN))
            segments = (Segment(run.version, digest(run.version), tokens),)
            piece = ms.Piece(run.saved, tokens - run.saved, content)
            prefix = ms.Prefix(
                trajectory=trajectory, fence=run.fence, pieces=(piece,), segments=segments
            )
            prefixes.append(prefix)
            lengths.append(Length(trajectory, run.fence, tokens))
            run.saved = tokens
        saved = tuple(lengths)
        event = ev.InstanceProgressed(instance.id, 0, self._kv(instance), saved, saved=saved)
        self._send(instance, ms.Prefixes(tuple(prefixes), encode_event(event), asked))


def digest(version: Version) -> str:
    return f"{version:064x}"


def main(encoded: str) -> None:
    fleet = Fleet(msgspec.json.decode(encoded, type=Order))
    try:
        fleet.run()
    except (Gone, KeyboardInterrupt):
        pass
    finally:
        fleet.write_sent()


if __name__ == "__main__":
    main(sys.argv[1])
