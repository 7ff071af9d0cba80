"""Telling the outside that the trainer gets on. It knows nothing of what is being done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


def nothing() -> None:
    """For whoever does not want to know how far it has come."""


class Progress:
    """Called often during whatever takes long; calls `tell`, which may raise. For one thread."""

    def __init__(self) -> None:
        self.tell: Callable[[], None] = nothing
        self._deferring = False
        self._error: BaseException | None = None

    def __call__(self) -> None:
        if not self._deferring:
            self.tell()
        elif self._error is None:  # whoever has failed is not asked again
            try:
                self.tell()
            except BaseException as error:
                self._error = error

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """What `tell` raises meanwhile is raised at the end: what was begun is done as a whole."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
            error, self._error = self._error, None
            if error is not None:
                raise error
