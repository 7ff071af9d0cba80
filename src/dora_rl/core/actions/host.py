"""How an instance comes to hold a version, and how it is emptied, left or lost.

A version is servable on an instance only after a verified install. Whatever the instance
ran continues: by migration, from host memory, or from a saved prefix elsewhere.
"""

from dora_rl.core.actions.migrate import open_migration, undo_migration
from dora_rl.core.actions.park import (
    await_answer,
    park_trajectories,
    recall_parked,
    residents_of,
    unmoved,
)
from dora_rl.core.protocol.commands import (
    Cancel,
    Dismiss,
    Evict,
    Expel,
    Install,
    Sleep,
    Wake,
)
from dora_rl.core.protocol.types import (
    HostState,
    SleepState,
    TrajectoryState,
    Version,
)
from dora_rl.core.state.fleet import Instance
from dora_rl.core.state.run import State
from dora_rl.core.state.timers import Wait
from dora_rl.core.state.work import Trajectory

# Bound once: in Python 3.11 an enum's member takes ten times as long to find as a global.
READY, INSTALLING, EVICTING = HostState.READY, HostState.INSTALLING, HostState.EVICTING
DRAINING = SleepState.DRAINING

PARK_AGAIN_S = 1.0  # a trajectory that cannot be parked just now, such as in its prefill


def convert(
    state: State,
    instance: Instance,
    incoming: Version,
    outgoing: Version | None,
    *,
    park: bool = False,
) -> None:
    """Make an instance take `incoming` in, as soon as it is empty of `outgoing`."""
    instance.incoming = incoming
    instance.outgoing = outgoing
    if park and outgoing is not None:
        left = [t for t in unmoved(state, instance) if t in instance.residents[outgoing]]
        if left:
            park_trajectories(state, instance, left)
    install_when_empty(state, instance)


def install_when_empty(state: State, instance: Instance) -> None:
    """Continue with a conversion if nothing is in its way any more."""
    incoming, outgoing = instance.incoming, instance.outgoing
    if incoming is None or instance.ticket or not instance.available:
        return
    if outgoing is not None and instance.has_work(outgoing):
        return
    if incoming not in state.versions.live or (
        incoming != state.versions.newest and incoming not in state.work.unfinished
    ):
        incoming = instance.incoming = state.versions.newest  # nobody needs the old aim any more
    if incoming in instance.hosts:
        instance.incoming = instance.outgoing = None
        if outgoing is not None and outgoing != incoming:
            evict(state, instance, outgoing)
        else:
            state.fleet.offer(instance)
        return
    _install(state, instance, incoming, outgoing, carry=False)


def carry_over(state: State, instance: Instance) -> None:
    """Switch an instance to the newest version under its running work (C1 is given up)."""
    newest = state.versions.newest
    if instance.leaving or newest in instance.hosts:
        return
    if instance.ticket:
        return  # an install is under way; its answer brings us here again
    old = next(iter(sorted(instance.hosts)), None)
    _install(state, instance, newest, old, carry=old is not None)


def _install(
    state: State, instance: Instance, version: Version, old: Version | None, *, carry: bool
) -> None:
    if old is not None and not carry:
        state.fleet.set_host(instance, old, EVICTING)
    instance.incoming, instance.outgoing = version, old
    state.fleet.set_host(instance, version, INSTALLING)
    instance.hosted_since[version] = state.now
    state.versions.live[version].instances.add(instance.id)
    await_answer(state, instance, Wait.INSTALL, state.settings.install_timeout_s)
    state.emit(Install(instance.id, instance.incarnation, version, old, carry))


def evict(state: State, instance: Instance, version: Version) -> None:
    """Drop a version that nothing here runs on."""
    state.fleet.set_host(instance, version, EVICTING)
    await_answer(state, instance, Wait.INSTALL, state.settings.install_timeout_s)
    state.emit(Evict(instance.id, instance.incarnation, version))


def repeat(state: State, instance: Instance, reason: str) -> None:
    """The instance did not do what it was asked: ask again, or give it up."""
    instance.attempts += 1
    if instance.attempts > state.settings.max_retries:
        lose(state, instance, reason, expel=True)
        return
    state.counters["repeated_installs"] += 1
    if instance.sleep is DRAINING and instance.parking:
        park_trajectories(state, instance, unmoved(state, instance))
        return
    if instance.parking:
        assert instance.outgoing is not None
        park_trajectories(state, instance, residents_of(instance, instance.outgoing))
        return
    for version, host in sorted(instance.hosts.items()):
        if host is INSTALLING:
            old = instance.outgoing
            carry = old is not None and instance.hosts.get(old) is READY
            _install(state, instance, version, old, carry=carry)
            return
    for version, host in sorted(instance.hosts.items()):
        if host is EVICTING:
            evict(state, instance, version)
            return


def installed(state: State, instance: Instance, version: Version) -> None:
    """A verified install: the version is served here from now on."""
    state.estimates.observe_install(state.now - instance.hosted_since[version])
    old = instance.outgoing
    if old is not None and instance.hosts.get(old) is READY:
        _rebind_residents(state, instance, old, version)
    if old is not None:
        drop_host(state, instance, old)
    instance.incoming = instance.outgoing = None
    instance.ticket = instance.attempts = 0
    instance.hosted_since[version] = state.now
    state.fleet.set_host(instance, version, READY)
    if version == state.versions.newest:
        state.versions.activate(version)
    state.unplaced.update(instance.hosts)
    recall_parked(state, version)
    if instance.sleep is DRAINING:
        state.disturbed.add(instance.id)  # that was all it still waited for
    if not state.paradigm.pins_version:
        carry_over(state, instance)
    else:
        let_go(state, instance)


def _rebind_residents(state: State, instance: Instance, old: Version, new: Version) -> None:
    moved = instance.residents.pop(old, set())
    for trajectory in moved:
        state.work.rebind(state.work.trajectories[trajectory], new)
    if moved:
        instance.residents.setdefault(new, set()).update(moved)


def let_go(state: State, instance: Instance) -> None:
    """Continue to free versions whose work was done while the instance was busy changing."""
    for version in sorted(instance.hosts):
        if state.versions.live[version].vacated:
            vacate(state, instance, version)


def vacate(state: State, instance: Instance, version: Version) -> None:
    """A version's work is done: its host takes the newest instead, or just lets go."""
    if not instance.settled or not instance.available or instance.hosts.get(version) is None:
        return
    if state.versions.newest in instance.hosts:
        evict(state, instance, version)
    else:
        convert(state, instance, state.versions.newest, version)


def drop_host(state: State, instance: Instance, version: Version) -> None:
    """The instance does not hold the version any more: its lease is gone."""
    state.fleet.set_host(instance, version, None)
    instance.hosted_since.pop(version, None)
    record = state.versions.live.get(version)
    if record is not None:
        record.instances.discard(instance.id)
        state.lease_dropped = True


def take_off(state: State, trajectory: Trajectory) -> None:
    """Take a trajectory off its instance, whether it has ended or must move on."""
    if trajectory.instance is None:
        return
    instance = state.fleet.instances[trajectory.instance]
    state.fleet.discard(instance, trajectory.version, trajectory.id, trajectory.paused)
    trajectory.instance = None
    state.unplaced.update(instance.hosts)
    emptied(state, instance)


def emptied(state: State, instance: Instance) -> None:
    """Something left an instance: see whether that was waited for."""
    if instance.sleep is DRAINING and not instance.leaving:
        drain(state, instance)
        return
    if instance.incoming is not None:
        if not instance.parking:
            install_when_empty(state, instance)
        elif instance.outgoing is None or not instance.residents.get(instance.outgoing):
            parked(state, instance)
    if instance.leaving and not instance.num_trajectories and not instance.reserved:
        _forget(state, instance)
        state.emit(Dismiss(instance.id, instance.incarnation))


def parked(state: State, instance: Instance) -> None:
    """Nothing of the outgoing version runs here any more."""
    instance.parking = False
    instance.ticket = instance.attempts = 0
    install_when_empty(state, instance)


def evacuate(state: State, instance: Instance, version: Version) -> None:
    """Send a version's residents to its other hosts, as far as these have room."""
    if not state.paradigm.rebalances:
        return
    records = state.work.trajectories
    moving = [
        t for t in sorted(instance.residents.get(version, ())) if records[t].migration is None
    ]
    while moving:
        target = state.fleet.emptiest(version)
        if target is None or target is instance:
            return
        part, moving = moving[: target.free], moving[target.free :]
        open_migration(state, instance, target, version, part)


def send_to_sleep(state: State, instance: Instance) -> None:
    """Empty an instance, with its KV where there is room elsewhere, and give its devices away."""
    state.fleet.set_sleep(instance, DRAINING)
    instance.switching_since = state.now
    if not instance.ticket:
        instance.incoming = instance.outgoing = None
    if not instance.parking:  # else what is being parked must not move as well
        for version in sorted(instance.residents):
            evacuate(state, instance, version)
    drain(state, instance)
    state.rebalance_soon()


def drain(state: State, instance: Instance) -> None:
    """Continue to empty an instance: what found no room elsewhere waits in its host memory."""
    if instance.ticket:
        return
    left = unmoved(state, instance)
    if left:
        park_trajectories(state, instance, left)
    elif not instance.residents and not instance.reserved:
        instance.incoming = instance.outgoing = None
        for version in sorted(instance.hosts):
            state.fleet.set_host(instance, version, EVICTING)
        state.fleet.set_sleep(instance, SleepState.FALLING_ASLEEP)
        send_switch(state, instance)


def parked_to_sleep(state: State, instance: Instance) -> None:
    """A draining instance has answered; what it could not park is asked for again in a moment."""
    if unmoved(state, instance):
        state.timers.set(state.now + PARK_AGAIN_S, Wait.PARKING, instance.id, instance.ticket)
        return
    instance.parking = False
    instance.ticket = instance.attempts = 0
    drain(state, instance)


def slept(state: State, instance: Instance) -> None:
    """Training has its devices."""
    for version in list(instance.hosts):
        drop_host(state, instance, version)
    instance.ticket = instance.attempts = 0
    state.fleet.set_sleep(instance, SleepState.ASLEEP)
    state.estimates.observe_sleep(state.now - instance.switching_since)


def wake(state: State, instance: Instance) -> None:
    """Have an instance take its devices back."""
    state.fleet.set_sleep(instance, SleepState.WAKING)
    instance.switching_since = state.now
    send_switch(state, instance)


def woke(state: State, instance: Instance) -> None:
    """Rollout has its devices: it takes the newest version in."""
    instance.ticket = instance.attempts = 0
    state.fleet.set_sleep(instance, SleepState.AWAKE)
    state.estimates.observe_wake(state.now - instance.switching_since)
    state.fleet_lost_at = None
    convert(state, instance, state.versions.newest, None)
    state.rebalance_soon()


def send_switch(state: State, instance: Instance) -> None:
    """Ask for the change of roles that is under way; repeated as it is if it was not answered."""
    await_answer(state, instance, Wait.SWITCH, state.settings.install_timeout_s)
    kind = Wake if instance.sleep is SleepState.WAKING else Sleep
    state.emit(kind(instance.id, instance.incarnation))


def switch_again(state: State, instance: Instance) -> None:
    """It did not answer in time: its process may be gone, and its devices with it."""
    instance.attempts += 1
    if instance.attempts > state.settings.max_retries:
        lose(state, instance, "did not change roles when it was told to", expel=True)
    else:
        send_switch(state, instance)


def lose(state: State, instance: Instance, reason: str, *, expel: bool, blame: bool = True) -> None:
    """An instance is gone: its trajectories continue elsewhere, on the same version.

    Unless nothing is to blame, one of them may be what killed it.
    """
    state.counters["instances_lost" if blame else "instances_stopped"] += 1
    lost = [
        trajectory
        for place in (instance.residents, instance.parked)
        for residents in place.values()
        for trajectory in residents
    ]
    _forget(state, instance)
    for trajectory_id in sorted(lost):
        trajectory = state.work.trajectories[trajectory_id]
        trajectory.losses += blame
        if trajectory.losses > state.settings.max_losses:
            state.failed_members.append((trajectory_id, "poison"))
        requeue(state, trajectory)
    if expel:
        state.emit(Expel(instance.id, instance.incarnation, reason))
    state.rebalance_soon()


def _forget(state: State, instance: Instance) -> None:
    for migration in state.migrations.touching(instance.id):
        undo_migration(state, migration, tell=True)
    for version in list(instance.hosts):
        drop_host(state, instance, version)
    state.fleet.remove(instance)
    await_fleet(state)


def await_fleet(state: State) -> None:
    """If no instance is there to stay, one must join in time."""
    if not state.fleet.slots and not state.fleet.helping() and state.fleet_lost_at is None:
        state.fleet_lost_at = state.now
        state.timers.set(state.now + state.settings.fleet_timeout_s, Wait.FLEET)


def requeue(state: State, trajectory: Trajectory) -> None:
    """Let a trajectory wait for a new place, on its version (or the newest, if not pinned)."""
    if trajectory.state is not TrajectoryState.WAITING:
        state.work.requeue(trajectory)
    newest = state.versions.newest
    if not state.paradigm.pins_version and trajectory.version != newest:
        state.work.rebind(trajectory, newest)
    state.unplaced.add(trajectory.version)


def cancel(state: State, trajectory: Trajectory) -> None:
    """Stop a placement that runs somewhere, and take it off."""
    if trajectory.instance is not None:
        state.emit(Cancel(trajectory.id, trajectory.fence, trajectory.instance))
        trajectory.migration = None
        take_off(state, trajectory)
