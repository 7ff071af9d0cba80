"""What `dora-rl bench modes` has measured: readings of runs, their ratios, shares of the limit."""

import statistics
from dataclasses import dataclass
from typing import Any, NamedTuple

from dora_rl.benchmarks.floors import Demand, Floor, Parts
from dora_rl.benchmarks.models import LORA_RANK
from dora_rl.benchmarks.modes_plan import OURS, Plan, Split
from dora_rl.core.protocol.settings import ParadigmName
from dora_rl.runtime.execution import Run


class Reading(NamedTuple):
    """One run of one paradigm, past its warm-up."""

    tokens_per_s: float
    step_s: float
    rollout_only_s: float
    train_s: float
    bubble_share: float
    mean_staleness: float
    max_staleness: float
    mean_length: float
    max_length: float
    reread_tokens: int
    audit: str
    deadline_stall_s: float = 0.0  # of a step: the trainer waits for a group at its deadline
    reward: float = 0.0  # of a trajectory, on the mean over the steps
    rewards: tuple[float, ...] = ()  # of each step

    @property
    def step_tokens(self) -> float:
        """Sampled tokens that a step trains on."""
        return self.tokens_per_s * self.step_s

    @classmethod
    def of(cls, run: Run, warmup_steps: int) -> "Reading":
        summary = run.summary
        step_s = 60 * summary.step_minutes
        steps = run.steps[warmup_steps:]
        return cls(
            summary.tokens_per_s,
            step_s,
            summary.rollout_only_share * step_s,
            statistics.fmean(step.train_s for step in steps),
            summary.bubble_share,
            summary.mean_staleness,
            summary.max_staleness,
            run.audit.lengths.finished.mean,
            run.audit.lengths.finished.max,
            summary.reprefilled_tokens,
            summary.audit,
            summary.deadline_stall_s / max(1, summary.steps),
            statistics.fmean(step.reward_mean for step in steps),
            tuple(step.reward_mean for step in steps),
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step of the workload asks for, and the parts that its floors come from."""

    parts: Parts
    demand: Demand
    lengths: dict[str, float]

    def floor(self, cores: int, sampled: float | None = None) -> Floor:
        """The floor of a step; of one in which so many tokens were sampled, if that is given."""
        demand = self.demand if sampled is None else self.demand.with_sampled(sampled)
        return Floor.of(self.parts, demand, cores)


@dataclass(frozen=True, slots=True)
class Result:
    """An interrupted measurement has fewer paradigms, or the search alone."""

    plan: Plan
    searched: dict[ParadigmName, dict[Split, float]]
    chosen: dict[ParadigmName, Split]
    readings: dict[ParadigmName, list[Reading]]
    limits: Limits | None = None  # None where nothing measures an engine's parts

    def median(self, paradigm: ParadigmName) -> Reading:
        """The round whose throughput is in the middle."""
        ordered = sorted(self.readings[paradigm])
        return ordered[len(ordered) // 2]

    def lengths(self) -> dict[str, float] | None:
        """Of the first paradigm's median round, and the longest of all."""
        if not self.readings:
            return None
        longest = max(r.max_length for readings in self.readings.values() for r in readings)
        return {"mean": self.median(next(iter(self.readings))).mean_length, "max": longest}

    def ratios(self) -> dict[str, dict[str, float]]:
        """Ours over each of the others."""
        if OURS not in self.readings:
            return {}
        ours = self.median(OURS)
        found = {}
        for name in self.readings:
            if name is not OURS:
                other = self.median(name)
                found[f"{OURS}/{name}"] = {
                    "tokens_per_s": _ratio(ours.tokens_per_s, other.tokens_per_s),
                    "rollout_only_s": _ratio(ours.rollout_only_s, other.rollout_only_s),
                }
        return found

    def sync_rollout_share(self) -> float | None:
        """The part of a synchronous step in which nothing was trained, if one was measured."""
        if ParadigmName.SYNC not in self.readings:
            return None
        sync = self.median(ParadigmName.SYNC)
        return _ratio(sync.rollout_only_s, sync.step_s)

    def shares(self, name: ParadigmName) -> dict[str, Any]:
        """The floor of a paradigm's median round, and how near the round came to the limit.

        Rounds differ in what the policy wrote, so the parts are those of its own tokens.
        """
        if self.limits is None:
            return {}
        reading = self.median(name)
        floor = self.limits.floor(self.plan.cores, reading.step_tokens)
        floor_s = floor.of_paradigm(name, self.plan.max_staleness)
        return {
            "limit_s": floor.limit_s,
            "share_of_limit": _ratio(floor.limit_s, reading.step_s),
            "floor_s": floor_s,
            "share_of_floor": _ratio(floor_s, reading.step_s),
            "most_share_of_limit": _ratio(floor.limit_s, floor_s),
            "parts": floor.to_json(),
        }

    def to_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "workload": str(plan.workload.name),
            "band": plan.workload.band,
            "sync_rollout_share": self.sync_rollout_share(),
            **self._limits_json(),
            "steps": plan.steps - plan.warmup_steps,
            "rounds": plan.rounds,
            "engine": str(plan.engine),
            "lora_rank": LORA_RANK if plan.lora else None,
            "elastic": str(plan.elastic),
            "cores": plan.cores,
            "groups_per_step": plan.groups,
            "max_staleness": plan.max_staleness,
            "group_size": plan.group_size,
            "slots": list(plan.slots),
            "lengths": self.lengths(),
            "search": {
                name: {str(split): rate for split, rate in tried.items()}
                for name, tried in self.searched.items()
            },
            "modes": {
                name: {
                    "split": str(self.chosen[name]),
                    **self.median(name)._asdict(),
                    **self.shares(name),
                    "tokens_per_s_of_rounds": [r.tokens_per_s for r in self.readings[name]],
                }
                for name in self.readings
            },
            "ratios": self.ratios(),
        }

    def _limits_json(self) -> dict[str, Any]:
        if self.limits is None:
            return {"expected": None}
        floor = self.limits.floor(self.plan.cores)
        floors = {
            str(name): floor.of_paradigm(name, self.plan.max_staleness) for name in ParadigmName
        }
        return {
            "expected": {
                "lengths": self.limits.lengths,
                "rates": self.limits.parts.to_json(),
                "floor": floor.to_json(),
                "floors_s": floors,
                "sync_rollout_share_at_its_floor": floor.sync_rollout_share,
            }
        }

    def summary(self) -> list[str]:
        from dora_rl.benchmarks.modes_table import lines

        return lines(self)


def _ratio(ours: float, other: float) -> float:
    return ours / other if other else 0.0
