"""What the orchestrator does after every event: the paper's Algorithm 1, completed.

Train if a batch may be taken, supplement the pipeline, lend devices that would idle, rebalance if
a trigger asks for it, place what waits, retire what nobody needs. Each action looks only where
something changed, so that an event costs the same on eight instances and on eight thousand.

Settled is settled: to settle a second time, with nothing but the time changed, decides nothing.
So an event that changes nothing that is looked at here, such as a timer whose wait was answered,
is over when the one trigger that depends on time has been looked at (`State.unchanged`).
"""

from dora_rl.core.actions import host
from dora_rl.core.actions.finish import fail, halt
from dora_rl.core.actions.lend import lend
from dora_rl.core.actions.place import place
from dora_rl.core.actions.rebalance import rebalance, watch_idle
from dora_rl.core.actions.retire import retire
from dora_rl.core.actions.supply import supplement
from dora_rl.core.actions.train import train
from dora_rl.core.protocol.commands import SetTimer
from dora_rl.core.state.run import State


def settle(state: State) -> None:
    """Take every action that the last event has given rise to."""
    if state.halted:
        return
    if state.quiet:
        state.quiet = False
    elif state.unchanged and state.lending is None:
        watch_idle(state)
    else:
        _act(state)
    state.unchanged = False
    at = state.timers.rearm()
    if at is not None and not state.halted:
        state.emit(SetTimer(at))


def _act(state: State) -> None:
    if state.failed_members or state.disturbed:
        _settle_instances(state)
    if state.wasted_groups:
        give_up(state)
    if not state.halted:
        train(state)
    if state.halted:
        return
    supplement(state)
    if state.lending is not None:
        lend(state)
    if state.rebalance_now:
        state.rebalance_now = False
        rebalance(state)
    if state.unplaced:
        place(state)
    if state.undone:
        state.undone.clear()
    retire(state)
    watch_idle(state)


def _settle_instances(state: State) -> None:
    """What the loss of an instance, or the end of a migration, leads to."""
    while state.failed_members or state.disturbed:
        while state.failed_members:
            trajectory_id, reason = state.failed_members.pop()
            trajectory = state.work.trajectories.get(trajectory_id)
            if trajectory is not None:
                fail(state, trajectory, reason)
        while state.disturbed:
            instance = state.fleet.instances.get(_pop_first(state.disturbed))
            if instance is not None:
                host.emptied(state, instance)


def _pop_first(ids: set[int]) -> int:
    first = min(ids)
    ids.discard(first)
    return first


def give_up(state: State) -> None:
    """A run that only fails or filters would continue for ever and train nothing."""
    limit = state.settings.max_wasted_batches * state.settings.groups_per_step
    if state.wasted_groups >= limit:
        ends = state.work.failed + state.work.filtered
        reason, _ = ends.most_common(1)[0]
        halt(
            state,
            ok=False,
            reason=f"{state.wasted_groups} consecutive groups failed or were filtered "
            f"(limit {state.settings.max_wasted_batches} batches); most frequent reason: {reason}",
        )
