"""What each event means. A handler checks first and changes then.

An event about something superseded is absorbed and counted: lost, repeated and reordered
messages are the world's nature. One that no order of messages explains is refused.
"""

from collections.abc import Callable
from typing import Any

from dora_rl.core.handlers import (
    instances,
    migrations,
    prompts,
    timeouts,
    training,
    trajectories,
)
from dora_rl.core.protocol import events as ev
from dora_rl.core.state.run import State

HANDLERS: dict[type, Callable[[State, Any], None]] = {
    ev.PromptsAvailable: prompts.prompts_available,
    ev.InstanceJoined: instances.instance_joined,
    ev.InstanceProgressed: instances.instance_progressed,
    ev.InstanceLeaving: instances.instance_leaving,
    ev.InstanceFailed: instances.instance_failed,
    ev.InstanceStopped: instances.instance_stopped,
    ev.InstanceSlept: instances.instance_slept,
    ev.InstanceWoke: instances.instance_woke,
    ev.VersionInstalled: instances.version_installed,
    ev.InstallFailed: instances.install_failed,
    ev.VersionEvicted: instances.version_evicted,
    ev.TrajectoryFinished: trajectories.trajectory_finished,
    ev.TrajectoryPaused: trajectories.trajectory_paused,
    ev.TrajectoryResumed: trajectories.trajectory_resumed,
    ev.TrajectoryFailed: trajectories.trajectory_failed,
    ev.TrajectoryRefused: trajectories.trajectory_refused,
    ev.TrajectoryScored: trajectories.trajectory_scored,
    ev.GroupJudged: trajectories.group_judged,
    ev.TrajectoriesParked: migrations.trajectories_parked,
    ev.MigrationReserved: migrations.migration_reserved,
    ev.MigrationCompleted: migrations.migration_completed,
    ev.MigrationFailed: migrations.migration_failed,
    ev.BatchTrained: training.batch_trained,
    ev.BatchFailed: training.batch_failed,
    ev.BatchRejected: training.batch_rejected,
    ev.WeightsPublished: training.weights_published,
    ev.PublicationFailed: training.publication_failed,
    ev.VersionPinned: training.version_pinned,
    ev.VersionUnpinned: training.version_unpinned,
    ev.StepLimitRaised: training.step_limit_raised,
    ev.TimerFired: timeouts.timer_fired,
}
