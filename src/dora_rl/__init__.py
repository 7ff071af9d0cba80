"""Asynchronous RL post-training with one policy version per trajectory and bounded staleness."""

import logging
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dora_rl.runtime.api import resume, train
    from dora_rl.runtime.execution import Run

__all__ = ["Run", "__version__", "resume", "train"]
_MODULES = {"Run": "execution", "resume": "api", "train": "api"}  # of `runtime`


# Whoever uses the package decides where log lines go; see `dora_rl.logs`.
logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    """The names are imported when they are asked for: `import dora_rl` costs nothing."""
    if name in _MODULES:
        import importlib

        return getattr(importlib.import_module(f"dora_rl.runtime.{_MODULES[name]}"), name)
    raise AttributeError(f"module `{__name__}` has no attribute `{name}`")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
