"""Whether this machine may have a GPU, without a library that would know."""

from pathlib import Path

# Of the drivers of NVIDIA and AMD, and of Windows' under Linux.
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))


def may_have_gpu() -> bool:
    """Whether a driver of one is there."""
    return any(path.exists() for path in _DRIVERS)
