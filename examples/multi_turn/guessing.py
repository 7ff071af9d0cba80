"""A game of several turns: find a secret digit; after each guess the player hears `+` or `-`.

An environment is a class with `reset(example)` and `step(text)`; one object is one episode. All
turns of an episode are one trajectory: one version plays it to its end, and only what the player
wrote is trained on.
"""

import random
from typing import Any

from dora_rl.tasks.environments import Step


def row(position: int, seed: int) -> dict[str, Any]:
    """The example at a position: a pure function, so that a resumed run sees the same ones."""
    return {"prompt": "0-9=", "secret": random.Random(f"{seed} {position}").randrange(10)}


class Guessing:
    """The player's first digit is the guess. The reward is less the more turns it takes."""

    def __init__(self) -> None:
        self.secret = 0
        self.turns = 0

    def reset(self, example: dict[str, Any]) -> None:
        """None keeps the prompt of the row; text or messages would take its place."""
        self.secret = example["secret"]

    def step(self, text: str) -> Step:
        self.turns += 1
        if not text[:1].isdecimal():
            return Step(reward=-1.0, done=True)
        guess = int(text[0])
        if guess == self.secret:
            return Step(reward=1.0 / self.turns, done=True)
        return Step("+" if self.secret > guess else "-")
