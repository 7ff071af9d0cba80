"""The keywords of `dora_rl.train` into sections of the configuration."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from dora_rl.config.text import show
from dora_rl.config.unknown import nearest_keys
from dora_rl.core.protocol.errors import UserError
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.prepare.not_yet import not_yet


def with_sections(
    data: Mapping[str, Any], options: Mapping[str, Any], parameters: Collection[str]
) -> dict[str, Any]:
    """`data` with the sections in `options` over it; anything else is refused with what was meant.

    `parameters` are the keywords that are no sections.
    """
    merged = dict(data)
    for name, values in options.items():
        if isinstance(values, Mapping):
            merged[name] = {**merged.get(name, {}), **values}
        elif name in RunConfig.model_fields:
            raise UserError(
                f"{name} must be a section with its keys: {show(values)}. "
                f'Write {name}={{"key": value}}.'
            )
        else:
            raise UserError(_unknown(name, values, parameters))
    return merged


def _unknown(name: str, value: Any, parameters: Collection[str]) -> str:
    text = f"unknown keyword: {show(name)}."
    missing = not_yet(name, value if isinstance(value, str) and value.isalpha() else "")
    if missing is not None:
        return f"{text} {missing}"
    found = nearest_keys(RunConfig, name, parameters)
    meant = [key for key in found if key in parameters] or found
    if not meant:
        sections = ", ".join(f"`{section}`" for section in RunConfig.model_fields)
        return f'{text} Give a key inside its section, section={{"key": value}}: {sections}.'
    return f"{text} Write {' or '.join(_written(key.split('.'), value) for key in meant)}."


def _written(path: list[str], value: Any) -> str:
    """`orchestration={"group_size": 4}`, or `reward=…` for what is no key."""
    shown = show(value)[1:-1] if isinstance(value, int | float | bool) else "…"
    if isinstance(value, bool):
        shown = str(value)
    if isinstance(value, str):
        shown = json.dumps(show(value)[1:-1])
    for key in reversed(path[1:]):
        shown = f'{{"{key}": {shown}}}'
    return f"{path[0]}={shown}"
