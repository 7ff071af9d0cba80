"""Rewards and an environment that print; imported by name in workers."""

import logging
import os
import sys
from typing import Any


def says(response: str) -> float:
    print("scoring", response)
    print("a warning", file=sys.stderr)
    return 1.0


def raises(response: str) -> float:
    print("before it breaks")
    return _inner(response)


def _inner(response: str) -> float:
    raise LookupError(f"nothing for {response}")


def floods(response: str) -> float:
    for _ in range(200_000):
        print("x" * 100)
    raise ValueError("after the flood")


def never_ends(response: str) -> float:
    while True:
        print("again")


def steers(response: str) -> float:
    print("\x1b[2J\x1b]0;title\x07\r\x9b31m\x00\udc80 red")
    return 1.0


def takes_the_streams(response: str) -> float:
    sys.stdout.close()
    sys.stdout = sys.stderr = None  # type: ignore[assignment]
    return 1.0


def uses_all_of_the_stream(response: str) -> float:
    """As libraries do that find a real file there."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.stdout.buffer.write(b"raw")
    os.write(sys.stdout.fileno(), b"raw")
    assert not sys.stdout.isatty() and sys.stdout.encoding
    return 1.0


_LOGGER = logging.getLogger("noisy")


def logs(response: str) -> float:
    """With a handler that the first request makes."""
    if not _LOGGER.handlers:
        _LOGGER.addHandler(logging.StreamHandler())
    _LOGGER.warning("heard %s", response)
    return 1.0


class Unshown(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raises_what_cannot_be_shown(response: str) -> float:
    raise Unshown


class Room:
    """An environment that prints, and breaks at its second turn."""

    def reset(self, example: dict[str, Any]) -> str:
        print("a room is opened")
        return "begin"

    def step(self, text: str) -> tuple[str, float, bool]:
        print("it hears", text)
        if text == "break":
            raise OSError("the room is broken")
        return "on", 1.0, False
