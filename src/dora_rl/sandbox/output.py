"""What the user's code prints during one request, as text of bounded length.

Of what Python itself writes: a program that a reward starts, or C code, writes to nowhere.
"""

import io
import sys
import traceback
from typing import Any, Self, TextIO

PRINTED = 4000  # characters that are kept of one request, from its beginning
TRACED = 4000  # of a traceback, from its end


class Captured(io.TextIOBase):
    """Standard output and standard error while a block lasts, one block after the other.

    One for a whole worker: what was made in one request, such as a handler of `logging`, writes
    to it in the next ones too. What it does not have is the streams' own: they go to nowhere.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self) -> None:
        self._before: tuple[TextIO, TextIO] = (sys.stdout, sys.stderr)

    def __enter__(self) -> Self:
        self._kept: list[str] = []
        self._room = PRINTED
        self._dropped = 0
        self._before = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = self
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._before[0], name)

    def fileno(self) -> int:
        return self._before[0].fileno()

    def close(self) -> None:
        """Whoever closes it may not need it any more; the next request does."""

    def __exit__(self, *_: object) -> None:
        sys.stdout, sys.stderr = self._before

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        kept = text[: self._room]
        self._room -= len(kept)
        self._dropped += len(text) - len(kept)
        if kept:
            self._kept.append(kept)
        return len(text)

    def text(self) -> str:
        """All that was kept, and how much was not."""
        dropped = f"\n[{self._dropped} more characters]\n" if self._dropped else ""
        return encodable("".join(self._kept)) + dropped


def trace_of(error: BaseException) -> str:
    """The traceback of what the user's code raised; empty where that cannot be had."""
    try:
        text = "".join(traceback.format_exception(error))
        return encodable(text if len(text) <= TRACED else f"[…]{text[-TRACED:]}")
    except BaseException:  # its own words raise what they like, or memory is short
        return ""


def encodable(text: str) -> str:
    """Lone surrogates are no text that a message can hold."""
    return text.encode("utf-8", "backslashreplace").decode()
