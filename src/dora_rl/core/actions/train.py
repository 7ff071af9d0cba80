"""Form the next batch and have it trained, once no deadline is in its way (docs/staleness.md)."""

from dora_rl.core.actions import lend, unanswered
from dora_rl.core.actions.finish import halt
from dora_rl.core.policy.batching import overdue, take_earliest
from dora_rl.core.protocol.commands import Suspend
from dora_rl.core.protocol.types import Version
from dora_rl.core.state.run import State, TrainerPhase
from dora_rl.core.state.timers import Wait

_IDLE = TrainerPhase.IDLE  # bound once: it is looked at after every event


def train(state: State) -> None:
    """Take the next batch, if there is one and no deadline is in its way."""
    trainer = state.trainer
    if trainer.phase is not _IDLE:
        return
    work, settings = state.work, state.settings
    if settings.max_steps and trainer.step >= settings.max_steps:
        halt(state, ok=True, reason=f"{trainer.step} steps trained")
        return
    size = settings.groups_per_step
    if work.exhausted and not work.backlog:
        size = min(size, work.num_outstanding)
        if not size:
            if trainer.step:
                halt(state, ok=True, reason="every prompt is trained, filtered or failed")
            else:
                halt(state, ok=False, reason="every prompt failed or was filtered: no step taken")
            return
    if work.num_ready < size:
        return
    taken = _choose(state, size)
    if taken is None:
        if trainer.stalled_since is None:
            trainer.stalled_since = state.now
            trainer.stalls += 1
        return
    if not lend.devices_are_back(state):
        return
    if trainer.stalled_since is not None:
        trainer.stalled_s += state.now - trainer.stalled_since
        trainer.stalled_since = None
    trainer.batch = tuple(
        sorted(work.batch_next(v).id for v, count in taken.items() for _ in range(count))
    )
    trainer.phase = TrainerPhase.TRAINING
    trainer.attempts = 0
    if state.paradigm.colocated and work.unfinished:
        state.suspended = True
        state.emit(Suspend())
    lend.training_begins(state)
    send_batch(state)


def _choose(state: State, size: int) -> dict[Version, int] | None:
    """How many groups of each version to train on; None while a deadline forbids any batch."""
    work = state.work
    if not state.paradigm.bounded:
        return _first_completed(state, size)
    taken = take_earliest({v: len(heap) for v, heap in work.ready.items()}, size)
    late = overdue(
        work.pending,
        taken,
        state.trainer.step,
        state.settings.groups_per_step,
        state.staleness,
    )
    return taken if late is None else None


def _first_completed(state: State, size: int) -> dict[Version, int]:
    order = sorted((entry, version) for version, heap in state.work.ready.items() for entry in heap)
    taken: dict[Version, int] = {}
    for _, version in order[:size]:
        taken[version] = taken.get(version, 0) + 1
    return taken


def send_batch(state: State) -> None:
    """Command the training of the chosen batch; repeated as it is if it was not answered."""
    trainer = state.trainer
    trainer.attempts += 1
    state.timers.set(
        state.now + state.settings.train_timeout_s, Wait.TRAIN, trainer.step, trainer.attempts
    )
    state.emit(unanswered.batch(state))
