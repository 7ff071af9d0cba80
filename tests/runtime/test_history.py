"""What a run remembers, saved at any event and loaded, continues as if it had never been saved."""

import json
import logging
import random
from collections import Counter
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from dora_rl.core.audit import Audit
from dora_rl.core.history import snapshots
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.protocol.commands import Command, Fail
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.events import BatchTrained, Event, InstanceJoined
from dora_rl.core.protocol.settings import OnFailedMember, ParadigmName, Settings
from dora_rl.observe.metrics import Collector
from dora_rl.runtime.control import messages as ms
from dora_rl.runtime.records.history import _KNOWN, History
from dora_rl.runtime.records.step_metrics import Recorder
from dora_rl.store.ledger import Position, SnapshotRow
from dora_rl.store.snapshot_files import SnapshotFiles
from tests.core.adversary import Adversary, stir

Story = list[tuple[float, Event, list[Command]]]


class Told:
    """A core and its history, without files of their own."""

    def __init__(self, settings: Settings) -> None:
        self.core = Orchestrator(settings)
        self.recorder = Recorder(self.core)
        self.collector = Collector(settings.group_size, 0, self.recorder.reading)
        self.audit = Audit(settings)
        self.history = History(self.core, self.recorder, self.collector, self.audit)

    def tell(self, story: Story) -> None:
        for now, event, commands in story:
            assert self.core.handle(now, event) == commands
            self.recorder.observed(now, event, commands)
            self.history.observed(now, event, commands)

    def known(self) -> Any:
        return self.core.snapshot(), snapshots.save(self.history._parts(), _KNOWN)


def storm(paradigm: ParadigmName, seed: int) -> tuple[Settings, Story]:
    """A world in which everything fails now and then."""
    rng = random.Random(seed)
    settings = Settings(
        paradigm=paradigm,
        groups_per_step=rng.randint(1, 3),
        group_size=rng.randint(1, 3),
        max_staleness=rng.randint(0, 3),
        version_slots=rng.randint(1, 2),
        max_retries=rng.randint(0, 2),
        on_failed_member=rng.choice(list(OnFailedMember)),
        trajectory_timeout_s=rng.choice((15.0, 60.0, 1800.0)),
    )
    story: Story = []
    world = Adversary(settings, lambda now, event, commands: story.append((now, event, commands)))
    for name in range(3):
        world.join(name)
    stir(world, rng, 300, faults=True)
    return settings, story


@pytest.mark.parametrize("paradigm", ParadigmName)
def test_a_storm_continues_from_any_event(paradigm: ParadigmName, tmp_path: Path) -> None:
    kinds: Counter[type] = Counter()
    for seed in range(8):
        settings, story = storm(paradigm, seed)
        kinds.update(type(event) for _, event, _ in story)
        at = random.Random(seed).randrange(len(story))
        run = tmp_path / str(seed)
        run.mkdir()
        files, trace = SnapshotFiles(run), run / "trace.json"

        whole = Told(settings)
        whole.history.draw_into(run / "whole.json")
        whole.tell(story)
        whole.history.flush()

        first = Told(settings)
        first.history.draw_into(trace)
        first.tell(story[:at])
        row = first.history.write(files, Position(at, 7, 0.0, "ab"))
        first.tell(story[at : at + 9])  # is lost with the process
        first.history.end()

        second = Told(settings)
        place = second.history.restore(files, row, run)
        assert place is not None and place.records == at
        second.history.draw_into(trace)
        second.tell(story[at:])
        second.history.flush()
        assert second.known() == whole.known(), f"seed {seed}, event {at}"
        assert second.audit.report() == whole.audit.report()
        assert second.history.halted == whole.history.halted
        assert trace.read_text() == (run / "whole.json").read_text()
        for told in (whole, second):
            told.history.end()
    assert kinds[BatchTrained] and len(kinds) > 12


def test_every_attribute_is_saved_or_given() -> None:
    """Whoever adds one says which: forgotten, it would be lost with the process."""
    for name, part in Told(Settings()).history._parts().items():
        saved = snapshots.names_of(type(part))
        has = set(vars(part)) if hasattr(part, "__dict__") else set(saved)
        assert {*saved, *getattr(part, "WIRED", ())} == has, name


def test_every_attribute_of_a_record_is_saved() -> None:
    for kind in _KNOWN:
        if issubclass(kind, Enum | tuple):
            continue  # their values are all that they are
        if hasattr(kind, "SAVED"):
            assert set(vars(kind())) == set(kind.SAVED), kind
        else:
            assert not hasattr(object.__new__(kind), "__dict__"), f"{kind} needs SAVED, or slots"


@pytest.mark.parametrize("paradigm", ParadigmName)
def test_nothing_is_remembered_of_work_that_is_over(paradigm: ParadigmName) -> None:
    ended: Counter[type] = Counter()
    for seed in range(6):
        settings, story = storm(paradigm, seed)
        told = Told(settings)
        for entry in story:
            told.tell([entry])
            ended.update(type(command) for command in entry[2])
            state = told.core.state
            if state.halted:
                break  # nothing that is under way comes to an end
            live = state.fleet.instances
            assert set(told.collector._lengths) <= set(state.work.trajectories), entry
            assert set(told.recorder._moves) == set(state.migrations.live), entry
            for install in told.history._timeline._trace._carrying.values():
                assert (
                    install.instance not in live
                    or live[install.instance].incarnation != install.incarnation
                    or live[install.instance].incoming == install.version
                ), entry
    assert ended[Fail]


def test_refused_events_are_counted() -> None:
    """By the audit of a run as by that of its journal."""
    told = fresh()
    told.history.refused(0.0, InstanceJoined(0, 0, 0, 0), "it needs slots")
    report = told.audit.report()
    assert (report.refused, report.events) == (1, 1)


def test_what_processes_counted_ends_with_them(tmp_path: Path) -> None:
    """As if the whole journal had been replayed, which tells of no counters."""
    settings, story = storm(ParadigmName.MULTI_VERSION, 1)
    counted, replayed, restored = Told(settings), Told(settings), Told(settings)
    joined = next(event for _, event, _ in story if isinstance(event, InstanceJoined))
    for number, entry in enumerate(story):
        used = ms.Used(10.0 * number, 5.0 * number, 0, 0, number, 0)
        counted.recorder.used(0.0, joined.instance, used)
        counted.tell([entry])
    assert counted.recorder.reading().slots_s > 0
    replayed.tell(story)
    counted.history.draw_into(tmp_path / "trace.json")
    row = counted.history.write(SnapshotFiles(tmp_path), Position(1, 1, 0.0, "ab"))
    restored.history.restore(SnapshotFiles(tmp_path), row, tmp_path)
    counted.history.end()
    assert restored.known() == replayed.known()
    assert restored.recorder.reading() == replayed.recorder.reading()


@pytest.fixture
def row(tmp_path: Path) -> SnapshotRow:
    """A snapshot in `tmp_path`."""
    settings, story = storm(ParadigmName.MULTI_VERSION, 2)
    told = Told(settings)
    told.history.draw_into(tmp_path / "trace.json")
    told.tell(story)
    written = told.history.write(SnapshotFiles(tmp_path), Position(5, 7, 0.0, "ab"))
    told.history.end()
    return written


def fresh() -> Told:
    return Told(storm(ParadigmName.MULTI_VERSION, 2)[0])


@pytest.mark.parametrize("damage", ["cut", "altered", "gone", "of another"])
def test_a_damaged_snapshot_is_not_loaded_and_that_is_told(
    damage: str, row: SnapshotRow, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = SnapshotFiles(tmp_path)
    path = files.path(row)
    data = path.read_bytes()
    said = "does not match the SHA-256"
    if damage == "cut":
        path.write_bytes(data[:-1])
    elif damage == "altered":
        path.write_bytes(data.replace(b"1", b"2", 1))
    elif damage == "gone":
        path.unlink()
        said = "cannot be read"
    else:
        other = json.dumps({**json.loads(data), "written_by": "0.0.1"}).encode()
        row = files.write(row.records, other)
        said = "was written by dora-rl 0.0.1"
    told = fresh()
    before = told.known()
    with caplog.at_level(logging.WARNING):
        assert told.history.restore(files, row, tmp_path) is None
    assert f"`{path}`" in caplog.text and said in caplog.text
    assert "the whole journal is replayed" in caplog.text
    assert told.known() == before


def test_a_snapshot_that_does_not_fit_is_refused_by_name(row: SnapshotRow, tmp_path: Path) -> None:
    files = SnapshotFiles(tmp_path)
    content = json.loads(files.read(row))
    for change in ({"parts": {}}, {"core": {}}, {"parts": {**content["parts"], "audit": {}}}):
        other = files.write(row.records, json.dumps({**content, **change}).encode())
        with pytest.raises(UserError, match=f"`{files.path(other)}` cannot be loaded.*Remove it"):
            fresh().history.restore(files, other, tmp_path)


def test_a_timeline_that_was_removed_begins_at_the_snapshot(
    row: SnapshotRow, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(trace.read_text()[:10])
    told = fresh()
    assert told.history.restore(SnapshotFiles(tmp_path), row, tmp_path) is not None
    assert f"`{trace}` was cut or removed" in caplog.text
    told.history.draw_into(trace)
    told.history.end()
    assert isinstance(json.loads(trace.read_text()), list)


def test_old_snapshots_go_and_the_one_that_counts_stays(row: SnapshotRow, tmp_path: Path) -> None:
    files = SnapshotFiles(tmp_path)
    newer = files.write(9, b"{}")
    (files.directory / ".000000000011.json.partial").write_bytes(b"{")
    others = [files.directory / "notes.json", files.directory / "lost+found"]
    others[0].write_bytes(b"{}")
    others[1].mkdir()
    files.keep_only(newer)
    assert {*files.directory.iterdir()} == {files.path(newer), *others}
    others[0].unlink()
    others[1].rmdir()
    with pytest.raises(UserError, match="recorded in the ledger"):
        files.read(newer._replace(name="../../elsewhere.json"))
    files.keep_only(None)
    assert not list(files.directory.iterdir())
