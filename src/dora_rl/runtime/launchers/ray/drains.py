"""Which nodes of the cluster are told to go, while they still run: preemption, or an autoscaler.

Ray marks a node as draining when `ray start --block` on it gets SIGTERM, by `ray drain-node`, and
from its autoscaler. It has no call that waits for this, so that it is asked now and then, on a
thread: a head that does not answer must not hold up the driver.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial

from ray._private.state import state

from dora_rl.runtime.launchers.ray.remote_worker import CallQueue

_PERIOD_S = 1.0  # of the 30 s and more that a node has left
_END_S = 5.0  # for a question to be answered that is under way
_log = logging.getLogger(__name__)


@contextmanager
def watched_drains(calls: CallQueue, drained: Callable[[Collection[str]], None]) -> Iterator[None]:
    """Inside, `drained` is called with the nodes that have to go, again and again until they have.

    It is called by whoever runs `calls`.
    """
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(calls, drained, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_END_S)


def _watch(
    calls: CallQueue, drained: Callable[[Collection[str]], None], over: threading.Event
) -> None:
    while not over.wait(_PERIOD_S):
        try:
            nodes = frozenset(state.get_draining_nodes())
        except Exception as error:  # the head is gone: the calls of workers tell what that means
            _log.debug("the cluster does not say which nodes are drained: %s", error)
            continue
        if nodes:
            calls.put(partial(drained, nodes))
