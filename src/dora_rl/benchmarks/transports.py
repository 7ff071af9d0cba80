"""Seconds and bytes that a version takes from the trainer to the engines, by each transport.

The sender and every receiver are processes of this machine, with an actor of Ray beside each where
they use its object store. The weights are random, in bfloat16,
and some of them move to the next number with every version, as at a small learning rate.
"""

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora_rl.benchmarks.contestants.process import Contestant, Start, start_all
from dora_rl.benchmarks.reporting import Reporter
from dora_rl.benchmarks.training import workplace
from dora_rl.core.protocol.errors import UserError
from dora_rl.extras import missing, require
from dora_rl.runtime.launchers.ray.installation import check_installed, prepare_import

if TYPE_CHECKING:  # it imports Ray
    from dora_rl.runtime.launchers.ray.lone_actors import LoneActor

TRANSPORTS: dict[str, dict[str, Any]] = {
    "directory": {"transport": "directory", "delta": False},
    "directory+delta": {"transport": "directory", "delta": True},
    "process_group": {"transport": "process_group", "delta": False},
    "process_group+delta": {"transport": "process_group", "delta": True},
    "object_store": {"transport": "object_store", "delta": False},
    "object_store+delta": {"transport": "object_store", "delta": True},
}
_FILE = Path(__file__).parent / "contestants" / "transporter.py"
_BYTES = 2  # of a parameter in bfloat16
_MOST = 2000  # millions of parameters
_MOST_RECEIVERS = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured; refuses what cannot be."""

    transports: tuple[str, ...] = ()
    """By default all that this installation has: `object_store` needs Ray."""
    parameters: tuple[int, ...] = (10, 100, 500)
    """In millions."""
    receivers: tuple[int, ...] = (1, 4)
    changed: float = 0.02
    versions: int = 3
    case_seconds: float = 120.0
    """Versions that a case would begin later than this are left out, but for one."""

    def __post_init__(self) -> None:
        if not self.transports:
            found = (n for n in TRANSPORTS if not _by_objects(n) or not missing("ray"))
            object.__setattr__(self, "transports", tuple(found))
        for name in self.transports:
            if name not in TRANSPORTS:
                raise UserError(f"--transports must be of {', '.join(TRANSPORTS)}: `{name}`.")
        bounds = {"parameters": _MOST, "receivers": _MOST_RECEIVERS}
        for option, most in bounds.items():
            for value in getattr(self, option) or (0,):
                if not 1 <= value <= most:
                    raise UserError(f"--{option} must be from 1 to {most}: `{value}`.")
        if not 0 < self.changed <= 1:
            raise UserError(f"--changed must be above 0, and 1 at most: `{self.changed:g}`.")
        if self.versions < 1:
            raise UserError(f"--versions must be >= 1: `{self.versions}`.")
        if self.case_seconds <= 0:
            raise UserError(f"--case-seconds must be > 0: `{self.case_seconds:g}`.")

    def cases(self) -> "Iterator[Case]":
        """By size and number of receivers, so that what is compared is measured side by side."""
        for parameters in self.parameters:
            for receivers in self.receivers:
                for name in self.transports:
                    yield Case(name, parameters, receivers)

    @property
    def by_objects(self) -> bool:
        return any(map(_by_objects, self.transports))

    @property
    def object_bytes(self) -> int:
        """Of an object store in which three versions are at once, and some room."""
        return max(self.parameters) * 1_000_000 * _BYTES * 3 + (256 << 20)

    @property
    def disk_bytes(self) -> int:
        """At once: two versions in the store, one on its way, two copies of every receiver."""
        return max(self.parameters) * 1_000_000 * _BYTES * (3 + 2 * max(self.receivers))


@dataclass(frozen=True, slots=True)
class Case:
    """One transport, size and number of receivers, with the versions that were measured."""

    transport: str
    parameters: int
    receivers: int
    publish_s: list[float] = field(default_factory=list)
    receive_s: list[float] = field(default_factory=list)
    """Until the last receiver had it."""
    sent_bytes: list[int] = field(default_factory=list)
    """To one receiver."""
    whole_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "transport": self.transport,
            "parameters": self.parameters * 1_000_000,
            "receivers": self.receivers,
            "publish_s": statistics.median(self.publish_s),
            "receive_s": statistics.median(self.receive_s),
            "seconds": statistics.median(
                map(sum, zip(self.publish_s, self.receive_s, strict=True))
            ),
            "sent_bytes": statistics.median(self.sent_bytes),
            "whole_bytes": self.whole_bytes,
            "versions": len(self.receive_s),
        }


@dataclass(frozen=True, slots=True)
class Result:
    plan: Plan
    cases: tuple[Case, ...]

    def to_json(self) -> dict[str, Any]:
        return {"changed": self.plan.changed, "cases": [case.to_json() for case in self.cases]}

    def summary(self) -> list[str]:
        lines = [
            f"{'transport':<20} {'parameters':>10} {'receivers':>9} {'publish':>9} {'receive':>9} "
            f"{'MB sent to each':>15}"
        ]
        for case in self.cases:
            row = case.to_json()
            lines.append(
                f"{case.transport:<20} {case.parameters:>8} M {case.receivers:>9} "
                f"{row['publish_s']:>7.2f} s {row['receive_s']:>7.2f} s "
                f"{row['sent_bytes'] / 1e6:>15.1f}"
            )
        return lines


def measure(plan: Plan, reporter: Reporter | None = None) -> Result:
    require("dora-rl bench transports", "engine")
    reporter = reporter or Reporter()
    cases: list[Case] = []

    def result() -> Result:
        return Result(plan, tuple(case for case in cases if case.sent_bytes))

    reporter.collects(lambda: result() if any(case.sent_bytes for case in cases) else None)
    with workplace() as place:
        free = shutil.disk_usage(place).free
        if free < plan.disk_bytes:
            raise UserError(
                f"`{place}` has {free / 1e9:.1f} GB free, and {plan.disk_bytes / 1e9:.1f} GB are "
                "needed. Measure fewer --parameters or --receivers, or set TMPDIR."
            )
        with ExitStack() as stack:
            names = ["sender", *(f"receiver-{n}" for n in range(max(plan.receivers)))]
            actors = stack.enter_context(_actors(plan, len(names), reporter))
            started = start_all(stack, list(map(_start, names)), place, reporter)
            for case in plan.cases():
                cases.append(case)
                beside = actors if _by_objects(case.transport) else []
                _measure(plan, cases, started, beside, place, reporter)
    return result()


@contextmanager
def _actors(plan: Plan, count: int, reporter: Reporter) -> "Iterator[list[LoneActor]]":
    """One for each process, where the object store of a cluster is measured."""
    if not plan.by_objects:
        yield []
        return
    check_installed()
    prepare_import(None)
    reporter.phase("a Ray cluster of this machine starts")
    from dora_rl.runtime.launchers.ray.lone_actors import lone_actors

    with lone_actors(count, plan.object_bytes) as actors:
        yield actors


def _measure(
    plan: Plan,
    cases: list[Case],
    started: Sequence[Contestant],
    actors: "Sequence[LoneActor]",
    place: Path,
    reporter: Reporter,
) -> None:
    """Fill the last case; the first version, which every receiver gets whole, is not counted."""
    case = cases[-1]
    reporter.phase(f"{case.transport}, {case.parameters} M parameters, {case.receivers} receivers")
    sender, *receivers = started[: 1 + case.receivers]
    late_at = time.monotonic() + plan.case_seconds
    with tempfile.TemporaryDirectory(dir=place) as work:
        ends = {"weights": f"{work}/weights", "settings": TRANSPORTS[case.transport]}
        size = {"parameters": case.parameters * 1_000_000, "changed": plan.changed}
        sender.ask("load", **ends, **size)
        if actors:
            actors[0].serve(Path(work, "weights"))
        for number, receiver in enumerate(receivers, start=1):
            if actors:
                _link(receiver, actors[number], actors[0], work, ends)
            else:
                receiver.ask("load", **ends, cache=f"{work}/{receiver.name}")
        for version in range(plan.versions + 1):
            if version > 1 and time.monotonic() > late_at:
                reporter.step(f"{plan.versions + 1 - version} versions are left out")
                break
            reporter.step(f"version {version} of {plan.versions}")
            if version:
                sender.ask("change")
            published_s = sender.ask("publish", version=version)
            if actors and version >= 2:
                actors[0].retire(version - 2)  # it was deleted
            found = _receive(receivers, version)
            if version:
                cases[-1] = _with(cases[-1], published_s, found)
        for end in (*receivers, sender):
            end.ask("close")


def _link(
    receiver: Contestant, actor: "LoneActor", sender: "LoneActor", work: str, ends: dict[str, Any]
) -> None:
    """Have a receiver pull from the object store, by the actor beside it."""
    path = Path(work, f"{receiver.name}.socket")
    receiver.ask("load", **ends, cache=f"{work}/{receiver.name}", objects=str(path))
    actor.connect(Path(work, "weights"), path)
    actor.introduce(sender)
    receiver.ask("accept")


def _with(case: Case, publish_s: float, found: list[dict[str, Any]]) -> Case:
    """One more version; a new case, so that an interrupt finds all of it or nothing."""
    return Case(
        case.transport,
        case.parameters,
        case.receivers,
        [*case.publish_s, publish_s],
        [*case.receive_s, max(one["seconds"] for one in found)],
        [*case.sent_bytes, round(statistics.mean(one["sent_bytes"] for one in found))],
        max(one["whole_bytes"] for one in found),
    )


def _receive(receivers: Sequence[Contestant], version: int) -> list[dict[str, Any]]:
    """All at once."""
    for receiver in receivers:
        receiver.send("receive", version=version)
    return [receiver.receive() for receiver in receivers]


def _by_objects(transport: str) -> bool:
    return TRANSPORTS.get(transport, {}).get("transport") == "object_store"


def _start(name: str) -> Start:
    """It is told with each case what it is to be."""
    return Start(name, [sys.executable], _FILE, {}, {"OMP_NUM_THREADS": "1"})
