"""Two runs that must decide alike: sync and K = 0, saved and never saved, written and replayed."""

import dataclasses
import json

import pytest

from dora_rl.core.history.codec import dumps, encode_command
from dora_rl.core.history.replay import replay
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.events import Event
from dora_rl.core.protocol.settings import Elastic, ParadigmName, Settings
from dora_rl.simulator.world import World
from tests.soak import Sampler, Storm


class Recording:
    """An orchestrator that writes its commands down, and may be saved and restored on the way."""

    def __init__(self, settings: Settings, restore_every: int = 0) -> None:
        self.core = Orchestrator(settings)
        self.restore_every = restore_every
        self.events = 0
        self.lines: list[str] = []

    def handle(self, now: float, event: Event) -> list[Command]:
        self.events += 1
        if self.restore_every and self.events % self.restore_every == 0:
            self.core = Orchestrator.restore(json.loads(json.dumps(self.core.snapshot())))
        commands = self.core.handle(now, event)
        self.lines += [f"{now!r} {dumps(encode_command(command))}" for command in commands]
        return commands


def run(storm: Storm, settings: Settings, restore_every: int = 0) -> list[str]:
    recording = Recording(settings, restore_every)
    World(
        recording,
        storm.params,
        Sampler(storm.workload, storm.seed),
        storm.seed,
        group_size=settings.group_size,
    ).run(until_s=50_000.0)
    return recording.lines


def storms_of(paradigm: ParadigmName, count: int) -> list[Storm]:
    found = []
    seed = 0
    while len(found) < count:
        storm = Storm(seed)
        if storm.settings.paradigm is paradigm:
            found.append(storm)
        seed += 1
    return found


@pytest.mark.parametrize("paradigm", list(ParadigmName))
def test_a_restored_core_decides_as_the_saved_one(paradigm: ParadigmName) -> None:
    for storm in storms_of(paradigm, 3):
        whole = run(storm, storm.settings)
        assert run(storm, storm.settings, restore_every=13) == whole, f"seed {storm.seed}"


def test_multi_version_with_k_0_is_sync_under_faults_too() -> None:
    """Where every device has one role: `sync`, whose devices are shared, has none to lend."""
    for storm in storms_of(ParadigmName.MULTI_VERSION, 6):
        fixed = dataclasses.replace(storm.settings, elastic=Elastic.OFF)
        ours = dataclasses.replace(fixed, max_staleness=0)
        sync = dataclasses.replace(fixed, paradigm=ParadigmName.SYNC)
        assert run(storm, ours) == run(storm, sync), f"seed {storm.seed}"


def test_a_storm_replays_to_the_byte() -> None:
    for seed in range(6):
        storm = Storm(seed)
        storm.run()
        report = replay(storm.lines)
        assert report.ok, f"seed {seed}: {report}"
        assert report.replayed == storm.events - 1
