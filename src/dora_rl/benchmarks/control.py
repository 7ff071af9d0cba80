"""What a large fleet costs the driver: processor time, latency of its decisions, memory.

The driver is the real one, in this process: the launcher's loop, sockets, messages in their codec,
core, journal, ledger, snapshots, timeline. The workers are a process that computes nothing and
says what so many instances would (`control_fleet`); a reward takes its time, and no processor.
Latency is counted from the moment a worker sends a message until all that the core answered is on
its way.
"""

import resource
import selectors
import socket
import subprocess
import sys
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from dora_rl.benchmarks.control_fleet import Order
from dora_rl.benchmarks.reporting import Reporter
from dora_rl.benchmarks.training import workplace
from dora_rl.config import load_toml, merged
from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.events import Event, WeightsPublished
from dora_rl.quickstart import model_directory
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.control.decisions import Role, Worker
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.control.task_workers import TaskWorkers
from dora_rl.runtime.errors import RunFailed
from dora_rl.runtime.launchers.local.channel import Channel
from dora_rl.runtime.launchers.local.launcher import LocalRuntime, Receive
from dora_rl.runtime.launchers.local.processes import WorkerProcess
from dora_rl.runtime.prepare.plan import Plan as RunPlan
from dora_rl.runtime.prepare.plan import prepare, read_config
from dora_rl.runtime.records.run_files import RunFiles
from dora_rl.store.rundir import CHECKPOINTS, JOURNAL, TRAJECTORIES
from dora_rl.tasks.scores import Outcome, ScoreJob
from dora_rl.tasks.task import Task

GOAL_SHARE = 0.5  # of a core
GOAL_P99_MS = 20.0
GROUP_SIZE = 16
SCORE_S = 0.5
MAX_STALENESS = 16  # eight batches are in flight at once
FILLED = 0.95  # of the slots, at least once before it is measured
WARM_STEPS = 1
_WARM_LIMIT_S = 600.0
_END_S = 20.0  # for the fleet to end
_FILES = 256  # that a process has open beside one socket, and one file, of each instance
_STEPS = 10_000_000  # never taken


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured; refuses what cannot be."""

    instances: int = 1000
    slots: int = 64
    tokens: int = 12_000
    """Of a response, in the mean."""
    report_period: float = 10.0
    save_period: float = 60.0
    seconds: float = 110.0
    pace: float = 1.0
    """Installs, moves, training and publications take this many times as long as usual."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("instances", 2, 1024),  # as many as runtime.instances may be
            ("slots", 1, 4096),
            ("tokens", 100, 1_000_000),
            ("report_period", 0.1, 30.0),  # half of the timeout of heartbeats, at most
            ("save_period", 0.1, 3600.0),
            ("seconds", 1.0, 86_400.0),
            ("pace", 1e-3, 1e3),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                option = name.replace("_", "-")
                raise UserError(f"--{option} must be from {least:g} to {most:g}: `{value:g}`.")

    @property
    def groups_per_step(self) -> int:
        """An eighth of what is in flight."""
        return max(1, self.trajectories // (8 * GROUP_SIZE))

    @property
    def trajectories(self) -> int:
        """That run at once."""
        return self.instances * self.slots


@dataclass(frozen=True, slots=True)
class Latency:
    """From a worker's message to what was answered, of all messages of instances."""

    messages: int
    p50_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True)
class Result:
    plan: Plan
    seconds: float
    steps: int
    in_flight: int
    versions: int
    core_share: float
    busiest_s: float
    """The largest share within one second."""
    latency: Latency | None
    """None if the fleet could not say when it sent its messages."""
    memory_mb: float
    growth_mb: float
    journal_bytes_per_s: float
    messages_per_s: dict[str, float]
    events_per_s: dict[str, float]

    @property
    def within_goal(self) -> bool:
        fast = self.latency is not None and self.latency.p99_ms <= GOAL_P99_MS
        return fast and self.core_share <= GOAL_SHARE

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        load = {**found.pop("plan"), "group_size": GROUP_SIZE}
        goal = {"core_share": GOAL_SHARE, "p99_ms": GOAL_P99_MS}
        load["groups_per_step"] = self.plan.groups_per_step
        return {"load": load, **found, "goal": goal, "within_goal": self.within_goal}

    def summary(self) -> list[str]:
        events, messages = (
            sum(rates.values()) for rates in (self.events_per_s, self.messages_per_s)
        )
        lines = [
            f"{self.plan.instances:,} instances, {self.in_flight:,} trajectories in flight on "
            f"{self.versions} versions: {messages:,.0f} messages/s, {events:,.0f} events/s, "
            f"{self.steps} train steps in {self.seconds:.0f} s",
            f"driver: {self.core_share:.0%} of a core (goal: {GOAL_SHARE:.0%} at most), "
            f"{self.busiest_s:.0%} in the busiest second",
        ]
        if self.latency is not None:
            lines.append(
                f"latency of a decision: p50 {self.latency.p50_ms:.1f} ms, p99 "
                f"{self.latency.p99_ms:.1f} ms (goal: {GOAL_P99_MS:g} at most), longest "
                f"{self.latency.max_ms:.0f} ms"
            )
        lines.append(
            f"memory: {self.memory_mb:.0f} MB, {self.growth_mb:+.0f} MB while measured; journal "
            f"{self.journal_bytes_per_s / 1e6:.2f} MB/s"
        )
        rates = sorted(self.events_per_s.items(), key=lambda item: -item[1])
        lines += [f"  {name:<22} {rate:>8.1f}/s" for name, rate in rates]
        return lines


class _FleetProcess:
    """The process that stands for all workers, and the driver's ends of its sockets."""

    def __init__(self, plan: Plan, out: Path, sent: Path) -> None:
        self._sent = sent
        pairs = [socket.socketpair() for _ in range(plan.instances + 1)]
        self._ours = [ours for ours, _ in pairs]
        theirs = [end for _, end in pairs]
        trainer, *instances = [end.fileno() for end in theirs]
        order = Order(
            instances=tuple(instances),
            trainer=trainer,
            slots=plan.slots,
            tokens=plan.tokens,
            report_period_s=plan.report_period,
            save_every_s=plan.save_period,
            pace=plan.pace,
            samples=str(out / TRAJECTORIES),
            checkpoints=str(out / CHECKPOINTS),
            sent=str(sent),
        )
        encoded = msgspec.json.encode(order).decode()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dora_rl.benchmarks.control_fleet", encoded],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(trainer, *instances),
            start_new_session=True,  # Ctrl-C is for us
        )
        for end in theirs:
            end.close()

    def socket_of(self, worker: Worker) -> socket.socket:
        number = 0 if worker.instance is None else worker.instance + 1
        return self._ours[number]

    def end(self) -> list["array[float]"]:
        """When each instance sent each of its messages; empty if the process did not say."""
        with suppress(OSError, subprocess.TimeoutExpired):
            self._process.communicate(timeout=_END_S)  # closes its standard input
        self._process.kill()
        self._process.wait()
        for ours in self._ours:
            ours.close()
        return _read_times(self._sent) if self._sent.is_file() else []


def _read_times(path: Path) -> list["array[float]"]:
    found, data = [], memoryview(path.read_bytes())
    while data:
        end = 8 + 8 * int.from_bytes(data[:8], "little")
        times = array("d")
        times.frombytes(data[8:end])
        found.append(times)
        data = data[end:]
    return found


class _Stand(WorkerProcess):
    """One worker of the fleet's process, as the launcher knows it."""

    def __init__(self, name: str, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.name = name
        self.channel = Channel(sock)

    def kill(self) -> None:
        raise RunFailed(f"{self.name} had to be given up: the driver did not keep up")

    def end(self) -> None:
        """The fleet ends as a whole."""


class _Rewards(TaskWorkers):
    """Gives every response a reward after a while; siblings get different ones."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, lambda about, text: None)
        self._due: deque[tuple[float, Callable[[Outcome], None]]] = deque()
        self._scored = 0

    def start(self) -> None:
        """There are no processes."""

    def score(self, job: ScoreJob, about: str, reply: Callable[[Outcome], None]) -> None:
        self._due.append((time.monotonic() + SCORE_S, reply))

    def poll_scores(self, timeout_s: float = 0.0) -> int:
        before, now = self._scored, time.monotonic()
        while self._due and self._due[0][0] <= now:
            self._scored += 1
            self._due.popleft()[1](Outcome(ticket=self._scored, reward=self._scored % 2))
        return self._scored - before


class _FleetRuntime(LocalRuntime):
    """The local launcher, whose workers are all in one process; ends when enough is measured."""

    def __init__(self, files: RunFiles, fleet: _FleetProcess, meter: "_Meter") -> None:
        super().__init__(files, around_receive=meter.around)
        self._fleet = fleet
        self._meter = meter

    def run_measured(self) -> None:
        with suppress(_Over):
            self.run()

    def _make_task_workers(self, files: RunFiles, *, scores: bool) -> TaskWorkers:
        return _Rewards(files.plan.task)

    def _spawn(self, worker: Worker, setup: ms.Setup, log: str) -> WorkerProcess:
        stand = _Stand(str(worker), self._fleet.socket_of(worker))
        if setup.incarnation:
            raise RunFailed(f"{worker} was lost: see the log above")
        if worker.role is Role.ROLLOUT:
            assert worker.instance is not None
            self._meter.instances[stand] = worker.instance
        serve = partial(self._serve, stand)
        self._selector.register(stand.channel.socket, selectors.EVENT_READ, serve)
        return stand

    def _end(self, processes: Iterable[WorkerProcess]) -> None:
        """The fleet ends as a whole."""

    def _turn(self) -> None:
        super()._turn()
        self._meter.look()


class _Over(Exception):
    """Enough is measured."""


class _Meter(Listener):
    """Warms up, measures, and says when it is over."""

    def __init__(self, plan: Plan, files: RunFiles, reporter: Reporter) -> None:
        self._plan = plan
        self._core = files.orchestrator
        self._journal = files.plan.out / JOURNAL
        self._reporter = reporter
        self.instances: dict[WorkerProcess, int] = {}
        self._answered = [array("d") for _ in range(plan.instances)]
        self._sent: Sequence[array[float]] = ()
        self._begun: float | None = None
        self._began_up = time.monotonic()
        self._filled = False
        self._seconds: list[tuple[float, float]] = []  # wall and processor time, at each second
        self._events: Counter[str] = Counter()
        self._messages: Counter[str] = Counter()
        self._steps = 0
        self._first: dict[str, float] = {}

    # What happens

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        self._events[type(event).__name__] += 1
        self._steps += isinstance(event, WeightsPublished)

    def around(self, receive: Receive) -> Receive:
        def receive_timed(process: WorkerProcess, message: ms.Message) -> None:
            receive(process, message)
            self._messages[type(message).__name__] += 1
            instance = self.instances.get(process)
            if instance is not None:
                self._answered[instance].append(time.monotonic())

        return receive_timed

    def look(self) -> None:
        """After every turn of the loop."""
        now = time.monotonic()
        if self._begun is None:
            self._warm(now)
        elif now >= self._seconds[-1][0] + 1.0:
            self._seconds.append((now, time.process_time()))
            left = self._plan.seconds - (now - self._begun)
            self._reporter.step(f"{max(0.0, left):.0f} s left, train step {self._steps}")
            if left <= 0:
                raise _Over

    def _warm(self, now: float) -> None:
        self._filled = self._filled or self._running >= FILLED * self._plan.trajectories
        # Version 0 is published before any step.
        if self._filled and self._steps > WARM_STEPS:
            self._reporter.phase("measuring")
            self._steps = 0
            self._events.clear()
            self._messages.clear()
            self._begun = now
            self._seconds = [(now, time.process_time())]
            self._first = {"memory": _memory_mb(), "journal": self._journal.stat().st_size}
        elif now > self._began_up + _WARM_LIMIT_S:
            raise RunFailed(
                f"{self._plan.instances} instances were not in a steady state after "
                f"{_WARM_LIMIT_S:g} s: the driver does not keep up. Measure fewer --instances."
            )
        else:
            self._reporter.step(f"{self._running:,} trajectories run, version {self._steps - 1}")

    @property
    def _running(self) -> int:
        return self._core.state.fleet.load

    # What it came to

    def ended(self, sent: Sequence["array[float]"]) -> None:
        self._sent = sent

    def result(self) -> Result | None:
        if self._begun is None or len(self._seconds) < 2:
            return None
        (began, cpu), (ended, cpu_end) = self._seconds[0], self._seconds[-1]
        pairs = zip(self._seconds, self._seconds[1:], strict=False)
        seconds = ended - began
        memory = _memory_mb()
        return Result(
            plan=self._plan,
            seconds=seconds,
            steps=self._steps,
            in_flight=self._running,
            versions=len(self._core.state.versions.live),
            core_share=(cpu_end - cpu) / seconds,
            busiest_s=max((c1 - c0) / (t1 - t0) for (t0, c0), (t1, c1) in pairs),
            latency=self._latency(began, ended),
            memory_mb=memory,
            growth_mb=memory - self._first["memory"],
            journal_bytes_per_s=(self._journal.stat().st_size - self._first["journal"]) / seconds,
            messages_per_s={name: n / seconds for name, n in self._messages.most_common()},
            events_per_s={name: n / seconds for name, n in self._events.most_common()},
        )

    def _latency(self, began: float, ended: float) -> Latency | None:
        """Of messages that were sent meanwhile: each instance's are answered in order."""
        taken = sorted(
            answered - sent
            for answers, times in zip(self._answered, self._sent, strict=False)
            for sent, answered in zip(times, answers, strict=False)
            if began <= sent < ended
        )
        if not taken:
            return None
        p50, p99 = taken[len(taken) // 2], taken[len(taken) * 99 // 100]
        return Latency(len(taken), 1e3 * p50, 1e3 * p99, 1e3 * taken[-1])


def measure(plan: Plan, reporter: Reporter | None = None) -> Result:
    reporter = reporter or Reporter()
    _allow_files(plan.instances + _FILES)
    with workplace() as place:
        out = place / "run"
        with RunFiles(_run_plan(plan, out)) as files:
            meter = _Meter(plan, files, reporter)
            files.listeners.append(meter)
            reporter.collects(meter.result)
            reporter.phase(f"filling {plan.instances:,} instances")
            fleet = _FleetProcess(plan, out, place / "sent")
            try:
                _FleetRuntime(files, fleet, meter).run_measured()
            finally:
                meter.ended(fleet.end())
                result = meter.result()  # while its files are there, for an interrupt too
                reporter.collects(lambda: result)
    assert result is not None, "it is over when enough is measured"
    return result


def _run_plan(plan: Plan, out: Path) -> RunPlan:
    quickstart = load_toml(model_directory().parent / "quickstart.toml")
    ours: dict[str, dict[str, Any]] = {
        "task": {"eval_prompts": None, "eval_every": None},
        "train": {"dtype": "float32"},  # else it is measured first
        "run": {"steps": _STEPS, "out": str(out), "save_every_s": plan.save_period},
        "rollout": {"slots": plan.slots, "version_slots": 1},
        "orchestration": {
            "groups_per_step": plan.groups_per_step,
            "group_size": GROUP_SIZE,
            "max_staleness": MAX_STALENESS,
        },
        "runtime": {"instances": plan.instances, "report_period_s": plan.report_period},
    }
    data = merged(quickstart, ours)
    settings = {
        section: {key: value for key, value in values.items() if value is not None}
        for section, values in data.items()
    }
    return prepare(read_config(settings))


def _allow_files(needed: int) -> None:
    """A socket of each instance; its process has a file of each as well."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * needed
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise UserError(
            f"a process may have {hard} files open here, and {wanted} are needed. Measure fewer "
            "--instances, or raise it with `ulimit -Hn`."
        )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _memory_mb() -> float:
    """Resident memory of this process, at its largest so far."""
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest / 1e6 if sys.platform == "darwin" else largest / 1e3
