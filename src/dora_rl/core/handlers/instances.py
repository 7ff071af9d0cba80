"""Instances come, report, install, leave and fail."""

from dora_rl.core.actions import host
from dora_rl.core.actions.rebalance import KV_LOW, relieve
from dora_rl.core.handlers.common import absorb, live_instance, refuse
from dora_rl.core.handlers.trajectories import attempt_failed
from dora_rl.core.protocol.events import (
    InstallFailed,
    InstanceFailed,
    InstanceJoined,
    InstanceLeaving,
    InstanceProgressed,
    InstanceSlept,
    InstanceStopped,
    InstanceWoke,
    VersionEvicted,
    VersionInstalled,
)
from dora_rl.core.protocol.types import HostState, SleepState
from dora_rl.core.state.fleet import Instance
from dora_rl.core.state.run import State
from dora_rl.core.state.timers import Wait


def instance_joined(state: State, event: InstanceJoined) -> None:
    if event.slots < 1 or event.kv_capacity_tokens < 1 or event.version_slots < 1:
        refuse(event, "an instance needs slots, KV memory and room for one version")
    fleet = state.fleet
    present = fleet.instances.get(event.instance)
    if event.incarnation <= fleet.ended.get(event.instance, -1) or (
        present is not None and event.incarnation <= present.incarnation
    ):
        return absorb(state, "duplicate")
    if present is not None:
        host.lose(state, present, "superseded", expel=False)
    instance = Instance(
        event.instance,
        event.incarnation,
        event.slots,
        event.kv_capacity_tokens,
        min(event.version_slots, state.settings.version_slots),
        heard_at=state.now,
        checked_at=state.now,
        elastic=event.elastic,
        lendable=event.lendable,
        sleep=SleepState.ASLEEP if event.elastic else SleepState.AWAKE,
    )
    fleet.join(instance)
    if instance.available:
        state.fleet_lost_at = None
    state.timers.set(
        state.now + state.settings.heartbeat_timeout_s,
        Wait.HEARTBEAT,
        instance.id,
        instance.incarnation,
    )
    if state.versions.newest >= 0 and instance.available:
        host.convert(state, instance, state.versions.newest, None)
        state.rebalance_soon()


def instance_progressed(state: State, event: InstanceProgressed) -> None:
    if event.kv_tokens < 0:
        refuse(event, "KV in use is not negative")
    for lengths in (event.lengths, event.saved):
        for _, _, tokens in lengths:
            if tokens < 0:
                refuse(event, "a trajectory has no fewer than 0 tokens")
    instance = live_instance(state, event.instance, event.incarnation)
    if instance is None:
        return
    here = event.instance
    now = instance.heard_at = state.now
    records = state.work.trajectories
    for trajectory_id, fence, tokens in event.lengths:
        trajectory = records.get(trajectory_id)
        if trajectory is not None and trajectory.fence == fence and trajectory.instance == here:
            trajectory.tokens = tokens
            trajectory.progress_at = now
    for trajectory_id, fence, tokens in event.saved:
        trajectory = records.get(trajectory_id)
        if trajectory is not None and trajectory.fence == fence and trajectory.instance == here:
            trajectory.saved = max(trajectory.saved, tokens)
    instance.kv_tokens = event.kv_tokens
    share = event.kv_tokens / instance.kv_capacity_tokens
    if instance.pressured or share >= state.settings.kv_pressure:
        _watch_pressure(state, instance, share)
    if not state.suspended and now - instance.checked_at >= state.settings.trajectory_timeout_s / 4:
        instance.checked_at = now
        _find_stuck(state, instance)
    # Only what was found stuck, or a change of pressure, gives rise to more.
    state.quiet = not state.out and not state.unplaced


def _watch_pressure(state: State, instance: Instance, share: float) -> None:
    if share >= state.settings.kv_pressure:
        if not instance.pressured:
            state.counters["kv_pressure"] += 1
        instance.pressured = True
        if state.paradigm.rebalances:
            relieve(state, instance)
    elif instance.pressured and share < KV_LOW * state.settings.kv_pressure:
        instance.pressured = False
        state.fleet.offer(instance)
        state.unplaced.update(instance.hosts)


def _find_stuck(state: State, instance: Instance) -> None:
    limit = state.now - state.settings.trajectory_timeout_s
    if state.resumed_at > limit:
        return  # everything stood still not long ago
    records = state.work.trajectories
    stuck = [
        t
        for residents in instance.residents.values()
        for t in residents
        if records[t].progress_at < limit
    ]
    for trajectory_id in sorted(stuck):
        if trajectory_id in records:  # a sibling's failure may have ended it meanwhile
            attempt_failed(state, records[trajectory_id], "timeout")


def instance_leaving(state: State, event: InstanceLeaving) -> None:
    instance = live_instance(state, event.instance, event.incarnation)
    if instance is None:
        return
    if instance.leaving:
        return absorb(state, "duplicate")
    state.fleet.leave(instance)
    if not instance.ticket:
        instance.incoming = instance.outgoing = None
    for version in sorted(instance.residents):
        host.evacuate(state, instance, version)
    host.await_fleet(state)
    state.disturbed.add(instance.id)
    state.rebalance_soon()


def instance_failed(state: State, event: InstanceFailed) -> None:
    instance = live_instance(state, event.instance, event.incarnation)
    if instance is not None:
        host.lose(state, instance, event.reason, expel=False)


def instance_stopped(state: State, event: InstanceStopped) -> None:
    instance = live_instance(state, event.instance, event.incarnation)
    if instance is not None:
        host.lose(state, instance, "stopped", expel=False, blame=False)


def instance_slept(state: State, event: InstanceSlept) -> None:
    instance = live_instance(state, event.instance, event.incarnation)
    if instance is None:
        return
    if instance.sleep is SleepState.FALLING_ASLEEP:
        host.slept(state, instance)
    else:
        absorb(state, "duplicate")


def instance_woke(state: State, event: InstanceWoke) -> None:
    instance = live_instance(state, event.instance, event.incarnation)
    if instance is None:
        return
    if instance.sleep is SleepState.WAKING:
        host.woke(state, instance)
    else:
        absorb(state, "duplicate")


def version_installed(state: State, event: VersionInstalled) -> None:
    instance = _asked(state, event, HostState.INSTALLING)
    if instance is None:
        return
    if event.digest != state.versions.live[event.version].digest:
        state.counters["wrong_weights"] += 1
        host.lose(state, instance, f"installed wrong weights `{event.digest}`", expel=True)
    else:
        host.installed(state, instance, event.version)


def install_failed(state: State, event: InstallFailed) -> None:
    instance = _asked(state, event, HostState.INSTALLING)
    if instance is not None:
        host.repeat(state, instance, event.reason)


def version_evicted(state: State, event: VersionEvicted) -> None:
    instance = _asked(state, event, HostState.EVICTING)
    if instance is None:
        return
    if instance.incoming is not None or instance.sleep is SleepState.FALLING_ASLEEP:
        return absorb(state, "duplicate")  # dropped for another reason, which is answered for
    instance.ticket = instance.attempts = 0
    host.drop_host(state, instance, event.version)
    if instance.sleep is SleepState.DRAINING:
        state.disturbed.add(instance.id)
    host.let_go(state, instance)


def _asked(
    state: State, event: VersionInstalled | InstallFailed | VersionEvicted, host: HostState
) -> Instance | None:
    """The instance that answers, if this version is still awaited on it in that state."""
    if event.version > state.versions.newest:
        refuse(event, "the version was never published")
    instance = live_instance(state, event.instance, event.incarnation)
    if instance is not None and instance.hosts.get(event.version) is not host:
        absorb(state, "duplicate")
        return None
    return instance
