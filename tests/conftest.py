"""Settings of the test run as a whole.

The same examples every time, so that a change is judged by what it changed. To look further:
`HYPOTHESIS_PROFILE=search make test` draws new ones, ten times as many.
"""

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

from dora_rl.models import cpu

# Neither a deadline nor a check of how fast examples are drawn: others share the machine, and a
# slow example is not a wrong one.
settings.register_profile(
    "any-speed", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("project", settings.get_profile("any-speed"), derandomize=True)
settings.register_profile("search", settings.get_profile("any-speed"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "project"))

# Before any test imports torch, and inherited by the workers and by what they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
cpu.guard()

# A shell starts what it puts into the background with SIGINT ignored, and children inherit that:
# those that a test interrupts would never hear of it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Workers are forks of one server as long as nothing changes in the environment."""
    os.environ["PYTEST_CURRENT_TEST"] = "a test"
