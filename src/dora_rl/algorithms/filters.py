"""Which groups teach nothing, judged by their rewards alone. Free of torch."""

from collections.abc import Sequence

from dora_rl.algorithms.settings import AlgorithmSettings

NO_SIGNAL = "no_signal"


def judge(settings: AlgorithmSettings, rewards: Sequence[float]) -> str | None:
    """The reason to filter a complete group, or None to train on it.

    Dynamic sampling (DAPO, arXiv 2503.14476): equal rewards give no advantage to anyone.
    """
    if settings.dynamic_sampling and len(set(rewards)) <= 1:
        return NO_SIGNAL
    return None
