"""The trainer answers, and versions are published and pinned."""

from dataclasses import replace

from dora_rl.core.actions import host, lend
from dora_rl.core.actions.finish import end_group, halt
from dora_rl.core.actions.train import send_batch
from dora_rl.core.handlers.common import absorb, refuse
from dora_rl.core.protocol.commands import Publish, Resume
from dora_rl.core.protocol.events import (
    BatchFailed,
    BatchRejected,
    BatchTrained,
    PublicationFailed,
    StepLimitRaised,
    VersionPinned,
    VersionUnpinned,
    WeightsPublished,
)
from dora_rl.core.protocol.types import TrajectoryState
from dora_rl.core.state.run import State, TrainerPhase
from dora_rl.core.state.timers import Wait


def batch_trained(state: State, event: BatchTrained) -> None:
    if not _expected_step(state, event, event.step):
        return
    trainer = state.trainer
    for group_id in trainer.batch:
        end_group(state, state.work.groups[group_id])
    trainer.batch = ()
    trainer.step += 1
    trainer.phase = TrainerPhase.PUBLISHING
    trainer.attempts = trainer.rejections = 0
    if trainer.trained_at is not None:
        state.estimates.observe_step(state.now - trainer.trained_at)
    trainer.trained_at = state.now
    lend.observe_training(state)
    _publish(state)


def batch_failed(state: State, event: BatchFailed) -> None:
    if not _was_rejected(state, event.step) and _expected_step(state, event, event.step):
        train_again(state, event.reason)


def batch_rejected(state: State, event: BatchRejected) -> None:
    """The batch itself is at fault: it fails, and the step is taken with another one."""
    if _was_rejected(state, event.step) or not _expected_step(state, event, event.step):
        return
    trainer = state.trainer
    if event.groups != trainer.batch:
        return absorb(state, "duplicate")
    for group_id in trainer.batch:
        end_group(state, state.work.groups[group_id], failed=event.reason)
    trainer.batch = ()
    trainer.phase = TrainerPhase.IDLE
    trainer.rejections += 1
    if trainer.rejections >= state.settings.max_train_attempts:
        halt(
            state,
            ok=False,
            reason=f"train step {trainer.step + 1} rejected {trainer.rejections} batches in a row: "
            f"{event.reason}",
        )
    else:
        _resume(state)


def _was_rejected(state: State, step: int) -> bool:
    """Absorb the late answer of one attempt at a batch that another attempt has rejected."""
    trainer = state.trainer
    if not trainer.rejections or step != trainer.step or trainer.phase is not TrainerPhase.IDLE:
        return False
    absorb(state, "duplicate")
    return True


def _expected_step(state: State, event: object, step: int) -> bool:
    trainer = state.trainer
    if (
        step < 0
        or step > trainer.step
        or (step == trainer.step and trainer.phase is not TrainerPhase.TRAINING)
    ):
        refuse(event, "the step is not being trained")
    if step < trainer.step:
        absorb(state, "duplicate")
        return False
    return True


def train_again(state: State, reason: str) -> None:
    if state.trainer.attempts < state.settings.max_train_attempts:
        send_batch(state)
    else:
        halt(
            state,
            ok=False,
            reason=f"train step {state.trainer.step + 1} failed "
            f"{state.trainer.attempts} times: {reason}",
        )


def _publish(state: State) -> None:
    trainer = state.trainer
    trainer.attempts += 1
    state.timers.set(
        state.now + state.settings.publish_timeout_s, Wait.PUBLISH, trainer.step, trainer.attempts
    )
    state.emit(Publish(trainer.step))


def weights_published(state: State, event: WeightsPublished) -> None:
    if 0 <= event.version <= state.versions.newest:
        return absorb(state, "duplicate")
    if not _expected_version(state, event.version):
        refuse(event, "the version is not being published")
    state.trainer.phase = TrainerPhase.IDLE
    state.versions.publish(event.version, event.digest)
    state.lease_dropped = True
    if not state.paradigm.pins_version:
        for trajectory in state.work.trajectories.values():
            if trajectory.state is TrajectoryState.WAITING:
                state.work.rebind(trajectory, event.version)
        state.unplaced.add(event.version)
    for instance in state.fleet.instances.values():
        if not instance.hosts and instance.settled and instance.available:
            host.convert(state, instance, event.version, None)
    host.await_fleet(state)
    _resume(state)
    state.rebalance_now = True


def _resume(state: State) -> None:
    """Training is over for now: suspended instances continue."""
    if state.suspended:
        state.suspended = False
        state.resumed_at = state.now
        state.emit(Resume())


def publication_failed(state: State, event: PublicationFailed) -> None:
    if 0 <= event.version <= state.versions.newest:
        return absorb(state, "duplicate")
    if not _expected_version(state, event.version):
        refuse(event, "the version is not being published")
    publish_again(state, event.reason)


def _expected_version(state: State, version: int) -> bool:
    return state.trainer.phase is TrainerPhase.PUBLISHING and version == state.trainer.step


def publish_again(state: State, reason: str) -> None:
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


def version_pinned(state: State, event: VersionPinned) -> None:
    record = state.versions.live.get(event.version)
    if record is None:
        refuse(event, "the version does not exist, or not any more")
    record.pins.add(event.holder)


def version_unpinned(state: State, event: VersionUnpinned) -> None:
    if event.version > state.versions.newest:
        refuse(event, "the version was never published")
    record = state.versions.live.get(event.version)
    if record is None or event.holder not in record.pins:
        return absorb(state, "duplicate")
    record.pins.discard(event.holder)
    state.lease_dropped = True


def step_limit_raised(state: State, event: StepLimitRaised) -> None:
    """A run that had taken all of its steps is not done any more."""
    limit = state.settings.max_steps
    if not limit or event.max_steps <= limit:
        refuse(event, "the limit of steps is not raised by it")
    if state.halted and (
        state.trainer.step < limit or state.trainer.phase is not TrainerPhase.IDLE
    ):
        refuse(event, "the run has ended, and not because all steps were taken")
    state.halted = False
    state.settings = replace(state.settings, max_steps=event.max_steps)
