"""What staleness costs in learning: the quickstart's task, several ways, several seeds each.

Every run trains on the same number of trajectories, from the same model, with prompts and
sampling noise of its seed. Shown are reward curves with confidence bands, the held-out reward of
the last version, and the time to a given reward on this machine.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dora_rl.benchmarks.reporting import Reporter
from dora_rl.benchmarks.training import train_once, workplace
from dora_rl.config import load_toml, merged
from dora_rl.core.protocol.errors import UserError
from dora_rl.runtime.execution import Run

_SMOOTH = 5  # steps; a step's mean reward alone is mostly noise

# Two-sided 95 % of Student's t, by degrees of freedom; beyond the last one, the normal's.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


class Way(NamedTuple):
    """A paradigm with its K."""

    label: str
    paradigm: str
    max_staleness: int

    @property
    def key(self) -> str:
        """As it is typed: `sync`, `multi_version:3`."""
        return self.label.replace(" K=", ":")


WAYS = (
    Way("sync", "sync", 0),
    Way("multi_version K=1", "multi_version", 1),
    Way("multi_version K=3", "multi_version", 3),
    Way("in_flight", "in_flight", 3),
)


@dataclass(frozen=True, slots=True)
class Plan:
    seeds: int = 5
    steps: int = 60
    eval_size: int = 512
    goal: float = 0.7
    ways: tuple[Way, ...] = WAYS

    def __post_init__(self) -> None:
        if not self.ways:
            raise UserError("--ways must name one at least.")
        if self.seeds < 2:
            raise UserError(f"--seeds must be >= 2, for a confidence band: `{self.seeds}`.")
        for option, number in (("--steps", self.steps), ("--eval-size", self.eval_size)):
            if number < 1:
                raise UserError(f"{option} must be >= 1: `{number}`.")

    def config(self, way: Way, seed: int) -> dict[str, Any]:
        import dora_rl.quickstart

        base = load_toml(Path(dora_rl.quickstart.__file__).with_name("quickstart.toml"))
        return merged(
            base,
            {
                "task": {"eval_size": self.eval_size},
                "orchestration": {
                    "paradigm": way.paradigm,
                    "max_staleness": max(1, way.max_staleness),
                },
                "run": {"steps": self.steps, "seed": seed},
            },
        )


class Band(NamedTuple):
    """A mean with its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Band":
        mean = statistics.fmean(values)
        if len(values) < 2:
            return cls(mean, mean, mean)
        free = len(values) - 1
        t = _T95[free - 1] if free <= len(_T95) else 1.96
        half = t * statistics.stdev(values) / math.sqrt(len(values))
        return cls(mean, mean - half, mean + half)


class Outcome(NamedTuple):
    """One run."""

    seed: int
    rewards: list[float]
    times_s: list[float]
    held_out: float
    mean_staleness: float
    audit: str

    @classmethod
    def of(cls, run: Run, seed: int) -> "Outcome":
        begin = run.steps[0].time_s
        return cls(
            seed,
            [step.reward_mean for step in run.steps],
            [step.time_s - begin for step in run.steps],
            run.evaluations[-1].reward_mean,
            run.summary.mean_staleness,
            run.summary.audit,
        )

    def smooth(self) -> list[float]:
        rewards = self.rewards
        return [
            statistics.fmean(rewards[max(0, i + 1 - _SMOOTH) : i + 1]) for i in range(len(rewards))
        ]

    def time_to(self, goal: float) -> float | None:
        """Seconds from the first step to a smoothed reward."""
        for time_s, reward in zip(self.times_s, self.smooth(), strict=True):
            if reward >= goal:
                return time_s
        return None


@dataclass(frozen=True, slots=True)
class Result:
    """An interrupted measurement has fewer ways, and fewer seeds of some."""

    plan: Plan
    outcomes: dict[str, list[Outcome]]

    def curve(self, label: str) -> list[Band]:
        """Reward by step, over the seeds."""
        smoothed = [outcome.smooth() for outcome in self.outcomes[label]]
        return [Band.of(values) for values in zip(*smoothed, strict=True)]

    def held_out(self, label: str) -> Band:
        return Band.of([outcome.held_out for outcome in self.outcomes[label]])

    def difference(self, label: str, base: str = "sync") -> Band | None:
        """Held-out reward less that of the base, seed by seed; None without a seed of both."""
        bases = {outcome.seed: outcome.held_out for outcome in self.outcomes.get(base, [])}
        found = [
            outcome.held_out - bases[outcome.seed]
            for outcome in self.outcomes[label]
            if outcome.seed in bases
        ]
        return Band.of(found) if found else None

    def time_to_goal(self, label: str) -> float | None:
        """Median over the seeds; None if half of them never got there."""
        times = [outcome.time_to(self.plan.goal) for outcome in self.outcomes[label]]
        reached = sorted(math.inf if time is None else time for time in times)
        middle = reached[len(reached) // 2]
        return None if middle == math.inf else middle

    def to_json(self) -> dict[str, Any]:
        return {
            "seeds": self.plan.seeds,
            "steps": self.plan.steps,
            "goal": self.plan.goal,
            "smoothed_over_steps": _SMOOTH,
            "ways": {
                label: {
                    "held_out": self.held_out(label)._asdict(),
                    "held_out_less_sync": less and less._asdict(),
                    "time_to_goal_s": self.time_to_goal(label),
                    "mean_staleness": statistics.fmean(o.mean_staleness for o in outcomes),
                    "curve": [band._asdict() for band in self.curve(label)],
                    "runs": [outcome._asdict() for outcome in outcomes],
                }
                for label, outcomes in self.outcomes.items()
                for less in [self.difference(label)]
            },
        }

    def summary(self) -> list[str]:
        plan = self.plan
        lines = [
            f"{plan.steps} steps, {plan.seeds} seeds; held-out reward of the last version with "
            "95 % confidence",
            f"{'':<18} {'held out':>22} {'less sync':>24} {'staleness':>9} "
            f"{f'to {plan.goal} (s)':>12}",
        ]
        for label, outcomes in self.outcomes.items():
            held, time_s = self.held_out(label), self.time_to_goal(label)
            less = self.difference(label)
            than_sync = "-" if less is None else _shown(less)
            staleness = statistics.fmean(o.mean_staleness for o in outcomes)
            lines.append(
                f"{label:<18} {_shown(held):>22} {than_sync:>24} {staleness:>9.2f} "
                f"{'never' if time_s is None else f'{time_s:.1f}':>12}"
            )
        return lines


def named_ways(keys: Sequence[str]) -> tuple[Way, ...]:
    """Ways by their keys, in the order of `WAYS`."""
    known = {way.key: way for way in WAYS}
    for key in keys:
        if key not in known:
            raise UserError(f"no such way: `{key}`. Use one of: {', '.join(known)}.")
    return tuple(way for key, way in known.items() if key in keys)


def measure(plan: Plan, reporter: Reporter | None = None) -> Result:
    """Every way with every seed; the ways take turns."""
    reporter = reporter or Reporter()
    outcomes: dict[str, list[Outcome]] = {way.label: [] for way in plan.ways}

    def result() -> Result:
        return Result(plan, {label: list(found) for label, found in outcomes.items() if found})

    reporter.collects(lambda: result() if any(outcomes.values()) else None)
    with workplace() as place:
        for seed in range(plan.seeds):
            for way in plan.ways if seed % 2 == 0 else reversed(plan.ways):
                reporter.phase(f"seed {seed + 1} of {plan.seeds}: {way.label}")
                out = place / f"{seed}-{way.label.replace(' ', '-')}"
                run = train_once(plan.config(way, seed), out, reporter)
                outcomes[way.label].append(Outcome.of(run, seed))
    return result()


def draw(result: Result, file: Path) -> None:
    """The reward curves as a picture."""
    from dora_rl.extras import require

    require("dora-rl bench convergence --plot", "plot")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    for label in result.outcomes:
        curve = result.curve(label)
        steps = range(1, len(curve) + 1)
        (line,) = axes.plot(steps, [band.mean for band in curve], label=label)
        axes.fill_between(
            steps,
            [band.low for band in curve],
            [band.high for band in curve],
            color=line.get_color(),
            alpha=0.15,
        )
    axes.set_xlabel("train step (equal numbers of trajectories)")
    axes.set_ylabel(f"training reward, mean of {_SMOOTH} steps")
    axes.set_title(f"{result.plan.seeds} seeds, 95 % confidence")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


def _shown(band: Band) -> str:
    return f"{band.mean:.3f} [{band.low:.3f}, {band.high:.3f}]"
