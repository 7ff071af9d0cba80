"""One paradigm of a scenario through the real core in virtual time, and what came of it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dora_rl.core.audit import Audit, AuditReport
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.protocol.commands import Command, Halt
from dora_rl.core.protocol.events import Event, WeightsPublished
from dora_rl.core.protocol.settings import ParadigmName, Settings
from dora_rl.observe.metrics import Collector, Phases, Reading, Summary
from dora_rl.simulator.scenarios import Scenario
from dora_rl.simulator.usage import Recorder
from dora_rl.simulator.world import Observer, World

Progress = Callable[[float, int], None]
"""Called now and then with the virtual time and the steps trained."""


class Journal(Protocol):
    """Who writes the run down, such as `core.journal.JournalWriter`."""

    def handled(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """An event and the commands that answered it."""

    def close(self, reason: str) -> None:
        """The run has ended."""


@dataclass(frozen=True, slots=True)
class Result:
    """The figures, and the audit behind their verdict."""

    summary: Summary
    audit: AuditReport


def settings_of(scenario: Scenario, paradigm: ParadigmName) -> Settings:
    """What the core is told in this scenario; a journal begins with it."""
    return scenario.setup(paradigm).settings


def simulate(
    scenario: Scenario,
    paradigm: ParadigmName,
    *,
    observers: Sequence[Observer] = (),
    recorder: Recorder | None = None,
    journal: Journal | None = None,
    progress: Progress | None = None,
) -> Result:
    """Run until version `run.steps` is published, or the core halts."""
    setup = scenario.setup(paradigm)
    started = time.perf_counter()
    orchestrator = Orchestrator(setup.settings)
    world = World(
        orchestrator,
        setup.params,
        setup.sampler(),
        setup.seed,
        group_size=setup.settings.group_size,
        groups_per_step=setup.settings.groups_per_step,
        recorder=recorder,
    )
    audit = Audit(setup.settings)
    collector = Collector(
        setup.settings.group_size,
        setup.warmup_steps,
        lambda: _read(world, orchestrator),
        lambda: _phases(world),
    )
    world.observe(audit.observe)
    world.observe(collector.observe)
    if journal is not None:
        world.observe(journal.handled)
    for observer in observers:
        world.observe(observer)
    world.observe(_stop_after(world, setup.steps))
    outcome = world.run(progress=progress)
    if journal is not None:
        journal.close(outcome.reason)
    report = audit.report()
    wall_s = time.perf_counter() - started
    summary = collector.summary(report, ok=outcome.ok, end=outcome.reason, wall_s=wall_s)
    return Result(summary, report)


def _stop_after(world: World, steps: int) -> Observer:
    """End the run with the last step's publication: work that continues is left outstanding."""

    def observe(now: float, event: Event, commands: Sequence[Command]) -> None:
        if isinstance(event, WeightsPublished) and event.version >= steps and world.halted is None:
            world.halted = Halt(True, f"{steps} steps trained")

    return observe


def _read(world: World, orchestrator: Orchestrator) -> Reading:
    usage, facts, trainer = world.usage.read(world.now), world.facts, orchestrator.state.trainer
    return Reading(
        usage.slots_s,
        usage.busy_s,
        trainer.stalls
        - (trainer.stalled_since is not None),  # one that continues has no length yet
        trainer.stalled_s,
        facts.migrated,
        facts.kv_bytes_moved,
        facts.reprefilled_tokens,
    )


def _phases(world: World) -> Phases:
    facts = world.facts
    return Phases(
        generate=world.usage.read(world.now).generating_s,
        train=facts.train_s,
        publish=facts.publish_s,
        install=facts.install_s / len(world.instances),
        switch=facts.switch_s,
    )
