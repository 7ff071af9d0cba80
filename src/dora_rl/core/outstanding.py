"""What the core has asked for and still waits for: for whoever performs its commands anew.

Commands to instances are not among them: a new life of a run begins with new instances.
"""

from dora_rl.core.commands import (
    Command,
    FetchPrompts,
    Judge,
    Publish,
    Score,
    SetTimer,
    Suspend,
    Train,
)
from dora_rl.core.state import State, TrainerPhase
from dora_rl.core.types import BatchGroup, GroupState, TrajectoryState


def batch(state: State) -> Train:
    """The batch that is to be trained, with its true membership."""
    ledger, trainer = state.ledger, state.trainer
    groups = tuple(
        BatchGroup(g, ledger.groups[g].version, ledger.surviving(g)) for g in trainer.batch
    )
    return Train(trainer.step, groups)


def outstanding(state: State) -> list[Command]:
    """Each command that was not answered yet, as it was given; in an order that is always legal."""
    commands: list[Command] = []
    ledger, trainer = state.ledger, state.trainer
    if state.fetching is not None:
        missing = max(state.settings.groups_per_step, 1)
        commands.append(FetchPrompts(state.fetching, missing))
    for name in sorted(ledger.trajectories):
        trajectory = ledger.trajectories[name]
        if trajectory.state is TrajectoryState.GENERATED:
            commands.append(Score(name, trajectory.fence))
    for group in sorted(ledger.groups):
        if ledger.groups[group].state is GroupState.JUDGING:
            commands.append(Judge(group, ledger.surviving(group)))
    if state.suspended:
        commands.append(Suspend())
    if trainer.phase is TrainerPhase.TRAINING:
        commands.append(batch(state))
    elif trainer.phase is TrainerPhase.PUBLISHING and trainer.step > 0:
        commands.append(Publish(trainer.step))
    if state.timers.armed_at is not None:
        commands.append(SetTimer(state.timers.armed_at))
    return commands
