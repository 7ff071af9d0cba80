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

_GENERATED = TrajectoryState.GENERATED  # bound once: it is looked at for every score's timer


def timer_fired(state: State, event: TimerFired) -> None:
    answered = True
    for timer in state.timers.due(state.now):
        if not state.halted and _EXPIRED[timer.wait](state, timer):
            answered = False
    state.unchanged = answered


def _no_heartbeat(state: State, timer: Timer) -> bool:
    instance = state.fleet.known(timer.subject, timer.ticket)
    if instance is None:
        return False
    due = instance.heard_at + state.settings.heartbeat_timeout_s
    if state.now < due:
        state.timers.set(due, *timer[1:])
        return False
    silent = state.now - instance.heard_at
    host.lose(state, instance, f"silent for {silent:.0f} s", expel=True)
    return True


def _no_install(state: State, timer: Timer) -> bool:
    instance = state.fleet.instances.get(timer.subject)
    if instance is None or instance.ticket != timer.ticket:
        return False
    host.repeat(state, instance, f"did not answer a {timer.wait} command")
    return True


def _no_switch(state: State, timer: Timer) -> bool:
    instance = state.fleet.instances.get(timer.subject)
    if instance is None or instance.ticket != timer.ticket:
        return False
    host.switch_again(state, instance)
    return True


def _no_migration(state: State, timer: Timer) -> bool:
    migration = state.migrations.live.get(timer.subject)
    if migration is None:
        return False
    undo_migration(state, migration, tell=True)
    return True


def _no_score(state: State, timer: Timer) -> bool:
    trajectory = state.work.trajectories.get(timer.subject)
    if trajectory is None or trajectory.fence != timer.ticket or trajectory.state is not _GENERATED:
        return False
    attempt_failed(state, trajectory, "score timeout")
    return True


def _no_judgement(state: State, timer: Timer) -> bool:
    group = state.work.groups.get(timer.subject)
    if group is None or group.state is not GroupState.JUDGING or group.attempts != timer.ticket:
        return False
    if group.attempts > state.settings.max_retries:
        end_group(state, group, failed="judge timeout")
    else:
        send_judge(state, group)
    return True


def _no_batch(state: State, timer: Timer) -> bool:
    trainer = state.trainer
    waits = trainer.phase is TrainerPhase.TRAINING
    if not waits or (trainer.step, trainer.attempts) != timer[2:]:
        return False
    train_again(state, f"no answer for {state.settings.train_timeout_s:.0f} s")
    return True


def _no_publication(state: State, timer: Timer) -> bool:
    trainer = state.trainer
    waits = trainer.phase is TrainerPhase.PUBLISHING
    if not waits or (trainer.step, trainer.attempts) != timer[2:]:
        return False
    publish_again(state, f"no answer for {state.settings.publish_timeout_s:.0f} s")
    return True


def _no_prompts(state: State, timer: Timer) -> bool:
    if (state.fetching, state.fetch_attempts) != timer[2:]:
        return False
    if state.fetch_attempts <= state.settings.max_retries:
        send_fetch(state, state.settings.groups_per_step)
    else:
        halt(
            state,
            ok=False,
            reason=f"prompt {timer.subject} was asked for {state.fetch_attempts} times "
            "and never came",
        )
    return True


def _rebalance_due(state: State, timer: Timer) -> bool:
    if state.rebalance_at is None or state.rebalance_at > state.now:
        return False
    state.rebalance_now = True
    return True


def _no_fleet(state: State, timer: Timer) -> bool:
    lost_at = state.fleet_lost_at
    if lost_at is None or state.now < lost_at + state.settings.fleet_timeout_s:
        return False
    halt(state, ok=False, reason=f"no rollout instance for {state.now - lost_at:.0f} s")
    return True


# Each returns whether something was still waited for.
_EXPIRED: dict[Wait, Callable[[State, Timer], bool]] = {
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
