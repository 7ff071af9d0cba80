"""How keys, values and files are written in messages."""

import json
from enum import Enum
from pathlib import Path
from typing import Any

Loc = tuple[str | int, ...]  # the keys and indices that lead to a value

_MAX_SHOWN = 60  # characters of a value in a message, so that the message stays readable


def dotted(loc: Loc) -> str:
    return ".".join(str(part) for part in loc)


def show(value: Any, limit: int = _MAX_SHOWN) -> str:
    """A value as the user would write it, in backticks, on one line, of bounded length."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, str):
        text = value
    elif isinstance(value, bool):
        text = str(value).lower()
    else:
        try:
            text = json.dumps(value, default=str)
        except (TypeError, ValueError, RecursionError):
            text = repr(value)
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    if len(text) > limit:
        text = f"{text[: limit - 1]}…"
    return f"`{text}`"


def file_name(path: str | Path) -> str:
    """A file's name in backticks: on one line as a value is, but never cut short."""
    return show(str(path), limit=10 * len(str(path)))


def one_line(text: object) -> str:
    return " ".join(str(text).split())
