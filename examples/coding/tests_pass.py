"""A coding reward: the share of the tests that the policy's program passes.

The program is what the policy wrote, between what the row has `before` and `after` it. It runs
in a sandbox, once for each test: it reads the test's input, and what it prints is compared here.
What it ought to print never gets near it, so that a program cannot pass by looking it up, nor by
ending early, nor by changing who compares.
"""

import re

from dora_rl.sandbox import run_python

TIMEOUT_S = 2.0
_FENCED = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)


def reward(response: str, example: dict) -> float:
    """From 0 to 1; a program that is slow, loud or greedy fails the test, not the run."""
    program = example["before"] + code_of(response) + example["after"]
    passed = 0
    for given, wanted in example["tests"]:
        done = run_python(
            program, stdin=given, timeout_s=TIMEOUT_S, memory_mb=128, max_output=10_000
        )
        passed += done.ok and done.stdout.split() == wanted.split()
    return passed / len(example["tests"])


def code_of(response: str) -> str:
    """The last fenced block, as chat models write it, or all of the response."""
    blocks = _FENCED.findall(response)
    return blocks[-1] if blocks else response
