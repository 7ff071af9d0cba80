"""How long trajectories are and how long their environments and rewards take.

Invariants: a drawn shape is a pure function of (seed, group, member, step), never of the order of
calls, so that every paradigm meets the same lengths; the correlation inside a group leaves each
marginal distribution exact; the mean of a clipped distribution is its mean after clipping.

Nothing here may know of instances, versions, the clock or faults (an environment that never ends
is a fault, not a latency).
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from math import erfc, exp, inf, log, pow, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Literal, NamedTuple

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)

Draw = Callable[[float, float], float]
"""Maps a standard normal and a scale >= 1 to a value: the inverse CDF, scaled, then clipped."""

_NORMAL = NormalDist()
_SQRT_HALF = sqrt(0.5)
# Far above any length or latency, far below where exponentials and powers overflow.
_LARGEST = 1e12
# Growth stops when the mean is this share of the maximum, which only an infinite factor reaches.
_CLOSEST_MEAN = 0.99


def _phi(z: float) -> float:
    """The standard normal CDF, accurate in both tails."""
    return 0.5 * erfc(-z * _SQRT_HALF)


def _whole(x: float) -> int:
    return int(x + 0.5)


def _solve(rising: Callable[[float], float], target: float, low: float, high: float) -> float:
    """The x in [low, high] where a rising function meets `target`, to the last bit or so."""
    for _ in range(200):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        if rising(middle) < target:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


class _Parameters(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LogNormal(_Parameters):
    """A lognormal clipped at `max`: what lies above counts as `max`, as a length limit does.

    `mean` is the mean after clipping. The spread is `sigma` (of the logarithm) or the 99th
    percentile.
    """

    kind: Literal["lognormal"] = "lognormal"
    mean: float = Field(gt=0, description="mean after clipping")
    sigma: float | None = Field(
        default=None, gt=0, le=5, description="spread of the logarithm; 1 is a heavy tail already"
    )
    p99: float | None = Field(default=None, gt=0, description="99th percentile, below `max`")
    max: float = Field(gt=0, le=_LARGEST, description="values above it become it")
    _mu: float = PrivateAttr(default=0.0)
    _sigma: float = PrivateAttr(default=0.0)

    @model_validator(mode="after")
    def _fit(self) -> LogNormal:
        if self.mean >= self.max:
            raise ValueError(f"mean must be < max ({self.max:g}): `{self.mean:g}`.")
        if (self.sigma is None) == (self.p99 is None):
            raise ValueError("give exactly one of sigma and p99.")
        if self.sigma is not None:
            self._sigma = self.sigma
            mean_of = partial(self._clipped_mean, sigma=self.sigma)
            # Clipping only lowers the mean, so mu is at least that of the unclipped lognormal;
            # at ten sigmas above log(max) nearly all mass is at `max`.
            low = log(self.mean) - 0.5 * self.sigma**2
            self._mu = _solve(mean_of, self.mean, low, log(self.max) + 10 * self.sigma)
        elif self.p99 is not None:
            self._fit_p99(self.p99)
        return self

    def _fit_p99(self, p99: float) -> None:
        if not self.mean < p99 < self.max:
            raise ValueError(
                f"p99 must lie between mean ({self.mean:g}) and max ({self.max:g}): `{p99:g}`."
            )
        z = _NORMAL.inv_cdf(0.99)

        def mean_of(narrowness: float) -> float:
            sigma = z - narrowness
            return self._clipped_mean(log(p99) - z * sigma, sigma)

        # With the percentile fixed, the mean falls as sigma grows, up to sigma = z.
        if mean_of(0.0) > self.mean:
            raise ValueError(
                f"no lognormal has mean `{self.mean:g}` and p99 `{p99:g}`: the mean must be at "
                f"least {mean_of(0.0):.4g}. Lower p99, or give sigma instead."
            )
        self._sigma = z - _solve(mean_of, self.mean, 0.0, z - 1e-9)
        self._mu = log(p99) - z * self._sigma

    def _clipped_mean(self, mu: float, sigma: float) -> float:
        """E[min(X, max)] of a lognormal."""
        top = (log(self.max) - mu) / sigma
        return exp(mu + 0.5 * sigma**2) * _phi(top - sigma) + self.max * _phi(-top)

    @property
    def upper(self) -> float:
        """The largest value."""
        return self.max

    def scaled_mean(self, scale: float = 1.0) -> float:
        """The mean when every value is multiplied by `scale` before clipping."""
        return self._clipped_mean(self._mu + log(scale), self._sigma)

    def cdf(self, x: float) -> float:
        """P(value <= x)."""
        if x >= self.max:
            return 1.0
        return _phi((log(x) - self._mu) / self._sigma) if x > 0 else 0.0

    def draw(self) -> Draw:
        """The inverse CDF as a function of a standard normal."""
        mu, sigma, top = self._mu, self._sigma, self.max

        def lognormal(z: float, scale: float) -> float:
            x = scale * exp(mu + sigma * z)
            return x if x < top else top

        return lognormal


class Pareto(_Parameters):
    """A Pareto tail from `minimum` on, clipped at `max`."""

    kind: Literal["pareto"] = "pareto"
    minimum: float = Field(gt=0, description="smallest and most likely value")
    alpha: float = Field(gt=0, le=100, description="tail exponent; the smaller, the heavier")
    max: float = Field(gt=0, le=_LARGEST, description="values above it become it")

    @model_validator(mode="after")
    def _ordered(self) -> Pareto:
        if self.minimum >= self.max:
            raise ValueError(f"minimum must be < max ({self.max:g}): `{self.minimum:g}`.")
        return self

    @property
    def upper(self) -> float:
        """The largest value."""
        return self.max

    def scaled_mean(self, scale: float = 1.0) -> float:
        """The mean when every value is multiplied by `scale` before clipping."""
        low = self.minimum * scale
        if low >= self.max:
            return self.max
        ratio = low / self.max
        if abs(self.alpha - 1) < 1e-9:
            return low * (1 - log(ratio))
        return low * (self.alpha - pow(ratio, self.alpha - 1)) / (self.alpha - 1)

    def cdf(self, x: float) -> float:
        """P(value <= x)."""
        if x >= self.max:
            return 1.0
        return 1 - pow(self.minimum / x, self.alpha) if x > self.minimum else 0.0

    def draw(self) -> Draw:
        """The inverse CDF as a function of a standard normal."""
        low, power, top = self.minimum, -1 / self.alpha, self.max
        # From this survival on the value is `max`, and the power could overflow.
        least = pow(low / top, self.alpha)

        def pareto(z: float, scale: float) -> float:
            survival = 0.5 * erfc(z * _SQRT_HALF)
            if survival <= least:
                return top
            x = scale * low * pow(survival, power)
            return x if x < top else top

        return pareto


class Empirical(_Parameters):
    """Values from a file, each equally likely: one number a line, or a JSON list.

    A relative path is resolved against `base_dir` of the validation context (the directory of
    the scenario file), so `Workload.model_validate(data, context={"base_dir": ...})`.
    """

    kind: Literal["empirical"] = "empirical"
    path: Path = Field(description="text with one number a line (# comments), or a JSON list")
    max: float | None = Field(
        default=None, gt=0, le=_LARGEST, description="values above it become it"
    )
    _values: tuple[float, ...] = PrivateAttr(default=())
    _sums: tuple[float, ...] = PrivateAttr(default=())

    @field_validator("path")
    @classmethod
    def _resolve(cls, path: Path, info: ValidationInfo) -> Path:
        base = info.context.get("base_dir") if info.context else None
        return path if base is None else Path(base) / path

    @model_validator(mode="after")
    def _load(self) -> Empirical:
        top = inf if self.max is None else self.max
        self._values = tuple(sorted(min(value, top) for value in read_values(self.path)))
        self._sums = tuple(accumulate(self._values, initial=0.0))
        return self

    @property
    def upper(self) -> float:
        """The largest value."""
        return self._values[-1] if self.max is None else self.max

    def scaled_mean(self, scale: float = 1.0) -> float:
        """The mean when every value is multiplied by `scale` before clipping."""
        count = len(self._values)
        if self.max is None:
            return self._sums[-1] * scale / count
        below = bisect_right(self._values, self.max / scale)
        return (self._sums[below] * scale + (count - below) * self.max) / count

    def cdf(self, x: float) -> float:
        """P(value <= x)."""
        return bisect_right(self._values, x) / len(self._values)

    def draw(self) -> Draw:
        """The inverse CDF as a function of a standard normal."""
        values, count = self._values, len(self._values)
        top = inf if self.max is None else self.max

        def empirical(z: float, scale: float) -> float:
            index = int(count * _phi(z))
            x = scale * values[index if index < count else count - 1]
            return x if x < top else top

        return empirical


class Constant(_Parameters):
    """Always the same value."""

    kind: Literal["constant"] = "constant"
    value: float = Field(ge=0, le=_LARGEST)

    @property
    def upper(self) -> float:
        """The largest value."""
        return self.value

    def scaled_mean(self, scale: float = 1.0) -> float:
        """The mean when every value is multiplied by `scale`."""
        return self.value * scale

    def cdf(self, x: float) -> float:
        """P(value <= x)."""
        return 1.0 if x >= self.value else 0.0

    def draw(self) -> Draw:
        """The inverse CDF as a function of a standard normal."""
        value = self.value
        return lambda z, scale: value * scale


class Uniform(_Parameters):
    """Every value between `low` and `high` equally likely."""

    kind: Literal["uniform"] = "uniform"
    low: float = Field(ge=0)
    high: float = Field(gt=0, le=_LARGEST)

    @model_validator(mode="after")
    def _ordered(self) -> Uniform:
        if self.low >= self.high:
            raise ValueError(
                f"low must be < high ({self.high:g}): `{self.low:g}`. "
                f"Use kind = `constant` for a single value."
            )
        return self

    @property
    def upper(self) -> float:
        """The largest value."""
        return self.high

    def scaled_mean(self, scale: float = 1.0) -> float:
        """The mean when every value is multiplied by `scale`."""
        return 0.5 * (self.low + self.high) * scale

    def cdf(self, x: float) -> float:
        """P(value <= x)."""
        return min(max((x - self.low) / (self.high - self.low), 0.0), 1.0)

    def draw(self) -> Draw:
        """The inverse CDF as a function of a standard normal."""
        low, width = self.low, self.high - self.low
        return lambda z, scale: scale * (low + width * _phi(z))


def _number_is_constant(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"kind": "constant", "value": value}
    return value


Distribution = Annotated[
    Annotated[LogNormal | Pareto | Empirical | Constant | Uniform, Field(discriminator="kind")],
    BeforeValidator(_number_is_constant),
]
"""For configuration: a table with its `kind`, or a bare number for a constant."""


def read_values(path: Path) -> list[float]:
    """The non-negative numbers of a file, text or JSON list; a ValueError names each bad line."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(
            f"no such file of lengths: `{path}`. "
            f"A relative path starts at the scenario file's directory."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the lengths in `{path}`: {error}") from None
    if text.lstrip().startswith("["):
        unit, entries = "item", _json_entries(path, text)
    else:
        unit, entries = "line", _text_entries(text)
    values: list[float] = []
    bad: list[str] = []
    for number, entry in entries:
        value = _number(entry)
        if value is None:
            bad.append(f"{unit} {number}: `{str(entry)[:40]}`")
        else:
            values.append(value)
    if bad:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise ValueError(
            f"not a non-negative number in `{path}`: {', '.join(bad[:5])}{more}. "
            f"Give one number a line, or a JSON list of numbers."
        )
    if not values:
        raise ValueError(f"no lengths in `{path}`: the file is empty. Give at least one number.")
    return values


def _text_entries(text: str) -> list[tuple[int, object]]:
    lines = ((i, line.partition("#")[0].strip()) for i, line in enumerate(text.splitlines(), 1))
    return [(i, line) for i, line in lines if line]


def _json_entries(path: Path, text: str) -> list[tuple[int, object]]:
    try:
        # A recursion error is what a hostile or broken file of brackets gives.
        entries = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not a JSON list in `{path}`: {error}") from None
    return list(enumerate(entries, 1))


def _number(entry: object) -> float | None:
    if isinstance(entry, bool) or not isinstance(entry, int | float | str):
        return None
    try:
        value = float(entry)
    except (ValueError, OverflowError):
        return None
    return value if 0 <= value <= _LARGEST else None


class Workload(_Parameters):
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
        turns = max(_whole(self.turns.upper), 1)
        tokens = _whole(self.prompt_tokens.upper) + turns * _whole(self.response_tokens.upper)
        return tokens + (turns - 1) * _whole(self.observation_tokens.upper)

    def response_scale(self, step: int) -> float:
        """The factor on every response, before clipping, that gives step `step` its mean."""
        if not self.growth_per_step or step <= 0:
            return 1.0
        response = self.response_tokens
        first = response.scaled_mean()
        wanted = first * (1 + self.growth_per_step * step)
        wanted = min(wanted, max(first, _CLOSEST_MEAN * response.upper))
        log_scale = _solve(lambda x: response.scaled_mean(exp(x)), wanted, 0.0, 50.0)
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


_inverse_normal = _NORMAL.inv_cdf


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
        self._prompt_tokens = _whole(self._prompt.value(bits, _GROUP_PROMPT)) or 1
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
        return _whole(self._turns.draw(z, 1.0)) or 1

    def _many_turns(self, bits: int, first: int, num_turns: int, scale: float) -> tuple[Turn, ...]:
        turns: list[Turn] = []
        generate = first
        for counter in range(_FIRST_TURN, _FIRST_TURN + (num_turns - 1) * _PER_TURN, _PER_TURN):
            environment_s = self._environment.value(bits, counter + _ENVIRONMENT)
            observation = self._observation.value(bits, counter + _OBSERVATION)
            turns.append(Turn(generate, environment_s, _whole(observation)))
            z = _normal(_hash(bits, counter + _PER_TURN + _RESPONSE))
            z = self._group_z + self._member_weight * z
            generate = _whole(self._response(z, scale)) or 1
        turns.append(Turn(generate, 0.0, 0))
        return tuple(turns)
