"""The promises, as checks over the core's state at one moment.

Each function counts again from the records, shares nothing with the code that maintains the
counts, and yields one sentence per breach. What spans time (trained once, nothing accepted
from a zombie) is checked by `audit` over the journal.
"""

from collections import Counter
from collections.abc import Iterator

from dora_rl.core.protocol.errors import InvariantViolation
from dora_rl.core.protocol.paradigms import PARADIGMS
from dora_rl.core.protocol.types import (
    GroupState,
    HostState,
    SleepState,
    TrajectoryState,
    VersionState,
)
from dora_rl.core.state.run import State, TrainerPhase
from dora_rl.core.state.work import TERMINAL, Work

_T = TrajectoryState
_G = GroupState
_NO_WORK = (SleepState.FALLING_ASLEEP, SleepState.ASLEEP, SleepState.WAKING)
_MEMBER_STATES = {
    _G.OPEN: frozenset(_T) - {_T.TRAINED, _T.FILTERED},
    _G.JUDGING: frozenset({_T.SCORED, _T.FAILED}),
    _G.READY: frozenset({_T.SCORED, _T.FAILED}),
    _G.TRAINING: frozenset({_T.SCORED, _T.FAILED}),
}
_WORK_INDEXES = (
    *("pending", "unfinished", "placeless", "demand"),
    *("num_ready", "num_waiting", "num_parked"),
)


def check(state: State) -> None:
    """Raise if any promise does not hold."""
    breaches = list(violations(state))
    if breaches:
        raise InvariantViolation("; ".join(breaches))


def violations(state: State) -> Iterator[str]:
    """Every breach of every promise, in words."""
    yield from conservation(state)
    yield from membership(state)
    yield from one_version(state)
    yield from bounded_staleness(state)
    yield from whereabouts(state)
    yield from migrations(state)
    yield from leases(state)
    yield from devices(state)
    yield from indexes(state)


def conservation(state: State) -> Iterator[str]:
    """C2: issued = trained + filtered + failed + outstanding."""
    work = state.work
    outstanding = sum(t.state not in TERMINAL for t in work.trajectories.values())
    ended = work.trained + work.filtered.total() + work.failed.total()
    issued = work.issued * work.group_size
    if issued != ended + outstanding:
        yield f"C2: {issued} trajectories issued, {ended} ended, {outstanding} outstanding"
    if not 0 <= work.issued <= work.prompts:
        yield f"C2: {work.issued} groups issued of {work.prompts} prompts"


def membership(state: State) -> Iterator[str]:
    """A group has all its members, in states that fit its own."""
    work = state.work
    for group in work.groups.values():
        members = [work.trajectories.get(t) for t in work.members(group.id)]
        states = [m.state for m in members if m is not None]
        if len(states) != work.group_size:
            yield f"C2: group {group.id} has {len(states)} of {work.group_size} members"
        allowed = _MEMBER_STATES.get(group.state)
        if allowed is None or not allowed.issuperset(states):
            yield f"group {group.id} is {group.state}, its members {sorted(set(states))}"
        if group.unscored != sum(s not in (_T.SCORED, _T.FAILED) for s in states):
            yield f"group {group.id} counts {group.unscored} unscored members wrongly"
    if len(work.trajectories) != len(work.groups) * work.group_size:
        yield "C2: a trajectory without its group"
    batch = sorted(g.id for g in work.groups.values() if g.state is _G.TRAINING)
    if batch != sorted(state.trainer.batch):
        yield f"trained once: batch {state.trainer.batch} is not what is in training"
    if state.trainer.batch and state.trainer.phase is not TrainerPhase.TRAINING:
        yield "trained once: a batch is kept though nothing is being trained"


def one_version(state: State) -> Iterator[str]:
    """C1: a trajectory is bound to its group's version and runs where that is installed."""
    pins = PARADIGMS[state.settings.paradigm].pins_version
    for trajectory in state.work.trajectories.values():
        group = state.work.groups.get(trajectory.group)
        if pins and group is not None and trajectory.version != group.version:
            yield (
                f"C1: trajectory {trajectory.id} of version {group.version} "
                f"is bound to {trajectory.version}"
            )
        if trajectory.state is not _T.RUNNING or trajectory.instance is None:
            continue
        instance = state.fleet.instances.get(trajectory.instance)
        if instance is None or instance.hosts.get(trajectory.version) is not HostState.READY:
            yield (
                f"C1: trajectory {trajectory.id} runs on instance {trajectory.instance}, "
                f"where version {trajectory.version} is not installed"
            )


def bounded_staleness(state: State) -> Iterator[str]:
    """C3: all outstanding groups can still be consumed in time, and the batch is in time."""
    if not PARADIGMS[state.settings.paradigm].bounded:
        return
    step, bound, per_step = state.trainer.step, state.staleness, state.settings.groups_per_step
    free = step + (state.trainer.phase is TrainerPhase.TRAINING)  # that step's batch is full
    due = 0
    by_version = Counter(g.version for g in state.work.groups.values() if g.state != _G.TRAINING)
    for version in sorted(by_version):
        due += by_version[version]
        if due > (version + bound - free + 1) * per_step:
            yield f"C3: {due} groups are due by step {version + bound}, the next is {free}"
    for group_id in state.trainer.batch:
        group = state.work.groups.get(group_id)
        if group is not None and step - group.version > bound:
            yield f"C3: group {group_id} is trained at staleness {step - group.version} > {bound}"


def whereabouts(state: State) -> Iterator[str]:
    """Trajectories and instances agree on who is where, and fences are unique."""
    places: dict[int, tuple[int, int, _T]] = {}
    for instance in state.fleet.instances.values():
        for place, status in ((instance.residents, _T.RUNNING), (instance.parked, _T.PARKED)):
            for version, trajectory_ids in place.items():
                for trajectory_id in trajectory_ids:
                    if trajectory_id in places:
                        yield f"trajectory {trajectory_id} is in two places"
                    places[trajectory_id] = (instance.id, version, status)
    fences: set[int] = set()
    paused: Counter[int] = Counter()
    for trajectory in state.work.trajectories.values():
        expected = places.pop(trajectory.id, None)
        if trajectory.state in (_T.RUNNING, _T.PARKED):
            found = (trajectory.instance, trajectory.version, trajectory.state)
            if expected != found:
                yield f"trajectory {trajectory.id} is at {found}, but {expected} holds it"
            if trajectory.fence in fences or not 0 < trajectory.fence < state.next_fence:
                yield f"fence {trajectory.fence} of trajectory {trajectory.id} is not unique"
            fences.add(trajectory.fence)
            if trajectory.paused and trajectory.instance is not None:
                paused[trajectory.instance] += 1
        elif expected is not None:
            yield f"trajectory {trajectory.id} is {trajectory.state}, but {expected} holds it"
    for trajectory_id in places:
        yield f"C2: an instance holds trajectory {trajectory_id}, which is not outstanding"
    for instance in state.fleet.instances.values():
        if instance.paused != paused[instance.id]:
            yield f"instance {instance.id} counts {instance.paused} paused trajectories wrongly"


def migrations(state: State) -> Iterator[str]:
    """Each trajectory is in at most one migration, whose target keeps a place for it."""
    reserved: Counter[tuple[int, int]] = Counter()
    members: set[int] = set()
    for migration in state.migrations.live.values():
        reserved[migration.target, migration.version] += len(migration.moves)
        for move in migration.moves:
            trajectory = state.work.trajectories.get(move.trajectory)
            if trajectory is None or trajectory.migration != migration.id:
                continue
            members.add(trajectory.id)
            if trajectory.instance != migration.source:
                yield f"trajectory {trajectory.id} migrates from where it is not"
            if trajectory.version != migration.version:
                yield f"C1: migration {migration.id} mixes versions"
        for end in (migration.source, migration.target):
            if end not in state.fleet.instances:
                yield f"migration {migration.id} has lost instance {end}"
    for trajectory in state.work.trajectories.values():
        if trajectory.migration is not None and trajectory.id not in members:
            yield f"trajectory {trajectory.id} waits for a migration that is over"
    found = {
        (instance.id, version): count
        for instance in state.fleet.instances.values()
        for version, count in instance.reserved.items()
    }
    if found != dict(reserved):
        yield f"instances keep places for {found}, migrations need {dict(reserved)}"


def leases(state: State) -> Iterator[str]:
    """Whatever is needed is leased, and nothing else is."""
    live = state.versions.live
    pins = PARADIGMS[state.settings.paradigm].pins_version
    groups = {(g.version, g.id) for g in state.work.groups.values()} if pins else set()
    held = {(v, g) for v, record in live.items() for g in record.groups}
    if groups != held:
        yield f"lease: groups {sorted(groups ^ held)[:4]} and their leases differ"
    hosts = {(v, i.id) for i in state.fleet.instances.values() for v in i.hosts}
    held = {(v, i) for v, record in live.items() for i in record.instances}
    if hosts != held:
        yield f"lease: hosts {sorted(hosts ^ held)[:4]} and their leases differ"
    newest = state.versions.newest
    if newest >= 0 and newest not in live:
        yield f"lease: the newest version {newest} is gone"
    for version, record in live.items():
        if record.state is VersionState.RETIRED or record.version != version:
            yield f"lease: version {version} is {record.state}"
        if version != newest and not record.leased and not state.lease_dropped:
            yield f"lease: version {version} is kept without a lease"
    for instance in state.fleet.instances.values():
        carried = instance.incoming in instance.hosts and instance.outgoing is not None
        if len(instance.hosts) > instance.version_slots + carried:
            yield f"instance {instance.id} holds {len(instance.hosts)} versions"


def devices(state: State) -> Iterator[str]:
    """Devices that both roles use are used by one of them at a time."""
    training = state.trainer.phase is TrainerPhase.TRAINING
    for instance in state.fleet.instances.values():
        if instance.sleep is SleepState.AWAKE and not instance.elastic:
            continue
        if instance.elastic and training and instance.sleep is not SleepState.ASLEEP:
            yield (
                f"devices: a step is trained while instance {instance.id} "
                f"has them ({instance.sleep})"
            )
        if instance.sleep in _NO_WORK and (instance.residents or instance.reserved):
            yield f"devices: instance {instance.id} is {instance.sleep}, but has work"
        if instance.sleep in (SleepState.ASLEEP, SleepState.WAKING) and instance.hosts:
            yield f"devices: instance {instance.id} is {instance.sleep}, but holds versions"
    lent = {i.id for i in state.fleet.instances.values() if i.lent}
    if lent != state.fleet.lent:
        yield f"devices: {sorted(state.fleet.lent)} are counted as lent, not {sorted(lent)}"


def indexes(state: State) -> Iterator[str]:
    """Derived counts equal those that a restored state would have."""
    kept = state.work
    fresh = Work(kept.group_size, groups=kept.groups, trajectories=kept.trajectories)
    fresh.rebuild()
    for name in _WORK_INDEXES:
        if getattr(kept, name) != getattr(fresh, name):
            yield f"index {name} is {getattr(kept, name)}, not {getattr(fresh, name)}"
    for version, heap in fresh.waiting.items():
        if not set(heap) <= set(kept.waiting.get(version, ())):
            yield f"C2: waiting work of version {version} is not queued"
    for instance in state.fleet.instances.values():
        load = instance.load
        if instance.available != (not instance.leaving and instance.sleep is SleepState.AWAKE):
            yield f"instance {instance.id} takes work: {instance.available}, which is not so"
        instance.rebuild()
        if load != instance.load:
            yield f"instance {instance.id} has load {instance.load}, not {load}"
    yield from _queues(state)
    slots = sum(i.slots for i in state.fleet.instances.values() if i.available)
    load = sum(i.load for i in state.fleet.instances.values() if i.available)
    if load != state.fleet.load:
        yield f"the fleet has load {load}, not {state.fleet.load}"
    if slots != state.fleet.slots:
        yield f"the fleet has {slots} slots, not {state.fleet.slots}"


def _queues(state: State) -> Iterator[str]:
    """Who queues is a resident that wants a slot, of an instance that has none free."""
    fleet, records = state.fleet, state.work.trajectories
    parked: dict[int, set[int]] = {}
    for instance in fleet.instances.values():
        here = {t for t in set().union(*instance.residents.values()) if not records[t].paused}
        queued = [trajectory_id for _, trajectory_id in instance.queue]
        if not here.issuperset(queued) or len(set(queued)) != len(queued):
            yield f"instance {instance.id} queues {queued}, but runs {sorted(here)}"
        if queued and len(queued) > instance.load - instance.slots:
            yield f"instance {instance.id} has load {instance.load} and queues {queued}"
        for version in instance.parked:
            parked.setdefault(version, set()).add(instance.id)
    if fleet.num_queued != sum(len(i.queue) for i in fleet.instances.values()):
        yield f"the fleet counts {fleet.num_queued} queued trajectories wrongly"
    if fleet.parked_at != parked:
        yield f"the fleet has parked work at {fleet.parked_at}, not {parked}"
