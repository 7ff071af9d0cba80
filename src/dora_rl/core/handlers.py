"""What each event means. A handler checks first and changes then.

An event about something superseded is absorbed and counted: lost, repeated and reordered
messages are the world's nature. One that no order of messages explains is refused.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from dora_rl.core import events as ev
from dora_rl.core import hosting, transfers
from dora_rl.core.commands import Publish, Resume, Score
from dora_rl.core.duties import (
    complete_if_scored,
    end_group,
    fail,
    halt,
    relieve,
    send_batch,
    send_fetch,
    send_judge,
)
from dora_rl.core.errors import RefusedEvent
from dora_rl.core.ledger import Trajectory
from dora_rl.core.migration import Migration, Phase
from dora_rl.core.placement import Instance
from dora_rl.core.state import State, TrainerPhase
from dora_rl.core.timers import Timer, Wait
from dora_rl.core.transfers import commit_migration, reserved, undo_migration
from dora_rl.core.types import (
    Fence,
    GroupState,
    HostState,
    InstanceId,
    MigrationId,
    Placement,
    TrajectoryId,
    TrajectoryState,
)

_T = TrajectoryState


def _refuse(event: object, why: str) -> NoReturn:
    raise RefusedEvent(f"{why}: `{event}`")


def _absorb(state: State, why: str) -> None:
    state.counters[f"absorbed_{why}"] += 1


# Prompts


def prompts_available(state: State, event: ev.PromptsAvailable) -> None:
    ledger = state.ledger
    if event.first < 0 or event.count < 0:
        _refuse(event, "positions and counts of prompts are not negative")
    if event.first > ledger.prompts:
        _refuse(event, f"prompts {ledger.prompts} to {event.first - 1} were skipped")
    if event.first < ledger.prompts or state.fetching is None:
        if event.first == ledger.prompts and not ledger.exhausted:
            _refuse(event, "no prompts were asked for")
        return _absorb(state, "duplicate")
    if not event.count and not event.exhausted:
        _refuse(event, "no prompt came, and the stream is not exhausted")
    ledger.prompts += event.count
    ledger.exhausted = event.exhausted
    state.fetching = None


# Instances


def instance_joined(state: State, event: ev.InstanceJoined) -> None:
    if event.slots < 1 or event.kv_capacity_tokens < 1 or event.version_slots < 1:
        _refuse(event, "an instance needs slots, KV memory and room for one version")
    fleet = state.fleet
    present = fleet.instances.get(event.instance)
    if event.incarnation <= fleet.ended.get(event.instance, -1) or (
        present is not None and event.incarnation <= present.incarnation
    ):
        return _absorb(state, "duplicate")
    if present is not None:
        hosting.lose(state, present, "superseded", expel=False)
    instance = Instance(
        event.instance,
        event.incarnation,
        event.slots,
        event.kv_capacity_tokens,
        min(event.version_slots, state.settings.version_slots),
        heard_at=state.now,
        checked_at=state.now,
    )
    fleet.join(instance)
    state.fleet_lost_at = None
    state.timers.set(
        state.now + state.settings.heartbeat_timeout_s,
        Wait.HEARTBEAT,
        instance.id,
        instance.incarnation,
    )
    if state.versions.newest >= 0:
        hosting.convert(state, instance, state.versions.newest, None)
        state.rebalance_soon()


def instance_progressed(state: State, event: ev.InstanceProgressed) -> None:
    if event.kv_tokens < 0:
        _refuse(event, "KV in use is not negative")
    instance = _live(state, event.instance, event.incarnation)
    if instance is None:
        return
    now = instance.heard_at = state.now
    records = state.ledger.trajectories
    for name, fence, tokens in event.lengths:
        trajectory = records.get(name)
        if trajectory is not None and trajectory.fence == fence:
            trajectory.tokens = tokens
            trajectory.progress_at = now
    for name, fence, tokens in event.saved:
        trajectory = records.get(name)
        if trajectory is not None and trajectory.fence == fence and tokens > trajectory.saved:
            trajectory.saved = tokens
    _watch_pressure(state, instance, event.kv_tokens)
    if not state.suspended and now - instance.checked_at >= state.settings.trajectory_timeout_s / 4:
        instance.checked_at = now
        _find_stuck(state, instance)


def _watch_pressure(state: State, instance: Instance, kv_tokens: int) -> None:
    instance.kv_tokens = kv_tokens
    share = kv_tokens / instance.kv_capacity_tokens
    if share >= state.settings.kv_pressure:
        if not instance.pressured:
            state.counters["kv_pressure"] += 1
        instance.pressured = True
        if state.paradigm.rebalances:
            relieve(state, instance)
    elif instance.pressured and share < 0.9 * state.settings.kv_pressure:
        instance.pressured = False
        state.fleet.offer(instance)
        state.unplaced.update(instance.hosts)


def _find_stuck(state: State, instance: Instance) -> None:
    limit = state.now - state.settings.trajectory_timeout_s
    if state.resumed_at > limit:
        return  # everything stood still not long ago
    records = state.ledger.trajectories
    stuck = [
        t
        for residents in instance.residents.values()
        for t in residents
        if records[t].progress_at < limit
    ]
    for name in sorted(stuck):
        if name in records:  # a sibling's failure may have ended it meanwhile
            _attempt_failed(state, records[name], "timeout")


def instance_leaving(state: State, event: ev.InstanceLeaving) -> None:
    instance = _live(state, event.instance, event.incarnation)
    if instance is None:
        return
    if instance.leaving:
        return _absorb(state, "duplicate")
    state.fleet.leave(instance)
    if not instance.ticket:
        instance.incoming = instance.outgoing = None
    for version in sorted(instance.residents):
        hosting.evacuate(state, instance, version)
    state.disturbed.add(instance.id)
    state.rebalance_soon()


def instance_failed(state: State, event: ev.InstanceFailed) -> None:
    instance = _live(state, event.instance, event.incarnation)
    if instance is not None:
        hosting.lose(state, instance, event.reason, expel=False)


def version_installed(state: State, event: ev.VersionInstalled) -> None:
    if event.version > state.versions.newest:
        _refuse(event, "the version was never published")
    instance = _live(state, event.instance, event.incarnation)
    if instance is None:
        return
    if instance.hosts.get(event.version) is not HostState.INSTALLING:
        return _absorb(state, "duplicate")
    if event.digest != state.versions.live[event.version].digest:
        state.counters["wrong_weights"] += 1
        hosting.lose(state, instance, f"installed wrong weights `{event.digest}`", expel=True)
    else:
        hosting.installed(state, instance, event.version)


def install_failed(state: State, event: ev.InstallFailed) -> None:
    instance = _live(state, event.instance, event.incarnation)
    if instance is None:
        return
    if instance.hosts.get(event.version) is not HostState.INSTALLING:
        return _absorb(state, "duplicate")
    hosting.repeat(state, instance, event.reason)


def version_evicted(state: State, event: ev.VersionEvicted) -> None:
    instance = _live(state, event.instance, event.incarnation)
    if instance is None:
        return
    if instance.hosts.get(event.version) is not HostState.EVICTING or instance.incoming is not None:
        return _absorb(state, "duplicate")
    instance.ticket = instance.attempts = 0
    hosting.drop_host(state, instance, event.version)


def _live(state: State, instance: InstanceId, incarnation: int) -> Instance | None:
    """The instance that speaks, unless it is a zombie or ahead of its own joining."""
    record = state.fleet.known(instance, incarnation)
    if record is None:
        _absorb(state, "fenced_instance")
    return record


# Trajectories


def trajectory_finished(state: State, event: ev.TrajectoryFinished) -> None:
    if event.tokens != sum(s.tokens for s in event.segments) or not event.segments:
        _refuse(event, "the segments do not add up to the trajectory")
    if any(s.tokens < 0 or not 0 <= s.version <= state.versions.newest for s in event.segments):
        _refuse(event, "a segment names a version that was never published, or fewer than 0 tokens")
    trajectory = _placed(state, event, event.trajectory, event.fence, on_its_way=True)
    if trajectory is None:
        return
    if trajectory.state not in (_T.RUNNING, _T.PARKED):
        return _absorb(state, "duplicate")
    if state.paradigm.pins_version:
        digest = state.versions.live[trajectory.version].digest
        if any(s.version != trajectory.version or s.digest != digest for s in event.segments):
            _reject_mixed(state, trajectory)
            return
    if trajectory.fence != event.fence:  # finished at the target before the commit was heard of
        hosting.cancel(state, trajectory)
        trajectory.fence = event.fence
    hosting.take_off(state, trajectory)
    state.ledger.generated(trajectory, event.tokens)
    _send_score(state, trajectory)


def _reject_mixed(state: State, trajectory: Trajectory) -> None:
    """C1: tokens of other weights are not accepted, nor is the instance that made them."""
    assert trajectory.instance is not None
    state.counters["wrong_weights"] += 1
    trajectory.saved = 0
    instance = state.fleet.instances[trajectory.instance]
    hosting.lose(state, instance, "sampled from wrong weights", expel=True)


def _send_score(state: State, trajectory: Trajectory) -> None:
    state.timers.set(
        state.now + state.settings.score_timeout_s, Wait.SCORE, trajectory.id, trajectory.fence
    )
    state.emit(Score(trajectory.id, trajectory.fence))


def trajectory_paused(state: State, event: ev.TrajectoryPaused) -> None:
    trajectory = _placed(state, event, event.trajectory, event.fence)
    if trajectory is None:
        return
    if event.turn <= trajectory.turn:
        return _absorb(state, "duplicate")
    trajectory.turn = event.turn
    _set_paused(state, trajectory, True)


def trajectory_resumed(state: State, event: ev.TrajectoryResumed) -> None:
    trajectory = _placed(state, event, event.trajectory, event.fence)
    if trajectory is None:
        return
    if event.turn < trajectory.turn:
        return _absorb(state, "duplicate")
    trajectory.turn = event.turn
    _set_paused(state, trajectory, False)


def _set_paused(state: State, trajectory: Trajectory, paused: bool) -> None:
    if trajectory.state is not _T.RUNNING or trajectory.paused == paused:
        return
    assert trajectory.instance is not None
    instance = state.fleet.instances[trajectory.instance]
    state.ledger.set_paused(trajectory, paused)
    state.fleet.set_paused(instance, paused)
    trajectory.progress_at = state.now
    state.unplaced.update(instance.hosts)


def trajectory_failed(state: State, event: ev.TrajectoryFailed) -> None:
    trajectory = _placed(state, event, event.trajectory, event.fence)
    if trajectory is None:
        return
    if trajectory.state in (_T.RUNNING, _T.PARKED, _T.GENERATED):
        _attempt_failed(state, trajectory, event.reason)
    else:
        _absorb(state, "duplicate")


def _attempt_failed(state: State, trajectory: Trajectory, reason: str) -> None:
    """One attempt failed: try again on the same version, until the limit."""
    trajectory.failures += 1
    final = trajectory.failures > state.settings.max_retries
    if trajectory.state is _T.GENERATED:
        if not final:
            trajectory.fence = state.fence()
            _send_score(state, trajectory)
            return
    else:
        hosting.cancel(state, trajectory)
        if not final:
            hosting.requeue(state, trajectory)
            return
    fail(state, trajectory, reason)


def trajectory_scored(state: State, event: ev.TrajectoryScored) -> None:
    trajectory = state.ledger.trajectories.get(event.trajectory)
    if trajectory is not None and trajectory.instance is not None:
        _refuse(event, "a score came before the trajectory was whole")
    trajectory = _placed(state, event, event.trajectory, event.fence)
    if trajectory is None:
        return
    if trajectory.state is not _T.GENERATED:
        return _absorb(state, "duplicate")
    state.ledger.scored(trajectory)
    complete_if_scored(state, state.ledger.groups[trajectory.group])


def _placed(
    state: State, event: object, name: TrajectoryId, fence: Fence, *, on_its_way: bool = False
) -> Trajectory | None:
    """The trajectory, if the event speaks of its present placement (or of the one to come)."""
    ledger = state.ledger
    if not 0 <= name < ledger.issued * ledger.group_size:
        _refuse(event, "the trajectory was never issued")
    if not 0 < fence < state.next_fence:
        _refuse(event, "the fence was never given out")
    trajectory = ledger.trajectories.get(name)
    if trajectory is None:
        _absorb(state, "duplicate")
        return None
    if trajectory.fence == fence or (on_its_way and transfers.on_its_way(state, trajectory, fence)):
        return trajectory
    _absorb(state, "fenced_trajectory")
    return None


def group_judged(state: State, event: ev.GroupJudged) -> None:
    if not 0 <= event.group < state.ledger.issued:
        _refuse(event, "the group was never issued")
    group = state.ledger.groups.get(event.group)
    if group is None or group.state in (GroupState.READY, GroupState.TRAINING):
        return _absorb(state, "duplicate")
    if group.state is GroupState.OPEN:
        _refuse(event, "the group is not complete, and no judgement was asked for")
    if event.filtered is None:
        state.ledger.keep(group)
    else:
        end_group(state, group, filtered=event.filtered)


# Migration


def trajectories_parked(state: State, event: ev.TrajectoriesParked) -> None:
    instance = _live(state, event.instance, event.incarnation)
    if instance is None:
        return
    if not instance.parking:
        return _absorb(state, "duplicate")
    for name, fence in event.parked:
        trajectory = state.ledger.trajectories.get(name)
        if (
            trajectory is not None
            and trajectory.fence == fence
            and trajectory.state is _T.RUNNING
            and trajectory.version == instance.outgoing
        ):
            trajectory.migration = None
            state.fleet.discard(instance, trajectory.version, name, trajectory.paused)
            state.fleet.park(instance, trajectory.version, name)
            state.ledger.park(trajectory)
    hosting.emptied(state, instance)


def migration_reserved(state: State, event: ev.MigrationReserved) -> None:
    migration = _migration(state, event, event.migration)
    if migration is None:
        return
    if migration.phase is not Phase.RESERVING:
        return _absorb(state, "duplicate")
    reserved(state, migration)


def migration_completed(state: State, event: ev.MigrationCompleted) -> None:
    migration = _migration(state, event, event.migration)
    if migration is None:
        return
    if migration.phase is not Phase.TRANSFERRING:
        _refuse(event, "the transfer was not asked for")
    if not {Placement(m.trajectory, m.fence) for m in migration.moves}.issuperset(event.moved):
        _refuse(event, "a trajectory is not of this migration")
    commit_migration(state, migration, event.moved)


def migration_failed(state: State, event: ev.MigrationFailed) -> None:
    migration = _migration(state, event, event.migration)
    if migration is not None:
        undo_migration(state, migration, tell=True)


def _migration(state: State, event: object, name: MigrationId) -> Migration | None:
    if not 0 <= name < state.migrations.next_id:
        _refuse(event, "the migration was never begun")
    migration = state.migrations.live.get(name)
    if migration is None:
        _absorb(state, "duplicate")
    return migration


# Training and versions


def batch_trained(state: State, event: ev.BatchTrained) -> None:
    if not _expected_step(state, event, event.step):
        return
    trainer = state.trainer
    for name in trainer.batch:
        end_group(state, state.ledger.groups[name])
    trainer.batch = ()
    trainer.step += 1
    trainer.phase = TrainerPhase.PUBLISHING
    trainer.attempts = 0
    if trainer.trained_at is not None:
        state.estimates.observe_step(state.now - trainer.trained_at)
    trainer.trained_at = state.now
    _publish(state)


def batch_failed(state: State, event: ev.BatchFailed) -> None:
    if _expected_step(state, event, event.step):
        _train_again(state, event.reason)


def _expected_step(state: State, event: object, step: int) -> bool:
    trainer = state.trainer
    if (
        step < 0
        or step > trainer.step
        or (step == trainer.step and trainer.phase is not TrainerPhase.TRAINING)
    ):
        _refuse(event, "the step is not being trained")
    if step < trainer.step:
        _absorb(state, "duplicate")
        return False
    return True


def _train_again(state: State, reason: str) -> None:
    if state.trainer.attempts < state.settings.max_train_attempts:
        send_batch(state)
    else:
        halt(
            state,
            ok=False,
            reason=f"train step {state.trainer.step} failed "
            f"{state.trainer.attempts} times: {reason}",
        )


def _publish(state: State) -> None:
    trainer = state.trainer
    trainer.attempts += 1
    state.timers.set(
        state.now + state.settings.publish_timeout_s, Wait.PUBLISH, trainer.step, trainer.attempts
    )
    state.emit(Publish(trainer.step))


def weights_published(state: State, event: ev.WeightsPublished) -> None:
    if 0 <= event.version <= state.versions.newest:
        return _absorb(state, "duplicate")
    if not _expected_version(state, event.version):
        _refuse(event, "the version is not being published")
    state.trainer.phase = TrainerPhase.IDLE
    state.versions.publish(event.version, event.digest)
    state.lease_dropped = True
    if not state.paradigm.pins_version:
        for trajectory in state.ledger.trajectories.values():
            if trajectory.state is _T.WAITING:
                state.ledger.rebind(trajectory, event.version)
        state.unplaced.add(event.version)
    for instance in state.fleet.instances.values():
        if not instance.hosts and instance.settled and not instance.leaving:
            hosting.convert(state, instance, event.version, None)
    if state.suspended:
        state.suspended = False
        state.resumed_at = state.now
        state.emit(Resume())
    state.rebalance_now = True


def publication_failed(state: State, event: ev.PublicationFailed) -> None:
    if 0 <= event.version <= state.versions.newest:
        return _absorb(state, "duplicate")
    if not _expected_version(state, event.version):
        _refuse(event, "the version is not being published")
    _publish_again(state, event.reason)


def _expected_version(state: State, version: int) -> bool:
    return state.trainer.phase is TrainerPhase.PUBLISHING and version == state.trainer.step


def _publish_again(state: State, reason: str) -> None:
    trainer = state.trainer
    if trainer.attempts < state.settings.max_publish_attempts:
        _publish(state)
    else:
        halt(
            state,
            ok=False,
            reason=f"publication of version {trainer.step} failed "
            f"{trainer.attempts} times: {reason}",
        )


def version_pinned(state: State, event: ev.VersionPinned) -> None:
    record = state.versions.live.get(event.version)
    if record is None:
        _refuse(event, "the version does not exist, or not any more")
    record.pins.add(event.holder)


def version_unpinned(state: State, event: ev.VersionUnpinned) -> None:
    if event.version > state.versions.newest:
        _refuse(event, "the version was never published")
    record = state.versions.live.get(event.version)
    if record is None or event.holder not in record.pins:
        return _absorb(state, "duplicate")
    record.pins.discard(event.holder)
    state.lease_dropped = True


# Time


def timer_fired(state: State, event: ev.TimerFired) -> None:
    for timer in state.timers.due(state.now):
        if not state.halted:
            _EXPIRED[timer.wait](state, timer)


def _no_heartbeat(state: State, timer: Timer) -> None:
    instance = state.fleet.known(timer.subject, timer.ticket)
    if instance is None:
        return
    silent = state.now - instance.heard_at
    if silent >= state.settings.heartbeat_timeout_s:
        hosting.lose(state, instance, f"silent for {silent:.0f} s", expel=True)
    else:
        state.timers.set(instance.heard_at + state.settings.heartbeat_timeout_s, *timer[1:])


def _no_install(state: State, timer: Timer) -> None:
    instance = state.fleet.instances.get(timer.subject)
    if instance is not None and instance.ticket == timer.ticket:
        hosting.repeat(state, instance, f"did not answer a {timer.wait} command")


def _no_migration(state: State, timer: Timer) -> None:
    migration = state.migrations.live.get(timer.subject)
    if migration is not None:
        undo_migration(state, migration, tell=True)


def _no_score(state: State, timer: Timer) -> None:
    trajectory = state.ledger.trajectories.get(timer.subject)
    if (
        trajectory is not None
        and trajectory.fence == timer.ticket
        and trajectory.state is _T.GENERATED
    ):
        _attempt_failed(state, trajectory, "score timeout")


def _no_judgement(state: State, timer: Timer) -> None:
    group = state.ledger.groups.get(timer.subject)
    if group is None or group.state is not GroupState.JUDGING or group.attempts != timer.ticket:
        return
    if group.attempts > state.settings.max_retries:
        end_group(state, group, failed="judge timeout")
    else:
        send_judge(state, group)


def _no_batch(state: State, timer: Timer) -> None:
    trainer = state.trainer
    if trainer.phase is TrainerPhase.TRAINING and (trainer.step, trainer.attempts) == timer[2:]:
        _train_again(state, f"no answer for {state.settings.train_timeout_s:.0f} s")


def _no_publication(state: State, timer: Timer) -> None:
    trainer = state.trainer
    if trainer.phase is TrainerPhase.PUBLISHING and (trainer.step, trainer.attempts) == timer[2:]:
        _publish_again(state, f"no answer for {state.settings.publish_timeout_s:.0f} s")


def _no_prompts(state: State, timer: Timer) -> None:
    if (state.fetching, state.fetch_attempts) != timer[2:]:
        return
    if state.fetch_attempts <= state.settings.max_retries:
        send_fetch(state, state.settings.groups_per_step)
    else:
        halt(
            state,
            ok=False,
            reason=f"prompt {timer.subject} was asked for {state.fetch_attempts} times "
            "and never came",
        )


def _rebalance_due(state: State, timer: Timer) -> None:
    if state.rebalance_at is not None and state.rebalance_at <= state.now:
        state.rebalance_now = True


def _no_fleet(state: State, timer: Timer) -> None:
    lost_at = state.fleet_lost_at
    if lost_at is not None and state.now - lost_at >= state.settings.fleet_timeout_s:
        halt(state, ok=False, reason=f"no rollout instance for {state.now - lost_at:.0f} s")


_EXPIRED: dict[Wait, Callable[[State, Timer], None]] = {
    Wait.HEARTBEAT: _no_heartbeat,
    Wait.INSTALL: _no_install,
    Wait.PARKING: _no_install,
    Wait.MIGRATION: _no_migration,
    Wait.SCORE: _no_score,
    Wait.JUDGE: _no_judgement,
    Wait.TRAIN: _no_batch,
    Wait.PUBLISH: _no_publication,
    Wait.PROMPTS: _no_prompts,
    Wait.REBALANCE: _rebalance_due,
    Wait.FLEET: _no_fleet,
}

HANDLERS: dict[type, Callable[[State, Any], None]] = {
    ev.PromptsAvailable: prompts_available,
    ev.InstanceJoined: instance_joined,
    ev.InstanceProgressed: instance_progressed,
    ev.InstanceLeaving: instance_leaving,
    ev.InstanceFailed: instance_failed,
    ev.VersionInstalled: version_installed,
    ev.InstallFailed: install_failed,
    ev.VersionEvicted: version_evicted,
    ev.TrajectoryFinished: trajectory_finished,
    ev.TrajectoryPaused: trajectory_paused,
    ev.TrajectoryResumed: trajectory_resumed,
    ev.TrajectoryFailed: trajectory_failed,
    ev.TrajectoryScored: trajectory_scored,
    ev.GroupJudged: group_judged,
    ev.TrajectoriesParked: trajectories_parked,
    ev.MigrationReserved: migration_reserved,
    ev.MigrationCompleted: migration_completed,
    ev.MigrationFailed: migration_failed,
    ev.BatchTrained: batch_trained,
    ev.BatchFailed: batch_failed,
    ev.WeightsPublished: weights_published,
    ev.PublicationFailed: publication_failed,
    ev.VersionPinned: version_pinned,
    ev.VersionUnpinned: version_unpinned,
    ev.TimerFired: timer_fired,
}
