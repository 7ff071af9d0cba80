"""What `dora-rl bench modes` measures: a workload, paradigms, and the splits of cores to try."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dora_rl.benchmarks.models import LORA_RANK
from dora_rl.benchmarks.workloads import WORKLOADS, Workload, WorkloadName
from dora_rl.config import merged
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.paradigms import PARADIGMS
from dora_rl.core.protocol.settings import Elastic, ParadigmName
from dora_rl.engines.registry import EngineName, most_versions
from dora_rl.machine.processor import cores

OURS = ParadigmName.MULTI_VERSION
_OF_THE_WORKLOAD = ("steps", "warmup_steps", "group_size", "max_staleness", "slots")


class Split(NamedTuple):
    """How the cores are shared out, and how many trajectories run at once on all instances."""

    instances: int
    rollout_threads: int
    train_threads: int
    slots: int

    def __str__(self) -> str:
        rollout = f"{self.instances} x {self.rollout_threads}"
        return f"{rollout} rollout, {self.train_threads} train, {self.slots} slots"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured; refuses what cannot be."""

    paradigms: tuple[ParadigmName, ...] = tuple(ParadigmName)
    workload: Workload = WORKLOADS[WorkloadName.DEFAULT]
    steps: int = 16
    warmup_steps: int = 4
    rounds: int = 3
    search_steps: int = 6  # 0: no search, the first split is taken
    max_staleness: int = 3
    groups_per_step: int = 0  # 0: as many as the workload asks for on this machine
    group_size: int = 4
    slots: tuple[int, ...] = (32, 64, 128)
    seed: int = 0
    cores: int = field(default_factory=cores)
    engine: EngineName = EngineName.EMBEDDED
    lora: bool = False  # versions are adapters of one base
    elastic: Elastic = Elastic.OFF  # for the paradigms that can lend devices

    @classmethod
    def of(cls, workload: WorkloadName, **options: Any) -> "Plan":
        """A plan with the workload's own values for what is absent, or None."""
        known = WORKLOADS[workload]
        own = {name: getattr(known, name) for name in _OF_THE_WORKLOAD}
        given = {name: value for name, value in options.items() if value is not None}
        plan = cls(workload=known, **{**own, **given})
        return replace(plan, workload=replace(known, group_size=plan.group_size))

    @property
    def groups(self) -> int:
        """Prompts of a step: what was given, or found, or what the workload begins with."""
        return self.groups_per_step or self.workload.groups

    def __post_init__(self) -> None:
        if not self.paradigms:
            raise UserError("--paradigms must name one at least.")
        if not self.slots or min(self.slots) < self.cores:
            raise UserError(f"--slots must be >= {self.cores}, one a core: `{self.slots}`.")
        least = {"steps": 1, "rounds": 1, "search_steps": 0, "group_size": 1, "groups_per_step": 0}
        for name, wanted in least.items():
            if getattr(self, name) < wanted:
                option = name.replace("_", "-")
                raise UserError(f"--{option} must be >= {wanted}: `{getattr(self, name)}`.")
        if not 0 <= self.warmup_steps < self.steps:
            raise UserError(
                f"--warmup-steps must be from 0 to {self.steps - 1}, so that a step is left to "
                f"measure: `{self.warmup_steps}`."
            )

    def splits(self, paradigm: ParadigmName) -> list[Split]:
        """What the search tries first: the cores, with a middling number of slots."""
        cores, slots = self.cores, self.slots[len(self.slots) // 2]
        half = max(1, cores // 2)
        if PARADIGMS[paradigm].colocated:
            found = [(1, cores, cores), (cores, 1, cores), (cores, 1, 1)]
        elif paradigm is OURS and most_versions(self.engine, 2, lora=self.lora) == 1:
            # Several versions need several instances, though they share their cores.
            found = [(max(2, half), 1, half), (max(4, half), 1, half)]
        else:
            found = [(1, half, half), (half, 1, half), (cores - half or 1, 1, half)]
            # More threads than cores: whoever waits leaves its core to the others.
            found += [(cores, 1, half), (1, half, cores)]
        return [Split(*each, slots) for each in dict.fromkeys(found)]

    def config(self, paradigm: ParadigmName, split: Split, steps: int) -> dict[str, Any]:
        return merged(
            {
                "model": {"path": "quickstart", **self._lora()},
                "task": self.workload.task(self.groups),
                "train": {"learning_rate": 1e-4},
                "rollout": {
                    "engine": str(self.engine),
                    "slots": split.slots // split.instances,
                    **self.workload.rollout(),
                },
                "orchestration": {
                    "paradigm": str(paradigm),
                    "groups_per_step": self.groups,
                    "group_size": self.group_size,
                    "max_staleness": self.max_staleness,
                    "install_estimate_s": 0.05,
                    "migration_estimate_s": 0.05,
                    "rebalance_period_s": 2.0,
                    "elastic": str(self.elastic),
                    "switch_estimate_s": 0.01,
                },
                "runtime": {
                    "instances": split.instances,
                    "rollout_threads": split.rollout_threads,
                    "train_threads": split.train_threads,
                },
                "run": {"steps": steps, "seed": self.seed},
            }
        )

    def _lora(self) -> dict[str, Any]:
        return {"lora": {"rank": LORA_RANK, "alpha": 2.0 * LORA_RANK}} if self.lora else {}
