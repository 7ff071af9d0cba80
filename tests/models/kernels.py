"""Tests of the native kernels need a C compiler, and run without one's being fast."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from dora_rl.engines.embedded import settings
from dora_rl.machine.fast_paths import Trial, portable
from dora_rl.models.native.library import why_unavailable

_WHY = "fast paths are switched off" if portable() else why_unavailable()

needs_kernels = pytest.mark.skipif(_WHY is not None, reason=_WHY or "")


@contextmanager
def dots_everywhere() -> Iterator[None]:
    """Versions that are loaded here are multiplied in bf16, if they are of it.

    Also where the processor has no instruction for that: it is as right there, and slower.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "bf16_dots", lambda: Trial(True, "as the test says"))
        yield


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """This many threads of torch, which the kernels have too."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
