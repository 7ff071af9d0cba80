"""One simulated instance: an engine in a process that starts, dies, hangs and holds weights.

Invariant: an incarnation is one process; what it held dies with it. Tokens are sampled by the
weights that this process holds, whatever anybody believes. Knows nothing of commands and of
other instances; what the world must remember of it (whom the core has heard of, messages that
wait) stands here because it lives and dies with the process.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from dora_rl.core.protocol.events import Event, InstanceJoined, InstanceProgressed
from dora_rl.core.protocol.types import Length
from dora_rl.simulator.engine import Engine
from dora_rl.simulator.runs import DEAD, FROZEN, KEPT, PARKED, PAUSED, RUNNING, Run
from dora_rl.simulator.surroundings import Surroundings


class Loading(NamedTuple):
    """An install under way: what it replaces, and whether running work goes along."""

    evict: int | None
    carry: bool
    start: float


class Arrival(NamedTuple):
    """A migration on its way here."""

    version: int
    source: "Instance"
    fences: tuple[int, ...]  # at the source


class Instance(Engine):
    """A replica; `incarnation` counts the starts of its process."""

    __slots__ = (
        "alive",
        "asleep",
        "cut_off",
        "elastic",
        "expecting",
        "expelled",
        "incarnation",
        "installing",
        "known",
        "leaving",
        "mailbox",
        "outbox",
        "saved_at",
        "successors",
        "switching",
        "told",
        "version_slots",
        "versions",
    )

    def __init__(
        self,
        id: int,
        slots: int,
        version_slots: int,
        around: Surroundings,
        *,
        elastic: bool = False,
    ) -> None:
        self.version_slots = version_slots
        self.elastic = elastic  # on the trainer's devices
        self.incarnation = 0
        self.alive = False
        self.known = 0  # the latest incarnation that the core has heard of
        self.expelled = 0  # the latest incarnation that the core has disowned
        super().__init__(id, slots, around)

    def clear(self) -> None:
        super().clear()
        self.versions: dict[int, str] = {}  # version -> digest of the weights in memory
        self.installing: dict[int, Loading] = {}
        self.successors: dict[int, int] = {}  # version -> the one that took its work over
        self.expecting: dict[int, Arrival] = {}  # by migration
        self.leaving = False
        self.asleep = self.elastic  # training has its devices
        self.switching = False  # they change roles just now
        self.saved_at = self._clock.now
        self.told = False  # it has received a command
        self.cut_off = False  # nothing reaches it, and nothing is heard of it
        self.mailbox: list[tuple[Callable[[Any], None], Any]] = []
        self.outbox: list[Event] = []

    def boot(self) -> None:
        """A new process, empty; it says so."""
        self.incarnation += 1
        self.alive = True
        if not self.asleep:
            self._around.usage.change(self._clock.now, slots=self.slots)
        self.join()

    def join(self) -> None:
        """Announce this incarnation."""
        self.emit(
            InstanceJoined(
                self.id,
                self.incarnation,
                self.slots,
                self.capacity,
                self.version_slots,
                self.elastic,
            )
        )

    def die(self) -> None:
        """The process ends, with all that it holds."""
        self.advance(self._clock.now)
        facts = self._facts
        for run in self.runs.values():
            if run.state == RUNNING:
                self.leave(run)
            if run.state != KEPT:
                facts.cancelled_tokens += max(0, run.done - run.job.saved)
            run.state = DEAD
        self._account(0)
        if not self.asleep:
            self._around.usage.change(self._clock.now, slots=-self.slots)
        self.alive = False
        self.clear()

    def set_asleep(self, asleep: bool) -> None:
        """Training has its devices from now on, or rollout."""
        self.asleep = asleep
        slots = -self.slots if asleep else self.slots
        self._around.usage.change(self._clock.now, slots=slots)

    def settle(self) -> None:
        if self.alive:
            super().settle()

    def report(self, save: bool) -> None:
        """Say how far everything is; with `save`, what is said so far becomes durable."""
        self.advance(self._clock.now)
        steps = self.steps
        advanced = [run for run in self.runs.values() if run.state == RUNNING]
        lengths = [
            Length(run.trajectory, run.fence, run.done + steps - run.joined) for run in advanced
        ]
        for run in self.paused:
            if run.state == PAUSED:
                advanced.append(run)
                lengths.append(Length(run.trajectory, run.fence, run.done))
        self.paused.clear()
        told = tuple(lengths)
        if save:
            self.saved_at = self._clock.now
            for run, length in zip(advanced, told, strict=True):
                job = run.job
                if length.tokens > job.saved:
                    job.saved = length.tokens
                    job.saved_segments = run.segments_at(length.tokens)
        saved = told if save else ()
        self.emit(InstanceProgressed(self.id, self.incarnation, self.used, told, saved))

    # Weights

    def holds(self, version: int) -> bool:
        """In memory, or on its way there."""
        return version in self.versions or version in self.installing

    def serves(self, version: int) -> bool:
        """In memory, and not about to be replaced."""
        return version in self.versions and all(
            loading.evict != version or loading.carry for loading in self.installing.values()
        )

    def awaited(self, version: int) -> list[Run]:
        """Runs elsewhere that are to come here and continue under a version."""
        return [
            arrival.source.runs[fence]
            for arrival in self.expecting.values()
            for fence in arrival.fences
            if arrival.version == version and fence in arrival.source.runs
        ]

    def using(self, version: int) -> list[Run]:
        """Runs that could not continue here without a version. Parked ones could wait."""
        return [
            run
            for run in self.runs.values()
            if run.version == version
            and run.state != PARKED
            and run.state != KEPT
            and not (run.state == FROZEN and run.was_parked)
        ]
