"""Why a plan is as it is: what bounds the step, what is wasted, why asynchrony (not) pays."""

from dora_rl.simulator.planning.search import OURS, Search, Trial

# Idle less than this, a resource counts as the one that bounds the step.
_SATURATED = 0.1
# Training below this share of a synchronous step: generation dominates.
_LITTLE_TRAINING = 0.25
# Synchronous slots idle less than this: the tail is short.
_SHORT_TAIL = 0.35
# Batches that save less device time than this are not worth a word.
_FULLER_BATCHES = 1.2
# Fewer instances than this can be split only coarsely.
_FEW_INSTANCES = 8

NO_VERDICT = "Only sync was simulated, so there is no verdict."


def bound_by(trial: Trial) -> str:
    """`training`, `rollout` or `tail`: what an asynchronous step waits for."""
    if trial.summary.rollout_only_share <= _SATURATED:
        return "training"
    return "rollout" if trial.slots_idle <= _SATURATED else "tail"


def why(search: Search, best: Trial, sync: Trial) -> str:
    """The reason for an asynchronous recommendation."""
    gain = best.tokens_per_s / sync.tokens_per_s
    ages = best.summary
    return " ".join(
        [
            f"`{best.paradigm}` with {devices(best.train_devices)} for training and "
            f"{best.rollout_devices} for rollout trains {best.tokens_per_s:,.0f} tokens a second, "
            f"{gain:.2f} times sync, at a staleness of {ages.mean_staleness:.2f} on average and "
            f"{ages.max_staleness:g} at most.",
            _what_bounds(search, best),
            *_what_sync_loses(search, sync),
            *_what_batches_gain(search, best),
            f"Here {_percent(best.lost_share)} is lost.",
            _what_staleness_buys(search, best),
        ]
    )


def why_not(search: Search, rival: Trial | None, sync: Trial) -> str:
    """The reason for synchronous training."""
    if not search.max_staleness:
        return "A staleness limit of 0 is synchronous training. Use sync."
    begin = "Asynchrony does not pay here"
    if rival is None:
        return f"{begin}: {_no_split(search)}. Use sync."
    gain = rival.tokens_per_s / sync.tokens_per_s
    causes = _causes(search, rival, sync)
    return " ".join(
        [
            f"{begin}: the best asynchronous candidate (`{rival.paradigm}`, "
            f"{devices(rival.train_devices)} for training, {rival.rollout_devices} for rollout) "
            f"trains {gain:.2f} times the tokens of sync a second, and less than 1.05 is not "
            "worth the staleness.",
            *causes,
            "Use sync.",
        ]
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def devices(count: int) -> str:
    """So many devices, in words."""
    return f"{count} device" if count == 1 else f"{count} devices"


def _what_bounds(search: Search, best: Trial) -> str:
    summary, kind = best.summary, bound_by(best)
    waits, idle = summary.rollout_only_share, best.slots_idle
    if kind == "training":
        return (
            f"Training bounds the step: the trainer works {_percent(1 - waits)} of the time, and "
            f"{_percent(idle)} of the rollout slots idle."
        )
    if kind == "rollout":
        return (
            f"Rollout throughput bounds the step: {_percent(1 - idle)} of the slots are busy, and "
            f"the trainer waits {_percent(waits)} of the time."
        )
    longest = search.bounds.longest_s() / 60
    return (
        f"The tail bounds the step: neither the trainer ({_percent(1 - waits)} busy) nor the "
        f"slots ({_percent(1 - idle)} busy) are full, while a trajectory alone may take "
        f"{longest:.1f} min and a step takes {summary.step_minutes:.1f} min."
    )


def _what_sync_loses(search: Search, sync: Trial) -> list[str]:
    summary = sync.summary
    said = [
        f"In sync, generation takes {_percent(summary.rollout_only_share)} of a step, and "
        f"{_percent(sync.slots_idle)} of its slot time waits for the longest responses."
    ]
    efficiency = search.reduction.real.efficiency
    switching = 2 * efficiency.switch_s / (60 * summary.step_minutes)
    if switching > _SATURATED:
        said.append(
            f"Switching devices between generation and training takes {_percent(switching)} "
            f"(efficiency.switch_s = {efficiency.switch_s:g})."
        )
    return [*said, f"In all, sync loses {_percent(sync.lost_share)} of the device time."]


def _what_batches_gain(search: Search, best: Trial) -> list[str]:
    """Fewer instances run fuller batches, and read the weights less often for each token."""
    bounds, candidate = search.bounds, best.candidate
    shared, split = search.reduction.instances, candidate.rollout
    before = shared * bounds.rollout_s(shared, 0)
    gain = before / (split * bounds.rollout_s(split, candidate.max_staleness))
    if gain < _FULLER_BATCHES:
        return []
    return [
        f"Fewer instances with fuller batches generate the same tokens in {gain:.1f} times less "
        "device time."
    ]


def _what_staleness_buys(search: Search, best: Trial) -> str:
    """What a larger bound would add, if it was tried."""
    bound = best.candidate.max_staleness
    larger = [t for t in search.of(OURS) if t.candidate.max_staleness > bound]
    if not larger and bound < search.max_staleness:
        return f"No bound above K = {bound} was simulated."
    if not larger:
        return f"K = {bound} is the largest bound that was allowed."
    most = max(trial.tokens_per_s for trial in larger) / best.tokens_per_s - 1
    if most <= 0.001:
        return f"A bound above K = {bound} adds nothing."
    return f"A bound above K = {bound} adds only {100 * most:.1f}%."


def _no_split(search: Search) -> str:
    reduction = search.reduction
    each = reduction.real.cluster.devices_per_instance
    if reduction.instances < 2:
        return (
            f"a split needs a device for the trainer and an instance for rollout, and there is "
            f"one instance of {each} device(s) in all"
        )
    if not search.splits:
        return "the trainer's weights, gradients and moments leave no instance to rollout"
    last = next(reversed(search.refused.values()), "no split could be simulated")
    return f"no split can run ({last.rstrip('.')})"


def _causes(search: Search, rival: Trial, sync: Trial) -> list[str]:
    """Every cause that applies, the most telling first."""
    causes = []
    training = 1 - sync.summary.rollout_only_share
    total = rival.train_devices + rival.rollout_devices
    taken = rival.train_devices / total
    if training < _LITTLE_TRAINING:
        causes.append(
            f"Generation dominates: training takes {_percent(training)} of a synchronous step, "
            f"so overlap can hide no more than that, while the split takes {_percent(taken)} of "
            "the devices from generation."
        )
    if sync.slots_idle < _SHORT_TAIL:
        causes.append(
            f"The tail is short: while sync generates, only "
            f"{_percent(sync.slots_idle)} of its slots idle, so there is little to win back."
        )
    if search.reduction.real_instances < _FEW_INSTANCES:
        each = search.reduction.real.cluster.devices_per_instance
        causes.append(
            f"The cluster is small: {search.reduction.real_instances} instance(s) of {each} "
            f"device(s) can be split only coarsely, and the split loses "
            f"{_percent(rival.lost_share)} of its device time."
        )
    if not causes:
        causes.append(
            f"Sync loses {_percent(sync.lost_share)} of its device time, the split "
            f"{_percent(rival.lost_share)}: what overlap gains, the split loses."
        )
    return causes
