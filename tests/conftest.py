"""Settings of the test run as a whole.

The same examples every time, so that a change is judged by what it changed. To look further:
`HYPOTHESIS_PROFILE=search make test` draws new ones, ten times as many.
"""

import os

from hypothesis import settings

from dora_rl.models import cpu

# No deadline: two workers share the machine, and a slow example is not a wrong one.
settings.register_profile("project", deadline=None, print_blob=True, derandomize=True)
settings.register_profile("search", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "project"))

# Before any test imports torch, and inherited by the workers and by what they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
cpu.guard()
