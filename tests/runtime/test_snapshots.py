"""A run with snapshots resumes from the last one, and as it would by its whole journal."""

import json
import logging
import shutil
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dora_rl.core.audit import audit_journal
from dora_rl.core.handlers import HANDLERS
from dora_rl.core.history import snapshots
from dora_rl.core.history.replay import replay
from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.errors import JournalError, RefusedEvent, UserError
from dora_rl.core.protocol.events import BatchTrained, Event, VersionUnpinned, WeightsPublished
from dora_rl.core.state.run import State
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.launchers.inline import InlineRuntime
from dora_rl.runtime.prepare.plan import plan_resume
from dora_rl.runtime.records.history import _KNOWN
from dora_rl.runtime.records.run_files import RunFiles
from dora_rl.store.ledger import Ledger, SnapshotRow
from dora_rl.store.rundir import JOURNAL, LEDGER, TRACE
from dora_rl.store.snapshot_files import SNAPSHOTS
from tests.runtime.harness import PROMPTS, assert_sound, journal, lines, trained
from tests.runtime.test_local import driver, wait_for
from tests.runtime.test_resume import go_on, plan_of

RUN: dict[str, Any] = {"steps": 9, "checkpoint_every": None, "snapshot_every": 30}


NONSENSE = VersionUnpinned(1000, "nobody")  # the core refuses it


class Committing(Listener):
    """Commits at every event, as often as a run in processes would; some are refused."""

    def __init__(self) -> None:
        self.runtime: InlineRuntime | None = None

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        assert self.runtime is not None
        self.runtime._files.committer.commit()
        if isinstance(event, WeightsPublished):
            if event.version in (2, 7):
                self.runtime.driver.post(NONSENSE)
            if event.version == 7:
                self.runtime.stop()


@pytest.fixture(scope="module")
def left(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stopped after seven steps, some events after its last snapshot."""
    out = tmp_path_factory.mktemp("left") / "run"
    committing = Committing()
    with RunFiles(plan_of(model, out, run=RUN), listeners=[committing]) as files:
        committing.runtime = InlineRuntime(files)
        ending = committing.runtime.run()
        _, audit = files.close(ending, 1.0)
    assert audit == audit_journal(journal(out).lines())
    assert audit.refused == 2
    with Ledger.read(out / LEDGER) as ledger:
        row = ledger.snapshot()
        assert row is not None and row.records < ledger.position.records
    return out


@pytest.fixture
def out(left: Path, tmp_path: Path) -> Path:
    shutil.copytree(left, tmp_path / "run")
    return tmp_path / "run"


def snapshot_of(run: Path) -> SnapshotRow:
    with Ledger.read(run / LEDGER) as ledger:
        row = ledger.snapshot()
    assert row is not None
    return row


def remembered(run: Path) -> Any:
    """All that a resumed run knows before it goes on."""
    with RunFiles(plan_resume(run, prompts=PROMPTS)) as files:
        history = files._history
        known = snapshots.save(history._parts(), _KNOWN)
        return files.orchestrator.snapshot(), known, history.halted, files.audit.report()


def test_a_resume_knows_what_the_whole_journal_tells(out: Path, tmp_path: Path) -> None:
    row = snapshot_of(out)
    assert [path.name for path in (out / SNAPSHOTS).iterdir()] == [row.name]
    assert row.records >= 30
    by_snapshot = remembered(out)
    assert by_snapshot[-1].refused == 2
    shutil.rmtree(out / SNAPSHOTS)
    assert remembered(out) == by_snapshot


def refuse(state: State, event: Event) -> None:
    raise RefusedEvent("another core")


@pytest.mark.parametrize(
    ("kind", "handler"), [(BatchTrained, refuse), (VersionUnpinned, lambda state, event: None)]
)
def test_a_core_that_refuses_other_events_is_not_used(
    kind: type, handler: Any, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(HANDLERS, kind, handler)
    shutil.rmtree(out / SNAPSHOTS)
    with pytest.raises(UserError, match="this dora-rl decides otherwise"):
        remembered(out)


def tail(run: Path) -> int:
    """How many events were committed after the last snapshot; 0 without one."""
    if not (run / LEDGER).is_file():
        return 0
    with Ledger.read(run / LEDGER) as ledger:
        row = ledger.snapshot()
        return 0 if row is None else ledger.position.records - row.records


@pytest.mark.slow
def test_a_killed_run_in_processes_knows_what_its_whole_journal_tells(
    model: Path, tmp_path: Path
) -> None:
    out, copy = tmp_path / "run", tmp_path / "copy"
    with driver(model, out, steps=1000, snapshot_every=20) as process:
        wait_for(lambda: tail(out) > 0, process)
        process.kill()
    assert tail(out) > 0
    shutil.copytree(out, copy)
    shutil.rmtree(copy / SNAPSHOTS)
    assert remembered(out) == remembered(copy)
    before = trained(out)
    with driver(model, out, steps=1000, again=True) as process:
        wait_for(lambda: len(trained(out)) > len(before), process)
        process.kill()
    assert trained(out)[: len(before)] == before
    assert audit_journal(journal(out).lines()).ok
    assert replay(journal(out).lines()).ok


def test_a_resume_reads_what_came_after_alone(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The journal before the snapshot may be anything; whoever reads all of it refuses it."""
    row = snapshot_of(out)
    text = (out / JOURNAL).read_text().splitlines(keepends=True)
    assert row.records > 5
    text[3] = text[3].replace("0", "1")
    (out / JOURNAL).write_text("".join(text))
    with caplog.at_level(logging.WARNING):
        remembered(out)
    assert not caplog.text
    for read in (audit_journal, replay):
        with pytest.raises(JournalError, match=r"journal line \d+"):
            read(journal(out).lines())


@pytest.mark.parametrize("damage", ["altered", "removed"])
def test_a_damaged_snapshot_costs_time_and_nothing_else(
    damage: str, out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = lines(out)
    path = out / SNAPSHOTS / snapshot_of(out).name
    if damage == "altered":
        path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    else:
        path.unlink()
    with caplog.at_level(logging.WARNING):
        assert_sound(go_on(out))
    assert f"`{path}`" in caplog.text and "the whole journal is replayed" in caplog.text
    assert lines(out)[: len(before)] == before
    assert isinstance(json.loads((out / TRACE).read_text()), list)


def test_a_run_that_goes_on_from_a_snapshot_is_whole(out: Path) -> None:
    first = (out / JOURNAL).read_bytes()
    with Ledger.read(out / LEDGER) as ledger:
        committed = ledger.position.bytes
    inode = (out / JOURNAL).stat().st_ino
    assert_sound(go_on(out))
    assert (out / JOURNAL).stat().st_ino == inode  # appended to
    assert (out / JOURNAL).read_bytes()[:committed] == first[:committed]
    drawn = json.loads((out / TRACE).read_text())
    trained = [span["args"]["version"] for span in drawn if span.get("cat") == "train"]
    assert trained == sorted(trained) and len(set(trained)) == RUN["steps"]


def test_a_journal_that_ends_before_the_snapshot_is_refused(out: Path) -> None:
    path = out / JOURNAL
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
    before = path.read_bytes()
    with pytest.raises(UserError, match=rf"`{path}` cannot be resumed.*it was cut"):
        go_on(out)
    assert path.read_bytes() == before


def test_a_run_of_another_ledger_is_refused_with_the_fix(out: Path) -> None:
    ledger = sqlite3.connect(out / LEDGER)
    ledger.execute("PRAGMA user_version=1")
    ledger.close()
    with pytest.raises(UserError, match=r"format `1`.*Use a dora-rl that knows format 1, or start"):
        plan_resume(out, prompts=PROMPTS)
