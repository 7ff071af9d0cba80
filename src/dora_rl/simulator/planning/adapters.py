"""Whether LoRA versions pay: the plan beside the best one with full weights on the same cluster.

Both are searched alike, at the same reduced size. What decode loses to adapters differs most
between engines, so the answer is given over a range of it, unless the user has measured it.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dora_rl.core.protocol.errors import UserError
from dora_rl.observe.metrics import WORTHWHILE
from dora_rl.simulator.planning.bounds import Bounds
from dora_rl.simulator.planning.reasons import devices
from dora_rl.simulator.planning.reduction import with_full_weights
from dora_rl.simulator.planning.search import (
    SYNC,
    Search,
    Trial,
    choose,
)

SLOWDOWN = "lora_decode_slowdown"
# What was measured of vLLM: see `LORA_DECODE_SLOWDOWN` for where.
SLOWDOWNS = (1.1, 2.0)
# Simulations of the plan at the other slowdowns.
RESERVED_RUNS = len(SLOWDOWNS)


class Part(NamedTuple):
    """One operation with adapters and with full weights, in seconds."""

    lora: float
    full_weights: float

    @property
    def ratio(self) -> float:
        return self.lora / self.full_weights


@dataclass(frozen=True, slots=True)
class Adapters:
    """The plan with LoRA versions against the best one with full weights."""

    rank: int
    lora: Trial
    full: Trial | None
    """None where it could not be simulated."""
    refused: str = ""
    """Why it could not be."""
    version_bytes: tuple[float, float] = (0.0, 0.0)
    """Of an adapter, of full weights."""
    parts: dict[str, Part] = field(default_factory=dict)
    """Of the LoRA plan: train step, publication, install, decode step."""
    batch: int = 0
    """Sequences of the decode step."""
    ratios: dict[float, float] = field(default_factory=dict)
    """Throughput over that of full weights, by the slowdown of decode; in rising order."""
    slowdown: float = 1.0
    """The one that was planned with."""
    measured: bool = False
    """Whether the user gave it."""
    complete: bool = True
    """Whether every slowdown was simulated."""

    @property
    def ratio(self) -> float | None:
        """Tokens a second over those with full weights."""
        return None if self.full is None else self.lora.tokens_per_s / self.full.tokens_per_s

    @property
    def depends(self) -> bool:
        """Whether adapters pay at some slowdowns and not at others."""
        return len({_verdict(ratio) for ratio in self.ratios.values()}) > 1

    def describe(self) -> str:
        """The comparison, where it comes from and how sure it is, in words."""
        full, ratio = self.full, self.ratio
        begin = f"LoRA versions of rank {self.rank}"
        if full is None or ratio is None:
            return f"{begin} were not compared with full weights: {self.refused.rstrip('.')}."
        said = [
            f"{begin} train {ratio:.2f} times the tokens a second of full-weight versions on the "
            f"same cluster ({_candidate(full)}: {full.tokens_per_s:,.0f}): {_verdict(ratio)}.",
            self._causes(),
            *self._range(),
        ]
        return " ".join(said)

    def _causes(self) -> str:
        parts, (small, large) = self.parts, self.version_bytes
        moved = parts["publish_s"], parts["install_s"]
        lora_s, full_s = (sum(part[index] for part in moved) for index in (0, 1))
        slots = self.lora.candidate.version_slots
        versions = f", with up to {slots} versions in it" if slots > 1 else ""
        return (
            f"In this plan, against full weights: a train step takes {parts['train_s'].ratio:.2f} "
            f"times as long (no gradients of the base's weights); a version is {_bytes(small)} "
            f"instead of {_bytes(large)}, published and installed in {lora_s:.1f} s instead of "
            f"{full_s:.1f} s; a decode step of {self.batch} sequences takes "
            f"{parts['decode_step_s'].ratio:.2f} times as long{versions} "
            f"(efficiency.{SLOWDOWN} = {self.slowdown:g})."
        )

    def _range(self) -> list[str]:
        if self.measured:
            return []
        if not self.complete:
            return ["Not every slowdown of decode was simulated."]
        cases = ", ".join(f"{ratio:.2f} x ({slow:g})" for slow, ratio in self.ratios.items())
        if self.depends:
            end = (
                "The answer depends on it: measure a decode step with and without an adapter, and "
                f"give the ratio by --set efficiency.{SLOWDOWN}=RATIO."
            )
        else:
            end = "The answer does not depend on it."
        return [f"Over the slowdown of decode by adapters: {cases}. {end}"]

    def to_json(self) -> dict[str, Any]:
        """The same in numbers."""
        ratio, full = self.ratio, self.full
        return {
            "rank": self.rank,
            "pay": None if ratio is None else ratio >= WORTHWHILE,
            "speedup_over_full_weights": ratio,
            "tokens_per_s": {
                "lora": self.lora.tokens_per_s,
                "full_weights": None if full is None else full.tokens_per_s,
            },
            "full_weights": None if full is None else _settings(full),
            "refused": self.refused or None,
            "version_bytes": dict(zip(("lora", "full_weights"), self.version_bytes, strict=True)),
            "parts": {name: part._asdict() for name, part in self.parts.items()},
            "decode_batch": self.batch,
            "decode_slowdowns": {f"{slow:g}": value for slow, value in self.ratios.items()},
            "depends_on_decode_slowdown": self.depends,
            "reason": self.describe(),
        }


def search_full_weights(search: Search) -> Search | None:
    """The same search with full weights; None where there is nothing or no time to compare."""
    if not search.lora or search.cut == "interrupted" or not search.of(SYNC):
        return None
    announce = search.progress
    other = Search(
        with_full_weights(search.reduction),
        search.max_staleness,
        search.budget_s,
        None if announce is None else lambda done, what: announce(done, f"full weights, {what}"),
        search.clock,
        runs=search.runs,
        reserved_runs=0,
    )
    try:
        other.run()
        if other.of(SYNC) and other.cut != "interrupted":
            # A budget may cut the two at different points, and neither may lose by that.
            other.include(choose(search)[0].candidate)
            search.runs = other.runs
            search.include(choose(other)[0].candidate)
    except KeyboardInterrupt:
        other.cut = "interrupted"
    search.cut = "interrupted" if other.cut == "interrupted" else search.cut or other.cut
    return other


def compare(search: Search, other: Search | None, measured: frozenset[str]) -> Adapters | None:
    """The recommended candidate against the best with full weights; None without adapters."""
    model = search.reduction.real.model
    if model.lora_rank is None:
        return None
    lora = choose(search)[0]
    if other is None or other.cut == "interrupted":
        return Adapters(model.lora_rank, lora, None, "interrupted")
    if not other.of(SYNC):
        reason = next(iter(other.refused.values()), "nothing was simulated")
        return Adapters(model.lora_rank, lora, None, reason)
    full = choose(other)[0]
    planned = search.reduction.real.efficiency.lora_decode_slowdown
    ratios = {planned: lora.tokens_per_s / full.tokens_per_s}
    others = [slow for slow in SLOWDOWNS if slow != planned and SLOWDOWN not in measured]
    ratios |= _at_slowdowns(search, lora, full, others)
    parts, batch = _parts(search, other, lora)
    return Adapters(
        model.lora_rank,
        lora,
        full,
        version_bytes=(model.version_bytes, other.reduction.real.model.version_bytes),
        parts=parts,
        batch=batch,
        ratios=dict(sorted(ratios.items())),
        slowdown=planned,
        measured=SLOWDOWN in measured,
        complete=len(ratios) == 1 + len(others),
    )


def _at_slowdowns(
    search: Search, lora: Trial, full: Trial, slowdowns: list[float]
) -> dict[float, float]:
    """The ratio of the same candidate at other slowdowns; fewer after an interruption."""
    ratios: dict[float, float] = {}
    if search.cut == "interrupted":
        return ratios
    try:
        for slowdown in slowdowns:
            name = f"adapters slow decode {slowdown:g} times"
            summary = search.at_costs(lora.candidate, {SLOWDOWN: slowdown}, name)
            ratios[slowdown] = summary.tokens_per_s * search.reduction.factor / full.tokens_per_s
    except UserError:
        pass  # the case is missing, which is said
    except KeyboardInterrupt:
        search.cut = "interrupted"
    return ratios


def _parts(search: Search, other: Search, lora: Trial) -> tuple[dict[str, Part], int]:
    """The operations of the LoRA plan, at its split, with adapters and with full weights."""
    real = search.reduction.real
    candidate = lora.candidate
    mine, theirs = Bounds(real), Bounds(other.reduction.real)
    trainers = lora.train_devices or real.cluster.devices
    batch = mine.sequences(lora.rollout_instances, candidate.max_staleness)
    train_s = [both.train_s(trainers) - both.publish_s(trainers) for both in (mine, theirs)]
    decode_s = mine.decode_step_s(batch, candidate.version_slots), theirs.decode_step_s(batch)
    return {
        "train_s": Part(*train_s),
        "publish_s": Part(mine.publish_s(trainers), theirs.publish_s(trainers)),
        "install_s": Part(mine.install_s(), theirs.install_s()),
        "decode_step_s": Part(*decode_s),
    }, batch


def _verdict(ratio: float) -> str:
    if ratio >= WORTHWHILE:
        return "adapters pay"
    if ratio > 1 / WORTHWHILE:
        return "adapters make no difference"
    return "adapters do not pay, and model.lora_rank is better left out"


def _candidate(trial: Trial) -> str:
    if not trial.train_devices:
        return f"`{trial.paradigm}`"
    return (
        f"`{trial.paradigm}`, {devices(trial.train_devices)} for training and "
        f"{trial.rollout_devices} for rollout, K = {trial.candidate.max_staleness}"
    )


def _settings(trial: Trial) -> dict[str, Any]:
    return {
        "paradigm": str(trial.paradigm),
        "train_devices": trial.train_devices,
        "rollout_devices": trial.rollout_devices,
        "max_staleness": trial.candidate.max_staleness,
        "pipeline_depth": trial.pipeline_depth,
        "version_slots": trial.candidate.version_slots,
    }


def _bytes(count: float) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
