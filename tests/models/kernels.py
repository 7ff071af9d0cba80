"""Tests of the native kernels need a C compiler, and run without one's being fast."""

import pytest

from dora_rl.machine.fast_paths import portable
from dora_rl.models.native.library import why_unavailable

_WHY = "fast paths are switched off" if portable() else why_unavailable()

needs_kernels = pytest.mark.skipif(_WHY is not None, reason=_WHY or "")
