"""Which instances should hold which versions: the plan of one rebalance, as pure functions.

Partition in proportion to work, then change as little as possible: instances that nobody
needs first, then the emptiest hosts of versions that have too many, and those only where the
slot time gained outweighs what the move costs. O(instances + trajectories moved).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop
from typing import NamedTuple

from dora_rl.core.protocol.types import InstanceId, TrajectoryId, Version
from dora_rl.core.state.fleet import Instance

PARK_FROM = 1 / 8  # of a donor's slots idle: below that, emptying it is hardly worth an install
PARK_UP_TO = 1 / 2  # of what other hosts run: so about the median rest of a response is waited for


class Demand(NamedTuple):
    """What one version needs."""

    version: Version
    work: int  # trajectories that need a slot: waiting, running, parked
    waiting: int  # of these, without a place (waiting or parked)
    urgent: bool  # its deadline has come: the trainer waits, or will next


class Economy(NamedTuple):
    """What a move costs and how long its gain lasts."""

    install_s: float
    migration_s: float
    horizon_s: float
    gain: float

    def pays(self, slots: int, moved: int, unmet: int) -> bool:
        """Slots put to use over the horizon, against slots held up by the change."""
        gained = min(slots, unmet) * self.horizon_s
        cost = slots * self.install_s
        if moved:
            cost += (slots + moved) * self.migration_s
        return gained > self.gain * cost


class Shift(NamedTuple):
    """Trajectories of one version that change instance."""

    source: InstanceId
    target: InstanceId
    version: Version
    trajectories: tuple[TrajectoryId, ...]


class Conversion(NamedTuple):
    """An instance takes a version in, for which another may have to go."""

    instance: InstanceId
    incoming: Version
    outgoing: Version | None
    park: bool = False


@dataclass(slots=True)
class RebalancePlan:
    """What one rebalance changes: versions of instances, and trajectories that move."""

    conversions: list[Conversion] = field(default_factory=list)
    shifts: list[Shift] = field(default_factory=list)


def partition(work: Mapping[Version, int], total: int) -> dict[Version, int]:
    """Instances per version: in proportion to work, by largest remainder.

    Sums to `total`; every version with work gets at least one, provided that there are
    enough. Ties go to the older version.
    """
    live = sorted(version for version, amount in work.items() if amount > 0)
    if not live or total < len(live):
        raise ValueError(f"cannot give {total} instances to {len(live)} versions, one each")
    whole = sum(work[version] for version in live)
    share = {version: max(1, total * work[version] // whole) for version in live}

    def excess(version: Version) -> int:
        """How far above its exact quota a version is, in units of 1 / whole."""
        return share[version] * whole - total * work[version]

    while sum(share.values()) < total:
        share[min(live, key=excess)] += 1
    while sum(share.values()) > total:
        share[max((v for v in live if share[v] > 1), key=lambda v: (excess(v), v))] -= 1
    return share


class Planner:
    """Scratch state of one plan; the instances themselves are only read."""

    def __init__(
        self,
        instances: Iterable[Instance],
        demands: Iterable[Demand],
        newest: Version,
        economy: Economy,
        turn_ends: Callable[[Instance, Version], bool],
        *,
        needs_slot: Callable[[TrajectoryId], bool] = lambda _: True,
        length: Callable[[TrajectoryId], int] = lambda _: 0,
        kv_limit: float = 1.0,
    ) -> None:
        self.demands = {d.version: d for d in demands}
        self.newest = newest
        self.economy = economy
        self.turn_ends = turn_ends
        self.needs_slot = needs_slot  # one that waits for its environment needs none
        self.length = length
        self.kv_limit = kv_limit  # share of an instance's KV that may be filled by moves
        self.plan = RebalancePlan()
        self.changed: set[InstanceId] = set()
        self.keepers: set[InstanceId] = set()  # they receive what others give up
        self.added_kv: dict[InstanceId, int] = {}  # by the moves of this plan
        self.load: dict[InstanceId, int] = {}  # as it will be, like the next
        self.hosts: defaultdict[Version, dict[InstanceId, Instance]] = defaultdict(dict)
        self.instances = [i for i in instances if i.available]
        self.places = 0
        self.underused: list[Instance] = []  # a version could come in, or has no work
        self._visit()

    def _visit(self) -> None:
        """Ask all that is asked of every instance at one visit: they are many."""
        load, all_hosts = self.load, self.hosts
        for instance in self.instances:
            name, hosts, version_slots = instance.id, instance.hosts, instance.version_slots
            outgoing, incoming = instance.outgoing, instance.incoming
            load[name] = instance.load
            self.places += version_slots
            for version in hosts:
                if version != outgoing:
                    all_hosts[version][name] = instance
            if incoming is not None:
                if incoming != outgoing:
                    all_hosts[incoming][name] = instance
            elif len(hosts) < version_slots or not hosts.keys() <= instance.residents.keys():
                self.underused.append(instance)

    def make(self) -> RebalancePlan:
        if not self.instances or not self.demands:
            return self.plan
        targets = self._targets()
        spare = self._spare(targets)
        for demand in sorted(self.demands.values()):
            wanted = targets.get(demand.version, 0) - len(self.hosts.get(demand.version, ()))
            if wanted <= 0:
                continue
            unmet = demand.waiting - self._free_slots(demand.version)
            while wanted > 0 and spare:
                instance, outgoing = spare.pop()
                if (
                    instance.id in self.changed
                    or demand.version in instance.hosts
                    or not self._can_lose(outgoing, targets)
                ):
                    continue
                self._convert(instance, demand.version, outgoing)
                wanted -= 1
                unmet -= instance.free
            if wanted > 0:
                self._take_from_others(demand, targets, wanted, unmet)
        return self.plan

    def _targets(self) -> dict[Version, int]:
        """How many instances each version should be on."""
        work = {v: max(1, d.work) for v, d in self.demands.items()}
        if self.places > len(self.instances):
            return {v: self._shared_target(v, amount) for v, amount in work.items()}
        if len(work) <= len(self.instances):
            return partition(work, len(self.instances))
        return dict.fromkeys(work, 1)  # more versions than places: they take turns

    def _shared_target(self, version: Version, work: int) -> int:
        """With shared instances the newest is wanted everywhere, an older one where it fits."""
        if version == self.newest:
            return len(self.instances)
        slots = sum(instance.slots for instance in self.instances)
        needed = -(-work * self.places // slots)
        return max(1, min(needed, len(self.hosts.get(version, ()))))

    def _spare(self, targets: Mapping[Version, int]) -> list[tuple[Instance, Version | None]]:
        """Instances that can take a version in without moving anything; the best ones last."""
        spare: list[tuple[int, int, Instance, Version | None]] = []
        for instance in self.underused:
            if not instance.settled:
                continue
            if len(instance.hosts) < instance.version_slots:
                spare.append((0, -instance.id, instance, None))
                continue
            for version in sorted(instance.hosts):
                if not instance.has_work(version) and self._can_lose(version, targets):
                    spare.append((version not in self.demands, -instance.id, instance, version))
                    break
        spare.sort(key=lambda entry: entry[:2])
        return [entry[2:] for entry in spare]

    def _can_lose(self, version: Version | None, targets: Mapping[Version, int]) -> bool:
        """Whether one host fewer leaves a version its share."""
        demand = None if version is None else self.demands.get(version)
        if demand is None or version is None or len(self.hosts[version]) > targets[version]:
            return True
        # With more versions than places, one without work (the newest) has to wait for some.
        return demand.work <= 0 and len(self.demands) > self.places

    def _free_slots(self, version: Version) -> int:
        return sum(self._room(i, version) for i in self.hosts.get(version, {}).values())

    def _take_from_others(
        self, demand: Demand, targets: Mapping[Version, int], wanted: int, unmet: int
    ) -> None:
        """Empty the lightest hosts of versions that have more than their share."""
        housed = bool(self.hosts.get(demand.version))
        for donor_version in sorted(self.hosts, reverse=True):
            donor_demand = self.demands.get(donor_version)
            if donor_version == demand.version or (donor_demand and donor_demand.urgent):
                continue
            surplus = len(self.hosts[donor_version]) - targets.get(donor_version, 0)
            if housed and surplus <= 0:
                continue
            hosts = self._by_work(donor_version)
            if not housed:
                surplus = max(surplus, min(1, len(hosts) - 1))
            if surplus <= 0 or len(hosts) < 2:
                continue
            keepers, room = self._keepers(hosts, donor_version)
            served = sum(self.load[i.id] for _, _, _, i in hosts)
            # Where trajectories have turns, a slot that becomes free is wanted back soon; where
            # KV is scarce, it cannot be filled.
            drains = not any(i.paused or i.pressured for _, _, _, i in hosts)
            heapify(hosts)  # few of them give, and those are the lightest: no need to sort them all
            for _ in range(min(surplus, len(hosts) - 1)):
                donor = heappop(hosts)[3]
                moved = sorted(donor.residents.get(donor_version, ()))
                needed = sum(map(self.needs_slot, moved))
                room -= self._room(donor, donor_version)
                served -= self.load[donor.id]
                parked = max(0, needed - room)
                if donor.id in self.keepers:
                    break
                if parked and not (drains and self._may_park(donor, parked, served)):
                    break
                won = donor.free + needed
                if housed and not self.economy.pays(won, len(moved), unmet):
                    break
                if parked:
                    moved = self._first_to_move(moved, room)
                if not self._shift(donor, donor_version, moved, keepers):
                    break
                self._convert(donor, demand.version, donor_version, park=parked > 0)
                room -= needed - parked
                served += needed - parked
                housed = True
                wanted -= 1
                unmet -= won
                if wanted <= 0:
                    return
        if not housed:
            self._take_turn(demand)

    def _keepers(
        self, hosts: list[tuple[int, int, InstanceId, Instance]], version: Version
    ) -> tuple[list[Instance], int]:
        """Hosts with room for a version's work, the fullest last, and the room in all."""
        keepers, room = [], 0
        for _, _, _, instance in sorted([e for e in hosts if e[3].load < e[3].slots]):
            here = self._room(instance, version)
            if here:
                keepers.append(instance)
                room += here
        return keepers, room

    def _by_work(self, version: Version) -> list[tuple[int, int, InstanceId, Instance]]:
        """The hosts of a version that can give it up, behind what orders them: the lightest least.

        Who is settled serves all that it holds.
        """
        return [
            (len(i.residents.get(version, ())), i.kv_tokens, i.id, i)
            for i in self.hosts[version].values()
            if len(i.hosts) >= i.version_slots and i.settled and i.id not in self.changed
        ]

    def _may_park(self, donor: Instance, parked: int, served: int) -> bool:
        """Whether a donor may be taken before all of its work fits elsewhere (decision 034).

        What is parked is not lost time: it fills the slots that the version's other hosts free
        while it drains, and the donor serves a full batch meanwhile. It is delayed, though, so
        it must be little beside the `served`, which the others run.
        """
        return PARK_FROM * donor.slots <= donor.free and parked <= PARK_UP_TO * served

    def _first_to_move(self, moved: list[TrajectoryId], room: int) -> list[TrajectoryId]:
        """Those that keep running: the longest so far, and all that need no slot.

        With long-tailed lengths, who has run longest has the most to go.
        """
        by_length = sorted(moved, key=lambda t: (-self.length(t), t))
        running = [t for t in by_length if self.needs_slot(t)][:room]
        return sorted({*running, *(t for t in moved if not self.needs_slot(t))})

    def _room(self, instance: Instance, version: Version) -> int:
        """Slots that an instance could still give to a version's trajectories from elsewhere."""
        if instance.load >= instance.slots or not instance.open_for(version):
            return 0
        return instance.slots - self.load[instance.id]

    def _shift(
        self, donor: Instance, version: Version, moved: list[TrajectoryId], keepers: list[Instance]
    ) -> bool:
        """Hand a donor's trajectories to the fullest hosts with room; False if they do not fit.

        So the light ones stay light, and can be emptied next. `keepers` are in order of their
        work, the fullest last; who has no more room is taken off.
        """
        parts: dict[InstanceId, list[TrajectoryId]] = {}
        room, kv_room = 0, 0.0
        keeper: Instance | None = None
        for trajectory_id in moved:
            needed, length = self.needs_slot(trajectory_id), self.length(trajectory_id)
            while keeper is None or needed > room or length > kv_room:
                if keeper is not None:
                    keepers.pop()
                if not keepers or keepers[-1] is donor:
                    return False
                keeper = keepers[-1]
                room = self._room(keeper, version)
                kv_tokens = keeper.kv_tokens + self.added_kv.get(keeper.id, 0)
                kv_room = self.kv_limit * keeper.kv_capacity_tokens - kv_tokens
            parts.setdefault(keeper.id, []).append(trajectory_id)
            room -= needed
            kv_room -= length
        for target, part in parts.items():
            self.keepers.add(target)
            self.load[target] += sum(map(self.needs_slot, part))
            self.added_kv[target] = self.added_kv.get(target, 0) + sum(map(self.length, part))
            self.plan.shifts.append(Shift(donor.id, target, version, tuple(part)))
        return True

    def _take_turn(self, demand: Demand) -> None:
        """No place can be had by moving: some version's turn must end, its work be parked.

        Only where there are more versions than places: else room comes as work is finished.
        """
        if demand.work <= 0 or (len(self.demands) <= self.places and not demand.urgent):
            return
        best: tuple[bool, float, InstanceId, Version, Instance] | None = None
        for instance in self.instances:
            if instance.id in self.changed or instance.id in self.keepers or not instance.settled:
                continue
            for version in instance.hosts:
                holder = self.demands.get(version)
                cuts_in = demand.urgent and not (holder and holder.urgent)
                if not (cuts_in or self.turn_ends(instance, version)):
                    continue
                here = demand.version in instance.parked
                since = instance.hosted_since.get(version, 0.0)
                entry = (not here, since, instance.id, version, instance)
                if best is None or entry[:4] < best[:4]:
                    best = entry
        if best is not None:
            _, _, _, version, instance = best
            self._convert(instance, demand.version, version, park=True)

    def _convert(
        self, instance: Instance, incoming: Version, outgoing: Version | None, park: bool = False
    ) -> None:
        self.plan.conversions.append(Conversion(instance.id, incoming, outgoing, park))
        self.changed.add(instance.id)
        self.hosts[incoming][instance.id] = instance
        if outgoing is not None:
            del self.hosts[outgoing][instance.id]


def even_out(hosts: list[Instance], version: Version) -> list[Shift]:
    """Urgency: spread a version's work over its hosts, since a smaller batch decodes faster."""
    if len(hosts) < 2:
        return []
    even = sum(i.load for i in hosts) / len(hosts)
    # The margin keeps a host that is nearly even from giving what would come back next time.
    takers = [
        [i.id, int(min(even, i.slots) - i.load)]
        for i in sorted(hosts, key=lambda i: (i.load - min(even, i.slots), i.id))
    ]
    shifts: list[Shift] = []
    for source in sorted(hosts, key=lambda i: (-i.load, i.id)):
        give = min(int(source.load - even), len(source.residents.get(version, ())))
        if give < max(2, source.slots // 8):
            continue
        moved = sorted(source.residents[version])[:give]
        while moved and takers and takers[0][1] > 0:
            target, room = takers[0]
            part, moved = moved[:room], moved[room:]
            shifts.append(Shift(source.id, target, version, tuple(part)))
            takers[0][1] -= len(part)
            if takers[0][1] == 0:
                takers.pop(0)
    return shifts
