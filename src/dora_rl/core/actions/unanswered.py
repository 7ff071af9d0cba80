"""What the core has asked for and still waits for: for a resume, which performs it again.

Commands to instances are not among them: a resumed run starts new instances.
"""

from dora_rl.core.protocol.commands import (
    Command,
    FetchPrompts,
    Judge,
    Publish,
    Score,
    SetTimer,
    Suspend,
    Train,
)
from dora_rl.core.protocol.types import BatchGroup, GroupState, TrajectoryState
from dora_rl.core.state.run import State, TrainerPhase


def batch(state: State) -> Train:
    """The batch that is to be trained, with its true membership."""
    work, trainer = state.work, state.trainer
    groups = tuple(BatchGroup(g, work.groups[g].version, work.surviving(g)) for g in trainer.batch)
    return Train(trainer.step, groups)


def unanswered_commands(state: State) -> list[Command]:
    """Each command that was not answered yet, as it was given; in an order that is always legal."""
    commands: list[Command] = []
    work, trainer = state.work, state.trainer
    if state.fetching is not None:
        missing = max(state.settings.groups_per_step, 1)
        commands.append(FetchPrompts(state.fetching, missing))
    for trajectory_id in sorted(work.trajectories):
        trajectory = work.trajectories[trajectory_id]
        if trajectory.state is TrajectoryState.GENERATED:
            commands.append(Score(trajectory_id, trajectory.fence))
    for group in sorted(work.groups):
        if work.groups[group].state is GroupState.JUDGING:
            commands.append(Judge(group, work.surviving(group)))
    if state.suspended:
        commands.append(Suspend())
    if trainer.phase is TrainerPhase.TRAINING:
        commands.append(batch(state))
    elif trainer.phase is TrainerPhase.PUBLISHING and trainer.step > 0:
        commands.append(Publish(trainer.step))
    if state.timers.armed_at is not None:
        commands.append(SetTimer(state.timers.armed_at))
    return commands
