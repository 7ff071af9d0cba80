"""The virtual world: it hands events to the core and performs what the core commands.

    commands = orchestrator.handle(now, event)

Everything of one instant is done before time advances: events are handed over in the order
in which they came, every command is performed, then the engines that were touched are settled.
Observers see each event with its commands. The world checks what it is told and raises
`WorldError` on what no real engine could do; it takes no decision of its own. A run is a pure
function of orchestrator, parameters, sampler and seed.
"""

import gc
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple, Protocol

from dora_rl.core.protocol import commands as cmd
from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.events import Event, InstanceJoined, WeightsPublished
from dora_rl.simulator.clock import Clock
from dora_rl.simulator.core_timer import CoreTimer
from dora_rl.simulator.errors import WorldError
from dora_rl.simulator.faults import Faults
from dora_rl.simulator.fleet import Fleet
from dora_rl.simulator.hosting import Hosting
from dora_rl.simulator.instance import Instance
from dora_rl.simulator.migrations import Migrations
from dora_rl.simulator.network import Network
from dora_rl.simulator.params import WorldParams
from dora_rl.simulator.placing import Placing, Shapes
from dora_rl.simulator.runs import KEPT, Job, Run
from dora_rl.simulator.services import Services
from dora_rl.simulator.surroundings import Surroundings
from dora_rl.simulator.trainer import Store, Trainer, digest_of
from dora_rl.simulator.usage import Facts, Recorder, Usage, UsageReading
from dora_rl.simulator.workload import Sampler, Workload

Observer = Callable[[float, Event, Sequence[Command]], None]
Progress = Callable[[float, int], None]

# Progress is also shown between train steps, after so many actions of the clock.
PROGRESS_EVERY = 1 << 15


class Decider(Protocol):
    """The core, as the world sees it."""

    def handle(self, now: float, event: Event) -> list[Command]:
        """Take one event in; say what is to be done."""


class Outcome(NamedTuple):
    """How a run ended: by the core's `Halt`, or because the caller wanted no more."""

    ok: bool
    reason: str
    now: float
    steps: int


class World:
    """One simulated run. `facts`, `usage`, `faults.log` and `outcome` tell what happened."""

    def __init__(
        self,
        orchestrator: Decider,
        params: WorldParams,
        sampler: Shapes,
        seed: int,
        *,
        group_size: int,
        groups_per_step: int | None = None,
        recorder: Recorder | None = None,
        steady_version: int | None = None,
    ) -> None:
        self.params = params
        self.clock = Clock()
        self.faults = Faults(params.faults, seed)
        self.jobs: dict[int, Job] = {}
        self.store = Store()
        self.steady_start: UsageReading | None = None  # at the publication of `steady_version`
        self.halted: cmd.Halt | None = None
        self._handle = orchestrator.handle
        self._observers: list[Observer] = []
        self._inbox: deque[Event] = deque()
        self._steady_version = steady_version
        self._timer = CoreTimer(self.clock, self._inbox.append)
        self._begun = False
        self._suspended = False
        self._disowned: set[int] = set()  # fences that the core has given up; kept under faults

        costs = params.costs()
        if isinstance(sampler, Sampler):
            _check(sampler.workload, costs.kv_capacity_tokens, groups_per_step)
        self._around = around = Surroundings(self.clock, costs, recorder)
        if params.faults.endless_environment:
            around.hangs = self._environment_hangs
        self.network = Network(self.clock, self.faults, self._inbox.append)
        self.fleet = Fleet(around, params, self.faults, self.network, self._on_death)
        self.instances = self.fleet.instances
        self._migrations = Migrations(
            around, params, self.instances, self.faults, leases=self.network.faulty
        )
        jobs, report = self.jobs, self.network.report
        self._placing = Placing(
            around, sampler, group_size, groups_per_step, jobs, remember=params.faults.any_message
        )
        self._hosting = Hosting(
            around,
            self.store,
            self.faults,
            self._disowned,
            params.carry_reprefill,
            lambda: self.trainer.devices_changed(),
        )
        self.trainer = Trainer(
            around,
            params,
            group_size,
            jobs,
            self.store,
            self.faults,
            report,
            self.fleet.take_devices,
            self.instances,
        )
        self._services = Services(self.clock, params, seed, jobs, self.faults, report)
        self._perform = self._performers()

    # For whoever listens

    @property
    def now(self) -> float:
        return self.clock.now

    @property
    def usage(self) -> Usage:
        """Integrals of slot time; read it at both ends of a window."""
        return self._around.usage

    @property
    def facts(self) -> Facts:
        """Counters of what was done."""
        return self._around.facts

    def observe(self, observer: Observer) -> None:
        """Call `observer(now, event, commands)` for every event."""
        self._observers.append(observer)

    def steady_usage(self) -> UsageReading:
        """Slot time since the steady window began (or since the start, if it never did)."""
        reading = self.usage.read(self.now)
        return reading if self.steady_start is None else reading.since(self.steady_start)

    # The loop

    def run(
        self,
        until_steps: int | None = None,
        until_s: float | None = None,
        progress: Progress | None = None,
    ) -> Outcome:
        """Continue until the core halts, `until_steps` are trained, or `until_s` is reached."""
        if not self._begun:
            self._begun = True
            self._inbox.append(WeightsPublished(0, digest_of(0)))
            self.fleet.begin()
        collecting = gc.isenabled()
        gc.disable()  # nothing here makes cycles; the collector would walk millions of records
        try:
            return self._run(until_steps, inf if until_s is None else until_s, progress)
        finally:
            if collecting:
                gc.enable()

    def _run(self, until_steps: int | None, until_s: float, progress: Progress | None) -> Outcome:
        clock, trainer, inbox, dirty = self.clock, self.trainer, self._inbox, self._around.dirty
        shown, actions = trainer.steps, 0
        while True:
            while inbox or dirty:
                while inbox:
                    self._hand_over(inbox.popleft())
                    if self.halted is not None:
                        return self._outcome(self.halted.ok, self.halted.reason)
                touched = dirty[:]
                dirty.clear()
                for engine in touched:
                    engine.settle()
            if progress is not None and (trainer.steps != shown or actions >= PROGRESS_EVERY):
                shown, actions = trainer.steps, 0
                progress(clock.now, shown)
            if until_steps is not None and trainer.steps >= until_steps:
                return self._outcome(True, f"{trainer.steps} steps trained")
            time = clock.next_time()
            if time is None:
                raise WorldError(
                    "deadlock: the event queue is empty and the orchestrator has not halted"
                )
            if time > until_s:
                clock.now = until_s
                return self._outcome(True, f"{until_s} s passed")
            actions += 1
            clock.step()

    def _hand_over(self, event: Event) -> None:
        now = self.clock.now
        kind = type(event)
        if kind is InstanceJoined or kind is WeightsPublished:
            self._note(event)
        commands = self._handle(now, event)
        for observer in self._observers:
            observer(now, event, commands)
        perform = self._perform
        for command in commands:
            perform[type(command)](command)

    def _note(self, event: Event) -> None:
        if isinstance(event, InstanceJoined):
            instance = self.instances[event.instance]
            instance.known = max(instance.known, event.incarnation)
        elif isinstance(event, WeightsPublished):
            wanted = self._steady_version
            if wanted is not None and event.version >= wanted and self.steady_start is None:
                self.steady_start = self.usage.read(self.now)

    def _outcome(self, ok: bool, reason: str) -> Outcome:
        return Outcome(ok, reason, self.clock.now, self.trainer.steps)

    # Commands, each to whoever performs it

    def _performers(self) -> dict[type, Callable[[Any], None]]:
        services, trainer = self._services, self.trainer
        return {
            cmd.FetchPrompts: self._via(None, services.fetch),
            cmd.Start: self._start,
            cmd.Cancel: self._cancel,
            cmd.Install: lambda c: self._to_process(c, self._hosting.install),
            cmd.Evict: lambda c: self._to_process(c, self._hosting.evict),
            cmd.Sleep: lambda c: self._to_process(c, self._hosting.sleep),
            cmd.Wake: lambda c: self._to_process(c, self._hosting.wake),
            cmd.Reserve: self._reserve,
            cmd.Transfer: self._transfer,
            cmd.Release: self._release,
            cmd.AbortMigration: self._abort,
            cmd.Park: lambda c: self._to_process(c, self._placing.park),
            cmd.Unpark: lambda c: self._to_process(c, self._placing.unpark),
            cmd.Score: self._via(None, services.score),
            cmd.Judge: self._via(None, services.judge),
            cmd.Fail: self._fail,
            cmd.Train: self._via("trainer", trainer.train),
            cmd.Publish: self._via("trainer", trainer.publish),
            cmd.Delete: lambda c: self.store.delete(c, self.instances),
            cmd.Suspend: lambda c: self._suspend(True),
            cmd.Resume: lambda c: self._suspend(False),
            cmd.Expel: self._expel,
            cmd.Dismiss: self._dismiss,
            cmd.SetTimer: self._timer.set,
            cmd.Halt: self._halt,
        }

    def _via(self, channel: str | None, perform: Callable[[Any], None]) -> Callable[[Any], None]:
        if not self.network.faulty:
            return perform
        return lambda command: self.network.send(channel, perform, command)

    def _to_process(self, command: Any, receive: Callable[[Instance, Any], None]) -> None:
        instance = self.instances[command.instance]
        self.network.send_to(instance, command.incarnation, receive, command)

    def _start(self, command: cmd.Start) -> None:
        instance = self.instances[command.instance]
        self.network.send_to(instance, instance.known, self._placing.start, command)

    def _cancel(self, command: cmd.Cancel) -> None:
        instance = self.instances[command.instance]
        if self.network.faulty:
            self._disowned.add(command.fence)
            # A copy that is arriving elsewhere is given up with it.
            for migration in self._migrations.live.values():
                for move in migration.moves:
                    if move.fence == command.fence:
                        self._disowned.add(move.new_fence)
        self.network.send_to(instance, instance.known, self._placing.cancel, command)

    def _reserve(self, command: cmd.Reserve) -> None:
        target = self.instances[command.target]
        self.network.send_to(target, target.known, self._migrations.reserve, command)

    def _transfer(self, command: cmd.Transfer) -> None:
        migration = self._migrations.live.get(command.migration)
        if migration is not None:
            source, incarnation = migration.source, migration.incarnations[0]
            self.network.send_to(source, incarnation, self._migrations.transfer, command)

    def _release(self, command: cmd.Release) -> None:
        migration = self._migrations.live.get(command.migration)
        if migration is not None:
            if self.network.faulty:
                self._disowned.update(move.fence for move in migration.moves)
            source, incarnation = migration.source, migration.incarnations[0]
            self.network.send_to(source, incarnation, self._migrations.release, command)

    def _abort(self, command: cmd.AbortMigration) -> None:
        migration = self._migrations.given_up(command.migration)
        if migration is None:
            return
        if self.network.faulty:
            self._disowned.update(move.new_fence for move in migration.moves)
        for instance, incarnation in zip(
            (migration.source, migration.target), migration.incarnations, strict=True
        ):
            self.network.send_to(instance, incarnation, self._migrations.abort, command)

    def _suspend(self, suspended: bool) -> None:
        if suspended != self._suspended:
            self._suspended = suspended
            self.fleet.take_devices(suspended)

    def _expel(self, command: cmd.Expel) -> None:
        self._disown(command.instance, command.incarnation)
        self._to_process(command, self.fleet.expel)

    def _dismiss(self, command: cmd.Dismiss) -> None:
        instance = self.instances[command.instance]
        if instance.incarnation == command.incarnation:
            for run in instance.runs.values():
                if run.state != KEPT and run.fence not in self._disowned:
                    raise WorldError(f"{command}, but trajectory {run.trajectory} is there")
        self._disown(command.instance, command.incarnation)
        self._to_process(command, self.fleet.dismiss)

    def _disown(self, name: int, incarnation: int) -> None:
        instance = self.instances[name]
        instance.expelled = max(instance.expelled, incarnation)

    def _fail(self, command: cmd.Fail) -> None:
        self.jobs.pop(command.trajectory, None)

    def _halt(self, command: cmd.Halt) -> None:
        self.halted = command

    # Called back by fleet and engines

    def _on_death(self, instance: Instance) -> None:
        self._migrations.lost(instance)
        self.trainer.devices_changed()

    def _environment_hangs(self, run: Run) -> bool:
        share = self.params.faults.endless_environment
        subject = f"trajectory {run.trajectory}, turn {run.turn + 1}"
        return self.faults.strikes(self.now, "endless_environment", share, subject)


def _check(workload: Workload, capacity: int, groups_per_step: int | None) -> None:
    """Refuse trajectories that fit into no instance, and growth over steps of unknown size."""
    longest = workload.longest_tokens
    if longest >= capacity:
        raise UserError(
            f"the longest trajectory must fit into one instance's KV memory ({capacity} tokens): "
            f"`{longest}` tokens. Raise devices_per_instance, or shorten the workload."
        )
    if workload.growth_per_step and groups_per_step is None:
        raise ValueError("growth_per_step needs groups_per_step: how many groups are a step?")
