"""Settings of the trainer's tests."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_sync() -> Iterator[None]:
    """No test can see a power failure: what counts syncs still does, and nobody waits for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield
