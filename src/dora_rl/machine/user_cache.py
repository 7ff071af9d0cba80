"""Where this user keeps what can be made again."""

import os
from pathlib import Path


def user_cache() -> Path:
    """By the XDG standard; raises RuntimeError where there is no home directory."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # Also when unset; a relative one is invalid, says the standard.
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "dora-rl"
