"""Which groups the next train step consumes, and when it must wait (docs/staleness.md).

Bounded batches are earliest-deadline-first, and leave the rest schedulable: it is not enough
to hold every group whose deadline is now, because a batch of later ones could leave more
early groups behind than the next steps can take.
"""

from collections.abc import Mapping

from dora_rl.core.protocol.types import Version


def take_earliest(ready: Mapping[Version, int], size: int) -> dict[Version, int]:
    """How many ready groups of each version the earliest-deadline batch takes."""
    taken: dict[Version, int] = {}
    for version in sorted(ready):
        count = min(ready[version], size - sum(taken.values()))
        if count:
            taken[version] = count
    return taken


def overdue(
    pending: Mapping[Version, int],
    taken: Mapping[Version, int],
    step: int,
    per_step: int,
    staleness: int,
) -> Version | None:
    """The version whose unfinished groups this batch would leave unschedulable, if any.

    Taking ready groups by deadline maximises, for every d at once, how many with deadline
    <= d are taken: if that batch leaves too many behind, so does any other.
    """
    left = 0
    for version in sorted(pending):
        left += pending[version] - taken.get(version, 0)
        if left > (version + staleness - step) * per_step:
            return version
    return None
