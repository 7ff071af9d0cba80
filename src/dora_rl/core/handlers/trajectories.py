"""Trajectories finish, wait for their environments, fail and are scored; groups are judged."""

from dora_rl.core.actions import host
from dora_rl.core.actions.finish import complete_if_scored, end_group, fail
from dora_rl.core.handlers.common import absorb, placed_trajectory, refuse
from dora_rl.core.protocol.commands import Score
from dora_rl.core.protocol.events import (
    GroupJudged,
    TrajectoryFailed,
    TrajectoryFinished,
    TrajectoryPaused,
    TrajectoryRefused,
    TrajectoryResumed,
    TrajectoryScored,
)
from dora_rl.core.protocol.types import Fence, GroupState, TrajectoryState
from dora_rl.core.state.run import State
from dora_rl.core.state.timers import Wait
from dora_rl.core.state.work import Trajectory

_T = TrajectoryState
# Bound once: in Python 3.11 an enum's member takes ten times as long to find as a global.
_ON_INSTANCE = (_T.RUNNING, _T.PARKED)
_GENERATED = _T.GENERATED
_JUDGING = GroupState.JUDGING
_SCORE = Wait.SCORE


def trajectory_finished(state: State, event: TrajectoryFinished) -> None:
    total, newest = 0, state.versions.newest
    for version, _, tokens in event.segments:
        if tokens < 0 or not 0 <= version <= newest:
            refuse(event, "a segment has a version never published, or fewer than 0 tokens")
        total += tokens
    if event.tokens != total or not event.segments:
        refuse(event, "the segments do not add up to the trajectory")
    trajectory = placed_trajectory(state, event, event.trajectory, event.fence, on_its_way=True)
    if trajectory is None:
        return
    if trajectory.state not in _ON_INSTANCE:
        return absorb(state, "duplicate")
    pinned = trajectory.version if state.paradigm.pins_version else None
    for version, digest, _ in event.segments:
        if digest != state.versions.digests[version] or pinned not in (None, version):
            _reject_mixed(state, trajectory, event.fence)
            return
    if trajectory.fence != event.fence:  # finished at the target before the commit was heard of
        host.cancel(state, trajectory)
        trajectory.fence = event.fence
    host.take_off(state, trajectory)
    state.work.generated(trajectory, event.tokens)
    _send_score(state, trajectory)


def _reject_mixed(state: State, trajectory: Trajectory, fence: Fence) -> None:
    """C1: tokens of other weights are not accepted, nor is the instance that made them."""
    state.counters["wrong_weights"] += 1
    trajectory.saved = 0
    culprit = trajectory.instance
    if trajectory.fence != fence and trajectory.migration is not None:
        culprit = state.migrations.live[trajectory.migration].target
    assert culprit is not None
    instance = state.fleet.instances[culprit]
    host.lose(state, instance, "sampled from wrong weights", expel=True)


def _send_score(state: State, trajectory: Trajectory) -> None:
    name, fence = trajectory.id, trajectory.fence
    state.timers.set(state.now + state.settings.score_timeout_s, _SCORE, name, fence)
    state.emit(Score(name, fence))


def trajectory_paused(state: State, event: TrajectoryPaused) -> None:
    trajectory = placed_trajectory(state, event, event.trajectory, event.fence)
    if trajectory is None:
        return
    if event.turn <= trajectory.turn:
        return absorb(state, "duplicate")
    trajectory.turn = event.turn
    _set_paused(state, trajectory, True)


def trajectory_resumed(state: State, event: TrajectoryResumed) -> None:
    trajectory = placed_trajectory(state, event, event.trajectory, event.fence)
    if trajectory is None:
        return
    if event.turn < trajectory.turn:
        return absorb(state, "duplicate")
    trajectory.turn = event.turn
    _set_paused(state, trajectory, False)


def _set_paused(state: State, trajectory: Trajectory, paused: bool) -> None:
    if trajectory.state is not _T.RUNNING or trajectory.paused == paused:
        return
    assert trajectory.instance is not None
    instance = state.fleet.instances[trajectory.instance]
    state.work.set_paused(trajectory, paused)
    if paused:
        state.fleet.pause(instance, trajectory.id)
    else:
        state.fleet.resume(instance, trajectory.id, state.now)
    trajectory.progress_at = state.now
    state.unplaced.update(instance.hosts)


def trajectory_failed(state: State, event: TrajectoryFailed) -> None:
    trajectory = placed_trajectory(state, event, event.trajectory, event.fence)
    if trajectory is None:
        return
    if trajectory.state in (_T.RUNNING, _T.PARKED, _T.GENERATED):
        attempt_failed(state, trajectory, event.reason)
    else:
        absorb(state, "duplicate")


def trajectory_refused(state: State, event: TrajectoryRefused) -> None:
    trajectory = placed_trajectory(state, event, event.trajectory, event.fence)
    if trajectory is None:
        return
    if trajectory.state in _ON_INSTANCE:
        host.cancel(state, trajectory)
        fail(state, trajectory, event.reason)
    else:
        absorb(state, "duplicate")


def attempt_failed(state: State, trajectory: Trajectory, reason: str) -> None:
    """One attempt failed: try again on the same version, until the limit."""
    trajectory.failures += 1
    final = trajectory.failures > state.settings.max_retries
    if trajectory.state is _T.GENERATED:
        if not final:
            trajectory.fence = state.fence()
            _send_score(state, trajectory)
            return
    else:
        host.cancel(state, trajectory)
        if not final:
            host.requeue(state, trajectory)
            return
    fail(state, trajectory, reason)


def trajectory_scored(state: State, event: TrajectoryScored) -> None:
    trajectory = state.work.trajectories.get(event.trajectory)
    if trajectory is not None and trajectory.instance is not None:
        refuse(event, "a score came before the trajectory was whole")
    trajectory = placed_trajectory(state, event, event.trajectory, event.fence)
    if trajectory is None:
        return
    if trajectory.state is not _GENERATED:
        return absorb(state, "duplicate")
    state.work.scored(trajectory)
    group = state.work.groups[trajectory.group]
    if group.unscored:
        state.quiet = True
        return
    complete_if_scored(state, group)
    state.unchanged = group.state is _JUDGING


def group_judged(state: State, event: GroupJudged) -> None:
    if not 0 <= event.group < state.work.issued:
        refuse(event, "the group was never issued")
    group = state.work.groups.get(event.group)
    if group is None or group.state in (GroupState.READY, GroupState.TRAINING):
        return absorb(state, "duplicate")
    if group.state is GroupState.OPEN:
        refuse(event, "the group is not complete, and no judgement was asked for")
    if event.filtered is None:
        state.work.keep(group)
        state.wasted_groups = 0
    else:
        end_group(state, group, filtered=event.filtered)
