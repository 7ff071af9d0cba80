"""How much one event costs the orchestrator, and how that grows with the fleet.

Only processor time inside `Orchestrator.handle` counts: it does no I/O, and what else runs on
the machine is not its cost. The sizes take turns in small chunks, so that a noisy moment hits all
of them alike; each is measured over whole train steps, so that what is done once a step (batch,
publication, rebalance) is charged in its true proportion.
"""

import gc
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dora_rl.benchmarks.reporting import Reporter
from dora_rl.benchmarks.world import SLOTS, World
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.events import Event, WeightsPublished

GOAL = 2.0  # cost per event at the largest size over that at the smallest
DEFAULT_INSTANCES = (64, 512, 4096, 8192)
DEFAULT_EVENTS = 150_000
CHUNK = 4_000  # events of one size before the next takes its turn
WARM_STEPS = 2
_GIVE_UP = 200  # events per slot: a world that is not steady by then never will be


@dataclass(frozen=True, slots=True)
class Rebalances:
    count: int
    mean_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True)
class Kind:
    """One type of event; `share` is of the time of all."""

    count: int
    mean_us: float
    share: float


@dataclass(frozen=True, slots=True)
class Size:
    """What was measured on one number of instances."""

    instances: int
    in_flight: int
    versions: int
    steps: int
    events: int
    events_per_s: float
    mean_us: float
    p50_us: float
    p99_us: float
    max_us: float
    rebalances: Rebalances
    kinds: dict[str, Kind]


@dataclass(frozen=True, slots=True)
class Result:
    sizes: tuple[Size, ...]

    @property
    def ratio(self) -> float:
        """Cost per event at the largest size, over that at the smallest."""
        return self.sizes[-1].mean_us / self.sizes[0].mean_us

    def to_json(self) -> dict[str, Any]:
        return {
            "slots_per_instance": SLOTS,
            "sizes": [asdict(size) for size in self.sizes],
            "cost_ratio": self.ratio,
            "goal": GOAL,
            "within_goal": self.ratio <= GOAL,
        }

    def summary(self) -> list[str]:
        lines = [
            f"{'instances':>9} {'in flight':>9} {'events/s':>9} {'mean us':>8} {'p50 us':>7} "
            f"{'p99 us':>7} {'rebalances':>10} {'mean ms':>8} {'max ms':>8}"
        ]
        for size in self.sizes:
            again = size.rebalances
            lines.append(
                f"{size.instances:>9,} {size.in_flight:>9,} {size.events_per_s:>9,.0f} "
                f"{size.mean_us:>8.1f} {size.p50_us:>7.1f} {size.p99_us:>7.1f} "
                f"{again.count:>10,} {again.mean_ms:>8.1f} {again.max_ms:>8.1f}"
            )
        first, last = self.sizes[0].instances, self.sizes[-1].instances
        if first != last:
            lines.append(
                f"An event costs {self.ratio:.2f} times as much on {last:,} instances "
                f"as on {first:,} (goal: at most {GOAL:g})."
            )
        return lines


class Meter:
    """One world, and the time that its orchestrator took."""

    def __init__(self, instances: int) -> None:
        self.world = World(instances)
        self._reset()

    def _reset(self) -> None:
        self.steps = 0
        self.taken = array("q")  # ns of each event
        self.rebalances = array("q")
        self.by_kind: dict[type[Event], tuple[int, int]] = {}

    def one(self) -> type[Event]:
        """Deliver one event."""
        world = self.world
        event = world.next_event()
        handle, now, counters = world.core.handle, world.now, world.core.state.counters
        before = counters["rebalances"]
        began = time.thread_time_ns()
        commands = handle(now, event)
        taken = time.thread_time_ns() - began
        world.obey(commands)
        kind = type(event)
        self.taken.append(taken)
        if counters["rebalances"] != before:
            self.rebalances.append(taken)
        count, total = self.by_kind.get(kind, (0, 0))
        self.by_kind[kind] = count + 1, total + taken
        self.steps += kind is WeightsPublished
        return kind

    def warm_up(self) -> None:
        """Bring the world to steady state and to the beginning of a step."""
        slots = self.world.instances * SLOTS
        busy = 0
        for _ in range(_GIVE_UP * slots):
            published = self.one() is WeightsPublished
            busy = max(busy, len(self.world.runs))
            # Parking stops nothing in that world, so more than the slots may run.
            if published and self.steps > WARM_STEPS and busy >= slots and self._versions() >= 2:
                self._reset()
                return
        raise RuntimeError(f"{self.world.instances} instances never reached a steady state")

    def measure(self, events: int) -> bool:
        """Continue for one chunk; true when `events` and the step they end in are over."""
        for _ in range(CHUNK):
            if self.one() is WeightsPublished and len(self.taken) >= events:
                return True
        return False

    def _versions(self) -> int:
        return len(self.world.core.state.work.unfinished)

    def result(self) -> Size:
        taken = sorted(self.taken)
        total = sum(taken)
        again = self.rebalances
        return Size(
            instances=self.world.instances,
            in_flight=len(self.world.runs),
            versions=self._versions(),
            steps=self.steps,
            events=len(taken),
            events_per_s=len(taken) / total * 1e9,
            mean_us=total / len(taken) / 1e3,
            p50_us=taken[len(taken) // 2] / 1e3,
            p99_us=taken[len(taken) * 99 // 100] / 1e3,
            max_us=taken[-1] / 1e3,
            rebalances=Rebalances(
                len(again),
                sum(again) / len(again) / 1e6 if again else 0.0,
                max(again, default=0) / 1e6,
            ),
            kinds={
                kind.__name__: Kind(count, ns / count / 1e3, ns / total)
                for kind, (count, ns) in sorted(self.by_kind.items(), key=lambda item: -item[1][1])
            },
        )


def measure(
    sizes: Sequence[int] = DEFAULT_INSTANCES,
    events: int = DEFAULT_EVENTS,
    reporter: Reporter | None = None,
) -> Result:
    """Measure every size in one run, smallest first in the result."""
    reporter = reporter or Reporter()
    meters: list[Meter] = []
    warm: list[Meter] = []

    def result() -> Result | None:
        measured = [meter.result() for meter in warm if meter.taken]
        return Result(tuple(measured)) if measured else None

    reporter.collects(result)
    collecting = gc.isenabled()
    # As timeit does: when the collector runs depends on the world's garbage, not on the core's.
    gc.disable()
    try:
        for size in sorted(check_sizes(sizes)):
            reporter.phase(f"warming up {size:,} instances")
            meters.append(Meter(size))
            meters[-1].warm_up()
        reporter.phase("measuring")
        warm += meters
        waiting = list(meters)
        while waiting:
            waiting = [meter for meter in waiting if not meter.measure(events)]
            done = min(len(meter.taken) for meter in meters)
            reporter.step(f"{min(99, 100 * done // events)} % done")
    finally:
        if collecting:
            gc.enable()
    return Result(tuple(meter.result() for meter in meters))


def check_sizes(sizes: Sequence[int]) -> Sequence[int]:
    """Refuse what cannot be measured."""
    if not sizes:
        raise UserError("no sizes to measure. Give the numbers of instances, as in `64,512`.")
    for size in sizes:
        if size < 2:
            raise UserError(
                f"instances must be >= 2: `{size}`. Two versions at once need a place each."
            )
    if len(set(sizes)) < len(sizes):
        raise UserError(f"a size is given twice: `{','.join(map(str, sizes))}`. Name each once.")
    return sizes
