"""The trainer answers, and versions are published and pinned."""

from dora_rl.core import hosting
from dora_rl.core.commands import Publish, Resume
from dora_rl.core.duties import send_batch
from dora_rl.core.ends import end_group, halt
from dora_rl.core.events import (
    BatchFailed,
    BatchRejected,
    BatchTrained,
    PublicationFailed,
    VersionPinned,
    VersionUnpinned,
    WeightsPublished,
)
from dora_rl.core.handlers.common import absorb, refuse
from dora_rl.core.state import State, TrainerPhase
from dora_rl.core.timers import Wait
from dora_rl.core.types import TrajectoryState


def batch_trained(state: State, event: BatchTrained) -> None:
    if not _expected_step(state, event, event.step):
        return
    trainer = state.trainer
    for name in trainer.batch:
        end_group(state, state.ledger.groups[name])
    trainer.batch = ()
    trainer.step += 1
    trainer.phase = TrainerPhase.PUBLISHING
    trainer.attempts = trainer.rejections = 0
    if trainer.trained_at is not None:
        state.estimates.observe_step(state.now - trainer.trained_at)
    trainer.trained_at = state.now
    _publish(state)


def batch_failed(state: State, event: BatchFailed) -> None:
    if _expected_step(state, event, event.step):
        train_again(state, event.reason)


def batch_rejected(state: State, event: BatchRejected) -> None:
    """The batch itself is at fault: it fails, and the step is taken with another one."""
    if not _expected_step(state, event, event.step):
        return
    trainer = state.trainer
    if event.groups != trainer.batch:
        return absorb(state, "duplicate")
    for name in trainer.batch:
        end_group(state, state.ledger.groups[name], failed=event.reason)
    trainer.batch = ()
    trainer.phase = TrainerPhase.IDLE
    trainer.rejections += 1
    if trainer.rejections >= state.settings.max_train_attempts:
        halt(
            state,
            ok=False,
            reason=f"train step {trainer.step} rejected {trainer.rejections} batches in a row: "
            f"{event.reason}",
        )
    else:
        _resume(state)


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
            reason=f"train step {state.trainer.step} failed "
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
        for trajectory in state.ledger.trajectories.values():
            if trajectory.state is TrajectoryState.WAITING:
                state.ledger.rebind(trajectory, event.version)
        state.unplaced.add(event.version)
    for instance in state.fleet.instances.values():
        if not instance.hosts and instance.settled and not instance.leaving:
            hosting.convert(state, instance, event.version, None)
    hosting.await_fleet(state)
    _resume(state)
    state.rebalance_now = True


def _resume(state: State) -> None:
    """Training is over for now: whoever stood still for it goes on."""
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
