"""What happens to a run, as log lines for its operator.

Hears what is rare: deaths, versions, refusals. What happens with every event is the journal's.
"""

import logging
from collections.abc import Sequence

from dora_rl.core.protocol.events import Event
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.listeners import Listener
from dora_rl.samples import SampleRef

_log = logging.getLogger(__name__)


class RunLog(Listener):
    """Logs what a listener hears."""

    def refused(self, now: float, event: Event, reason: str) -> None:
        _log.warning("event refused: %s: %s", type(event).__name__, reason)

    def trained(self, now: float, report: ms.Trained, samples: Sequence[SampleRef]) -> None:
        _log.info(
            "step %d trained: %d trajectories, %d tokens, %.2f s",
            report.step + 1,
            len(samples),
            report.tokens,
            report.seconds,
        )

    def rejected(self, now: float, report: ms.Rejected) -> None:
        _log.warning("batch of step %d rejected: %s", report.step + 1, report.reason)

    def published(self, now: float, report: ms.Published) -> None:
        _log.debug("version %d published in %.2f s", report.version, report.seconds)

    def replaced(self, now: float, why: str) -> None:
        _log.warning("worker replaced: %s", why)

    def must_end(self, now: float, why: str) -> None:
        _log.warning("the run must stop: %s", why)
