"""How keys, values and files are written in messages."""

import json
from enum import Enum
from pathlib import Path
from typing import Any

from dora_rl.config.redaction import REDACTED, Loc, concealed, looks_secret, scrubbed

_MAX_SHOWN = 60  # characters of a value in a message, so that the message stays readable


def dotted(loc: Loc) -> str:
    return ".".join(str(part) for part in loc)


def show(value: Any, limit: int = _MAX_SHOWN) -> str:
    """A value as the user would write it, in backticks, on one line, of bounded length.

    What looks like a credential is not shown; nor what stands under the name of one inside.
    """
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, str):
        text = value
    elif isinstance(value, bool):
        text = str(value).lower()
    else:
        try:
            text = json.dumps(concealed((), value), default=str)
        except (TypeError, ValueError):
            text = scrubbed(repr(value), value)
        except RecursionError:
            text = "…"
    if looks_secret(text):
        text = REDACTED
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    if len(text) > limit:
        text = f"{text[: limit - 1]}…"
    return f"`{text}`"


def file_name(path: str | Path) -> str:
    """A file's name in backticks: on one line as a value is, but never cut short."""
    return show(str(path), limit=10 * len(str(path)))


def one_line(text: object) -> str:
    return " ".join(str(text).split())
