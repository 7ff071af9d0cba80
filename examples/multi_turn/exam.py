"""An environment of several turns: an exam of three questions, asked one after the other.

An environment is a class with `reset(example)` and `step(text)`, plain or async; one object is
one episode. All turns of an episode are one trajectory: one policy version writes all of it, and
only what the policy wrote is trained on, not the questions.
"""

from typing import Any

from dora_rl.tasks import chains
from dora_rl.tasks.environments import Step

QUESTIONS = 3


def row(position: int, seed: int) -> dict[str, Any]:
    """The example at a position: a pure function, so that a resumed run sees the same ones."""
    sums = [chains.row(QUESTIONS * position + n, seed, max_terms=2) for n in range(QUESTIONS)]
    first, *more = [sum_["prompt"] for sum_ in sums]
    return {"prompt": first, "more": more}


class Exam:
    """Three sums in a row; each is a third of the mark."""

    def __init__(self) -> None:
        self.questions: list[str] = []

    def reset(self, example: dict[str, Any]) -> None:
        """None keeps the prompt of the row; text or messages would take its place."""
        self.questions = [example["prompt"], *example["more"]]

    def step(self, text: str) -> Step:
        """What the policy hears next, the reward of this turn, and whether it was the last."""
        mark = chains.reward(text, {"prompt": self.questions.pop(0)}) / QUESTIONS
        if not self.questions:
            return Step(reward=mark, done=True)
        return Step(self.questions[0], reward=mark)
