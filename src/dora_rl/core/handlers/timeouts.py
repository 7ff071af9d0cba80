"""A wait has come to its end: ask again, give up, or find that it was answered."""

from collections.abc import Callable

from dora_rl.core.actions import host
from dora_rl.core.actions.finish import end_group, halt, send_judge
from dora_rl.core.actions.migrate import undo_migration
from dora_rl.core.actions.supply import send_fetch
from dora_rl.core.handlers.training import publish_again, train_again
from dora_rl.core.handlers.trajectories import attempt_failed
from dora_rl.core.protocol.events import TimerFired
from dora_rl.core.protocol.types import GroupState, TrajectoryState
from dora_rl.core.state.run import State, TrainerPhase
from dora_rl.core.state.timers import Timer, Wait


def timer_fired(state: State, event: TimerFired) -> None:
    for timer in state.timers.due(state.now):
        if not state.halted:
            _EXPIRED[timer.wait](state, timer)


def _no_heartbeat(state: State, timer: Timer) -> None:
    instance = state.fleet.known(timer.subject, timer.ticket)
    if instance is None:
        return
    due = instance.heard_at + state.settings.heartbeat_timeout_s
    if state.now >= due:
        silent = state.now - instance.heard_at
        host.lose(state, instance, f"silent for {silent:.0f} s", expel=True)
    else:
        state.timers.set(due, *timer[1:])


def _no_install(state: State, timer: Timer) -> None:
    instance = state.fleet.instances.get(timer.subject)
    if instance is not None and instance.ticket == timer.ticket:
        host.repeat(state, instance, f"did not answer a {timer.wait} command")


def _no_switch(state: State, timer: Timer) -> None:
    instance = state.fleet.instances.get(timer.subject)
    if instance is not None and instance.ticket == timer.ticket:
        host.switch_again(state, instance)


def _no_migration(state: State, timer: Timer) -> None:
    migration = state.migrations.live.get(timer.subject)
    if migration is not None:
        undo_migration(state, migration, tell=True)


def _no_score(state: State, timer: Timer) -> None:
    trajectory = state.work.trajectories.get(timer.subject)
    if (
        trajectory is not None
        and trajectory.fence == timer.ticket
        and trajectory.state is TrajectoryState.GENERATED
    ):
        attempt_failed(state, trajectory, "score timeout")


def _no_judgement(state: State, timer: Timer) -> None:
    group = state.work.groups.get(timer.subject)
    if group is None or group.state is not GroupState.JUDGING or group.attempts != timer.ticket:
        return
    if group.attempts > state.settings.max_retries:
        end_group(state, group, failed="judge timeout")
    else:
        send_judge(state, group)


def _no_batch(state: State, timer: Timer) -> None:
    trainer = state.trainer
    if trainer.phase is TrainerPhase.TRAINING and (trainer.step, trainer.attempts) == timer[2:]:
        train_again(state, f"no answer for {state.settings.train_timeout_s:.0f} s")


def _no_publication(state: State, timer: Timer) -> None:
    trainer = state.trainer
    if trainer.phase is TrainerPhase.PUBLISHING and (trainer.step, trainer.attempts) == timer[2:]:
        publish_again(state, f"no answer for {state.settings.publish_timeout_s:.0f} s")


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
    if lost_at is not None and state.now >= lost_at + state.settings.fleet_timeout_s:
        halt(state, ok=False, reason=f"no rollout instance for {state.now - lost_at:.0f} s")


_EXPIRED: dict[Wait, Callable[[State, Timer], None]] = {
    Wait.HEARTBEAT: _no_heartbeat,
    Wait.INSTALL: _no_install,
    Wait.PARKING: _no_install,
    Wait.SWITCH: _no_switch,
    Wait.MIGRATION: _no_migration,
    Wait.SCORE: _no_score,
    Wait.JUDGE: _no_judgement,
    Wait.TRAIN: _no_batch,
    Wait.PUBLISH: _no_publication,
    Wait.PROMPTS: _no_prompts,
    Wait.REBALANCE: _rebalance_due,
    Wait.FLEET: _no_fleet,
}
