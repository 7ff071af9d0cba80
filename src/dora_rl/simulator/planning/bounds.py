"""How fast a split could be at best, from costs alone: what need not be simulated.

Every bound is optimistic: full batches, mean contexts, no tail, no waits. So a split whose
bound is below what another one has shown cannot win. Nothing here may run a simulation.
"""

from dataclasses import dataclass

from dora_rl.core.settings import ParadigmName
from dora_rl.simulator.scenarios import Scenario
from dora_rl.simulator.workload import Sampler, Workload

# Enough for means of heavy tails to a few percent, in some ten milliseconds.
_SAMPLES = 2048


@dataclass(frozen=True, slots=True)
class Lengths:
    """Means over trajectories, by sampling."""

    generated: float
    total: float
    pairs: float
    """Pairs of tokens that attend to each other."""
    mean_context: float
    """Cached tokens behind a token that is being generated."""
    prompt: float

    @classmethod
    def of(cls, workload: Workload, seed: int, group_size: int) -> "Lengths":
        sampler = Sampler(workload, seed)
        members = min(group_size, 16)
        groups = -(-_SAMPLES // members)
        generated = total = prompt = 0
        pairs = context = 0.0
        for group in range(groups):
            for member in range(members):
                shape = sampler.trajectory(group, member)
                cached = shape.prompt_tokens
                prompt += cached
                for turn in shape.turns:
                    tokens = turn.generate_tokens
                    generated += tokens
                    context += tokens * (cached + 0.5 * tokens)
                    cached += tokens + turn.observation_tokens
                total += cached
                pairs += 0.5 * cached * (cached + 1)
        count = groups * members
        return cls(generated / count, total / count, pairs / count, context / generated,
                   prompt / count)


class Bounds:
    """Least times of one step of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        setup = scenario.setup(ParadigmName.SYNC)
        self._params = setup.params
        self._costs = setup.params.costs()
        settings = setup.settings
        self.lengths = Lengths.of(setup.workload, setup.seed, settings.group_size)
        self._groups = settings.groups_per_step
        self._trajectories = settings.groups_per_step * settings.group_size

    def train_s(self, devices: int) -> float:
        """A train step on so many devices, and the publication that follows it."""
        lengths, count = self.lengths, self._trajectories
        train_s = self._costs.train_time(
            count * lengths.total, devices, self._params.updates_per_step, count * lengths.pairs
        )
        return train_s + self._costs.publish_time(devices)

    def rollout_s(self, instances: int, max_staleness: int) -> float:
        """A batch's tokens at full batches: slots, KV memory and the bound on staleness allow
        no more trajectories at once."""
        lengths, costs, params = self.lengths, self._costs, self._params
        batch = min(
            params.slots,
            costs.kv_capacity_tokens / lengths.mean_context,
            (max_staleness + 1) * self._trajectories / instances,
        )
        num = max(1, int(batch))
        step_s = costs.decode.step_time(num, num * lengths.mean_context)
        made = 1 / (1 - params.filter_rate)  # filtered groups are generated as well
        decode_s = made * self._trajectories * lengths.generated * step_s / (num * instances)
        prefill_s = made * self._groups * costs.prefill_time(int(lengths.prompt)) / instances
        return decode_s + prefill_s

    def step_s(self, instances: int, train_devices: int, max_staleness: int) -> float:
        """A step where training and rollout overlap wholly."""
        return max(self.train_s(train_devices), self.rollout_s(instances, max_staleness))

    def longest_s(self) -> float:
        """The longest response, alone on an instance."""
        response = self._params_longest()
        return self._costs.decode.steps_time(1, self.lengths.prompt, response)
