"""Settings of the test run as a whole.

The same examples every time, so that a change is judged by what it changed. To look further:
`HYPOTHESIS_PROFILE=search make test` draws new ones, ten times as many.
"""

import os

from hypothesis import settings

# No deadline: two workers share the machine, and a slow example is not a wrong one.
settings.register_profile("project", deadline=None, print_blob=True, derandomize=True)
settings.register_profile("search", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "project"))
