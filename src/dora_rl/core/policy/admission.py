"""The inequality that bounds staleness without dropping anything (docs/staleness.md).

Let s be the next step whose batch is not chosen yet. The groups that wait for a step are
schedulable if, for every d >= s, those with deadline <= d number at most (d - s + 1) * B.
Admission keeps it; `batching` keeps it from step to step.
"""

from collections.abc import Mapping

from dora_rl.core.protocol.types import Version


def schedulable(
    pending: Mapping[Version, int], version: Version, step: int, per_step: int, staleness: int
) -> int:
    """How many more groups may start on `version` so that all stay schedulable.

    A group on `version` counts against its own deadline and every later one; a version's
    deadline is the version plus `staleness`.
    """
    room: int | None = None
    due = 0
    for other in sorted({*pending, version}):
        due += pending.get(other, 0)
        if other >= version:
            capacity = (other + staleness - step + 1) * per_step
            room = capacity - due if room is None else min(room, capacity - due)
    assert room is not None  # `version` itself was in the loop
    return max(0, room)
