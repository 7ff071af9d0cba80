"""The search: which candidates are simulated, in which order, and when to stop.

Deterministic: the next candidate depends on the problem and on earlier results alone, so the
same seed gives the same plan. One candidate of each paradigm comes first, whatever it takes.
After that a budget or an interruption cuts the order short, between two candidates, and the
result says so.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil

from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.settings import ParadigmName
from dora_rl.observe.metrics import WORTHWHILE, Summary
from dora_rl.simulator.planning.bounds import Bounds
from dora_rl.simulator.planning.reduction import Reduction, with_efficiency, with_settings
from dora_rl.simulator.scenarios import Scenario
from dora_rl.simulator.simulate import simulate

SYNC, ONE_STEP, OURS = ParadigmName.SYNC, ParadigmName.ONE_STEP, ParadigmName.MULTI_VERSION
PARTIAL, IN_FLIGHT = ParadigmName.PARTIAL, ParadigmName.IN_FLIGHT

# Runs at other fixed costs that follow the search: `planning/fixed_costs.py`.
RESERVED_RUNS = 6
# What a plan usually takes; with the cost of a turn it makes a size of a budget.
PLANNED_RUNS = 27 + RESERVED_RUNS
TURN_COST_S = 0.0002
# Devices of one machine: a split in whole machines is easier to live with.
NODE_DEVICES = 8
# Weights and gradients in bf16, master weights and two moments in fp32, sharded (as in ZeRO). Of a
# frozen base, the weights alone.
TRAIN_BYTES_PER_PARAMETER = 16
# Candidates so near to the best are as good as it: a few steps measure no finer.
TIE = 0.02
_LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
# Splits whose bounds are computed; more would only be closer to each other.
_BOUNDED_SPLITS = 1024
_DEPTHS = (1.0, 1.25, 1.5, 2.0)
# A bound must be this far below the best to count as hopeless: its means are sampled.
_HOPELESS = 0.97


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """One way to run the simulated cluster."""

    paradigm: ParadigmName
    rollout: int
    """Simulated rollout instances; 0 where all devices are shared."""
    max_staleness: int
    depth: float = 0.0
    """`pipeline_depth` in batches; 0 follows the slots."""
    version_slots: int = 1

    def describe(self) -> str:
        """It in a few words, for whoever waits for it."""
        split = f", {self.rollout} rollout instances" if self.rollout else ""
        return f"{self.paradigm} with K = {self.max_staleness}{split}"


@dataclass(frozen=True, slots=True)
class Trial:
    """A simulated candidate, in figures of the real cluster."""

    candidate: Candidate
    summary: Summary
    tokens_per_s: float
    rollout_instances: int
    train_devices: int
    """0 where the devices are shared."""
    rollout_devices: int
    pipeline_depth: int
    lost_share: float
    """Device time that a schedule without waits, switches and half-empty batches would save."""
    slots_idle: float
    """Of the slots that the admitted work could fill."""
    more_weights: int = 0
    """Full sets of weights that an instance holds besides one; adapters are none."""

    @property
    def paradigm(self) -> ParadigmName:
        return self.candidate.paradigm

    @property
    def whole_nodes(self) -> bool:
        """Whether no machine is shared by training and rollout."""
        return self.train_devices % NODE_DEVICES == 0


def best_of(trials: list[Trial]) -> Trial:
    """The fastest; among those as fast, the one with the least staleness, then the simplest."""
    fastest = max(trial.tokens_per_s for trial in trials)
    near = [trial for trial in trials if trial.tokens_per_s >= (1 - TIE) * fastest]
    return min(
        near,
        key=lambda trial: (
            round(trial.summary.mean_staleness, 1),
            trial.candidate.max_staleness,
            not trial.whole_nodes,
            trial.more_weights,
            -trial.tokens_per_s,
            trial.candidate,
        ),
    )


class _Cut(Exception):
    """The budget is spent."""


Progress = Callable[[int, str], None]
"""Called before each simulation, with the number done and with what is simulated."""


@dataclass
class Search:
    """Simulates candidates of one problem, each once."""

    reduction: Reduction
    max_staleness: int
    budget_s: float
    progress: Progress | None = None
    clock: Callable[[], float] = time.perf_counter
    trials: dict[Candidate, Trial] = field(default_factory=dict)
    refused: dict[Candidate, str] = field(default_factory=dict)
    cut: str | None = None
    """Why the search ended early."""
    runs: int = 0
    """Simulations so far."""
    reserved_runs: int = RESERVED_RUNS
    """Simulations that follow the search, for which it leaves time."""

    def __post_init__(self) -> None:
        self.bounds = Bounds(self.reduction.scenario)
        self._started = self.clock()
        self._each = self.reduction.scenario.cluster.devices_per_instance
        self.least_train = self._least_train_instances()

    @property
    def splits(self) -> range:
        """The rollout instances that a split can have; the trainer takes the others."""
        return range(1, self.reduction.instances - self.least_train + 1)

    @property
    def lora(self) -> bool:
        """Whether versions are adapters of one base."""
        return self.reduction.real.model.lora_rank is not None

    def run(self) -> None:
        """Simulate until nothing promising is left, or the search is cut."""
        try:
            self._try(Candidate(SYNC, 0, 0), must=True)
            if self.max_staleness and self.splits:
                self._explore()
        except _Cut:
            self.cut = "budget"
        except KeyboardInterrupt:
            if not self.trials:
                raise
            self.cut = "interrupted"

    def of(self, paradigm: ParadigmName) -> list[Trial]:
        """The successful trials of one paradigm, in the order of the search."""
        return [trial for trial in self.trials.values() if trial.paradigm == paradigm]

    def _explore(self) -> None:
        middle = min(3, self.max_staleness)
        start = self._promising(middle)
        for candidate in (
            self._ours(start, middle),
            Candidate(ONE_STEP, start, 1),
            Candidate(PARTIAL, 0, middle),
            Candidate(IN_FLIGHT, start, middle),
        ):
            self._try(candidate, must=True)
        self._climb(self._ours(start, middle), self._stride())
        if not self.of(OURS):
            return
        best = best_of(self.of(OURS)).candidate
        for bound in _LADDER:
            if bound <= self.max_staleness:
                self._try(self._ours(best.rollout, bound))
        best = best_of(self.of(OURS)).candidate
        self._try(Candidate(ONE_STEP, best.rollout, 1))
        self._vary(best)
        self._climb(best_of(self.of(OURS)).candidate, 1)
        self._tighten(best_of(self.of(OURS)))
        best = best_of(self.of(OURS)).candidate
        self._climb(Candidate(ONE_STEP, best.rollout, 1), self._stride())
        self._try(Candidate(IN_FLIGHT, best.rollout, best.max_staleness))

    def _vary(self, best: Candidate) -> None:
        """Depths and version slots around the best so far."""
        for depth in _DEPTHS:
            if depth <= best.max_staleness + 1:
                self._try(replace(best, depth=depth))
        best = best_of(self.of(OURS)).candidate
        other = 1 if self.lora else best.version_slots + 1
        self._try(replace(best, version_slots=other))

    def _tighten(self, best: Trial) -> None:
        """The same with the bound that it keeps by itself: a promise that costs nothing."""
        kept = int(best.summary.max_staleness)
        if max(1, best.candidate.depth - 1) <= kept < best.candidate.max_staleness:
            slots = best.candidate.version_slots
            slots = min(slots, kept + 1) if self.lora else slots
            self._try(replace(best.candidate, max_staleness=kept, version_slots=slots))

    def _ours(self, rollout: int, bound: int) -> Candidate:
        """With one version an instance; with every live one where they are adapters."""
        return Candidate(OURS, rollout, bound, version_slots=bound + 1 if self.lora else 1)

    # Splits

    def _least_train_instances(self) -> int:
        """The trainer's least share, in instances, that holds what training keeps in memory."""
        real = self.reduction.real
        memory = real.cluster.device.memory_bytes * real.efficiency.kv_memory_fraction
        kept = real.model.parameters * TRAIN_BYTES_PER_PARAMETER
        if real.model.lora_rank is not None:
            kept = real.model.adapter_parameters * TRAIN_BYTES_PER_PARAMETER
            kept += real.model.weight_bytes
        devices = kept / memory
        share = devices / real.cluster.devices
        if share > 1:  # then it is not kept in device memory, or not for all weights
            return 1
        return max(1, ceil(share * self.reduction.instances - 1e-9))

    def _stride(self) -> int:
        """The first distance between splits: about an eighth of the cluster, in whole nodes."""
        stride = max(1, self.reduction.instances // 8)
        node = max(1, NODE_DEVICES // self._each)
        return stride - stride % node if stride >= node else stride

    def _promising(self, max_staleness: int) -> int:
        """The split with the best bound; whole nodes where the cluster has several."""
        splits = list(self.splits)
        if self.reduction.scenario.cluster.devices >= 4 * NODE_DEVICES:
            whole = [rollout for rollout in splits if self._train(rollout) % NODE_DEVICES == 0]
            splits = whole or splits
        splits = splits[:: max(1, len(splits) // _BOUNDED_SPLITS)]
        return min(splits, key=lambda rollout: (self._bound_s(rollout, max_staleness), rollout))

    def _bound_s(self, rollout: int, max_staleness: int) -> float:
        return self.bounds.step_s(rollout, self._train(rollout), max_staleness)

    def _train(self, rollout: int) -> int:
        return self.reduction.scenario.cluster.devices - rollout * self._each

    def _climb(self, start: Candidate, stride: int) -> None:
        """From split to better split, with ever smaller strides."""
        best = self._try(start)
        while stride:
            here = start.rollout if best is None else best.candidate.rollout
            near = [
                self._try(replace(start, rollout=rollout))
                for rollout in (here - stride, here + stride)
                if rollout in self.splits and not self._hopeless(start, rollout)
            ]
            better = [
                trial
                for trial in near
                if trial and (best is None or trial.tokens_per_s > best.tokens_per_s)
            ]
            if better:
                best = max(better, key=lambda trial: trial.tokens_per_s)
            else:
                stride //= 2

    def _hopeless(self, start: Candidate, rollout: int) -> bool:
        """Even at its bound this split would be slower than one that was simulated."""
        rivals = self.of(start.paradigm)
        if not rivals:
            return False
        bound_s = self._bound_s(rollout, start.max_staleness)
        per_step = self.reduction.real.orchestration.groups_per_step
        per_step *= self.reduction.real.orchestration.group_size
        most = per_step * self.bounds.lengths.generated / bound_s
        return most < _HOPELESS * max(trial.tokens_per_s for trial in rivals)

    # One candidate

    def scenario_of(self, candidate: Candidate) -> Scenario:
        """What is simulated for a candidate."""
        scenario = self.reduction.scenario
        values: dict[str, dict[str, int]] = {
            "orchestration": {
                "max_staleness": candidate.max_staleness,
                "pipeline_depth": ceil(candidate.depth * scenario.orchestration.groups_per_step),
            },
            "rollout": {"version_slots": candidate.version_slots},
        }
        if candidate.rollout:
            values["cluster"] = {"train_devices": self._train(candidate.rollout)}
        return with_settings(scenario, values)

    def _try(self, candidate: Candidate, must: bool = False) -> Trial | None:
        """Simulate a candidate, unless that was done; None where it cannot run.

        One that must be simulated is, also after the end of the budget.
        """
        if candidate in self.trials or candidate in self.refused:
            return self.trials.get(candidate)
        if not must and self._spent():
            raise _Cut
        try:
            summary = self._simulate(self.scenario_of(candidate), candidate, candidate.describe())
        except UserError as error:
            self.refused[candidate] = str(error)
            return None
        trial = self.trials[candidate] = self._trial(candidate, summary)
        return trial

    def include(self, candidate: Candidate) -> None:
        """Simulate what another search has found, whatever the budget, if it can be had here."""
        if candidate.paradigm is OURS:
            slots = candidate.max_staleness + 1 if self.lora else 1
            candidate = replace(candidate, version_slots=slots)
        if not candidate.rollout or candidate.rollout in self.splits:
            self._try(candidate, must=True)

    def at_costs(self, candidate: Candidate, costs: Mapping[str, float], name: str) -> Summary:
        """The same candidate where some constants of `[efficiency]` differ; UserError as ever."""
        scenario = with_efficiency(self.scenario_of(candidate), costs)
        return self._simulate(scenario, candidate, f"{candidate.describe()}, {name}")

    def _spent(self) -> bool:
        """Whether the rest of the budget is needed for what follows the search."""
        passed_s = self.clock() - self._started
        return passed_s * (1 + self.reserved_runs / max(1, self.runs)) >= self.budget_s

    def _simulate(self, scenario: Scenario, candidate: Candidate, description: str) -> Summary:
        if self.progress is not None:
            self.progress(self.runs, description)
        scenario.setup(candidate.paradigm)
        self.runs += 1
        summary = simulate(scenario, candidate.paradigm).summary
        if not summary.ok or not summary.tokens_per_s:
            reason = summary.end if summary.audit_ok else summary.audit
            raise UserError(f"the simulated run failed: {reason}")
        return summary

    def _trial(self, candidate: Candidate, summary: Summary) -> Trial:
        real = self.reduction.real
        each, devices = real.cluster.devices_per_instance, real.cluster.devices
        instances = self.reduction.real_instances
        if candidate.rollout:
            instances = self.reduction.real_rollout(candidate.rollout, NODE_DEVICES)
        return Trial(
            candidate,
            summary,
            summary.tokens_per_s * self.reduction.factor,
            instances,
            devices - instances * each if candidate.rollout else 0,
            instances * each,
            ceil(candidate.depth * real.orchestration.groups_per_step),
            self._lost_share(candidate, summary),
            self._slots_idle(candidate, summary),
            0 if self.lora else candidate.version_slots - 1,
        )

    def _lost_share(self, candidate: Candidate, summary: Summary) -> float:
        bounds, devices = self.bounds, self.reduction.scenario.cluster.devices
        bound = candidate.max_staleness
        if candidate.rollout:
            train = self._train(candidate.rollout)
            needed_s = train * bounds.train_s(train)
            needed_s += (devices - train) * bounds.rollout_s(candidate.rollout, bound)
            needed_s /= devices
        else:
            needed_s = bounds.train_s(devices) + bounds.rollout_s(self.reduction.instances, bound)
        return max(0.0, 1 - needed_s / (60 * summary.step_minutes))

    def _slots_idle(self, candidate: Candidate, summary: Summary) -> float:
        scenario = self.reduction.scenario
        slots = (candidate.rollout or self.reduction.instances) * scenario.rollout.slots
        settings = scenario.orchestration
        work = settings.groups_per_step * settings.group_size * (candidate.max_staleness + 1)
        return max(0.0, 1 - (1 - summary.bubble_share) / min(1.0, work / slots))


def choose(search: Search) -> tuple[Trial, Trial, Trial | None]:
    """What to recommend of a search, its sync, and its best asynchronous candidate."""
    sync = search.of(SYNC)[0]
    asynchronous = [*search.of(OURS), *search.of(ONE_STEP)]
    rival = best_of(asynchronous) if asynchronous else None
    if rival is not None and rival.tokens_per_s >= WORTHWHILE * sync.tokens_per_s:
        return rival, sync, rival
    return sync, sync, rival
