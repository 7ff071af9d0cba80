"""What `dora-rl bench modes` trains on: lengths, tools, and how large a step is.

A workload is a shape, not a number of seconds: how long responses are against each other, how
long tools take, and which share of a synchronous step rollout has. The share depends on the
machine, so the number of prompts of a step is found from measured parts (`sized`), unless the
workload fixes it. No torch here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any, NamedTuple

from dora_rl.benchmarks import workload_tasks as tasks
from dora_rl.benchmarks.floors import Parts, Size
from dora_rl.tasks import chains

_TASKS = "dora_rl.benchmarks.workload_tasks"
_BATCHES = 64  # that lengths and floors are taken from
_MOST_GROUPS = 512
_SIZING_PROMPTS = 512  # enough of them for a mean that does not depend on the seed


class WorkloadName(StrEnum):
    DEFAULT = "default"
    REASONING = "reasoning"
    LONG = "long"
    AGENTIC = "agentic"


class Band(NamedTuple):
    """The share of a synchronous step in which nothing is trained."""

    least: float
    most: float

    @property
    def middle(self) -> float:
        return (self.least + self.most) / 2


@dataclass(frozen=True, slots=True)
class Workload:
    """One shape of work; `groups` is what a step has if no band asks for another number."""

    name: WorkloadName
    about: str
    prompts: str
    row: Callable[..., Mapping[str, Any]]
    options: Mapping[str, Any]
    steps: int = 16
    warmup_steps: int = 4  # more than K, so that what started before the first version is gone
    groups: int = 64
    fewest_groups: int = 2
    group_size: int = 4
    max_staleness: int = 3
    slots: tuple[int, ...] = (32, 64, 128)
    max_tokens: int = 6 * 96 + 16
    band: Band | None = None
    native_kernels: bool | None = None  # None: what the engine picks
    tool_workers: int = 0  # processes whose tools wait at once; 0: there are no tools

    def task(self, groups: int) -> dict[str, Any]:
        """The section `[task]`."""
        section: dict[str, Any] = {"prompts": self.prompts, "options": self._options(groups)}
        if not self.tool_workers:
            return {**section, "reward": "dora_rl.tasks.chains:reward", "reward_workers": 1}
        return {
            **section,
            "environment": f"{_TASKS}:CountingTool",
            "max_turns": tasks.MOST_TERMS,
            "reward_workers": self.tool_workers,
            "reward_timeout_s": 60.0,
        }

    def rollout(self) -> dict[str, Any]:
        """Its part of the section `[rollout]`."""
        section: dict[str, Any] = {"max_tokens": self.max_tokens}
        if self.native_kernels is not None:
            section["native_kernels"] = self.native_kernels
        return {**section, "stop": [":"]} if self.tool_workers else section

    def batches(self, groups: int, seed: int, count: int = _BATCHES) -> list[list[Size]]:
        """The trajectories of so many steps, if each takes the next prompts in order."""
        options = self._options(groups)
        return [
            [
                size
                for position in range(first, first + groups)
                for size in [_size(self.row(position, seed, **options))] * self.group_size
            ]
            for first in range(0, count * groups, groups)
        ]

    def _options(self, groups: int) -> dict[str, Any]:
        """A workload with one long response in every batch has to know how large one is."""
        return {name: groups if value is None else value for name, value in self.options.items()}


_ALL = (
    Workload(
        WorkloadName.DEFAULT,
        "lengths with a power-law tail; training has the larger share of a step",
        "dora_rl.tasks.chains:row",
        chains.row,
        {"max_terms": 96, "tail": 1.2},
    ),
    Workload(
        WorkloadName.REASONING,
        "lengths as in the paper: p99 5 times the mean, the longest 12.5 times",
        f"{_TASKS}:lognormal_row",
        tasks.lognormal_row,
        {"mean": 3.4, "sigma": 0.9},
        steps=20,
        warmup_steps=6,
        groups=16,
        fewest_groups=8,
        max_tokens=6 * tasks.MOST_TERMS + 16,
        band=Band(0.65, 0.75),
        native_kernels=False,
    ),
    Workload(
        WorkloadName.LONG,
        "late in training: in every batch the longest response is 8 times the mean",
        f"{_TASKS}:one_long_row",
        tasks.one_long_row,
        {"every": None, "ratio": 8.0, "sigma": 0.6},
        steps=20,
        warmup_steps=8,
        groups=16,
        fewest_groups=12,
        max_staleness=5,
        max_tokens=6 * tasks.MOST_TERMS + 16,
        band=Band(0.85, 0.92),
        native_kernels=False,
    ),
    Workload(
        WorkloadName.AGENTIC,
        "2 to 6 calls of tools that take 50 ms in the median and 2 s in the 99th percentile",
        f"{_TASKS}:tool_row",
        tasks.tool_row,
        {
            "fewest": 2,
            "most": 6,
            "median_wait_s": 0.05,
            "wait_sigma": math.log(2.0 / 0.05) / 2.326,
            "longest_wait_s": 8.0,
        },
        steps=24,
        warmup_steps=9,
        groups=16,
        max_staleness=7,
        max_tokens=96,
        tool_workers=96,
    ),
)
WORKLOADS: Mapping[WorkloadName, Workload] = {workload.name: workload for workload in _ALL}


def describe(batches: Sequence[Sequence[Size]]) -> dict[str, float]:
    """Lengths of the right responses: of all, and the longest of a batch over its mean."""
    lengths = sorted(size.tokens for batch in batches for size in batch)
    waits = sorted(size.wait_s for batch in batches for size in batch)
    mean = sum(lengths) / len(lengths)
    ratios = [
        max(s.tokens for s in batch) * len(batch) / sum(s.tokens for s in batch)
        for batch in batches
    ]
    return {
        "mean": mean,
        "p99_over_mean": _quantile(lengths, 0.99) / mean,
        "max_over_mean": lengths[-1] / mean,
        "max_over_mean_in_a_batch": sum(ratios) / len(ratios),
        "wait_mean_s": sum(waits) / len(waits),
        "wait_p99_s": _quantile(waits, 0.99),
        "wait_max_s": waits[-1],
    }


def sized(workload: Workload, parts: Parts, cores: int, seed: int, overhead_s: float = 0.0) -> int:
    """The number of prompts of a step that puts rollout's share into the middle of the band.

    `overhead_s` is what a synchronous step takes besides decoding and training.
    """
    if workload.band is None:
        return workload.groups

    def share(groups: int) -> float:
        rollout_s, train_s = sync_step(workload, parts, cores, seed, groups)
        return (rollout_s + overhead_s) / (rollout_s + overhead_s + train_s)

    fewest, most = workload.fewest_groups, _MOST_GROUPS
    while fewest < most:  # more prompts are more training, and hardly a longer tail
        middle = (fewest + most + 1) // 2
        if share(middle) >= workload.band.middle:
            fewest = middle
        else:
            most = middle - 1
    return fewest


def sync_step(
    workload: Workload, parts: Parts, cores: int, seed: int, groups: int
) -> tuple[float, float]:
    """Seconds of rollout and of training that a synchronous step should take, from its parts."""
    batches = workload.batches(groups, seed, max(1, _SIZING_PROMPTS // groups))
    rollout_s = sum(drained_s(batch, parts, cores) for batch in batches) / len(batches)
    tokens = sum(size.tokens for batch in batches for size in batch) / len(batches)
    return rollout_s, tokens * parts.quiet_train_token_s


def drained_s(batch: Sequence[Size], parts: Parts, cores: int) -> float:
    """Seconds until a batch, spread over the cores, is generated to its last token.

    The rows become fewer as responses end, and a step the shorter.
    """
    rows = sorted((size.sampled for size in batch), reverse=True)[::cores]  # the fullest core's
    seconds, before = 0.0, 0.0
    for left in range(len(rows), 0, -1):
        seconds += (rows[left - 1] - before) * _step_s(parts, left)
        before = rows[left - 1]
    return seconds + max((size.wait_s for size in batch), default=0.0)


def _step_s(parts: Parts, rows: int) -> float:
    """Of a decode step of so many rows: between those that were measured, a straight line."""
    known = sorted((n, n * token_s) for n, token_s in parts.decode_token_core_s.items())
    (low, low_s), (high, high_s) = known[0], known[-1]
    for (a, a_s), (b, b_s) in pairwise(known):
        if a <= rows <= b:
            (low, low_s), (high, high_s) = (a, a_s), (b, b_s)
    if high == low:
        return low_s * rows / low
    return low_s + (high_s - low_s) * (rows - low) / (high - low)


def _size(row: Mapping[str, Any]) -> Size:
    terms = row.get("terms") or int(str(row["prompt"])[-3:-1])
    tokens = tasks.response_tokens(terms)
    if "waits_s" not in row:
        return Size(tokens, tokens)
    return Size(tokens, tokens - tasks.COUNT_TOKENS * terms, sum(row["waits_s"]))


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
