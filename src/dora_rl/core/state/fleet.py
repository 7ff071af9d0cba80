"""The instances, what each holds and runs, and where the next trajectory goes.

A trajectory goes to the emptiest open instance of its version: a smaller batch decodes
faster, which is also what urgent work needs. Choosing costs O(log n): each version keeps a
heap of (load, instance), and an entry that is out of date is skipped.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from dora_rl.core.protocol.types import (
    ADDED,
    SLEEP_MOVES,
    HostState,
    InstanceId,
    SleepState,
    TrajectoryId,
    Version,
    check_move,
)
from dora_rl.core.state.work import DERIVED

# Bound once: in Python 3.11 `HostState.READY` takes ten times as long to find as a global.
READY = HostState.READY
AWAKE = SleepState.AWAKE


class Queued(NamedTuple):
    """A resident that wants a slot again, after a turn, on an instance that has none free."""

    since: float
    trajectory: TrajectoryId


@dataclass(slots=True, eq=False)
class Instance:
    id: InstanceId
    incarnation: int
    slots: int
    kv_capacity_tokens: int
    version_slots: int
    heard_at: float
    hosts: dict[Version, HostState] = field(default_factory=dict)
    hosted_since: dict[Version, float] = field(default_factory=dict)
    residents: dict[Version, set[TrajectoryId]] = field(default_factory=dict)
    parked: dict[Version, set[TrajectoryId]] = field(default_factory=dict)
    paused: int = 0  # residents that wait for their environment
    reserved: dict[Version, int] = field(default_factory=dict)  # arriving by migration
    kv_tokens: int = 0
    pressured: bool = False
    leaving: bool = False
    outgoing: Version | None = None  # being emptied, to make room for `incoming`
    incoming: Version | None = None
    ticket: int = 0  # of the answer that is waited for: install, eviction or parking
    parking: bool = False
    attempts: int = 0  # at what it was asked last
    checked_at: float = 0.0  # when stuck trajectories were last looked for
    elastic: bool = field(default=False, metadata=ADDED)  # its devices are the trainer's
    lendable: bool = field(default=True, metadata=ADDED)  # training can use its devices
    sleep: SleepState = field(default=SleepState.AWAKE, metadata=ADDED)
    switching_since: float = field(default=0.0, metadata=ADDED)  # the last change of `sleep` asked
    queue: tuple[Queued, ...] = field(default=(), metadata=ADDED)
    """In the order in which the engine gives slots to them: first come, first served."""
    load: int = field(default=0, metadata=DERIVED)  # slots in use or promised
    available: bool = field(default=True, metadata=DERIVED)
    """It takes work: it stays, and rollout has its devices."""

    def __post_init__(self) -> None:
        self.available = not self.leaving and self.sleep is AWAKE

    def rebuild(self) -> None:
        self.load = (
            sum(map(len, self.residents.values())) + sum(self.reserved.values()) - self.paused
        )

    @property
    def free(self) -> int:
        return max(0, self.slots - self.load)

    @property
    def lent(self) -> bool:
        """Its devices are not, or not surely, where they belong."""
        home = SleepState.ASLEEP if self.elastic else SleepState.AWAKE
        return self.sleep is not home

    @property
    def num_trajectories(self) -> int:
        """Running and parked here: what would be lost with it."""
        return sum(map(len, self.residents.values())) + sum(map(len, self.parked.values()))

    def serves(self, version: Version) -> bool:
        """A verified install, and not on its way out."""
        return self.available and self.outgoing != version and self.hosts.get(version) is READY

    def open_for(self, version: Version) -> bool:
        return (
            self.load < self.slots
            and not self.pressured
            and self.available  # from here on as in `serves`: one call less, for every look
            and self.outgoing != version
            and self.hosts.get(version) is READY
        )

    def has_work(self, version: Version) -> bool:
        """Running here, or on its way here."""
        return bool(self.residents.get(version)) or bool(self.reserved.get(version))

    @property
    def settled(self) -> bool:
        """No change of versions is under way."""
        if self.incoming is not None:
            return False
        for state in self.hosts.values():  # noqa: SIM110 - the generator would cost twice the loop
            if state is not READY:
                return False
        return True


@dataclass(slots=True)
class Fleet:
    """Live instances; `ended` remembers the incarnations that must not speak again."""

    instances: dict[InstanceId, Instance] = field(default_factory=dict)
    ended: dict[InstanceId, int] = field(default_factory=dict)

    slots: int = field(default=0, metadata=DERIVED)
    load: int = field(default=0, metadata=DERIVED)  # of all instances that stay
    num_queued: int = field(default=0, metadata=DERIVED)
    parked_at: dict[Version, set[InstanceId]] = field(default_factory=dict, metadata=DERIVED)
    installing: dict[Version, int] = field(default_factory=dict, metadata=DERIVED)
    elastic: set[InstanceId] = field(default_factory=set, metadata=DERIVED)
    lent: set[InstanceId] = field(default_factory=set, metadata=DERIVED)
    _open: dict[Version, list[tuple[int, InstanceId]]] = field(
        default_factory=dict, metadata=DERIVED
    )
    _queues: dict[Version, list[tuple[float, InstanceId]]] = field(
        default_factory=dict, metadata=DERIVED
    )  # heaps of (since when its first is queued, instance)

    def rebuild(self) -> None:
        for instance in self.instances.values():
            instance.rebuild()
            self._count(instance)
            self.num_queued += len(instance.queue)
            for version in instance.parked:
                self.parked_at.setdefault(version, set()).add(instance.id)
            if instance.available:
                self.slots += instance.slots
                self.load += instance.load
            for version, state in instance.hosts.items():
                self._count_installing(version, state, 1)
            self.offer(instance)

    def known(self, instance: InstanceId, incarnation: int) -> Instance | None:
        """The live instance, if it is this very incarnation."""
        record = self.instances.get(instance)
        return record if record is not None and record.incarnation == incarnation else None

    def join(self, instance: Instance) -> None:
        self.instances[instance.id] = instance
        self._count(instance)
        if instance.available:
            self.slots += instance.slots

    def leave(self, instance: Instance) -> None:
        """It takes no new work from here on."""
        if instance.available:
            self.slots -= instance.slots
            self.load -= instance.load
        instance.leaving = True
        instance.available = False

    def set_sleep(self, instance: Instance, sleep: SleepState) -> None:
        """Change which role has its devices; IllegalTransition where that cannot follow."""
        before = instance.available
        name = f"instance {instance.id}"
        instance.sleep = check_move(SLEEP_MOVES, instance.sleep, sleep, name)
        instance.available = not instance.leaving and sleep is AWAKE
        change = instance.available - before
        self.slots += change * instance.slots
        self.load += change * instance.load
        self._count(instance)

    @property
    def num_awake(self) -> int:
        """Instances that rollout has the devices of."""
        if not self.elastic and not self.lent:
            return len(self.instances)
        switching = (self.instances[i].sleep for i in self.elastic | self.lent)
        return len(self.instances) - sum(sleep is not SleepState.AWAKE for sleep in switching)

    def borrowed(self) -> list[Instance]:
        """Elastic instances that do not sleep: training must not begin."""
        return [self.instances[i] for i in sorted(self.lent & self.elastic)]

    def helping(self) -> list[Instance]:
        """Instances of rollout's own whose devices training has, or is about to have."""
        return [self.instances[i] for i in sorted(self.lent - self.elastic)]

    def _count(self, instance: Instance) -> None:
        if instance.elastic:
            self.elastic.add(instance.id)
        if instance.lent:
            self.lent.add(instance.id)
        else:
            self.lent.discard(instance.id)

    def remove(self, instance: Instance) -> None:
        self.leave(instance)
        self._set_queue(instance, ())
        for version in instance.parked:
            self._forget_parked(instance, version)
        for version in list(instance.hosts):
            self.set_host(instance, version, None)
        del self.instances[instance.id]
        self.elastic.discard(instance.id)
        self.lent.discard(instance.id)
        self.ended[instance.id] = instance.incarnation

    def set_host(self, instance: Instance, version: Version, state: HostState | None) -> None:
        """What the instance is to a version from now on; None is nothing."""
        old = instance.hosts.pop(version, None)
        if old is not None:
            self._count_installing(version, old, -1)
        if state is not None:
            instance.hosts[version] = state
            self._count_installing(version, state, 1)
        if state is READY:
            self.offer(instance)

    def offer(self, instance: Instance) -> None:
        """Enter an instance, at its present load, under every version that it serves."""
        if instance.queue:
            self.offer_queue(instance)
        load = instance.load
        if load >= instance.slots or instance.pressured:
            return
        for version in instance.hosts:
            if instance.serves(version):
                heap = self._open.get(version)
                if heap is None:
                    heap = self._open[version] = []
                heappush(heap, (load, instance.id))
                if len(heap) > 4 * len(self.instances) + 64:
                    self._compact(version)

    def emptiest(self, version: Version) -> Instance | None:
        """The open instance of a version with the least load; ties go to the lowest id."""
        heap = self._open.get(version)
        while heap:
            load, instance_id = heap[0]
            instance = self.instances.get(instance_id)
            if instance is not None and instance.load == load and instance.open_for(version):
                return instance
            heappop(heap)
        return None

    def offer_queue(self, instance: Instance) -> None:
        """Enter an instance with a queue under every version that it serves."""
        for version in instance.hosts:
            if instance.queue and instance.serves(version):
                heap = self._queues.setdefault(version, [])
                heappush(heap, (instance.queue[0].since, instance.id))
                if len(heap) > 4 * len(self.instances) + 64:
                    heap[:] = sorted({entry for entry in heap if self._queues_since(*entry)})

    def longest_queued(self, version: Version) -> Instance | None:
        """The instance of a version whose queue has stood still longest; see `skip_queue`."""
        heap = self._queues.get(version)
        while heap:
            since, instance_id = heap[0]
            if self._queues_since(since, instance_id):
                instance = self.instances[instance_id]
                if instance.serves(version):
                    return instance
            heappop(heap)
        return None

    def skip_queue(self, version: Version) -> None:
        """Forget the longest queue, from which nothing can leave, until it is offered again."""
        heappop(self._queues[version])

    def _queues_since(self, since: float, instance_id: InstanceId) -> bool:
        instance = self.instances.get(instance_id)
        return instance is not None and bool(instance.queue) and instance.queue[0].since == since

    def forget_version(self, version: Version) -> None:
        self._open.pop(version, None)
        self._queues.pop(version, None)

    def add(self, instance: Instance, version: Version, trajectory: TrajectoryId) -> None:
        residents = instance.residents.get(version)
        if residents is None:
            residents = instance.residents[version] = set()
        residents.add(trajectory)
        self._add_load(instance, 1)

    def discard(
        self, instance: Instance, version: Version, trajectory: TrajectoryId, paused: bool
    ) -> None:
        """Take a trajectory off an instance, wherever on it it is."""
        self._leave_queue(instance, trajectory)
        residents = instance.residents.get(version)
        if residents is not None and trajectory in residents:
            residents.remove(trajectory)
            if not residents:
                del instance.residents[version]
            if paused:
                instance.paused -= 1
            else:
                self._add_load(instance, -1)
        elif trajectory in instance.parked.get(version, ()):
            self._take_parked(instance, version, trajectory)

    def park(self, instance: Instance, version: Version, trajectory: TrajectoryId) -> None:
        instance.parked.setdefault(version, set()).add(trajectory)
        self.parked_at.setdefault(version, set()).add(instance.id)

    def unpark(self, instance: Instance, version: Version, trajectory: TrajectoryId) -> None:
        self._take_parked(instance, version, trajectory)
        self.add(instance, version, trajectory)

    def _take_parked(self, instance: Instance, version: Version, trajectory: TrajectoryId) -> None:
        _take(instance.parked, version, trajectory)
        if version not in instance.parked:
            self._forget_parked(instance, version)

    def _forget_parked(self, instance: Instance, version: Version) -> None:
        self.parked_at[version].discard(instance.id)
        if not self.parked_at[version]:
            del self.parked_at[version]

    def pause(self, instance: Instance, trajectory: TrajectoryId) -> None:
        """It waits for its environment: its slot is free."""
        instance.paused += 1
        self._leave_queue(instance, trajectory)
        self._add_load(instance, -1)

    def resume(self, instance: Instance, trajectory: TrajectoryId, now: float) -> None:
        """It wants a slot again, and queues where none is free."""
        instance.paused -= 1
        self._add_load(instance, 1)
        if instance.load > instance.slots:
            self._set_queue(instance, (*instance.queue, Queued(now, trajectory)))

    def reserve(self, instance: Instance, version: Version, count: int) -> None:
        left = instance.reserved.get(version, 0) + count
        if left:
            instance.reserved[version] = left
        else:
            instance.reserved.pop(version, None)
        self._add_load(instance, count)

    def _add_load(self, instance: Instance, change: int) -> None:
        instance.load += change
        if instance.available:
            self.load += change
        if instance.queue and change < 0:
            self._advance_queue(instance)
        self.offer(instance)

    def _advance_queue(self, instance: Instance) -> None:
        """Slots have become free: the first in the queue have them."""
        served = len(instance.queue) - max(0, instance.load - instance.slots)
        if served > 0:
            self._set_queue(instance, instance.queue[served:])

    def _leave_queue(self, instance: Instance, trajectory: TrajectoryId) -> None:
        if instance.queue:
            rest = tuple(queued for queued in instance.queue if queued.trajectory != trajectory)
            self._set_queue(instance, rest)

    def _set_queue(self, instance: Instance, queue: tuple[Queued, ...]) -> None:
        self.num_queued += len(queue) - len(instance.queue)
        instance.queue = queue
        self.offer_queue(instance)

    def _count_installing(self, version: Version, state: HostState, change: int) -> None:
        if state is HostState.INSTALLING:
            left = self.installing.get(version, 0) + change
            if left:
                self.installing[version] = left
            else:
                del self.installing[version]

    def _compact(self, version: Version) -> None:
        live = {(i.load, i.id) for i in self.instances.values() if i.open_for(version)}
        self._open[version] = sorted(live)


def _take(
    place: dict[Version, set[TrajectoryId]], version: Version, trajectory: TrajectoryId
) -> None:
    place[version].remove(trajectory)
    if not place[version]:
        del place[version]
