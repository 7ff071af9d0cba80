"""Counts by reason. Reasons are free text, and may differ each time: so many are told apart."""

from collections import Counter

MOST_REASONS = 100
OTHER_REASONS = "other reasons"


def count_reason(counts: Counter[str], reason: str, number: int = 1) -> None:
    """Add to a reason's count; a new one, once there are MOST_REASONS, to that of all others."""
    if reason not in counts and len(counts) >= MOST_REASONS:
        reason = OTHER_REASONS
    counts[reason] += number
