"""The heartbeat of a rollout worker while its main thread is inside one operation.

Between operations the main thread reports by itself (`RolloutInstance.report`). Inside one it
cannot: an install may take minutes. So it declares the operation, and a thread sends for it:

    with heartbeat.during(limit_s):
        instance.handle(message)

An operation is vouched for up to its limit; from then on the worker is silent, and the core takes
it for dead after `orchestration.heartbeat_timeout_s`, as it does if the main thread hangs outside
of any operation.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from dora_rl.core.protocol import commands as cm
from dora_rl.core.protocol.settings import Settings
from dora_rl.runtime.control import messages as ms

_log = logging.getLogger(__name__)


class _Operation(NamedTuple):
    began: float
    limit_s: float


class Heartbeat:
    """Calls `send` every `period_s` while an operation takes longer than that.

    `send` is called on a thread of its own, which logs the first error that it raises and ends.
    """

    def __init__(
        self,
        send: Callable[[], None],
        period_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._period_s = period_s
        self._clock = clock
        self._operation: _Operation | None = None  # replaced as a whole, by the main thread alone
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(self._period_s)

    @contextmanager
    def during(self, limit_s: float) -> Iterator[None]:
        """Vouch for the main thread until the block ends, for `limit_s` at most."""
        self._operation = _Operation(self._clock(), limit_s)
        try:
            yield
        finally:
            self._operation = None

    @property
    def due(self) -> bool:
        """Whether the main thread is in an operation that is long, and within its limit."""
        operation = self._operation
        if operation is None:
            return False
        taken_s = self._clock() - operation.began
        return self._period_s <= taken_s < operation.limit_s

    def _run(self) -> None:
        while not self._stopped.wait(self._period_s):
            if self.due:
                try:
                    self._send()
                except Exception as error:
                    # If the channel is closed, the main thread finds the same.
                    _log.warning("no more heartbeats: %s: %s", type(error).__name__, error)
                    return


def limit_s(message: ms.Message, core: Settings, step_timeout_s: float) -> float:
    """How long the handling of a message may take before it counts as a hang.

    As long as the core waits for the answer. It then asks again, and the worker cannot hear it: a
    hang would be noticed only after `max_retries` more of these timeouts.
    """
    match message.command if isinstance(message, ms.Perform) else message:
        case cm.Install() | cm.Evict() | cm.Sleep() | cm.Wake():
            return core.install_timeout_s
        case cm.Park() | cm.Unpark() | ms.HandOver() | ms.TakeOver():
            return core.migration_timeout_s
    return step_timeout_s
