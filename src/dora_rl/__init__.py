"""Asynchronous RL post-training with one policy version per trajectory and bounded staleness."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dora_rl.runtime.train import Run, train

__all__ = ["Run", "__version__", "train"]


def __getattr__(name: str) -> Any:
    """`train` and `Run` are imported when they are asked for: `import dora_rl` costs nothing."""
    if name in ("Run", "train"):
        from dora_rl.runtime import train as module

        return getattr(module, name)
    raise AttributeError(f"module `{__name__}` has no attribute `{name}`")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
