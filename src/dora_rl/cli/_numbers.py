"""Numbers as people write them: `4K`, `32k`, `1.5M`. K is 1,000, M is 1,000,000."""

import math
import re
from typing import Any

import click

_UNITS = {"k": 1_000, "m": 1_000_000}
_WITH_UNIT = re.compile(r"\s*(\d+|\d*\.\d+|\d+\.)\s*([kKmM])\s*")


def expanded(text: str) -> str:
    """The same number without its unit; any other text as it is."""
    found = _WITH_UNIT.fullmatch(text)
    if found is None:
        return text
    value = float(found[1]) * _UNITS[found[2].lower()]
    return str(int(value)) if value.is_integer() else repr(value)


class Number(click.FloatRange):
    """A number, perhaps with a unit."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        return super().convert(_plain(value, param, ctx), param, ctx)


class Count(click.IntRange):
    """A whole number, perhaps with a unit."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return super().convert(_plain(value, param, ctx), param, ctx)


def _plain(value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
    text = expanded(str(value))
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise click.BadParameter(f"`{value}` is not a number, such as 4000 or 4K", ctx, param)
    return text
