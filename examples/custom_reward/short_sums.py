"""A reward of your own: the right sum, and a little for saying it briefly.

A reward names what it wants of `response`, `prompt`, `example`, `answer` and `trajectory`, and
returns a number, or numbers by name: those are added up, and shown one by one in metrics.jsonl.
It runs in worker processes that are killed when it takes too long. Never `eval` a response.
"""

LONG = 60  # characters from which a response counts as long


def reward(response: str, answer: str) -> dict[str, float]:
    """1 for a response that ends with the right sum; up to 0.2 more the shorter it is."""
    right = response.rpartition("=")[2] == answer
    brevity = max(0.0, 1 - len(response) / LONG)
    return {"right": float(right), "short": 0.2 * brevity if right else 0.0}
