"""Whole runs of the core under faults: journal, replay and audit agree on what happened."""

import random

import pytest

from dora_rl.core.audit import Audit, audit_journal
from dora_rl.core.history.journal import JournalWriter
from dora_rl.core.history.replay import replay
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.protocol.errors import RefusedEvent
from dora_rl.core.protocol.events import BatchTrained
from dora_rl.core.protocol.settings import ParadigmName, Settings
from tests.core.adversary import Adversary, stir


@pytest.mark.parametrize("paradigm", ParadigmName)
def test_a_storm_is_audited_live_and_offline_alike_and_replays(paradigm: ParadigmName) -> None:
    trained = 0
    for seed in range(12):
        rng = random.Random(seed)
        settings = Settings(
            paradigm=paradigm,
            groups_per_step=rng.randint(1, 3),
            group_size=rng.randint(1, 3),
            max_staleness=rng.randint(0, 3),
            max_retries=rng.randint(0, 3),
        )
        lines: list[str] = []
        journal = JournalWriter(lines.append, settings, {"seed": seed})
        live = Audit(settings)

        def observe(*told, journal=journal, live=live) -> None:
            journal.handled(*told)
            live.observe(*told)

        world = Adversary(settings, observe)
        for name in range(3):
            world.join(name)
        stir(world, rng, 400, faults=True)
        with pytest.raises(RefusedEvent) as refused:
            Orchestrator(settings).handle(world.now, BatchTrained(10**6))
        if not world.halted:
            journal.refused(world.now, BatchTrained(10**6), str(refused.value))
            live.observe_refused(world.now, BatchTrained(10**6))
        journal.close("stirred")

        report = live.report()
        assert report.ok, "\n".join([f"seed {seed}", *report.summary()])
        assert audit_journal(lines) == report
        replayed = replay(lines)
        assert replayed.ok, "\n".join([f"seed {seed}", *replayed.summary()])
        assert report.trained == world.core.state.work.trained
        trained += report.trained
    assert trained > 0
