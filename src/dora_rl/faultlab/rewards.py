"""A reward that now and then does what a reward must not. For `dora-rl chaos` alone."""

import os
import random
import signal
import time
from collections.abc import Mapping
from typing import Any

from dora_rl.tasks import chains

SHARE = 0.004  # of responses


def unreliable(response: str, example: Mapping[str, Any]) -> Any:
    """As `chains.reward`, but for a few that raise, hang, die, or are no number.

    Which ones is a matter of what was asked and answered, so that a storm has one seed.
    """
    rng = random.Random(f"{example} {response}")
    if rng.random() >= SHARE:
        return chains.reward(response, example)
    match rng.randrange(6):
        case 0:
            raise RuntimeError("a reward that raises")
        case 1:
            time.sleep(3600)
        case 2:
            os._exit(1)
        case 3:
            os.kill(os.getpid(), signal.SIGKILL)
        case 4:
            return float("nan")
    return "a reward that is no number"
