"""How a trajectory, a group and the run itself come to their ends."""

from dora_rl.core.actions import host
from dora_rl.core.protocol.commands import Fail, Halt, Judge
from dora_rl.core.protocol.settings import OnFailedMember
from dora_rl.core.protocol.types import GroupState
from dora_rl.core.state.run import State
from dora_rl.core.state.timers import Wait
from dora_rl.core.state.work import Group, Trajectory


def fail(state: State, trajectory: Trajectory, reason: str) -> None:
    """A trajectory has failed for good; the setting says what that does to its group."""
    group = state.work.groups[trajectory.group]
    if group.state is not GroupState.OPEN:
        return
    state.work.fail(trajectory, reason)
    state.emit(Fail(trajectory.id, reason))
    if state.settings.on_failed_member is OnFailedMember.FAIL_GROUP:
        for member in state.work.surviving(group.id):
            host.cancel(state, state.work.trajectories[member])
        end_group(state, group, failed="sibling failed")
    else:
        complete_if_scored(state, group)


def complete_if_scored(state: State, group: Group) -> None:
    """Every member is in: have the group judged, or end it if none is left."""
    if group.unscored:
        return
    if state.work.surviving(group.id):
        state.work.complete(group)
        send_judge(state, group)
    else:
        end_group(state, group, failed="every member failed")


def send_judge(state: State, group: Group) -> None:
    group.attempts += 1
    state.timers.set(
        state.now + state.settings.score_timeout_s, Wait.JUDGE, group.id, group.attempts
    )
    state.emit(Judge(group.id, state.work.surviving(group.id)))


def end_group(
    state: State, group: Group, *, failed: str | None = None, filtered: str | None = None
) -> None:
    """A group is terminal: it holds its version no longer."""
    if failed is not None:
        for member in state.work.surviving(group.id):
            state.emit(Fail(member, failed))
        state.work.fail_group(group, failed)
        state.wasted_groups += 1
    elif filtered is not None:
        state.work.filter(group, filtered)
        state.wasted_groups += 1
    else:
        state.work.train(group)
    record = state.versions.live.get(group.version)
    if record is not None:
        record.groups.discard(group.id)
        state.lease_dropped = True


def halt(state: State, *, ok: bool, reason: str) -> None:
    state.halted = True
    state.emit(Halt(ok, reason))
