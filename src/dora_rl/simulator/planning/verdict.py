"""The choice among simulated candidates, and the reason for it in words and numbers."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dora_rl.config import validate
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.paradigms import PARADIGMS
from dora_rl.core.protocol.settings import ParadigmName
from dora_rl.observe.metrics import speedup_over
from dora_rl.simulator.planning import adapters
from dora_rl.simulator.planning.adapters import Adapters
from dora_rl.simulator.planning.fixed_costs import FixedCosts, vary
from dora_rl.simulator.planning.question import Problem
from dora_rl.simulator.planning.reasons import NO_VERDICT, why, why_not
from dora_rl.simulator.planning.reduction import (
    Reduction,
    reduce,
    without_own_sizes,
)
from dora_rl.simulator.planning.search import (
    ONE_STEP,
    PLANNED_RUNS,
    RESERVED_RUNS,
    SYNC,
    TURN_COST_S,
    Progress,
    Search,
    Trial,
    best_of,
    choose,
)
from dora_rl.simulator.scenarios import Scenario

UNCHECKED = (
    "costs were checked against one published testbed (docs/calibration.md); for others, "
    "predictions were 30 to 60% off, once with the wrong sign: here tensor parallelism is free "
    "and training scales linearly"
)


@dataclass(frozen=True)
class Plan:
    """What to do with a cluster, and what was seen on the way to it."""

    reduction: Reduction
    best: Trial
    """The recommended one."""
    sync: Trial
    rival: Trial | None
    """The best asynchronous one, recommended or not; None where none can run."""
    trials: tuple[Trial, ...]
    """Everything simulated, in the order of the search."""
    reason: str
    notes: tuple[str, ...]
    cut: str | None
    """`budget` or `interrupted` where the search ended early."""
    fixed_costs: FixedCosts | None
    """How far the verdict depends on them; None where there is nothing to compare."""
    comparison: dict[str, Trial] = field(default_factory=dict)
    """The best of each paradigm."""
    adapters: Adapters | None = None
    """LoRA versions against full weights; None where versions are full weights."""

    @property
    def pays(self) -> bool:
        """Whether asynchrony gains enough to be recommended."""
        return self.best is not self.sync

    @property
    def decided(self) -> bool:
        """Whether anything was compared with sync, or nothing can be."""
        return self.rival is not None or self.cut != "interrupted"

    @property
    def front(self) -> list[Trial]:
        """Throughput against mean staleness: what no other candidate beats in both.

        Of those that could be recommended: each trajectory from one version.
        """
        return pareto([trial for trial in self.trials if PARADIGMS[trial.paradigm].pins_version])

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The recommendation as configuration."""
        candidate = self.best.candidate
        if not self.pays:
            return {"orchestration": {"paradigm": str(SYNC), "max_staleness": 0}}
        return {
            "orchestration": {
                "paradigm": str(candidate.paradigm),
                "max_staleness": candidate.max_staleness,
                "pipeline_depth": self.best.pipeline_depth,
            },
            "rollout": {"version_slots": candidate.version_slots},
            "cluster": {"train_devices": self.best.train_devices},
        }

    def scenario(self) -> Scenario:
        """The real problem, each paradigm with its best values: `dora-rl simulate` runs it."""
        trial = self.rival or self.sync
        plain = self.reduction.real.model_dump(mode="json", exclude_none=True)
        plain["scenario"]["paradigms"] = list(self.comparison)
        plain["orchestration"] |= {
            "max_staleness": trial.candidate.max_staleness,
            "pipeline_depth": trial.pipeline_depth,
        }
        plain["rollout"]["version_slots"] = trial.candidate.version_slots
        plain["cluster"]["train_devices"] = max(1, trial.train_devices)
        one_step = self.comparison.get(ONE_STEP)
        if one_step is not None and one_step is not trial:
            own = plain["paradigm"].setdefault(ONE_STEP, {})
            own.setdefault("cluster", {})["train_devices"] = one_step.train_devices
        return validate(Scenario, plain, self.reduction.real.scenario.title)

    def gain(self, trial: Trial) -> float:
        """Throughput over that of synchronous training."""
        return trial.tokens_per_s / self.sync.tokens_per_s

    def to_json(self) -> dict[str, Any]:
        """Everything that the same seed and budget reproduce."""
        small, real = self.reduction.scenario, self.reduction.real
        recommendation = {"settings": self.settings, **self.figures(self.best)}
        lora = {} if self.adapters is None else {"lora": self.adapters.to_json()}
        return lora | {
            "recommendation": recommendation if self.decided else None,
            "asynchrony_pays": self.pays if self.decided else None,
            "reason": self.reason,
            "fixed_costs": None if self.fixed_costs is None else self.fixed_costs.to_json(),
            "pareto": [self.figures(trial) for trial in self.front],
            "comparison": {name: self.figures(trial) for name, trial in self.comparison.items()},
            "candidates": [self.figures(trial) for trial in self.trials],
            "simulated": {
                "full_size": not self.reduction.reduced,
                "devices": small.cluster.devices,
                "real_devices": real.cluster.devices,
                "groups_per_step": small.orchestration.groups_per_step,
                "real_groups_per_step": real.orchestration.groups_per_step,
                "trajectories_for_one": self.reduction.peers,
                "steps": small.run.steps,
                "warmup_steps": small.scenario.warmup_steps,
            },
            "complete": self.cut is None,
            "cut": self.cut,
            "notes": list(self.notes),
        }

    def figures(self, trial: Trial) -> dict[str, Any]:
        """One candidate in numbers."""
        candidate, summary = trial.candidate, trial.summary
        return {
            "paradigm": str(candidate.paradigm),
            "train_devices": trial.train_devices,
            "rollout_devices": trial.rollout_devices,
            "max_staleness": candidate.max_staleness,
            "pipeline_depth": trial.pipeline_depth,
            "version_slots": candidate.version_slots,
            "tokens_per_s": trial.tokens_per_s,
            "speedup_over_sync": speedup_over(summary, self.sync.summary),
            "step_minutes": summary.step_minutes,
            "phase_seconds": summary.phase_seconds,
            "mean_staleness": summary.mean_staleness,
            "p95_staleness": summary.p95_staleness,
            "observed_max_staleness": summary.max_staleness,
            "trainer_idle_share": summary.rollout_only_share,
            "bubble_share": summary.bubble_share,
            "slots_idle_share": trial.slots_idle,
            "lost_share": trial.lost_share,
        }


def pareto(trials: list[Trial]) -> list[Trial]:
    """The candidates that no other one beats in throughput and mean staleness, freshest first."""
    ordered = sorted(trials, key=lambda t: (t.summary.mean_staleness, -t.tokens_per_s, t.candidate))
    front: list[Trial] = []
    for trial in ordered:
        if not front or trial.tokens_per_s > front[-1].tokens_per_s:
            front.append(trial)
    return front


def make_plan(
    problem: Problem,
    *,
    max_staleness: int | None = None,
    budget_s: float = 60.0,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Plan:
    """Search for the best way to run a problem, and say why it is the best.

    `max_staleness` limits K; left out, the scenario's own K does. The budget also sets the
    size of what is simulated, so a larger one measures more finely.
    """
    real = without_own_sizes(problem.scenario)
    limit = real.orchestration.max_staleness if max_staleness is None else max_staleness
    if limit < 0:
        raise UserError(f"--max-staleness-limit must be >= 0: `{limit}`.")
    reserved = RESERVED_RUNS
    if real.model.lora_rank is not None:  # full weights are searched as well
        budget_s /= 2
        reserved += adapters.RESERVED_RUNS
    reduction = reduce(real, budget_s / PLANNED_RUNS / TURN_COST_S, limit)
    search = Search(reduction, limit, budget_s, progress, clock, reserved_runs=reserved)
    search.run()
    return conclude(search, problem, adapters.search_full_weights(search))


def conclude(search: Search, problem: Problem, full_weights: Search | None = None) -> Plan:
    """Choose among what a search has simulated, and see how sure the choice is.

    `full_weights` is the same search where versions are no adapters.
    """
    if not search.of(SYNC):
        reason = next(iter(search.refused.values()), "nothing was simulated")
        raise UserError(f"sync cannot run here, so there is nothing to compare with: {reason}")
    best, sync, rival = choose(search)
    pays = best is not sync
    comparison = {str(name): best_of(search.of(name)) for name in ParadigmName if search.of(name)}
    fixed_costs = None if rival is None else vary(search, sync, rival, problem.measured)
    against = adapters.compare(search, full_weights, problem.measured)
    if rival is None and search.cut == "interrupted":
        reason = NO_VERDICT
    else:
        reason = why(search, best, sync) if pays else why_not(search, rival, sync)
    failed = sum("failed" in reason for reason in search.refused.values())
    more = [f"{failed} simulated candidate(s) failed and were left out"] if failed else []
    more.append(UNCHECKED)
    if rival is not None:
        more.append(
            "partial and in_flight are simulated for comparison alone: they mix versions within "
            "a trajectory"
        )
    if pays:
        more.append(
            "what staleness costs in learning is not modelled: where it matters, take a fresher "
            "candidate of the front"
        )
    if against is not None:
        more.append(
            "what a low rank costs in learning is not modelled, and fixed costs are taken to be "
            "those of full weights"
        )
    return Plan(
        search.reduction,
        best,
        sync,
        rival,
        tuple(search.trials.values()),
        reason,
        (*problem.notes, *more),
        search.cut,
        fixed_costs,
        comparison,
        against,
    )
