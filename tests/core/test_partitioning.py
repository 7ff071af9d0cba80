"""The plan of a rebalance: shares, what may move, and that a plan carried out is the last."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.policy.partitioning import (
    Demand,
    Economy,
    Planner,
    RebalancePlan,
    Shift,
    even_out,
    partition,
)
from dora_rl.core.protocol.types import HostState
from dora_rl.core.state.fleet import Instance

works = st.dictionaries(st.integers(0, 8), st.integers(1, 60), min_size=1, max_size=6)

# partition


@given(works, st.integers(0, 40))
def test_shares_sum_to_the_total_and_nobody_is_left_out(work: dict[int, int], extra: int) -> None:
    total = len(work) + extra
    share = partition(work, total)
    assert sum(share.values()) == total
    assert share.keys() == work.keys()
    assert min(share.values()) >= 1


@given(works, st.integers(0, 40))
def test_shares_are_within_one_of_the_exact_quota(work: dict[int, int], extra: int) -> None:
    total, whole = len(work) + extra, sum(work.values())
    share = partition(work, total)
    if all(total * amount >= whole for amount in work.values()):  # "at least one" binds nobody
        for version, amount in work.items():
            assert abs(share[version] * whole - total * amount) < whole


@given(works, st.integers(0, 40), st.data())
def test_more_work_is_never_a_smaller_share(
    work: dict[int, int], extra: int, data: st.DataObject
) -> None:
    total = len(work) + extra
    share = partition(work, total)
    for one, other in ((a, b) for a in work for b in work):
        if work[one] > work[other]:
            assert share[one] >= share[other]
    version = data.draw(st.sampled_from(sorted(work)))
    grown = {**work, version: work[version] + data.draw(st.integers(1, 30))}
    assert partition(grown, total)[version] >= share[version]


def test_ties_go_to_the_older_version() -> None:
    assert partition({3: 5, 4: 5}, 3) == {3: 2, 4: 1}
    assert partition({4: 5, 3: 5}, 3) == {3: 2, 4: 1}


def test_versions_without_work_get_nothing() -> None:
    assert partition({1: 0, 2: 3}, 4) == {2: 4}


@pytest.mark.parametrize(("work", "total"), [({}, 3), ({1: 0}, 3), ({1: 2, 2: 2}, 1), ({1: 1}, 0)])
def test_too_few_instances_or_no_work_is_refused(work: dict[int, int], total: int) -> None:
    with pytest.raises(ValueError, match="cannot give"):
        partition(work, total)


# Planner

NOW = 1000.0


@dataclass
class Cluster:
    """Instances that hold one version each, and trajectories that wait for a place."""

    instances: list[Instance]
    waiting: dict[int, int]
    newest: int
    urgent: frozenset[int] = frozenset()
    economy: Economy = field(default_factory=lambda: Economy(5.0, 1.0, 10.0, 1.5))

    def work(self) -> dict[int, int]:
        work = dict(self.waiting)
        for instance in self.instances:
            for version, residents in instance.residents.items():
                work[version] = work.get(version, 0) + len(residents)
        return {v: n for v, n in work.items() if n}

    def plan(self) -> RebalancePlan:
        work = self.work()
        demands = [
            Demand(v, work.get(v, 0), self.waiting.get(v, 0), v in self.urgent)
            for v in sorted({*work, self.newest})
        ]
        return Planner(
            self.instances,
            demands,
            self.newest,
            self.economy,
            lambda instance, version: instance.hosted_since[version] < NOW,
        ).make()

    def carry_out(self, plan: RebalancePlan) -> None:
        """All moves and installs are done at once, and what waits takes the free slots."""
        by_id = {i.id: i for i in self.instances}
        for shift in plan.shifts:
            move(by_id, shift)
        for change in plan.conversions:
            instance = by_id[change.instance]
            if change.outgoing is not None:
                parked = instance.residents.pop(change.outgoing, set())
                assert change.park or not parked
                self.waiting[change.outgoing] = self.waiting.get(change.outgoing, 0) + len(parked)
                del instance.hosts[change.outgoing], instance.hosted_since[change.outgoing]
            instance.hosts[change.incoming] = HostState.READY
            instance.hosted_since[change.incoming] = NOW
        for number, instance in enumerate(self.instances):
            instance.rebuild()
            for version in instance.hosts:
                count = min(instance.free, self.waiting.get(version, 0))
                if count:
                    self.waiting[version] -= count
                    new = {10_000 * (number + 1) + n for n in range(count)}
                    instance.residents.setdefault(version, set()).update(new)
                    instance.rebuild()


def move(instances: dict[int, Instance], shift: Shift) -> None:
    source, target = instances[shift.source], instances[shift.target]
    source.residents[shift.version] -= set(shift.trajectories)
    if not source.residents[shift.version]:
        del source.residents[shift.version]
    target.residents.setdefault(shift.version, set()).update(shift.trajectories)
    source.rebuild()
    target.rebuild()


def make_instance(
    name: int, version: int | None, residents: Iterable[int] = (), slots: int = 4
) -> Instance:
    instance = Instance(name, 0, slots, 1000, 1, heard_at=0.0)
    if version is not None:
        instance.hosts[version] = HostState.READY
        instance.hosted_since[version] = 0.0
        if names := set(residents):
            instance.residents[version] = names
    instance.rebuild()
    return instance


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    newest = draw(st.integers(0, 3))
    versions = st.integers(max(0, newest - 3), newest)
    instances = []
    for name in range(draw(st.integers(1, 6))):
        version = draw(st.none() | versions)
        count = draw(st.integers(0, 4))
        instances.append(make_instance(name, version, range(100 * name, 100 * name + count)))
    cluster = Cluster(
        instances,
        draw(st.dictionaries(versions, st.integers(1, 12), max_size=3)),
        newest,
        frozenset(draw(st.sets(versions, max_size=1))),
        Economy(draw(st.floats(0, 20)), draw(st.floats(0, 5)), draw(st.floats(1, 60)), 1.5),
    )
    # What waits has taken the free slots of its version, as placing leaves it.
    cluster.carry_out(RebalancePlan())
    return cluster


def hosts_of(instances: list[Instance], version: int) -> set[int]:
    return {i.id for i in instances if version in i.hosts}


@given(clusters())
def test_the_last_host_of_a_version_with_work_goes_only_by_parking(cluster: Cluster) -> None:
    plan = cluster.plan()
    parked = {c.outgoing for c in plan.conversions if c.park}
    housed = {v for v in cluster.work() if hosts_of(cluster.instances, v)}
    leaving = {(c.outgoing, c.instance) for c in plan.conversions}
    coming = {(c.incoming, c.instance) for c in plan.conversions}
    for version in housed - parked:
        kept = hosts_of(cluster.instances, version)
        kept -= {name for v, name in leaving if v == version}
        kept |= {name for v, name in coming if v == version}
        assert kept, f"version {version} has work and no host: {plan}"


@given(clusters())
def test_shifts_fit_into_the_free_slots_of_those_that_keep_the_version(cluster: Cluster) -> None:
    plan = cluster.plan()
    by_id = {i.id: i for i in cluster.instances}
    converted = {c.instance: c for c in plan.conversions}
    assert len(converted) == len(plan.conversions)
    arriving: dict[int, int] = {}
    moved: list[int] = []
    for shift in plan.shifts:
        source, target = by_id[shift.source], by_id[shift.target]
        assert converted[shift.source].outgoing == shift.version
        # A keeper may still lose its turn, where there are more versions than places.
        assert shift.target not in converted or converted[shift.target].park
        assert target.serves(shift.version)
        assert source.residents[shift.version].issuperset(shift.trajectories)
        arriving[target.id] = arriving.get(target.id, 0) + len(shift.trajectories)
        moved.extend(shift.trajectories)
    assert all(count <= by_id[name].free for name, count in arriving.items())
    assert len(moved) == len(set(moved))
    # A converted instance is empty of what goes, or its work is parked.
    for change in plan.conversions:
        if change.outgoing is not None and not change.park:
            assert by_id[change.instance].residents.get(change.outgoing, set()) <= set(moved)


@given(clusters())
def test_plans_carried_out_come_to_an_end(cluster: Cluster) -> None:
    for _ in range(len(cluster.instances) + 2):
        plan = cluster.plan()
        if not plan.conversions:
            assert not plan.shifts
            return
        cluster.carry_out(plan)
    raise AssertionError("instances are moved back and forth")


@given(st.integers(2, 6), st.integers(0, 4), st.integers(0, 4))
def test_instances_in_the_same_situation_stay_as_they_are(
    number: int, load: int, version: int
) -> None:
    instances = [make_instance(n, version, range(100 * n, 100 * n + load)) for n in range(number)]
    assert Cluster(instances, {}, version).plan() == RebalancePlan()


def test_a_version_gives_no_more_than_its_surplus() -> None:
    """Shares are 2 and 2: version 1 has one idle host too many, and an empty instance is there."""
    cluster = Cluster(
        [
            make_instance(0, 1),
            make_instance(1, 1),
            make_instance(2, None),
            make_instance(3, 1, [300]),
        ],
        {},
        2,
    )
    cluster.carry_out(cluster.plan())
    assert len(hosts_of(cluster.instances, 1)) == len(hosts_of(cluster.instances, 2)) == 2
    assert cluster.plan() == RebalancePlan()


def test_an_idle_instance_takes_what_is_wanted() -> None:
    cluster = Cluster([make_instance(0, 0, range(4)), make_instance(1, None)], {1: 4}, 1)
    plan = cluster.plan()
    assert [(c.instance, c.incoming, c.outgoing) for c in plan.conversions] == [(1, 1, None)]


def test_a_new_version_without_a_place_gets_one_by_packing_the_old() -> None:
    cluster = Cluster([make_instance(0, 0, [1, 2]), make_instance(1, 0, [3])], {}, 1)
    plan = cluster.plan()
    assert plan.shifts == [Shift(1, 0, 0, (3,))]
    assert [(c.instance, c.incoming, c.outgoing) for c in plan.conversions] == [(1, 1, 0)]


def test_a_full_house_gives_way_by_parking_when_the_turn_is_over() -> None:
    cluster = Cluster([make_instance(0, 0, range(4))], {1: 4}, 1)
    (change,) = cluster.plan().conversions
    assert (change.incoming, change.outgoing, change.park) == (1, 0, True)
    cluster.instances[0].hosted_since[0] = NOW
    assert cluster.plan() == RebalancePlan()
    assert replace(cluster, urgent=frozenset({1})).plan().conversions == [change]


def test_a_draining_host_is_taken_before_its_work_fits_elsewhere() -> None:
    """Three of its four are parked: the other hosts are full, and free their slots in time."""
    full = [make_instance(n, 0, range(100 * n, 100 * n + 4)) for n in range(2)]
    draining = make_instance(2, 0, [200, 201, 202])
    cluster = Cluster([*full, draining], {1: 8}, 1, economy=Economy(1.0, 0.1, 60.0, 1.5))
    cluster.instances.append(make_instance(3, 1, range(300, 304)))
    (change,) = cluster.plan().conversions
    assert (change.instance, change.incoming, change.outgoing, change.park) == (2, 1, 0, True)
    draining.paused = 1  # its slots are wanted back: the version does not drain
    assert cluster.plan() == RebalancePlan()
    draining.paused = 0
    full[0].pressured = True  # what becomes free there cannot be filled
    assert cluster.plan() == RebalancePlan()


def test_what_has_run_longest_moves_and_the_rest_is_parked() -> None:
    hosts = [
        make_instance(0, 0, range(4)),
        make_instance(1, 0, range(100, 103)),
        make_instance(2, 0, [200, 201]),
        make_instance(3, 1, range(300, 304)),
    ]
    demands = [Demand(0, 9, 0, False), Demand(1, 12, 8, False)]
    economy = Economy(1.0, 0.1, 60.0, 1.5)
    length = {200: 5, 201: 50}
    planner = Planner(
        hosts, demands, 1, economy, lambda *_: False, length=lambda t: length.get(t, 1)
    )
    plan = planner.make()
    assert plan.shifts == [Shift(2, 1, 0, (201,))]
    assert [(c.instance, c.park) for c in plan.conversions] == [(2, True)]


@given(clusters())
def test_work_is_parked_only_behind_hosts_that_keep_its_version(cluster: Cluster) -> None:
    """Unless a turn has ended, where there are more versions than places."""
    plan = cluster.plan()
    converted = {c.instance for c in plan.conversions}
    versions = {*cluster.work(), cluster.newest}
    if len(versions) > len(cluster.instances) or cluster.urgent:
        return
    for change in plan.conversions:
        if change.park:
            assert change.outgoing is not None
            assert hosts_of(cluster.instances, change.outgoing) - converted


# even_out


@given(
    st.lists(st.tuples(st.integers(0, 16), st.integers(0, 4)), min_size=0, max_size=6),
)
def test_evening_out_moves_from_fuller_to_emptier_and_never_past_the_mean(
    loads: list[tuple[int, int]],
) -> None:
    hosts = []
    for name, (load, reserved) in enumerate(loads):
        host = make_instance(name, 0, range(100 * name, 100 * name + load), slots=20)
        if reserved:
            host.reserved[0] = reserved
        host.rebuild()
        hosts.append(host)
    by_id = {h.id: h for h in hosts}
    before = {h.id: h.load for h in hosts}
    even = sum(before.values()) / max(1, len(hosts))
    for shift in even_out(hosts, 0):
        assert before[shift.source] > even > before[shift.target]
        assert shift.trajectories
        move(by_id, shift)
    for host in hosts:
        if before[host.id] > even:
            assert even <= host.load <= before[host.id]
        else:
            assert before[host.id] <= host.load <= even
    assert sum(h.load for h in hosts) == sum(before.values())


def test_evening_out_leaves_small_differences_alone() -> None:
    hosts = [make_instance(0, 0, range(5), slots=8), make_instance(1, 0, range(10, 13), slots=8)]
    assert even_out(hosts, 0) == []
    assert even_out(hosts[:1], 0) == []


def test_evening_out_respects_the_slots_of_the_smaller() -> None:
    hosts = [make_instance(0, 0, range(16), slots=16), make_instance(1, 0, slots=2)]
    assert sum(len(s.trajectories) for s in even_out(hosts, 0)) <= hosts[1].free
