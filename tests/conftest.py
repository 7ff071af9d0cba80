"""Settings of the test run as a whole."""

from hypothesis import settings

# No deadline: two workers share the machine, and a slow example is not a wrong one.
settings.register_profile("project", deadline=None, print_blob=True)
settings.load_profile("project")
