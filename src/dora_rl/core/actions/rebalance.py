"""Rebalance: give each version its share of the instances, and move work where it runs best.

Triggers: a published version, a period, idle slots while work waits, KV pressure, an instance
that joins, leaves or dies. `partitioning` plans; here the plan is carried out.
"""

from dora_rl.core.actions import host
from dora_rl.core.actions.migrate import open_migration
from dora_rl.core.actions.park import recall_parked
from dora_rl.core.actions.supply import admit
from dora_rl.core.policy.partitioning import Demand, Economy, Planner, even_out
from dora_rl.core.protocol.types import SleepState, Version
from dora_rl.core.state.fleet import Instance
from dora_rl.core.state.run import State

KV_LOW = 0.9  # of the pressure threshold: below it an instance has recovered


def watch_idle(state: State) -> None:
    """Trigger: slots idle though work waits, since they serve another version."""
    fleet, settings, due = state.fleet, state.settings, state.rebalance_at
    if not (state.work.num_waiting or fleet.num_queued):
        return
    # A tenth of the period apart, lest planning dominate.
    delay_s = state.rebalanced_at + settings.rebalance_period_s / 10 - state.now
    if delay_s < 0.0:
        delay_s = 0.0
    if due is not None and state.now + delay_s >= due:
        return  # one comes soon enough
    idle = fleet.slots - fleet.load + fleet.num_queued
    if (
        idle >= settings.idle_slots * fleet.slots
        and 4 * idle * fleet.num_awake >= fleet.slots  # a quarter of an instance: some can be taken
        and state.paradigm.rebalances
    ):
        state.rebalance_soon(delay_s)


def rebalance(state: State) -> None:
    """Give each version its share of the instances, with the least movement that pays."""
    state.counters["rebalances"] += 1
    state.rebalance_at = None
    state.rebalanced_at = state.now
    state.rebalance_soon(state.settings.rebalance_period_s)
    if state.versions.newest < 0:
        return
    if not state.paradigm.rebalances:
        for instance in list(state.fleet.instances.values()):
            host.carry_over(state, instance)
        return
    _evacuate_again(state)
    demands = _demands(state)
    records = state.work.trajectories
    planner = Planner(
        state.fleet.instances.values(),
        demands,
        state.versions.newest,
        _economy(state),
        lambda instance, version: (
            state.now - instance.hosted_since.get(version, 0.0) >= state.settings.turn_s
        ),
        needs_slot=lambda trajectory_id: not records[trajectory_id].paused,
        length=lambda trajectory_id: records[trajectory_id].tokens,
        kv_limit=KV_LOW * state.settings.kv_pressure,
    )
    plan = planner.make()
    instances = state.fleet.instances
    for shift in plan.shifts:
        source, target = instances[shift.source], instances[shift.target]
        open_migration(state, source, target, shift.version, shift.trajectories)
    for change in plan.conversions:
        host.convert(
            state, instances[change.instance], change.incoming, change.outgoing, park=change.park
        )
    for demand in demands:
        if demand.urgent:
            _hurry(state, demand.version)
        elif state.settings.fill_older and demand.version != state.versions.newest:
            _fill(state, demand)
        recall_parked(state, demand.version)


def _demands(state: State) -> list[Demand]:
    """What each version needs now; one that only waits for environments needs no slot yet."""
    unfinished, placeless = state.work.unfinished, state.work.placeless
    paused, queued = _paused(state), _queued(state)
    return [
        Demand(
            version,
            unfinished.get(version, 0) - paused.get(version, 0),
            placeless.get(version, 0) + queued.get(version, 0),
            version + state.staleness <= state.trainer.step,
        )
        for version in sorted(state.versions.live)
        if version in unfinished or version == state.versions.newest
    ]


def _paused(state: State) -> dict[Version, int]:
    """How many of each version wait for their environments."""
    paused: dict[Version, int] = {}
    if sum(state.work.unfinished.values()) == state.work.demand:
        return paused
    records = state.work.trajectories
    for instance in state.fleet.instances.values():
        if instance.paused:
            for version, residents in instance.residents.items():
                idle = sum(records[trajectory_id].paused for trajectory_id in residents)
                paused[version] = paused.get(version, 0) + idle
    return paused


def _queued(state: State) -> dict[Version, int]:
    """How many of each version have an instance, but no slot there."""
    queued: dict[Version, int] = {}
    if state.fleet.num_queued:
        for instance in state.fleet.instances.values():
            for _, trajectory_id in instance.queue:
                version = state.work.trajectories[trajectory_id].version
                queued[version] = queued.get(version, 0) + 1
    return queued


def _economy(state: State) -> Economy:
    estimates, settings = state.estimates, state.settings
    # A gain lasts until the next version reshuffles everything: half a step, on average.
    horizon = max(settings.rebalance_period_s, (estimates.step_s or 0.0) / 2)
    return Economy(estimates.install_s, estimates.migration_s, horizon, settings.migration_gain)


def _evacuate_again(state: State) -> None:
    """Instances that were to be emptied, and whose migrations failed or found no room."""
    for instance in list(state.fleet.instances.values()):
        if instance.outgoing is None and not instance.leaving:
            continue
        if instance.sleep is SleepState.DRAINING:
            continue  # it is being emptied: `host.drain`
        if instance.leaving:
            for version in sorted(instance.residents):
                host.evacuate(state, instance, version)
        elif instance.outgoing is not None and not instance.parking:
            host.evacuate(state, instance, instance.outgoing)


def _hurry(state: State, version: Version) -> None:
    """The trainer waits for this version: spread its work over its hosts."""
    hosts = [
        i
        for instance_id in sorted(state.versions.live[version].instances)
        if (i := state.fleet.instances[instance_id]).serves(version)
    ]
    for shift in even_out(hosts, version):
        source, target = (state.fleet.instances[n] for n in (shift.source, shift.target))
        open_migration(state, source, target, version, shift.trajectories)


def _fill(state: State, demand: Demand) -> None:
    """Put an older version's odd slots to use, unless it is about to be retired.

    Only what is left over when no whole instance can be won from it: a version that is filled
    while it drains would never give its instances to the newest.
    """
    version = demand.version
    if version + state.staleness < state.trainer.step + 2 or version < state.versions.newest - 1:
        return
    hosts = [
        i
        for instance_id in state.versions.live[version].instances
        if (i := state.fleet.instances[instance_id]).serves(version)
    ]
    idle = sum(i.free for i in hosts) - demand.waiting
    if len(hosts) > 1 and idle >= min(i.load for i in hosts):
        return  # the lightest host can be emptied into the others
    state.counters["filled_groups"] += admit(state, version, idle // state.settings.group_size)


def relieve(state: State, instance: Instance) -> None:
    """Trigger: KV pressure. Send the longest trajectories to where there is room."""
    if instance.sleep is not SleepState.AWAKE:
        return  # it is being emptied of everything
    low = KV_LOW * state.settings.kv_pressure
    records = state.work.trajectories
    excess = instance.kv_tokens - low * instance.kv_capacity_tokens
    for version in sorted(instance.residents):
        by_length = sorted(
            (t for t in instance.residents[version] if records[t].migration is None),
            key=lambda t: (-records[t].tokens, t),
        )
        target = state.fleet.emptiest(version)
        if target is None or target.kv_tokens > 0.8 * low * target.kv_capacity_tokens:
            continue
        part: list[int] = []
        for trajectory_id in by_length[: target.free]:
            if excess <= 0:
                break
            part.append(trajectory_id)
            excess -= records[trajectory_id].tokens
        open_migration(state, instance, target, version, part)
