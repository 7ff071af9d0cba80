"""What the loop of a launcher knows of the process of a worker, wherever that runs."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar


class Handle(Protocol):
    """One process of a worker, as its launcher knows it."""

    @property
    def waiting(self) -> bool:
        """Whether it has not begun, for want of resources."""

    def kill(self) -> None:
        """End it at once, with whatever it has started; its death is reported later."""


H = TypeVar("H", bound=Handle)
Receive: TypeAlias = Callable[[H, Any], None]
"""Takes a message that a process has sent."""
