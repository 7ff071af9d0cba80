"""A smaller problem that behaves like the large one, so that a plan takes about a minute.

Two rules, in this order, each as far as needed:

1. Each simulated trajectory stands for several alike: slots and groups per step shrink, and a
   token costs as much KV, attention and arithmetic as its peers did together. Weights, devices
   and splits stay. For dense models only: experts that a batch touches do not add up this way.
2. Fewer instances: devices and groups per step shrink by the same factor, so every ratio stays.

Either way a step draws fewer lengths, so its longest one is a little shorter and every figure
is noisier. docs/planning.md says by how much.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from dora_rl.config import validate
from dora_rl.core.protocol.settings import ParadigmName
from dora_rl.simulator.planning.bounds import Lengths
from dora_rl.simulator.scenarios import Scenario

# Fewer instances could not be shared out over versions as finely as many are.
MIN_INSTANCES = 16
# Fewer slots or groups, and single trajectories would show.
MIN_SLOTS = 16
MIN_GROUPS = 16
# The longest trajectory may take this share of an instance's KV memory, or it would crowd it.
_LONGEST_SHARE = 0.5
# Slots that the division by the number of peers may lose.
_LOST_SLOTS = 0.04

_SIZES = {
    "orchestration": (
        *("groups_per_step", "group_size", "max_steps"),
        *("max_staleness", "pipeline_depth"),
    ),
    "rollout": ("slots", "version_slots"),
    "task": ("reward_workers",),
    "cluster": ("devices", "devices_per_instance", "train_devices", "device", "prompts"),
}

MEASURED_STEPS = 5
_LEAST_WARMUP, _MOST_WARMUP = 3, 8


@dataclass(frozen=True, slots=True)
class Reduction:
    """The simulated problem beside the real one."""

    real: Scenario
    scenario: Scenario
    """The simulated one; its split, K, depth and version slots are still to be set."""
    peers: int
    """Real trajectories that one simulated trajectory stands for."""

    @property
    def instances(self) -> int:
        """Simulated instances, if all devices were rollout's."""
        return _instances(self.scenario)

    @property
    def real_instances(self) -> int:
        """Real instances, if all devices were rollout's."""
        return _instances(self.real)

    @property
    def reduced(self) -> bool:
        """Whether anything differs."""
        return self.peers > 1 or self.instances < self.real_instances

    @property
    def factor(self) -> float:
        """Real trajectories of a step over simulated ones."""
        return self.real.orchestration.groups_per_step / self.scenario.orchestration.groups_per_step

    def real_rollout(self, instances: int, node_devices: int) -> int:
        """Real rollout instances for so many simulated ones, in whole nodes if that is finer."""
        each = self.real.cluster.devices_per_instance
        ratio = self.real_instances / self.instances
        exact = instances * ratio
        node = node_devices // each if node_devices % each == 0 else 1
        if node > 1 and ratio >= node and self.real.cluster.devices % node_devices == 0:
            exact = node * round(exact / node)
        return min(max(round(exact), 1), self.real_instances - 1)

    def describe(self) -> str:
        """What was simulated, in words."""
        small, real = self.scenario, self.real
        parts = []
        if self.instances < self.real_instances:
            parts.append(f"{small.cluster.devices} of the {real.cluster.devices} devices")
        if self.peers > 1:
            parts.append(f"one trajectory for every {self.peers}")
        if not parts:
            return "the search simulates the problem at its full size"
        groups = small.orchestration.groups_per_step
        return (
            f"the search simulates {' and '.join(parts)}, with {groups} instead of "
            f"{real.orchestration.groups_per_step} groups a step: ratios stay, gains move by a few "
            "percent"
        )


def reduce(real: Scenario, turns: float, max_staleness: int) -> Reduction:
    """The problem made so small that one run has about so many turns of trajectories."""
    settings, cluster = real.orchestration, real.cluster
    instances = _instances(real)
    in_step = settings.groups_per_step * settings.group_size
    filled = min(instances * real.rollout.slots / in_step, max_staleness + 1)
    # The first steps fill the pipeline and train what is short; they are not measured.
    warmup = min(max(ceil(filled) + 1, _LEAST_WARMUP), _MOST_WARMUP)
    steps = warmup + MEASURED_STEPS
    each = Lengths.of(real.workload, real.run.seed, settings.group_size).turns
    wanted = in_step * each * (steps + filled) / turns
    wanted = max(1.0, min(wanted, settings.groups_per_step / MIN_GROUPS))
    peers = _peers(real, wanted)
    few = _fewer(instances, wanted / peers)
    plain = real.model_dump(mode="json", exclude_none=True)
    if real.model.lora_rank is not None:  # an estimate from the heads of peers would be another
        plain["model"]["lora_parameters"] = real.model.adapter_parameters
    _shrink(plain, few / instances / peers, peers)
    plain["cluster"]["devices"] = few * cluster.devices_per_instance
    plain["run"]["steps"], plain["scenario"]["warmup_steps"] = steps, warmup
    return Reduction(real, validate(Scenario, plain, real.scenario.title), peers)


def _instances(scenario: Scenario) -> int:
    return scenario.cluster.devices // scenario.cluster.devices_per_instance


def _peers(real: Scenario, most: float) -> int:
    slots = real.rollout.slots
    if real.model.experts is not None or real.model.active < real.model.parameters:
        return 1
    capacity = real.setup(ParadigmName.SYNC).params.costs().kv_capacity_tokens
    most = min(most, slots / MIN_SLOTS, _LONGEST_SHARE * capacity / real.workload.longest_tokens)
    for peers in range(int(most + 0.5), 1, -1):
        if slots % peers <= _LOST_SLOTS * slots:
            return peers
    return 1


def _fewer(instances: int, factor: float) -> int:
    """So many instances fewer; a whole factor of them, so that splits have exact images."""
    divisor = min(ceil(factor - 0.1), instances // MIN_INSTANCES)
    for whole in range(divisor, ceil(divisor / 2), -1):
        if instances % whole == 0:
            return instances // whole
    return round(instances / divisor) if divisor > 1 else instances


def _shrink(plain: dict[str, Any], ratio: float, peers: int) -> None:
    orchestration, cluster, model = plain["orchestration"], plain["cluster"], plain["model"]
    groups = max(1, round(orchestration["groups_per_step"] * ratio))
    # A plan is for the steady state: neither prompts nor steps run out.
    orchestration |= {"groups_per_step": groups, "pipeline_depth": 0, "max_steps": 0}
    cluster.pop("prompts", None)
    plain["rollout"]["slots"] = max(1, plain["rollout"]["slots"] // peers)
    task = plain["task"]
    if "reward_workers" in task:
        task["reward_workers"] = max(1, round(task["reward_workers"] * ratio))
    model["parameters"] *= peers
    for key in ("active_parameters", "lora_parameters"):
        if key in model:
            model[key] *= peers
    model["bytes_per_parameter"] /= peers
    model["heads"] *= peers
    model["kv_heads"] *= peers


def with_settings(scenario: Scenario, values: Mapping[str, Mapping[str, Any]]) -> Scenario:
    """The scenario with a candidate's values, by section."""
    plain = scenario.model_dump(mode="json", exclude_none=True)
    for section, own in values.items():
        plain[section] |= own
    return validate(Scenario, plain, scenario.scenario.title)


def with_efficiency(scenario: Scenario, values: Mapping[str, float]) -> Scenario:
    """The scenario with other constants, for every paradigm alike."""
    plain = scenario.model_dump(mode="json", exclude_none=True)
    plain["efficiency"] |= values
    for own in plain["paradigm"].values():
        for key in values:
            own["efficiency"].pop(key, None)
    return validate(Scenario, plain, scenario.scenario.title)


def with_full_weights(reduction: Reduction) -> Reduction:
    """The same problem at the same size, where a version is a full set of weights."""
    return Reduction(
        _full_weights(reduction.real), _full_weights(reduction.scenario), reduction.peers
    )


def _full_weights(scenario: Scenario) -> Scenario:
    plain = scenario.model_dump(mode="json", exclude_none=True)
    for key in ("lora_rank", "lora_parameters"):
        plain["model"].pop(key, None)
    return validate(Scenario, plain, scenario.scenario.title)


def without_own_sizes(scenario: Scenario) -> Scenario:
    """The scenario without what `[paradigm.…]` says of sizes: the plan sets these for all."""
    plain = scenario.model_dump(mode="json", exclude_none=True)
    plain["orchestration"] |= {"pipeline_depth": 0, "max_steps": 0}
    plain["rollout"]["version_slots"] = 1
    for own in plain["paradigm"].values():
        for section, keys in _SIZES.items():
            own[section] = {key: own[section][key] for key in own[section] if key not in keys}
    return validate(Scenario, plain, scenario.scenario.title)
