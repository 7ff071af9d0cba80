"""Lend: devices change roles where one role waits, and are back before their owner needs them.

An instance whose devices training has is asleep. The trainer's own devices are the elastic
instances: they wake while the trainer waits for a batch, and sleep before it trains. Instances of
rollout's own sleep while the next batch waits already, and wake when the step is taken. When that
pays is decided by `policy.lending`.
"""

from dora_rl.core.actions import host
from dora_rl.core.policy.admission import schedulable
from dora_rl.core.policy.batching import overdue, take_earliest
from dora_rl.core.policy.lending import IdleInstances, Wait, due_back
from dora_rl.core.protocol.settings import Elastic
from dora_rl.core.protocol.types import SleepState, Version
from dora_rl.core.state.fleet import Instance
from dora_rl.core.state.run import Lending, State, TrainerPhase


def lend(state: State) -> None:
    """Begin or end loans, after whatever has changed."""
    lending = state.lending
    if lending is None:
        return
    phase = state.trainer.phase
    if phase is TrainerPhase.TRAINING:
        if state.settings.elastic is Elastic.BOTH:
            _lend_to_training(state, lending)
        return
    for instance in state.fleet.helping():
        if instance.sleep is SleepState.ASLEEP and not instance.leaving:
            host.wake(state, instance)
    if phase is TrainerPhase.IDLE:
        if not state.fleet.borrowed():
            _lend_to_rollout(state, lending)
        elif due_back(_missing(state), _lent_rate(state, lending), state.estimates.sleep_s):
            _reclaim(state)


def devices_are_back(state: State) -> bool:
    """Whether the trainer can begin; if not, they have been asked for."""
    if state.lending is None or not state.fleet.borrowed():
        return True
    _reclaim(state)
    return False


def _reclaim(state: State) -> None:
    """Send borrowed instances to sleep; those that wake do so first, and sleep then."""
    for instance in state.fleet.borrowed():
        if instance.sleep is SleepState.AWAKE and not instance.leaving:
            host.send_to_sleep(state, instance)


# Training lends to rollout


def _lend_to_rollout(state: State, lending: Lending) -> None:
    step = state.trainer.step
    if lending.step >= step or not state.fleet.elastic:
        return
    asleep = [state.fleet.instances[i] for i in sorted(state.fleet.elastic)]
    asleep = [i for i in asleep if i.sleep is SleepState.ASLEEP and not i.leaving]
    estimates = state.estimates
    wait = Wait(
        missing=_missing(state),
        groups_per_s=lending.groups_per_s,
        own_slots=lending.own_slots,
        more_slots=min(sum(i.slots for i in asleep), _work_for_more(state)),
        wake_s=estimates.wake_s + estimates.install_s,
        sleep_s=estimates.sleep_s,
    )
    if not wait.pays(state.settings.elastic_gain):
        return
    lending.step = step
    lending.close(state.now, state.work.num_ready)
    state.counters["loans_to_rollout"] += 1
    for instance in asleep:
        host.wake(state, instance)


def _missing(state: State) -> int:
    return state.settings.groups_per_step - state.work.num_ready


def _work_for_more(state: State) -> int:
    """Trajectories that would run at once if there were slots: those that wait, and new ones."""
    work, settings = state.work, state.settings
    room = schedulable(
        work.pending,
        state.versions.newest,
        state.next_step,
        settings.groups_per_step,
        state.staleness,
    )
    if settings.pipeline_depth:
        room = min(room, settings.pipeline_depth - work.num_outstanding)
    if settings.max_steps:
        useful = (settings.max_steps - state.trainer.step) * settings.groups_per_step
        room = min(room, useful - work.num_outstanding)
    return work.num_waiting + work.num_parked + max(0, room) * settings.group_size


def _lent_rate(state: State, lending: Lending) -> float:
    """Groups completed per second with the slots that there are now."""
    slots = max(state.fleet.slots, lending.own_slots)
    return lending.groups_per_s * slots / lending.own_slots if lending.own_slots else 0.0


# Rollout lends to training


def _lend_to_training(state: State, lending: Lending) -> None:
    """Once the next batch is there, what rollout does is for later: whom it can spare may help."""
    if state.work.num_waiting or state.work.num_parked or state.fetching is not None:
        return  # there is work for every slot, or may be in a moment
    if lending.helped_step >= state.trainer.step or state.now < lending.look_at:
        return
    # Looking costs as much as a rebalance does, and is done as seldom.
    lending.look_at = state.now + state.settings.rebalance_period_s / 10
    if not _next_batch_is_there(state):
        return
    spare = _spare(state)
    estimates = state.estimates
    loan = IdleInstances(
        instances=len(spare),
        trainer_instances=max(1, len(state.fleet.elastic)),
        left_s=lending.trained_since + estimates.train_s - state.now,
        wake_s=estimates.wake_s,
        sleep_s=estimates.sleep_s,
    )
    if not loan.pays(state.settings.elastic_gain):
        return
    lending.helped_step = state.trainer.step
    state.counters["loans_to_training"] += 1
    for instance in spare:
        host.send_to_sleep(state, instance)


def _next_batch_is_there(state: State) -> bool:
    work, size = state.work, state.settings.groups_per_step
    if work.num_ready < size:
        return False
    taken = take_earliest({v: len(heap) for v, heap in work.ready.items()}, size)
    return overdue(work.pending, taken, state.next_step, size, state.staleness) is None


def _spare(state: State) -> list[Instance]:
    """Instances, the emptiest first, whose work finds room on others of the same versions."""
    candidates = sorted(
        (i for i in state.fleet.instances.values() if _may_go(i)), key=lambda i: (i.load, i.id)
    )
    kept = {i.id: i for i in state.fleet.instances.values() if i.available}
    room: dict[Version, int] = {}
    for instance in kept.values():
        for version in instance.hosts:
            if instance.serves(version):
                room[version] = room.get(version, 0) + instance.free
    spare = []
    for instance in candidates:
        if len(kept) == 1 and instance.residents:
            break
        need = {version: len(residents) for version, residents in instance.residents.items()}
        own = {v: instance.free for v in instance.hosts if instance.serves(v)}
        left = {version: room[version] - free for version, free in own.items()}
        if all(left.get(version, 0) >= count for version, count in need.items()):
            for version, free in left.items():
                room[version] = free - need.get(version, 0)
            del kept[instance.id]
            spare.append(instance)
    return spare


def _may_go(instance: Instance) -> bool:
    return (
        instance.available
        and instance.lendable
        and not instance.elastic
        and instance.settled
        and not instance.ticket
        and not instance.parked
        and not instance.reserved
    )


# What the decisions rest on


def training_begins(state: State) -> None:
    """The batch has been taken; from here on, rollout has its own devices alone."""
    lending = state.lending
    if lending is not None:
        left = state.work.num_ready
        lending.close(state.now, left + len(state.trainer.batch))
        lending.watch(state.now, left)
        lending.own_slots = state.fleet.slots
        lending.trained_since = state.now


def observe_training(state: State) -> None:
    """The step is taken."""
    if state.lending is not None:
        state.estimates.observe_train(state.now - state.lending.trained_since)
