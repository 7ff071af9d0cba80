"""How fast a split could be at best, from costs alone: what need not be simulated.

Every bound is optimistic: full batches, mean contexts, no tail, no waits. So a split whose
bound is below what another one has shown cannot win. Nothing here may run a simulation.
"""

from dataclasses import dataclass
from math import ceil

from dora_rl.core.protocol.settings import ParadigmName
from dora_rl.simulator.scenarios import Scenario
from dora_rl.simulator.workload import Sampler, Workload

# Enough for means of heavy tails to a few percent, in some ten milliseconds.
_SAMPLES = 2048


@dataclass(frozen=True, slots=True)
class Lengths:
    """Means over trajectories, and the longest one, by sampling."""

    prompt: float
    generated: float
    total: float
    pairs: float
    """Pairs of tokens that attend to each other."""
    context: float
    """Cached tokens behind a token that is being generated."""
    turns: float
    longest: int
    """Generated tokens of the longest trajectory."""
    longest_wait_s: float
    """Most time that a trajectory spends in environments and for its reward."""

    @classmethod
    def of(cls, workload: Workload, seed: int, group_size: int) -> "Lengths":
        """Draw some thousand trajectories and take means."""
        sampler = Sampler(workload, seed)
        members = min(group_size, 16)
        count = -(-_SAMPLES // members) * members
        prompt = generated = total = turns = longest = 0
        pairs = context = longest_wait_s = 0.0
        for index in range(count):
            shape = sampler.trajectory(index // members, index % members)
            cached = shape.prompt_tokens
            prompt += cached
            for turn in shape.turns:
                tokens = turn.generate_tokens
                context += tokens * (cached + 0.5 * tokens)
                cached += tokens + turn.observation_tokens
            wait_s = sum(turn.environment_s for turn in shape.turns) + shape.reward_s
            longest_wait_s = max(longest_wait_s, wait_s)
            turns += len(shape.turns)
            generated += shape.generated_tokens
            longest = max(longest, shape.generated_tokens)
            total += cached
            pairs += 0.5 * cached * (cached + 1)
        return cls(
            prompt / count,
            generated / count,
            total / count,
            pairs / count,
            context / generated,
            turns / count,
            longest,
            longest_wait_s,
        )


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
        return train_s + self.publish_s(devices)

    def publish_s(self, devices: int) -> float:
        """The publication of a version by so many trainer devices."""
        return self._costs.publish_time(devices)

    def install_s(self) -> float:
        """The install of a version on one instance."""
        return self._costs.install_time()

    def sequences(self, instances: int, max_staleness: int) -> int:
        """Trajectories that run at once on each of so many instances, at most.

        Slots, KV memory and the bound on staleness limit them.
        """
        return ceil(
            min(
                self._params.slots,
                self._costs.kv_capacity_tokens / self.lengths.context,
                (max_staleness + 1) * self._trajectories / instances,
            )
        )

    def decode_step_s(self, sequences: int, num_versions: int = 1) -> float:
        """A decode step of so many sequences of mean contexts."""
        context = sequences * self.lengths.context
        return self._costs.decode.step_time(sequences, context, num_versions)

    def rollout_s(self, instances: int, max_staleness: int) -> float:
        """The tokens of a batch at full batches of every instance."""
        lengths, costs, params = self.lengths, self._costs, self._params
        num = self.sequences(instances, max_staleness)
        step_s = self.decode_step_s(num)
        decode_s = self._trajectories * lengths.generated * step_s / (num * instances)
        prefill_s = self._groups * costs.prefill_time(int(lengths.prompt)) / instances
        return (decode_s + prefill_s) / (1 - params.filter_rate)  # the filtered are made as well

    def step_s(self, instances: int, train_devices: int, max_staleness: int) -> float:
        """A step in which training and rollout overlap wholly."""
        return max(self.train_s(train_devices), self.rollout_s(instances, max_staleness))

    def longest_s(self) -> float:
        """What a trajectory may take at most, alone on an instance."""
        lengths = self.lengths
        decode_s = self._costs.decode.steps_time(1, lengths.prompt, lengths.longest)
        return decode_s + lengths.longest_wait_s
