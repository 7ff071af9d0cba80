"""The result of `dora-rl bench modes` as lines for a terminal."""

from typing import TYPE_CHECKING

from dora_rl.core.protocol.settings import Elastic, ParadigmName

if TYPE_CHECKING:
    from dora_rl.benchmarks.modes_result import Result

_QUIET = 1.1  # above it other work had a tenth of a core: times are not to be trusted


def lines(result: "Result") -> list[str]:
    """What a step asks for and its floors, the search, the table, the ratios."""
    parts = [_workload(result), _search(result), _table(result)]
    shown: list[str] = []
    for part in filter(None, parts):
        shown += ["", *part] if shown else part
    return shown


def _workload(result: "Result") -> list[str]:
    plan, limits = result.plan, result.limits
    if limits is None:
        return []
    floor, lengths = limits.floor(plan.cores), limits.lengths
    found = limits.parts
    waits = (
        f"; tools take {lengths['wait_mean_s']:.2f} s mean, {lengths['wait_p99_s']:.1f} s p99"
        if plan.workload.tool_workers
        else ""
    )
    floors = ", ".join(
        f"{name} {floor.of_paradigm(name, plan.max_staleness):.2f}" for name in ParadigmName
    )
    busy = (
        [f"  NOT QUIET: one thread took {found.contention:.1f} x as long as it computed"]
        if found.contention > _QUIET
        else []
    )
    return [
        *busy,
        f"{plan.workload.name}: {plan.workload.about}",
        f"  lengths {lengths['mean']:.0f} mean, p99 {lengths['p99_over_mean']:.1f} x, "
        f"max {lengths['max_over_mean']:.1f} x the mean; in a batch the longest is "
        f"{lengths['max_over_mean_in_a_batch']:.1f} x{waits}",
        f"  a step: training {floor.train_core_s:.2f} core-s ({found.best_train_threads} thread(s) "
        f"best; {floor.train_s:.2f} s on all), decoding {floor.decode_core_s:.2f} core-s "
        f"({found.best_batch} rows best), slowest trajectory {floor.tail_s:.2f} s, of it "
        f"{floor.wait_s:.2f} s waits",
        f"  limit of {plan.cores} cores {floor.limit_s:.2f} s; floors, s: {floors}",
        f"  at its floor a synchronous step is {floor.sync_rollout_share:.0%} rollout",
    ]


def _search(result: "Result") -> list[str]:
    if not result.searched:
        return []
    shown = ["The search for each one's best split (tokens/s):"]
    for name, tried in result.searched.items():
        rates = "; ".join(f"{split}: {rate:.0f}" for split, rate in tried.items())
        shown.append(f"  {name:<14} {rates}")
    return shown


def _table(result: "Result") -> list[str]:
    lengths = result.lengths()
    if lengths is None:
        return ["No round was measured."]
    shown = [
        _heading(result, lengths),
        f"{'':<14} {'tokens/s':>9} {'step s':>7} {'floor s':>8} {'of limit':>9} "
        f"{'rollout-only s':>14} {'train s':>8} {'stalls s':>9} {'bubbles':>8} {'staleness':>10} "
        f"{'reward':>7}  audit",
    ]
    for name in result.readings:
        r, shares = result.median(name), result.shares(name)
        staleness = f"{r.mean_staleness:.2f}/{r.max_staleness:.0f}"
        floor_s = f"{shares['floor_s']:.2f}" if shares else "-"
        of_limit = f"{shares['share_of_limit']:.0%}" if shares else "-"
        shown.append(
            f"{name:<14} {r.tokens_per_s:>9.0f} {r.step_s:>7.2f} {floor_s:>8} {of_limit:>9} "
            f"{r.rollout_only_s:>14.2f} {r.train_s:>8.2f} {r.deadline_stall_s:>9.2f} "
            f"{r.bubble_share:>8.1%} {staleness:>10} {r.reward:>7.3f}  {r.audit}"
        )
    for pair, values in result.ratios().items():
        shown.append(
            f"{pair}: {values['tokens_per_s']:.2f} x tokens/s, "
            f"{values['rollout_only_s']:.2f} x rollout-only time"
        )
    return shown + _share(result)


def _share(result: "Result") -> list[str]:
    """Whether rollout had the share of a synchronous step that the workload asks for."""
    band, share = result.plan.workload.band, result.sync_rollout_share()
    if band is None or share is None:
        return []
    missed = "" if band.least <= share <= band.most else ": MISSED, the ratios are of another mix"
    return [
        f"rollout alone was {share:.0%} of a synchronous step, of {band.least:.0%} to "
        f"{band.most:.0%} asked for{missed}"
    ]


def _heading(result: "Result", lengths: dict[str, float]) -> str:
    plan = result.plan
    kernels = ", portable kernels" if plan.workload.native_kernels is False else ""
    return (
        f"{plan.engine}{kernels}{', versions are adapters' if plan.lora else ''}"
        f"{f', elastic: {plan.elastic}' if plan.elastic is not Elastic.OFF else ''}, "
        f"{plan.groups} groups of {plan.group_size} a step, K = {plan.max_staleness}, "
        f"{plan.cores} cores; lengths {lengths['mean']:.0f} mean, {lengths['max']:.0f} max; "
        f"{plan.steps - plan.warmup_steps} steps after warm-up, median of {plan.rounds} rounds"
    )
