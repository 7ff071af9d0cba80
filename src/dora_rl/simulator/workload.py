"""How long trajectories are and how long their environments and rewards take.

Invariants: a drawn shape is a pure function of (seed, group, member, step), never of the order of
calls, so that every paradigm meets the same lengths; the correlation inside a group leaves each
marginal distribution exact.

Nothing here may know of instances, versions, the clock or faults (an environment that never ends
is a fault, not a latency).
"""

from __future__ import annotations

from math import exp, sqrt
from typing import NamedTuple

from pydantic import (
    Field,
    model_validator,
)

from dora_rl.simulator.distributions import (
    CLOSEST_MEAN,
    NORMAL,
    Constant,
    Distribution,
    LogNormal,
    Parameters,
    solve,
    whole,
)


class Workload(Parameters):
    """What a run is made of: prompts, responses, turns, environments, rewards.

    Tokens and turns are rounded to whole numbers. A prompt belongs to its group; all else is
    drawn for each member.
    """

    prompt_tokens: Distribution = Field(
        default=Constant(value=512), description="tokens of the prompt, shared by its group"
    )
    response_tokens: Distribution = Field(
        default=LogNormal(mean=2400, sigma=1.0, max=30_000),
        description="tokens generated in each turn, at least 1",
        json_schema_extra={"elsewhere": "rollout.max_tokens"},
    )
    turns: Distribution = Field(
        default=Constant(value=1), description="turns of a trajectory, at least 1"
    )
    environment_s: Distribution = Field(
        default=Constant(value=0), description="the environment's time between two turns"
    )
    observation_tokens: Distribution = Field(
        default=Constant(value=0), description="tokens the environment adds between two turns"
    )
    reward_s: Distribution = Field(
        default=Constant(value=0), description="time to score a finished trajectory"
    )
    group_correlation: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="of the normals behind lengths and turns inside a group: hard prompts are "
        "long for every member; 0 = independent, 1 = all alike",
    )
    growth_per_step: float = Field(
        default=0.0,
        ge=0,
        description="responses grow in training: the mean rises by this share of its first value "
        "each train step, while the maximum stays",
    )

    @model_validator(mode="after")
    def _sensible(self) -> Workload:
        for name in ("prompt_tokens", "response_tokens", "turns"):
            upper = getattr(self, name).upper
            if upper < 1:
                raise ValueError(f"{name} must reach at least 1: its largest value is `{upper:g}`.")
        if self.growth_per_step and getattr(self.response_tokens, "max", None) is None:
            raise ValueError(
                f"growth_per_step needs response_tokens with a `max` to grow towards: "
                f"`{self.response_tokens.kind}` has none. Use lognormal, pareto, or empirical "
                f"with max."
            )
        return self

    @property
    def longest_tokens(self) -> int:
        """The most tokens that one trajectory can hold: what an instance's KV must fit."""
        turns = max(whole(self.turns.upper), 1)
        tokens = whole(self.prompt_tokens.upper) + turns * whole(self.response_tokens.upper)
        return tokens + (turns - 1) * whole(self.observation_tokens.upper)

    def response_scale(self, step: int) -> float:
        """The factor on every response, before clipping, that gives step `step` its mean."""
        if not self.growth_per_step or step <= 0:
            return 1.0
        response = self.response_tokens
        first = response.scaled_mean()
        wanted = first * (1 + self.growth_per_step * step)
        wanted = min(wanted, max(first, CLOSEST_MEAN * response.upper))
        log_scale = solve(lambda x: response.scaled_mean(exp(x)), wanted, 0.0, 50.0)
        return exp(log_scale)

    def mean_response_tokens(self, step: int = 0) -> float:
        """The expected tokens of one turn at train step `step`, before rounding."""
        return self.response_tokens.scaled_mean(self.response_scale(step))


class Turn(NamedTuple):
    """One generation and what the environment answers (nothing after the last turn)."""

    generate_tokens: int
    environment_s: float
    observation_tokens: int


class TrajectoryShape(NamedTuple):
    """All that is drawn for one trajectory."""

    prompt_tokens: int
    turns: tuple[Turn, ...]
    reward_s: float

    @property
    def generated_tokens(self) -> int:
        """Tokens that the policy generates over all turns."""
        return sum(turn.generate_tokens for turn in self.turns)

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole trajectory: what its KV holds at the end."""
        observed = sum(turn.observation_tokens for turn in self.turns)
        return self.prompt_tokens + self.generated_tokens + observed


_MASK = (1 << 64) - 1
# The odd constant of splitmix64 (2^64 over the golden ratio): its multiples visit every state.
_GOLDEN = 0x9E3779B97F4A7C15

# Counters below a group's hash: three draws of its own, then its members.
_GROUP_PROMPT, _GROUP_RESPONSE, _GROUP_TURNS, _FIRST_MEMBER = 1, 2, 3, 4
# Counters below a member's hash: two draws of its own, then some for each turn.
_MEMBER_TURNS, _MEMBER_REWARD, _FIRST_TURN = 1, 2, 3
_RESPONSE, _ENVIRONMENT, _OBSERVATION, _PER_TURN = 0, 1, 2, 3


def _hash(bits: int, counter: int) -> int:
    """Output `counter` of splitmix64 (Steele, Lea and Flood, 2014) seeded with `bits`."""
    x = (bits + counter * _GOLDEN) & _MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


_inverse_normal = NORMAL.inv_cdf


def _normal(bits: int) -> float:
    """A standard normal from 64 random bits; 52 of them, so that 0 and 1 are never reached."""
    return _inverse_normal(((bits >> 12) + 0.5) * 2.0**-52)


class _Source:
    """A distribution ready to draw from; a constant spends no random number."""

    __slots__ = ("constant", "draw")

    def __init__(self, distribution: Distribution) -> None:
        self.draw = distribution.draw()
        self.constant = distribution.value if isinstance(distribution, Constant) else None

    def value(self, bits: int, counter: int) -> float:
        if self.constant is not None:
            return self.constant
        return self.draw(_normal(_hash(bits, counter)), 1.0)


class Sampler:
    """Draws the shape of any trajectory of a workload, in any order.

    Random numbers are hashes of what they are for, so none is ever "the next". The only state
    is a memory of the last group and of each step's scale, which changes no result.
    """

    __slots__ = (
        "_environment",
        "_group",
        "_group_bits",
        "_group_turns_z",
        "_group_weight",
        "_group_z",
        "_key",
        "_member_weight",
        "_observation",
        "_prompt",
        "_prompt_tokens",
        "_response",
        "_reward",
        "_scales",
        "_turns",
        "workload",
    )

    def __init__(self, workload: Workload, seed: int) -> None:
        self.workload = workload
        self._key = _hash(seed, 1)
        self._prompt = _Source(workload.prompt_tokens)
        self._response = workload.response_tokens.draw()
        self._turns = _Source(workload.turns)
        self._environment = _Source(workload.environment_s)
        self._observation = _Source(workload.observation_tokens)
        self._reward = _Source(workload.reward_s)
        # A Gaussian copula: sqrt(rho) z_group + sqrt(1 - rho) z_member is a standard normal
        # again, so each marginal stays what it is, and two members correlate by rho.
        self._group_weight = sqrt(workload.group_correlation)
        self._member_weight = sqrt(1 - workload.group_correlation)
        self._scales: dict[int, float] = {}
        self._group: int | None = None
        self._group_bits = 0
        self._prompt_tokens = 1
        self._group_z = 0.0
        self._group_turns_z = 0.0

    def trajectory(self, group: int, member: int, step: int = 0) -> TrajectoryShape:
        """The shape of one member of a group; `step` is the train step that sets the growth."""
        if group != self._group:
            self._enter(group)
        scale = self._scales.get(step)
        if scale is None:
            scale = self._scales[step] = self.workload.response_scale(step)
        bits = _hash(self._group_bits, member + _FIRST_MEMBER)
        z = self._group_z + self._member_weight * _normal(_hash(bits, _FIRST_TURN + _RESPONSE))
        first = int(self._response(z, scale) + 0.5) or 1
        num_turns = self._num_turns(bits)
        turns: tuple[Turn, ...]
        if num_turns == 1:
            turns = (Turn(first, 0.0, 0),)
        else:
            turns = self._many_turns(bits, first, num_turns, scale)
        reward_s = self._reward.constant
        if reward_s is None:
            reward_s = self._reward.value(bits, _MEMBER_REWARD)
        return TrajectoryShape(self._prompt_tokens, turns, reward_s)

    def _enter(self, group: int) -> None:
        """Draw what the members of `group` share."""
        bits = _hash(self._key, group)
        self._prompt_tokens = whole(self._prompt.value(bits, _GROUP_PROMPT)) or 1
        if self._group_weight:
            self._group_z = self._group_weight * _normal(_hash(bits, _GROUP_RESPONSE))
            self._group_turns_z = self._group_weight * _normal(_hash(bits, _GROUP_TURNS))
        self._group_bits = bits
        self._group = group

    def _num_turns(self, bits: int) -> int:
        constant = self._turns.constant
        if constant is not None:
            return int(constant + 0.5) or 1
        z = self._group_turns_z + self._member_weight * _normal(_hash(bits, _MEMBER_TURNS))
        return whole(self._turns.draw(z, 1.0)) or 1

    def _many_turns(self, bits: int, first: int, num_turns: int, scale: float) -> tuple[Turn, ...]:
        turns: list[Turn] = []
        generate = first
        for counter in range(_FIRST_TURN, _FIRST_TURN + (num_turns - 1) * _PER_TURN, _PER_TURN):
            environment_s = self._environment.value(bits, counter + _ENVIRONMENT)
            observation = self._observation.value(bits, counter + _OBSERVATION)
            turns.append(Turn(generate, environment_s, whole(observation)))
            z = _normal(_hash(bits, counter + _PER_TURN + _RESPONSE))
            z = self._group_z + self._member_weight * z
            generate = whole(self._response(z, scale)) or 1
        turns.append(Turn(generate, 0.0, 0))
        return tuple(turns)
