"""Tests of the sandbox on a system whose kernel or container keeps less from workers."""

import os
from typing import NoReturn

import pytest

EXPECTED = "DORA_RL_TESTS_EXPECT_SANDBOX"


def skip_weaker(reason: str) -> NoReturn:
    """Skip what this system does not keep; fail where all of the sandbox is expected to hold."""
    __tracebackhide__ = True  # the line that is reported is the test's
    if os.environ.get(EXPECTED) == "1":
        pytest.fail(f"{reason} ({EXPECTED}=1)")
    pytest.skip(reason)
