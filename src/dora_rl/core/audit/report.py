"""What an audit found: counts, breaches with their first examples, and the verdict.

A breach of a promise that the paradigm makes breaks the verdict; the same finding where the
paradigm promises nothing is its nature, and is noted. It must not know how breaches are found.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

DONE = "done: "  # begins how a run was halted that came to its end
EXAMPLES = 5  # a broken run repeats itself; the first few tell


class Promise(StrEnum):
    """What is checked; the value is its name in reports."""

    ONE_VERSION = "C1 one version each"
    STAMPS = "true stamps"
    NOTHING_LOST = "C2 nothing lost"
    STALENESS = "C3 staleness"
    TRAINED_ONCE = "trained once"
    LEASES = "leases"
    VERIFIED = "verified install"
    PLACEMENT = "one live placement"
    MIGRATION = "migration"
    FENCING = "fencing"
    DEVICES = "devices of one role"


@dataclass(slots=True)
class Breaches:
    """Counts per promise, and the first examples.

    Whoever reads the stream sets where it is: the number of the event, and the time.
    """

    event: int = 0
    now: float = 0.0
    counts: Counter[Promise] = field(default_factory=Counter)
    examples: dict[Promise, list[str]] = field(default_factory=dict)

    def add(self, promise: Promise, what: str) -> None:
        self.counts[promise] += 1
        kept = self.examples.setdefault(promise, [])
        if len(kept) < EXAMPLES:
            kept.append(f"event {self.event} at {self.now:.6g} s: {what}")


@dataclass(frozen=True, slots=True)
class Check:
    promise: Promise
    promised: bool
    breaches: int
    examples: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not (self.promised and self.breaches)

    @property
    def verdict(self) -> str:
        if not self.breaches:
            return "holds"
        return "BROKEN" if self.promised else "as designed"


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in three numbers; zeros when it is empty."""

    mean: float = 0.0
    p95: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, histogram: Mapping[int, int]) -> "Spread":
        total = sum(histogram.values())
        if not total:
            return cls()
        mean = sum(value * count for value, count in histogram.items()) / total
        return cls(mean, _quantile(histogram, 0.95), max(histogram))


@dataclass(frozen=True, slots=True)
class LengthBias:
    """Lengths of what was trained against lengths of all that finished."""

    finished: Spread
    trained: Spread
    ks: float
    """Kolmogorov-Smirnov: the largest distance between the two distribution functions."""
    warning: bool

    @classmethod
    def of(cls, finished: Mapping[int, int], trained: Mapping[int, int]) -> "LengthBias":
        ks = ks_statistic(finished, trained)
        counts = sum(finished.values()), sum(trained.values())
        # Chance alone passes the second term in 1 of 100 runs; below 0.1 no one need care.
        limit = max(0.1, 1.63 * math.sqrt(1 / counts[0] + 1 / counts[1])) if all(counts) else 1.0
        return cls(Spread.of(finished), Spread.of(trained), ks, ks > limit)


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The verdict on one run. Counts are of trajectories, unless their name says otherwise."""

    paradigm: str
    max_staleness: int
    events: int
    refused: int
    steps: int
    halted: str | None
    issued: int
    trained: int
    filtered: int
    failed: int
    outstanding: int
    lost: int
    filtered_for: dict[str, int]
    failed_for: dict[str, int]
    finished: int
    never_whole: int
    mixed: int
    mixed_trained: int
    staleness: Spread
    lengths: LengthBias
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def verdict(self) -> str:
        return "clean" if self.ok else "broken"

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know though nothing promised is broken."""
        notes = []
        by_design = [c for c in self.checks if c.breaches and not c.promised]
        if any(c.promise is Promise.ONE_VERSION for c in by_design):
            notes.append(
                f"C1: {self.mixed_trained} of {self.trained} trained trajectories are mixed; "
                f"`{self.paradigm}` does not promise one version each"
            )
        if any(c.promise is Promise.STALENESS for c in by_design):
            beyond = self.staleness.max > self.max_staleness
            found = f"staleness reaches {self.staleness.max:g}" if beyond else "late is overtaken"
            notes.append(
                f"C3: {found} with K = {self.max_staleness}; `{self.paradigm}` does not bound it"
            )
        if self.lengths.warning:
            notes.append(
                f"length bias: what was trained (mean {self.lengths.trained.mean:.0f}) differs "
                f"from what finished (mean {self.lengths.finished.mean:.0f}), "
                f"KS = {self.lengths.ks:.3f}"
            )
        if self.never_whole:
            notes.append(
                f"length bias: {self.never_whole} of {self.issued} trajectories failed before "
                "they were whole, and the long ones do so first; their lengths are not known"
            )
        return tuple(notes)

    def headline(self) -> str:
        """The verdict in one line."""
        return (
            f"{self.paradigm}: {self.verdict} "
            f"({self.events} events, {self.refused} refused, {self.steps} train steps)"
        )

    def brief(self) -> list[str]:
        """One line and the notes where every promise holds, else the whole summary."""
        if not self.ok:
            return self.summary()
        failed = self.halted is not None and not self.halted.startswith(DONE)
        return [
            self.headline(),
            *([f"  halted: {self.halted}"] if failed else ()),
            *(f"  note: {note}" for note in self.notes),
        ]

    def summary(self) -> list[str]:
        """The report as lines for people."""
        lines = [
            self.headline(),
            f"  issued {self.issued} = trained {self.trained} + filtered {self.filtered} "
            f"+ failed {self.failed} + outstanding {self.outstanding}"
            + (f" + LOST {self.lost}" if self.lost else ""),
            f"  staleness mean {self.staleness.mean:.2f}, p95 {self.staleness.p95:g}, "
            f"max {self.staleness.max:g} (K = {self.max_staleness})",
            f"  length of trained {self.lengths.trained.mean:.0f} mean, "
            f"{self.lengths.trained.p95:.0f} p95; of finished {self.lengths.finished.mean:.0f} "
            f"mean, {self.lengths.finished.p95:.0f} p95; KS {self.lengths.ks:.3f}",
        ]
        for what, reasons in (("filtered", self.filtered_for), ("failed", self.failed_for)):
            if reasons:
                lines.append(f"  {what} for: {_named(reasons)}")
        if self.halted is not None:
            lines.append(f"  halted: {self.halted}")
        for check in self.checks:
            count = f" ({check.breaches})" if check.breaches else ""
            lines.append(f"  {check.promise:<20} {check.verdict}{count}")
            if not check.ok:
                lines.extend(f"    {example}" for example in check.examples)
                if check.breaches > len(check.examples):
                    lines.append(f"    ... and {check.breaches - len(check.examples)} more")
        lines.extend(f"  note: {note}" for note in self.notes)
        return lines

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["ok"] = self.ok
        data["verdict"] = self.verdict
        data["notes"] = list(self.notes)
        data["checks"] = [
            {
                "promise": str(check.promise),
                "promised": check.promised,
                "verdict": check.verdict,
                "breaches": check.breaches,
                "examples": list(check.examples),
            }
            for check in self.checks
        ]
        return data


def ks_statistic(one: Mapping[int, int], other: Mapping[int, int]) -> float:
    """The largest distance between two empirical distribution functions; 0 if one is empty."""
    total_one, total_other = sum(one.values()), sum(other.values())
    if not total_one or not total_other:
        return 0.0
    seen_one = seen_other = 0
    largest = 0.0
    for value in sorted({*one, *other}):
        seen_one += one.get(value, 0)
        seen_other += other.get(value, 0)
        largest = max(largest, abs(seen_one / total_one - seen_other / total_other))
    return largest


def _named(reasons: Mapping[str, int]) -> str:
    """The most frequent reasons, with their counts."""
    order = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    more = [f"{len(order) - EXAMPLES} more reasons"] if len(order) > EXAMPLES else []
    return ", ".join([f"{reason} {count}" for reason, count in order[:EXAMPLES]] + more)


def _quantile(histogram: Mapping[int, int], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed."""
    wanted = share * sum(histogram.values())
    seen = 0
    for value in sorted(histogram):
        seen += histogram[value]
        if seen >= wanted:
            return value
    return max(histogram)
