"""What the orchestrator does after every event: the paper's Algorithm 1, completed.

Train if a batch may be taken, supplement the pipeline, rebalance if a trigger asks for it,
place what waits, retire what nobody needs. Each duty looks only where something changed, so
that an event costs the same on eight instances and on eight thousand.
"""

import heapq

from dora_rl.core import hosting, outstanding
from dora_rl.core.batching import overdue, take_earliest
from dora_rl.core.commands import Delete, SetTimer, Start, Suspend
from dora_rl.core.ends import fail, halt
from dora_rl.core.rebalancing import rebalance, watch_idle
from dora_rl.core.state import State, TrainerPhase
from dora_rl.core.supply import supplement
from dora_rl.core.timers import Wait
from dora_rl.core.types import TrajectoryState, Version


def settle(state: State) -> None:
    """Perform every duty that the last event has given rise to."""
    if state.halted:
        return
    if state.quiet:
        state.quiet = False
    else:
        _settle_instances(state)
        give_up(state)
        if not state.halted:
            train(state)
        if not state.halted:
            supplement(state)
            if state.rebalance_now:
                state.rebalance_now = False
                rebalance(state)
            place(state)
            retire(state)
            watch_idle(state)
    at = state.timers.rearm()
    if at is not None and not state.halted:
        state.emit(SetTimer(at))


def _settle_instances(state: State) -> None:
    """What the loss of an instance, or the end of a migration, leads to."""
    while state.failed_members or state.disturbed:
        while state.failed_members:
            name, reason = state.failed_members.pop()
            trajectory = state.ledger.trajectories.get(name)
            if trajectory is not None:
                fail(state, trajectory, reason)
        while state.disturbed:
            instance = state.fleet.instances.get(_pop_first(state.disturbed))
            if instance is not None:
                hosting.emptied(state, instance)


def _pop_first(names: set[int]) -> int:
    first = min(names)
    names.discard(first)
    return first


def give_up(state: State) -> None:
    """A run that only fails or filters would go on for ever and train nothing."""
    limit = state.settings.max_wasted_batches * state.settings.groups_per_step
    if state.wasted_groups >= limit:
        ends = state.ledger.failed + state.ledger.filtered
        reason, _ = ends.most_common(1)[0]
        halt(
            state,
            ok=False,
            reason=f"{state.wasted_groups} groups in a row came to nothing, most often: {reason}",
        )


def train(state: State) -> None:
    """Take the next batch, if there is one and no deadline is in its way."""
    trainer, ledger, settings = state.trainer, state.ledger, state.settings
    if trainer.phase is not TrainerPhase.IDLE:
        return
    if settings.max_steps and trainer.step >= settings.max_steps:
        halt(state, ok=True, reason=f"{trainer.step} steps trained")
        return
    size = settings.groups_per_step
    if ledger.exhausted and not ledger.backlog:
        size = min(size, ledger.num_outstanding)
        if not size:
            if trainer.step:
                halt(state, ok=True, reason="every prompt is trained, filtered or failed")
            else:
                halt(state, ok=False, reason="every prompt failed or was filtered: no step taken")
            return
    if ledger.num_ready < size:
        return
    taken = _choose(state, size)
    if taken is None:
        if trainer.stalled_since is None:
            trainer.stalled_since = state.now
            trainer.stalls += 1
        return
    if trainer.stalled_since is not None:
        trainer.stalled_s += state.now - trainer.stalled_since
        trainer.stalled_since = None
    trainer.batch = tuple(
        sorted(ledger.batch_next(v).id for v, count in taken.items() for _ in range(count))
    )
    trainer.phase = TrainerPhase.TRAINING
    trainer.attempts = 0
    if state.paradigm.colocated and ledger.work:
        state.suspended = True
        state.emit(Suspend())
    send_batch(state)


def _choose(state: State, size: int) -> dict[Version, int] | None:
    """How many groups of each version to train on; None while a deadline forbids any batch."""
    ledger = state.ledger
    if not state.paradigm.bounded:
        return _first_completed(state, size)
    taken = take_earliest({v: len(heap) for v, heap in ledger.ready.items()}, size)
    late = overdue(
        ledger.pending,
        taken,
        state.trainer.step,
        state.settings.groups_per_step,
        state.staleness,
    )
    return taken if late is None else None


def _first_completed(state: State, size: int) -> dict[Version, int]:
    order = sorted(
        (entry, version) for version, heap in state.ledger.ready.items() for entry in heap
    )
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
    state.emit(outstanding.batch(state))


def place(state: State) -> None:
    """Start waiting trajectories on the emptiest instances of their versions."""
    if not state.unplaced:
        return
    for version in sorted(state.unplaced):
        heap = state.ledger.waiting.get(version)
        if heap:
            _place_version(state, version, heap)
    state.unplaced.clear()


def _place_version(state: State, version: Version, heap: list[int]) -> None:
    ledger, fleet = state.ledger, state.fleet
    share: int | None = None
    if version in fleet.installing:
        # More hosts are about to be ready: leave them their part of the work.
        hosts = len(state.versions.live[version].instances)
        share = -(-ledger.work[version] // hosts)
    while heap:
        trajectory = ledger.trajectories.get(heap[0])
        if (
            trajectory is None
            or trajectory.version != version
            or trajectory.state is not TrajectoryState.WAITING
        ):
            heapq.heappop(heap)
            continue
        instance = fleet.emptiest(version)
        if instance is None or (share is not None and instance.load >= share):
            break
        heapq.heappop(heap)
        fence = state.fence()
        ledger.start(trajectory, instance.id, fence, state.now)
        fleet.add(instance, version, trajectory.id)
        state.emit(Start(trajectory.id, fence, instance.id, version, trajectory.saved))


def retire(state: State) -> None:
    """Let go of versions whose work is done, and delete what nobody leases."""
    versions = state.versions
    for version, record in versions.live.items():
        if version != versions.newest and not record.vacated and version not in state.ledger.work:
            record.vacated = True
            if state.paradigm.pins_version:
                for name in sorted(record.instances):
                    hosting.vacate(state, state.fleet.instances[name], version)
    if state.lease_dropped:
        state.lease_dropped = False
        for version in versions.retire_unleased():
            state.fleet.forget_version(version)
            state.emit(Delete(version))
