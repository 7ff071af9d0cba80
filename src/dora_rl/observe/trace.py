"""A timeline for Perfetto or chrome://tracing, written as the run goes, never held as a whole.

One process per paradigm; in it a lane for the trainer, one per instance with spans by version,
and lanes below an instance for what happened to it (installs, arrivals, parking). Viewers want
the spans of one lane to nest, so those that overlap get lanes of their own. Short changes are
merged: a span that lasts less than `resolution_s` says no more than its neighbours.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dora_rl.core.protocol.commands import Command, Install, Resume, Suspend, Train
from dora_rl.core.protocol.events import Event, GroupJudged, InstallFailed, VersionInstalled

# chrome://tracing paints by these names; each version takes the next.
_PALETTE = (
    "thread_state_running",
    "thread_state_runnable",
    "thread_state_iowait",
    "rail_response",
    "rail_animation",
    "rail_load",
    "good",
    "cq_build_passed",
)
# Perfetto paints by a span's name without its ASCII digits: these survive, and so tell versions
# apart while counts do not.
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
_TRAINER = "trainer"
_SUSPENDED = "rollout suspended"
_SORT_STRIDE = 64  # lanes of one instance, so that they stay together


class SpanLike(Protocol):
    """Something that took time; `lane` is an instance, or None for the trainer."""

    @property
    def kind(self) -> str: ...
    @property
    def lane(self) -> int | None: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def version(self) -> int: ...
    @property
    def detail(self) -> str: ...


class TraceFile:
    """A JSON array of trace events through `write`; `close` makes it whole."""

    SAVED = ("_pids", "_open", "_before")
    WIRED = ("_write",)

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._pids = 0
        self._open = True
        write("[")
        self._before = "\n"

    def process(self, name: str, resolution_s: float = 1.0) -> "Trace":
        """A new process: the timeline of one run."""
        self._pids += 1
        return Trace(self, self._pids, name, resolution_s)

    def put(self, event: dict[str, Any]) -> None:
        """Append one trace event."""
        self._write(self._before + json.dumps(event, separators=(",", ":"), allow_nan=False))
        self._before = ",\n"

    def close(self) -> None:
        """End the array; what was written before is a valid trace."""
        if self._open:
            self._open = False
            self._write("\n]\n")


class Running:
    """What one instance has been doing since `start`."""

    __slots__ = ("busy", "busy_s", "changed", "start", "version")

    def __init__(self, start: float, busy: int, version: int | None) -> None:
        self.start = self.changed = start
        self.busy = busy
        self.version = version
        self.busy_s = 0.0

    def change(self, now: float, busy: int) -> None:
        self.busy_s += (now - self.changed) * self.busy
        self.changed = now
        self.busy = busy


class Trace:
    """The timeline of one run: a recorder of slots and spans, and an observer of the stream."""

    SAVED = (
        *("_tids", "_ends", "_running", "_busy", "_ready", "_sampled", "_step", "_carrying"),
        *("_paused", "_now"),
    )
    WIRED = ("_file", "_pid", "_resolution_s")

    def __init__(self, file: TraceFile, pid: int, name: str, resolution_s: float) -> None:
        self._file = file
        self._pid = pid
        self._resolution_s = resolution_s
        self._tids: dict[str, int] = {}
        self._ends: dict[str, list[float]] = {}  # ends of the last spans on a base's lanes
        self._running: dict[int, Running] = {}
        self._busy = 0
        self._ready = 0
        self._sampled: dict[str, float] = {}
        self._step: int | None = None  # of the last batch
        self._carrying: dict[int, Install] = {}  # installs under running work, by instance
        self._paused = False
        self._now = 0.0
        self._metadata("process_name", 0, {"name": name})
        self._metadata("process_sort_index", 0, {"sort_index": pid})
        self._lane(_TRAINER, -2)

    # What the world records

    def slots(self, now: float, instance: int, busy: int, version: int | None) -> None:
        """From `now` on, so many slots of an instance are busy, the newest with `version`."""
        self._now = max(self._now, now)
        old = self._running.get(instance)
        self._busy += busy - (old.busy if old is not None else 0)
        self._sample(now, "running", self._busy)
        if old is None:
            self._running[instance] = Running(now, busy, version)
            return
        lasted = now - old.start >= self._resolution_s
        if old.version != version or lasted:
            self._turn_over(now, instance, busy, version)
        else:
            old.change(now, busy)

    def span(self, span: SpanLike) -> None:
        """A span has ended."""
        self._now = max(self._now, span.end)
        args: dict[str, Any] = {"version": span.version}
        if span.detail:
            args["detail"] = span.detail
        if span.lane is not None:
            base, sort = f"instance {span.lane} · moves", span.lane * _SORT_STRIDE + 1
        elif span.kind == "suspend":
            base, sort = _SUSPENDED, -1
        else:
            base, sort = _TRAINER, -2
        name = span.kind if span.kind == "suspend" else f"{span.kind} {_named(span.version)}"
        tid = self._lane(self._free_lane(base, span), sort)
        self._write_span(tid, span.kind, name, span.start, span.end, span.version, args)

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """What no record tells: ready groups, staleness, pauses, weights under running work."""
        if isinstance(event, GroupJudged) and event.filtered is None:
            self._ready += 1
            self._sample(now, "ready groups", self._ready)
        elif isinstance(event, VersionInstalled):
            self._carry(now, event)
        elif isinstance(event, InstallFailed):
            self._end_install(event)
        for command in commands:
            if type(command) is Train and command.step != self._step:
                self._step = command.step
                self._take(now, command)
            elif type(command) is Install:
                self._install(command)
            elif type(command) is Suspend or type(command) is Resume:
                self._pause(now, type(command) is Suspend)

    def _install(self, command: Install) -> None:
        """In place of what the instance was asked before: it installs one at a time."""
        self._carrying.pop(command.instance, None)
        if command.carry:
            self._carrying[command.instance] = command

    def _end_install(self, event: VersionInstalled | InstallFailed) -> bool:
        """Whether an install under running work has been answered by this."""
        asked = self._carrying.get(event.instance)
        if asked is None or (asked.incarnation, asked.version) != (
            event.incarnation,
            event.version,
        ):
            return False
        del self._carrying[event.instance]
        return True

    def _carry(self, now: float, event: VersionInstalled) -> None:
        """Running work continues under other weights: as many slots, another version."""
        if self._end_install(event):
            running = self._running.get(event.instance)
            if running is not None and running.busy:
                self._turn_over(now, event.instance, running.busy, event.version)

    def _pause(self, now: float, paused: bool) -> None:
        """Training takes the devices, or gives them back: what waits is not drawn as running."""
        for instance, running in self._running.items():
            self._turn_over(now, instance, running.busy, running.version)
        self._paused = paused

    def _turn_over(self, now: float, instance: int, busy: int, version: int | None) -> None:
        """End the span of an instance and begin the next."""
        running = self._running[instance]
        running.change(now, busy)
        if not self._paused:
            self._write_running(instance, running)
        self._running[instance] = Running(now, busy, version)

    def _take(self, now: float, command: Train) -> None:
        self._ready -= len(command.groups)
        self._sample(now, "ready groups", self._ready, always=True)
        ages: Counter[int] = Counter(command.step - group.version for group in command.groups)
        mean = sum(age * count for age, count in ages.items()) / max(1, ages.total())
        self._sample(now, "staleness", round(mean, 4), always=True)

    def end(self, now: float | None = None) -> None:
        """Write what is still open. Nothing may follow."""
        now = self._now if now is None else now
        for instance in sorted(self._running):
            self._turn_over(now, instance, 0, None)
        self._running.clear()

    # Writing

    def _write_running(self, instance: int, running: Running) -> None:
        seconds = running.changed - running.start
        if running.version is None or seconds <= 0.0:
            return  # idle: the gap shows it
        mean = running.busy_s / seconds
        self._write_span(
            self._lane(f"instance {instance}", instance * _SORT_STRIDE),
            "rollout",
            f"{_named(running.version)} · {mean:.0f} running",
            running.start,
            running.changed,
            running.version,
            {"version": running.version, "running": round(mean, 2)},
        )

    def _write_span(
        self,
        tid: int,
        category: str,
        name: str,
        start: float,
        end: float,
        version: int,
        args: dict[str, Any],
    ) -> None:
        begin = _micros(start)
        self._file.put(
            {
                "ph": "X",
                "pid": self._pid,
                "tid": tid,
                "ts": begin,
                "dur": _micros(end) - begin,
                "name": name,
                "cat": category,
                "cname": _PALETTE[version % len(_PALETTE)],
                "args": args,
            }
        )

    def _sample(self, now: float, counter: str, value: float, always: bool = False) -> None:
        due = self._sampled.get(counter, 0.0)
        if now < due and not always:
            return
        self._sampled[counter] = now + self._resolution_s
        self._file.put(
            {
                "ph": "C",
                "pid": self._pid,
                "tid": 0,
                "ts": _micros(now),
                "name": counter,
                "args": {counter: value},
            }
        )

    def _free_lane(self, base: str, span: SpanLike) -> str:
        """The first lane of a base where the span overlaps nothing."""
        ends = self._ends.setdefault(base, [])
        free = (number for number, end in enumerate(ends) if end <= span.start)
        number = next(free, len(ends))
        ends[number : number + 1] = [span.end]
        return base if number == 0 else f"{base} {number + 1}"

    def _lane(self, name: str, sort: int) -> int:
        tid = self._tids.get(name)
        if tid is None:
            tid = self._tids[name] = len(self._tids) + 1
            self._metadata("thread_name", tid, {"name": name})
            self._metadata("thread_sort_index", tid, {"sort_index": sort})
        return tid

    def _metadata(self, name: str, tid: int, args: dict[str, Any]) -> None:
        self._file.put(
            {"ph": "M", "pid": self._pid, "tid": tid, "ts": 0, "name": name, "args": args}
        )


def _named(version: int) -> str:
    return "v" + str(version).translate(_SUBSCRIPTS)


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)
