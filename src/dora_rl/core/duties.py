"""What the orchestrator does after every event: the paper's Algorithm 1, completed.

Train if a batch may be taken, supplement the pipeline, rebalance if a trigger asks for it,
place what waits, retire what nobody needs. Each duty looks only where something changed, so
that an event costs the same on eight instances and on eight thousand.
"""

import heapq

from dora_rl.core import hosting
from dora_rl.core.admission import schedulable
from dora_rl.core.batching import overdue, take_earliest
from dora_rl.core.commands import (
    Delete,
    Fail,
    FetchPrompts,
    Halt,
    Judge,
    SetTimer,
    Start,
    Suspend,
    Train,
)
from dora_rl.core.ledger import Group, Trajectory
from dora_rl.core.paradigms import Pipeline
from dora_rl.core.placement import Instance
from dora_rl.core.rebalancing import Demand, Economy, Planner, even_out
from dora_rl.core.settings import OnFailedMember
from dora_rl.core.state import State, TrainerPhase
from dora_rl.core.timers import Wait
from dora_rl.core.transfers import open_migration
from dora_rl.core.types import BatchGroup, GroupState, TrajectoryState, Version

KV_LOW = 0.9  # of the pressure threshold: below it an instance has recovered


def settle(state: State) -> None:
    """Perform every duty that the last event has given rise to."""
    if state.quiet:
        state.quiet = False
    else:
        _settle_instances(state)
        train(state)
        if not state.halted:
            supplement(state)
            if state.rebalance_now:
                state.rebalance_now = False
                rebalance(state)
            place(state)
            retire(state)
            _watch_idle(state)
    at = state.timers.rearm()
    if at is not None and not state.halted:
        state.emit(SetTimer(at))


def _settle_instances(state: State) -> None:
    """What the loss of an instance, or the end of a migration, leads to."""
    while state.failed_members or state.disturbed:
        while state.failed_members:
            name, reason = state.failed_members.pop()
            trajectory = state.ledger.trajectories.get(name)
            if trajectory is not None:
                fail(state, trajectory, reason)
        while state.disturbed:
            instance = state.fleet.instances.get(_pop_first(state.disturbed))
            if instance is not None:
                hosting.emptied(state, instance)


def _pop_first(names: set[int]) -> int:
    first = min(names)
    names.discard(first)
    return first


def halt(state: State, *, ok: bool, reason: str) -> None:
    state.halted = True
    state.emit(Halt(ok, reason))


# Train


def train(state: State) -> None:
    """Take the next batch, if there is one and no deadline is in its way."""
    trainer, ledger, settings = state.trainer, state.ledger, state.settings
    if trainer.phase is not TrainerPhase.IDLE:
        return
    if settings.max_steps and trainer.step >= settings.max_steps:
        halt(state, ok=True, reason=f"{trainer.step} steps trained")
        return
    size = settings.groups_per_step
    if ledger.exhausted and not ledger.backlog:
        size = min(size, ledger.num_outstanding)
        if not size:
            halt(state, ok=True, reason="every prompt is trained, filtered or failed")
            return
    if ledger.num_ready < size:
        return
    taken = _choose(state, size)
    if taken is None:
        if trainer.stalled_since is None:
            trainer.stalled_since = state.now
            trainer.stalls += 1
        return
    if trainer.stalled_since is not None:
        trainer.stalled_s += state.now - trainer.stalled_since
        trainer.stalled_since = None
    trainer.batch = tuple(
        sorted(ledger.batch_next(v).id for v, count in taken.items() for _ in range(count))
    )
    trainer.phase = TrainerPhase.TRAINING
    trainer.attempts = 0
    if state.paradigm.colocated and ledger.work:
        state.suspended = True
        state.emit(Suspend())
    send_batch(state)


def _choose(state: State, size: int) -> dict[Version, int] | None:
    """How many groups of each version to train on; None while a deadline forbids any batch."""
    ledger = state.ledger
    if not state.paradigm.bounded:
        return _first_completed(state, size)
    taken = take_earliest({v: len(heap) for v, heap in ledger.ready.items()}, size)
    late = overdue(
        ledger.pending,
        taken,
        state.trainer.step,
        state.settings.groups_per_step,
        state.staleness,
    )
    return taken if late is None else None


def _first_completed(state: State, size: int) -> dict[Version, int]:
    order = sorted(
        (entry, version) for version, heap in state.ledger.ready.items() for entry in heap
    )
    taken: dict[Version, int] = {}
    for _, version in order[:size]:
        taken[version] = taken.get(version, 0) + 1
    return taken


def send_batch(state: State) -> None:
    """Command the training of the chosen batch; repeated as it is if it was not answered."""
    trainer, ledger = state.trainer, state.ledger
    trainer.attempts += 1
    groups = tuple(
        BatchGroup(g, ledger.groups[g].version, ledger.surviving(g)) for g in trainer.batch
    )
    state.timers.set(
        state.now + state.settings.train_timeout_s, Wait.TRAIN, trainer.step, trainer.attempts
    )
    state.emit(Train(trainer.step, groups))


# Supplement


def supplement(state: State) -> None:
    """Admit new groups on the newest version, as many as the paradigm wants and K allows."""
    ledger, settings, newest = state.ledger, state.settings, state.versions.newest
    if newest < 0 or not state.fleet.slots or state.suspended:
        return
    outstanding = ledger.num_outstanding
    wanted = state.paradigm.room(
        Pipeline(
            outstanding,
            outstanding - len(state.trainer.batch),
            ledger.num_ready,
            state.fleet.slots - ledger.demand,
        ),
        settings,
    )
    if wanted > 0:
        admit(state, newest, wanted)


def admit(state: State, version: Version, wanted: int) -> int:
    """Start up to `wanted` groups on a version, within the bound, the run and the prompts."""
    ledger, settings, step = state.ledger, state.settings, state.trainer.step
    room = min(
        wanted,
        schedulable(
            ledger.pending, version, state.next_step, settings.groups_per_step, state.staleness
        ),
    )
    if settings.max_steps:
        useful = (settings.max_steps - step) * settings.groups_per_step
        room = min(room, useful - ledger.num_outstanding)
    if room <= 0:
        return 0
    admitted = min(room, ledger.backlog)
    record = state.versions.live[version]
    for _ in range(admitted):
        group = ledger.admit(version)
        if state.paradigm.pins_version:
            record.groups.add(group.id)
    if admitted:
        record.vacated = False
        state.unplaced.add(version)
    _fetch(state, room - admitted)
    return admitted


def _fetch(state: State, missing: int) -> None:
    """Keep a batch of prompts in hand."""
    ledger = state.ledger
    want = max(missing, state.settings.groups_per_step)
    if state.fetching is None and not ledger.exhausted and ledger.backlog < want:
        state.fetching = ledger.prompts
        state.fetch_attempts = 0
        send_fetch(state, want)


def send_fetch(state: State, count: int) -> None:
    state.fetch_attempts += 1
    first = state.ledger.prompts
    state.timers.set(
        state.now + state.settings.prompt_timeout_s, Wait.PROMPTS, first, state.fetch_attempts
    )
    state.emit(FetchPrompts(first, count))


# Place


def place(state: State) -> None:
    """Start waiting trajectories on the emptiest instances of their versions."""
    if not state.unplaced:
        return
    for version in sorted(state.unplaced):
        heap = state.ledger.waiting.get(version)
        if heap:
            _place_version(state, version, heap)
    state.unplaced.clear()


def _place_version(state: State, version: Version, heap: list[int]) -> None:
    ledger, fleet = state.ledger, state.fleet
    share: int | None = None
    if version in fleet.installing:
        # More hosts are about to be ready: leave them their part of the work.
        hosts = len(state.versions.live[version].instances)
        share = -(-ledger.work[version] // hosts)
    while heap:
        trajectory = ledger.trajectories.get(heap[0])
        if (
            trajectory is None
            or trajectory.version != version
            or trajectory.state is not TrajectoryState.WAITING
        ):
            heapq.heappop(heap)
            continue
        instance = fleet.emptiest(version)
        if instance is None or (share is not None and instance.load >= share):
            break
        heapq.heappop(heap)
        fence = state.fence()
        ledger.start(trajectory, instance.id, fence, state.now)
        fleet.add(instance, version, trajectory.id)
        state.emit(Start(trajectory.id, fence, instance.id, version, trajectory.saved))


# Rebalance


def _watch_idle(state: State) -> None:
    """Trigger: slots idle though work waits, since they serve another version."""
    fleet, settings = state.fleet, state.settings
    idle = fleet.slots - fleet.load
    if not state.ledger.num_waiting or idle < settings.idle_slots * fleet.slots:
        return
    if idle * len(fleet.instances) >= fleet.slots and state.paradigm.rebalances:
        # At least one instance's worth. A tenth of the period apart, lest planning dominate.
        earliest = state.rebalanced_at + settings.rebalance_period_s / 10
        state.rebalance_soon(max(0.0, earliest - state.now))


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
            hosting.carry_over(state, instance)
        return
    _evacuate_again(state)
    demands = _demands(state)
    planner = Planner(
        state.fleet.instances.values(),
        demands,
        state.versions.newest,
        _economy(state),
        lambda instance, version: (
            state.now - instance.hosted_since.get(version, 0.0) >= state.settings.turn_s
        ),
        needs_slot=lambda name: not state.ledger.trajectories[name].paused,
        length=lambda name: state.ledger.trajectories[name].tokens,
        kv_limit=KV_LOW * state.settings.kv_pressure,
    )
    plan = planner.make()
    instances = state.fleet.instances
    for shift in plan.shifts:
        source, target = instances[shift.source], instances[shift.target]
        open_migration(state, source, target, shift.version, shift.trajectories)
    for change in plan.conversions:
        hosting.convert(
            state, instances[change.instance], change.incoming, change.outgoing, park=change.park
        )
    for demand in demands:
        if demand.urgent:
            _hurry(state, demand.version)
        elif state.settings.fill_older and demand.version != state.versions.newest:
            _fill(state, demand)
        hosting.recall_parked(state, demand.version)


def _demands(state: State) -> list[Demand]:
    """What each version needs now; one that only waits for environments needs no slot yet."""
    work, records = state.ledger.work, state.ledger.trajectories
    placed: dict[Version, int] = {}
    paused: dict[Version, int] = {}
    for instance in state.fleet.instances.values():
        for version, residents in instance.residents.items():
            placed[version] = placed.get(version, 0) + len(residents)
            if instance.paused:
                idle = sum(records[name].paused for name in residents)
                paused[version] = paused.get(version, 0) + idle
    return [
        Demand(
            version,
            work.get(version, 0) - paused.get(version, 0),
            work.get(version, 0) - placed.get(version, 0),
            version + state.staleness <= state.trainer.step,
        )
        for version in sorted(state.versions.live)
        if version in work or version == state.versions.newest
    ]


def _economy(state: State) -> Economy:
    estimates, settings = state.estimates, state.settings
    # A gain lasts until the next version reshuffles everything: half a step, on average.
    horizon = max(settings.rebalance_period_s, (estimates.step_s or 0.0) / 2)
    return Economy(estimates.install_s, estimates.migration_s, horizon, settings.migration_gain)


def _evacuate_again(state: State) -> None:
    """Instances that were to be emptied, and whose migrations failed or found no room."""
    for instance in list(state.fleet.instances.values()):
        if instance.leaving:
            for version in sorted(instance.residents):
                hosting.evacuate(state, instance, version)
        elif instance.outgoing is not None and not instance.parking:
            hosting.evacuate(state, instance, instance.outgoing)


def _hurry(state: State, version: Version) -> None:
    """The trainer waits for this version: spread its work over its hosts."""
    hosts = [
        i
        for name in sorted(state.versions.live[version].instances)
        if (i := state.fleet.instances[name]).serves(version)
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
        for name in state.versions.live[version].instances
        if (i := state.fleet.instances[name]).serves(version)
    ]
    idle = sum(i.free for i in hosts) - demand.waiting
    if len(hosts) > 1 and idle >= min(i.load for i in hosts):
        return  # the lightest host can be emptied into the others
    state.counters["filled_groups"] += admit(state, version, idle // state.settings.group_size)


def relieve(state: State, instance: Instance) -> None:
    """Trigger: KV pressure. Send the longest trajectories to where there is room."""
    low = KV_LOW * state.settings.kv_pressure
    records = state.ledger.trajectories
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
        for name in by_length[: target.free]:
            if excess <= 0:
                break
            part.append(name)
            excess -= records[name].tokens
        open_migration(state, instance, target, version, part)


# Retire


def retire(state: State) -> None:
    """Let go of versions whose work is done, and delete what nobody leases."""
    versions = state.versions
    for version, record in versions.live.items():
        if version != versions.newest and not record.vacated and version not in state.ledger.work:
            record.vacated = True
            if state.paradigm.pins_version:
                for name in sorted(record.instances):
                    hosting.vacate(state, state.fleet.instances[name], version)
    if state.lease_dropped:
        state.lease_dropped = False
        for version in versions.retire_unleased():
            state.fleet.forget_version(version)
            state.emit(Delete(version))


# Ends of trajectories and groups


def fail(state: State, trajectory: Trajectory, reason: str) -> None:
    """A trajectory has failed for good; the setting says what that does to its group."""
    group = state.ledger.groups[trajectory.group]
    if group.state is not GroupState.OPEN:
        return
    state.ledger.fail(trajectory, reason)
    state.emit(Fail(trajectory.id, reason))
    if state.settings.on_failed_member is OnFailedMember.FAIL_GROUP:
        for member in state.ledger.surviving(group.id):
            hosting.cancel(state, state.ledger.trajectories[member])
        end_group(state, group, failed="sibling failed")
    else:
        complete_if_scored(state, group)


def complete_if_scored(state: State, group: Group) -> None:
    """Every member is in: have the group judged, or end it if none is left."""
    if group.unscored:
        return
    if state.ledger.surviving(group.id):
        state.ledger.complete(group)
        send_judge(state, group)
    else:
        end_group(state, group, failed="every member failed")


def send_judge(state: State, group: Group) -> None:
    group.attempts += 1
    state.timers.set(
        state.now + state.settings.score_timeout_s, Wait.JUDGE, group.id, group.attempts
    )
    state.emit(Judge(group.id, state.ledger.surviving(group.id)))


def end_group(
    state: State, group: Group, *, failed: str | None = None, filtered: str | None = None
) -> None:
    """A group is terminal: it holds its version no longer."""
    if failed is not None:
        for member in state.ledger.surviving(group.id):
            state.emit(Fail(member, failed))
        state.ledger.fail_group(group, failed)
    elif filtered is not None:
        state.ledger.filter(group, filtered)
    else:
        state.ledger.train(group)
    record = state.versions.live.get(group.version)
    if record is not None:
        record.groups.discard(group.id)
        state.lease_dropped = True
