"""The five ways of working, as rows of one table over the same orchestrator.

A paradigm says what may be admitted, what a batch must wait for, and what a new version does
to running work. Nothing else in the core asks for a paradigm's name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from dora_rl.core.protocol.settings import ParadigmName, Settings


class Pipeline(NamedTuple):
    """What admission may look at: counts of groups, and of slots."""

    outstanding: int
    unbatched: int  # outstanding, and not in the batch that trains now
    ready: int
    idle_slots: int  # slots that neither running nor waiting work will use
    stalled: bool = False  # a batch is there, and waits for a group at its deadline


@dataclass(frozen=True, slots=True)
class Paradigm:
    """One row: the policies that make a way of working."""

    name: ParadigmName
    room: Callable[[Pipeline, Settings], int]
    """How many groups it would start now on the newest version; the bound may admit fewer."""
    pins_version: bool
    """C1: a trajectory is finished by the version that started it."""
    bounded: bool
    """C3: the trainer waits for a group at its deadline instead of overtaking it."""
    colocated: bool
    """Training and rollout take turns on the same devices."""
    rebalances: bool
    """Instances are re-partitioned over versions, and running work migrates."""
    staleness: int | None = None
    """K, where the paradigm itself fixes it."""

    @property
    def lends(self) -> bool:
        """Devices are split, and running work can leave them: they can be lent."""
        return self.rebalances and not self.colocated

    def max_staleness(self, settings: Settings) -> int:
        return settings.max_staleness if self.staleness is None else self.staleness


def _one_batch(pipeline: Pipeline, settings: Settings) -> int:
    return settings.groups_per_step - pipeline.outstanding


def _next_batch(pipeline: Pipeline, settings: Settings) -> int:
    """The next wave starts when the trainer takes the last one: both barriers at once."""
    return settings.groups_per_step - pipeline.unbatched


def _stream(pipeline: Pipeline, settings: Settings) -> int:
    """Keep the slots busy, but never starve the next batch nor pile up for a busy trainer."""
    _, unbatched, ready, idle_slots, stalled = pipeline
    if settings.pipeline_depth:
        return settings.pipeline_depth - unbatched
    if ready >= settings.groups_per_step and not stalled:
        # A whole batch waits for the trainer already: more would only be older when consumed.
        # A trainer that waits for a deadline is not busy, and has to catch up afterwards.
        return 0
    return max(settings.groups_per_step - unbatched, -(-idle_slots // settings.group_size))


PARADIGMS: dict[ParadigmName, Paradigm] = {
    row.name: row
    for row in (
        Paradigm(
            ParadigmName.SYNC,
            room=_one_batch,
            pins_version=True,
            bounded=True,
            colocated=True,
            rebalances=True,
            staleness=0,
        ),
        Paradigm(
            ParadigmName.ONE_STEP,
            room=_next_batch,
            pins_version=True,
            bounded=True,
            colocated=False,
            rebalances=True,
            staleness=1,
        ),
        Paradigm(
            ParadigmName.PARTIAL,
            room=_stream,
            pins_version=False,
            bounded=False,
            colocated=True,
            rebalances=False,
        ),
        Paradigm(
            ParadigmName.IN_FLIGHT,
            room=_stream,
            pins_version=False,
            bounded=False,
            colocated=False,
            rebalances=False,
        ),
        Paradigm(
            ParadigmName.MULTI_VERSION,
            room=_stream,
            pins_version=True,
            bounded=True,
            colocated=False,
            rebalances=True,
        ),
    )
}
