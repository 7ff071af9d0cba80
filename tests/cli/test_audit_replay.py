"""`dora-rl audit` and `dora-rl replay` on what a run wrote: exit codes and words."""

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from dora_rl import cli
from dora_rl.cli import _journals
from dora_rl.core.audit import Promise
from dora_rl.core.history.journal import JournalWriter
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.protocol import commands as c
from dora_rl.core.protocol import events as e
from dora_rl.core.protocol.settings import ParadigmName, Settings
from dora_rl.core.protocol.types import BatchGroup, Segment
from dora_rl.store.rundir import RunDirectory

Capture = pytest.CaptureFixture[str]


def settings(paradigm: ParadigmName) -> Settings:
    return Settings(paradigm=paradigm, groups_per_step=1, group_size=1)


def write_honest(run: RunDirectory, paradigm: ParadigmName = ParadigmName.MULTI_VERSION) -> None:
    """The first events of a run, as the core itself answers them."""
    core = Orchestrator(settings(paradigm))
    with run.journal() as write:
        writer = JournalWriter(write, core.settings)
        for now, event in (
            (0.0, e.WeightsPublished(0, "d0")),
            (1.0, e.InstanceJoined(0, 0, 4, 1000)),
            (2.0, e.VersionInstalled(0, 0, 0, "d0")),
        ):
            writer.handled(now, event, core.handle(now, event))
        writer.close("done")


def write_told(
    run: RunDirectory,
    paradigm: ParadigmName,
    *more: tuple[e.Event, Sequence[c.Command]],
) -> None:
    """Trajectory 0 is started on version 0; then whatever the test wants."""
    with run.journal() as write:
        writer = JournalWriter(write, settings(paradigm))
        story: list[tuple[e.Event, Sequence[c.Command]]] = [
            (e.WeightsPublished(0, "d0"), []),
            (e.InstanceJoined(0, 0, 4, 1000), [c.Install(0, 0, 0)]),
            (e.VersionInstalled(0, 0, 0, "d0"), [c.Start(0, 1, 0, 0)]),
            *more,
        ]
        for now, (event, commands) in enumerate(story):
            writer.handled(now, event, commands)
        writer.refused(9, e.BatchTrained(7), "not being trained")
        writer.close("done")


def finished(trajectory: int, fence: int, *segments: Segment) -> e.Event:
    return e.TrajectoryFinished(trajectory, fence, sum(s.tokens for s in segments), segments)


# Group 0 is trained, version 1 published; trajectory 1 continues from version 0 to version 1.
MIXED: list[tuple[e.Event, Sequence[c.Command]]] = [
    (finished(0, 1, Segment(0, "d0", 5)), [c.Score(0, 1)]),
    (e.TrajectoryScored(0, 1), [c.Judge(0, (0,))]),
    (e.GroupJudged(0), [c.Train(0, (BatchGroup(0, 0, (0,)),)), c.Start(1, 2, 0, 0)]),
    (e.BatchTrained(0), [c.Publish(1)]),
    (e.WeightsPublished(1, "d1"), []),
    (finished(1, 2, Segment(0, "d0", 2), Segment(1, "d1", 3)), [c.Score(1, 2)]),
    (e.TrajectoryScored(1, 2), [c.Judge(1, (1,))]),
    (e.GroupJudged(1), [c.Train(1, (BatchGroup(1, 0, (1,)),))]),
    (e.BatchTrained(1), [c.Publish(2)]),
]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


def call(capsys: Capture, *args: str | Path) -> tuple[int, str, str]:
    code = cli.main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return code, out, err


def test_an_honest_run_is_clean_and_identical(run: RunDirectory, capsys: Capture) -> None:
    write_honest(run)
    for path in (run.path, run.path / "journal.jsonl"):
        code, out, err = call(capsys, "audit", path)
        assert (code, err) == (0, "")
        assert out.startswith("multi_version: clean (3 events, 0 refused")
        code, out, err = call(capsys, "replay", path)
        assert (code, out, err) == (
            0,
            "multi_version: identical, 3 events (0 refused), ended: done\n",
            "",
        )


def test_a_clean_run_has_one_line_and_the_rest_on_request(
    run: RunDirectory, capsys: Capture
) -> None:
    write_honest(run)
    _, brief, _ = call(capsys, "audit", run.path)
    assert brief.startswith("multi_version: clean (3 events") and brief.count("\n") == 1
    for option in ("--verbose", "-v"):
        _, whole, _ = call(capsys, "audit", run.path, option)
        assert whole.startswith(brief) and "issued 0 = trained 0" in whole
        assert [whole.count(f"  {promise} ") for promise in Promise] == [1] * len(Promise)


def test_a_broken_promise_exits_1(run: RunDirectory, capsys: Capture) -> None:
    write_told(run, ParadigmName.MULTI_VERSION, (e.TimerFired(), [c.Delete(0)]))
    code, out, err = call(capsys, "audit", run.path)
    assert (code, err) == (1, "")
    assert "multi_version: broken (5 events, 1 refused" in out
    assert "leases" in out and "event 4 at 3 s: Delete of version 0" in out
    assert call(capsys, "audit", run.path, "--verbose")[1] == out  # all of it without a request


def test_mixed_trajectories_break_only_those_who_promise(
    run: RunDirectory, capsys: Capture
) -> None:
    for paradigm in (ParadigmName.MULTI_VERSION, ParadigmName.IN_FLIGHT):
        write_told(run.section(paradigm), paradigm, *MIXED)
    code, out, _ = call(capsys, "audit", run.path / "in_flight")
    assert code == 0
    assert out.startswith("in_flight: clean")
    assert (
        "note: C1: 1 of 2 trained trajectories are mixed; "
        "`in_flight` does not promise one version each" in out
    )
    code, out, _ = call(capsys, "audit", run.path, "--json")
    runs = json.loads(out)["runs"]
    assert code == 1
    assert (runs["in_flight"]["ok"], runs["multi_version"]["ok"]) == (True, False)
    assert runs["in_flight"]["mixed_trained"] == runs["multi_version"]["mixed_trained"] == 1


def test_every_paradigm_of_a_run_is_audited(run: RunDirectory, capsys: Capture) -> None:
    for paradigm in ParadigmName:
        write_honest(run.section(paradigm), paradigm)
    code, out, _ = call(capsys, "audit", run.path, "--json")
    report = json.loads(out)
    assert (code, report["ok"]) == (0, True)
    assert sorted(report["runs"]) == sorted(ParadigmName)
    assert all(entry["verdict"] == "clean" for entry in report["runs"].values())
    code, out, _ = call(capsys, "replay", run.path, "--json")
    assert (code, json.loads(out)["ok"]) == (0, True)
    assert sorted(json.loads(out)["runs"]) == sorted(ParadigmName)


def test_a_difference_exits_1_and_shows_both_sides(run: RunDirectory, capsys: Capture) -> None:
    write_told(run, ParadigmName.MULTI_VERSION)
    code, out, err = call(capsys, "replay", run.path)
    assert (code, err) == (1, "")
    assert "multi_version: DIFFERENT at line 2, event 1 of 4" in out
    assert 'expected: [0,["WeightsPublished",0,"d0"],[]]' in out
    code, out, _ = call(capsys, "replay", run.path, "--json")
    assert (code, json.loads(out)["ok"]) == (1, False)
    assert json.loads(out)["runs"]["run"]["difference"]["line"] == 2


@pytest.mark.parametrize("command", ["audit", "replay"])
@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda text: text[:-30], "cut in the middle"),
        (lambda text: text[: text.rindex("{")], "the closing line is missing"),
        (lambda text: text.replace('"d0"', '"d1"', 1), "the digest does not match"),
        (lambda text: "not a journal\n", "not JSON"),
        (lambda text: "", "the journal is empty"),
    ],
)
def test_a_damaged_journal_exits_2_with_one_line(
    run: RunDirectory, capsys: Capture, command: str, damage: object, problem: str
) -> None:
    write_honest(run)
    path = run.path / "journal.jsonl"
    assert callable(damage)
    path.write_text(damage(path.read_text()))
    before = sorted(run.path.iterdir())
    code, out, err = call(capsys, command, run.path)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {path}: journal line ")
    assert problem in err
    assert err.count("\n") == 1
    assert sorted(run.path.iterdir()) == before


@pytest.mark.parametrize("command", ["audit", "replay"])
def test_a_missing_run_exits_2_with_one_line(tmp_path: Path, capsys: Capture, command: str) -> None:
    for path, problem in ((tmp_path / "nowhere", "no such run"), (tmp_path, "no journal.jsonl")):
        code, out, err = call(capsys, command, path)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert problem in err
    assert call(capsys, command)[0] == 2


def test_long_journals_show_progress_on_a_terminal(
    run: RunDirectory, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_honest(run)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(_journals, "_LONG", 0)
    monkeypatch.setattr(_journals, "_TICK", 100)
    monkeypatch.setattr(sys, "stderr", terminal)
    assert cli.main(["audit", str(run.path)]) == 0
    assert "Verifying run" in terminal.getvalue()
    assert "Auditing run" in terminal.getvalue()
    assert "100%" in terminal.getvalue()
    assert "Auditing" not in capsys.readouterr().out
