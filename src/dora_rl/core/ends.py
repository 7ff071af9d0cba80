"""How a trajectory, a group and the run itself come to their ends."""

from dora_rl.core import hosting
from dora_rl.core.commands import Fail, Halt, Judge
from dora_rl.core.ledger import Group, Trajectory
from dora_rl.core.settings import OnFailedMember
from dora_rl.core.state import State
from dora_rl.core.timers import Wait
from dora_rl.core.types import GroupState


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
        state.wasted_groups += 1
    elif filtered is not None:
        state.ledger.filter(group, filtered)
        state.wasted_groups += 1
    else:
        state.ledger.train(group)
    record = state.versions.live.get(group.version)
    if record is not None:
        record.groups.discard(group.id)
        state.lease_dropped = True


def halt(state: State, *, ok: bool, reason: str) -> None:
    state.halted = True
    state.emit(Halt(ok, reason))
