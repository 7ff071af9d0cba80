"""The base of every pool of workers: how it is limited, when a loop has to poll it, how it ends."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Self, TypedDict, TypeVar

from dora_rl.sandbox.protocol import Isolation, Limits, Program, UserFunction
from dora_rl.sandbox.worker_pool import WorkerPool

_Reply = TypeVar("_Reply")


class PoolOptions(TypedDict, total=False):
    """What every pool can be given; the defaults are those of `Pool`."""

    workers: int
    timeout_s: float
    memory_mb: int
    network: bool
    writable: tuple[str, ...]
    hidden: tuple[str, ...]
    import_path: tuple[str, ...]


class Pool(ABC, Generic[_Reply]):
    """Workers behind one interface: a subclass says what they are asked, and reads the answers."""

    def __init__(
        self,
        service: str,
        functions: Sequence[UserFunction],
        *,
        workers: int = 2,
        timeout_s: float = 10.0,
        memory_mb: int = 1024,
        network: bool = False,
        writable: tuple[str, ...] = (),
        hidden: tuple[str, ...] = (),
        import_path: tuple[str, ...] = (),
    ) -> None:
        """Start workers that run `service` on the user's functions, each under these limits."""
        limits = Limits(
            timeout_s=timeout_s,
            memory_mb=memory_mb,
            network=network,
            writable=writable,
            hidden=hidden,
        )
        program = Program(
            service=service, functions=tuple(functions), limits=limits, import_path=import_path
        )
        self._workers = WorkerPool(program, workers)
        self._done: deque[_Reply] = deque()
        self.log: Callable[[int, str], object] = lambda ticket, text: None
        """Told what the user's code printed for a ticket, and why it failed."""

    def poll(self, timeout_s: float = 0.0) -> list[_Reply]:
        """Replies so far; waits for one up to the time given, unless none is awaited."""
        deadline = time.monotonic() + timeout_s
        self._tend(0.0)
        while not self._done and self._awaited() and (left := deadline - time.monotonic()) > 0:
            self._tend(left)
        done = list(self._done)
        self._done.clear()
        return done

    @abstractmethod
    def _awaited(self) -> bool:
        """Whether a reply is still to come."""

    @abstractmethod
    def _tend(self, timeout_s: float) -> None:
        """Wait for the workers up to the time given, and take what they answered."""

    def _log(self, ticket: int, output: str, failure: str | None) -> None:
        if output or failure is not None:
            self.log(ticket, output + ("" if failure is None else f"{failure}\n"))

    @property
    def isolation(self) -> Isolation:
        """How the workers are isolated on this machine."""
        return self._workers.isolation

    def filenos(self) -> list[int]:
        """What to wait on until `poll` has something to do; it stays the same."""
        return [self._workers.fileno()]

    def due_in_s(self) -> float | None:
        """When `poll` must be called at the latest, since a time limit ends."""
        return self._workers.due_in_s()

    def close(self) -> None:
        """End all workers; what is still awaited gets no reply."""
        self._workers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
