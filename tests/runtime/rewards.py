"""Rewards and an environment for the tests of runs; imported by name in workers."""

import fcntl
import os
import time
from contextlib import suppress
from typing import Any


def vowels(response: str, example: dict[str, Any]) -> float:
    """The share of vowels: differs between most responses."""
    return sum(letter in "aeiou" for letter in response.lower()) / max(1, len(response))


def _picked(response: str) -> bool:
    """About one response in four, whichever process asks."""
    return sum(response.encode()) % 4 == 0


def raises_at_times(response: str, example: dict[str, Any]) -> float:
    if _picked(response):
        raise KeyError("no such thing")
    return vowels(response, example)


def hangs_at_times(response: str, example: dict[str, Any]) -> float:
    if _picked(response):
        time.sleep(600)
    return vowels(response, example)


def nan_at_times(response: str, example: dict[str, Any]) -> float:
    return float("nan") if _picked(response) else vowels(response, example)


def text_at_times(response: str, example: dict[str, Any]) -> Any:
    return "very good" if _picked(response) else vowels(response, example)


def vandal(response: str, example: dict[str, Any]) -> float:
    """Does to the run that it scores for whatever needs no right to write."""
    run = example["run"]
    assert not example["hidden"] or os.listdir(run) == []
    for name in ("", "weights", "checkpoints", "ledger.sqlite"):
        with suppress(OSError):
            os.chmod(os.path.join(run, name), 0o500 if name != "ledger.sqlite" else 0o400)
    for name in ("weights/.lock", "ledger.sqlite", "ledger.sqlite-shm"):
        with suppress(OSError):
            held = os.open(os.path.join(run, name), os.O_RDONLY)  # until the worker ends
            with suppress(OSError):
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return vowels(response, example)


def always_raises(response: str, example: dict[str, Any]) -> float:
    raise KeyError("no such thing")


class Counting:
    """An episode of `example["turns"]` turns; the reward of turn n is n."""

    def reset(self, example: dict[str, Any]) -> str:
        self.turns = int(example["turns"])
        self.turn = 0
        return f"{example['prompt']} begin"

    def step(self, text: str) -> tuple[str, float, bool]:
        self.turn += 1
        return f" t{self.turn} ", float(self.turn), self.turn >= self.turns
