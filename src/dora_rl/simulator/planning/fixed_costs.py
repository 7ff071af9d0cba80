"""How far a verdict depends on fixed costs that nobody measured: the same candidates at others.

A switch is paid by shared devices alone, so a dear one speaks for asynchrony. Publications and
updates are paid by every paradigm, and what bounds the step decides whom they hurt more. All low
and all high may therefore hide each other's effect, and both mixtures are simulated as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.paradigms import PARADIGMS
from dora_rl.observe.metrics import WORTHWHILE, Summary
from dora_rl.simulator.planning.search import Candidate, Search, Trial


class Range(NamedTuple):
    """Seconds that a fixed cost may take."""

    low: float
    planned: float
    high: float


# Keys of `[efficiency]`. High is what was fitted to the one published testbed that we have
# (docs/calibration.md); low is assumed, for weights that stay on the devices and travel by the
# devices' own links. A scenario's own value widens the range.
UNCERTAIN: MappingProxyType[str, tuple[float, float]] = MappingProxyType(
    {
        "switch_s": (2.0, 45.0),
        "publish_latency_s": (0.1, 70.0),
        "update_overhead_s": (0.1, 6.5),
    }
)
_SWITCH = "switch_s"  # of shared devices alone
LOW, PLANNED, HIGH = "low", "planned", "high"
LOW_SWITCH, HIGH_SWITCH = "low switch, others high", "high switch, others low"
_ENDS = {  # of a case: for the switch, for the others
    LOW: (LOW, LOW),
    HIGH: (HIGH, HIGH),
    LOW_SWITCH: (LOW, HIGH),
    HIGH_SWITCH: (HIGH, LOW),
}
_Known = dict[tuple[Candidate, tuple[tuple[str, float], ...]], Summary]


@dataclass(frozen=True, slots=True)
class FixedCosts:
    """The gain of the best asynchronous candidate over sync, at each case of the costs."""

    ranges: dict[str, Range]
    """What was varied; without what the user measured."""
    gains: dict[str, float]
    """By tokens a second; a case that could not be simulated is not in it."""
    failed: dict[str, str]
    """Cases that could not be simulated, and why."""
    complete: bool

    @property
    def least(self) -> float:
        """The smallest gain over all cases."""
        return min(self.gains.values())

    @property
    def most(self) -> float:
        """The largest one."""
        return max(self.gains.values())

    @property
    def decide(self) -> bool:
        """Whether asynchrony pays in some cases and does not in others."""
        return self.least < WORTHWHILE <= self.most

    def describe(self) -> str:
        """The range of the verdict, and whether it depends on the costs, in words."""
        if not self.ranges:
            return "No fixed cost was varied: all of them were given."
        costs = ", ".join(
            f"{key} {span.low:g} to {span.high:g} s" for key, span in self.ranges.items()
        )
        cases = ", ".join(f"{gain:.2f} x ({name})" for name, gain in self.gains.items())
        said = [f"Over the uncertain fixed costs ({costs}): {cases}."]
        if self.decide:
            said.append(
                "The verdict depends on them: asynchrony pays at some and not at others. Measure "
                "them, and give each by --set efficiency.KEY=SECONDS."
            )
        elif self.complete and not self.failed:
            word = "pays" if self.least >= WORTHWHILE else "does not pay"
            said.append(f"The verdict does not depend on them: asynchrony {word} at all of these.")
        said += [f"Not simulated: {name} ({reason})." for name, reason in self.failed.items()]
        if not self.complete:
            said.append("Interrupted before every case was simulated.")
        return " ".join(said)

    def to_json(self) -> dict[str, Any]:
        """The ranges in seconds, and the gain by tokens a second at each case."""
        return {
            "ranges": {f"efficiency.{key}": span._asdict() for key, span in self.ranges.items()},
            "speedup_over_sync": dict(self.gains),
            "least": self.least,
            "most": self.most,
            "verdict_depends_on_them": self.decide,
            "failed": dict(self.failed),
            "complete": self.complete,
        }


def ranges_of(search: Search, measured: frozenset[str]) -> dict[str, Range]:
    """The costs that are uncertain in this problem."""
    efficiency = search.reduction.real.efficiency
    return {
        key: Range(min(low, own), own, max(high, own))
        for key, (low, high) in UNCERTAIN.items()
        for own in [getattr(efficiency, key)]
        if key not in measured
    }


def vary(search: Search, sync: Trial, rival: Trial, measured: frozenset[str]) -> FixedCosts:
    """Simulate both at the ends of the ranges. An interruption leaves the cases so far."""
    ranges = ranges_of(search, measured)
    gains = {PLANNED: rival.tokens_per_s / sync.tokens_per_s}
    failed: dict[str, str] = {}
    known: _Known = {}
    complete = search.cut != "interrupted"
    try:
        for name, costs in _cases(ranges).items() if complete else ():
            try:
                both = [_at(search, trial, costs, name, known) for trial in (rival, sync)]
                gains[name] = both[0].tokens_per_s / both[1].tokens_per_s
            except UserError as error:
                failed[name] = str(error).rstrip(".")
    except KeyboardInterrupt:
        search.cut, complete = "interrupted", False
    ordered = {name: gains[name] for name in (LOW, PLANNED, HIGH, *_ENDS) if name in gains}
    return FixedCosts(ranges, ordered, failed, complete)


def _cases(ranges: Mapping[str, Range]) -> dict[str, dict[str, float]]:
    """The costs of each case; one that repeats another is left out."""
    cases: dict[str, dict[str, float]] = {}
    for name, (switch, others) in _ENDS.items():
        ends = {key: switch if key == _SWITCH else others for key in ranges}
        costs = {key: getattr(ranges[key], end) for key, end in ends.items()}
        if costs and costs not in cases.values():
            cases[name] = costs
    return cases


def _at(
    search: Search, trial: Trial, costs: Mapping[str, float], name: str, known: _Known
) -> Summary:
    """The trial's candidate at these costs, simulated once for all cases that are alike to it."""
    shared = PARADIGMS[trial.paradigm].colocated
    felt = {key: value for key, value in costs.items() if shared or key != _SWITCH}
    case = trial.candidate, tuple(felt.items())
    if case not in known:
        known[case] = search.at_costs(trial.candidate, felt, f"fixed costs: {name}")
    return known[case]
