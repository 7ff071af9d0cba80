"""Distributions of lengths and latencies, by kind, as scenario files name them.

Invariants: a value is the inverse CDF of a standard normal, so that correlated normals leave each
marginal exact; the mean of a clipped distribution is its mean after clipping.

Nothing here may know what is drawn, nor for whom.
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
from typing import Annotated, Literal

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

NORMAL = NormalDist()
_SQRT_HALF = sqrt(0.5)
# Far above any length or latency, far below where exponentials and powers overflow.
_LARGEST = 1e12
# Growth stops when the mean is this share of the maximum, which only an infinite factor reaches.
CLOSEST_MEAN = 0.99


def _phi(z: float) -> float:
    """The standard normal CDF, accurate in both tails."""
    return 0.5 * erfc(-z * _SQRT_HALF)


def whole(x: float) -> int:
    return int(x + 0.5)


def solve(rising: Callable[[float], float], target: float, low: float, high: float) -> float:
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


class Parameters(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LogNormal(Parameters):
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
            self._mu = solve(mean_of, self.mean, low, log(self.max) + 10 * self.sigma)
        elif self.p99 is not None:
            self._fit_p99(self.p99)
        return self

    def _fit_p99(self, p99: float) -> None:
        if not self.mean < p99 < self.max:
            raise ValueError(
                f"p99 must lie between mean ({self.mean:g}) and max ({self.max:g}): `{p99:g}`."
            )
        z = NORMAL.inv_cdf(0.99)

        def mean_of(narrowness: float) -> float:
            sigma = z - narrowness
            return self._clipped_mean(log(p99) - z * sigma, sigma)

        # With the percentile fixed, the mean falls as sigma grows, up to sigma = z.
        if mean_of(0.0) > self.mean:
            raise ValueError(
                f"no lognormal has mean `{self.mean:g}` and p99 `{p99:g}`: the mean must be at "
                f"least {mean_of(0.0):.4g}. Lower p99, or give sigma instead."
            )
        self._sigma = z - solve(mean_of, self.mean, 0.0, z - 1e-9)
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


class Pareto(Parameters):
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


class Empirical(Parameters):
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


class Constant(Parameters):
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


class Uniform(Parameters):
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
