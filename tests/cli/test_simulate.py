"""`dora-rl simulate`: what it prints, writes, promises and refuses."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dora_rl import cli
from dora_rl.core.protocol.errors import DoraError
from dora_rl.core.protocol.settings import ParadigmName
from dora_rl.simulator import simulate as simulator
from dora_rl.simulator.errors import WorldError
from dora_rl.simulator.scenarios import load_scenario

PARADIGMS = ["sync", "one_step", "partial", "in_flight", "multi_version"]

TINY = """
[scenario]
title = "tiny"
warmup_steps = 1
[run]
steps = 3
[orchestration]
groups_per_step = 8
group_size = 4
[cluster]
devices = 8
device = "H100"
train_devices = 2
[rollout]
slots = 4
[model]
parameters = 1e9
layers = 16
heads = 16
kv_heads = 4
head_dim = 64
[workload]
response_tokens = { kind = "lognormal", mean = 500, sigma = 1.0, max = 3000 }
"""

MAIN = "import sys; from dora_rl.cli import main; sys.exit(main())"

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="module")
def default() -> dict[str, Any]:
    """The default scenario, run once as a user would."""
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "simulate", "default", "--json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def run_json(capsys: Capture, *args: str) -> dict[str, Any]:
    assert cli.main(["simulate", *args, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


# The promises of the default scenario


@pytest.mark.slow
def test_default_keeps_what_is_promised_and_shows_what_the_others_give_up(
    default: dict[str, Any],
) -> None:
    """One test for both: they would be run in two processes, with a simulation in each."""
    runs = default["paradigms"]
    assert list(runs) == PARADIGMS
    ours = runs["multi_version"]
    assert ours["tokens_per_s"] >= 2 * runs["sync"]["tokens_per_s"]
    assert ours["bubble_share"] <= 0.05
    assert ours["tokens_per_s"] >= runs["in_flight"]["tokens_per_s"]
    assert ours["audit"] == "clean"
    assert ours["max_staleness"] <= 3
    assert ours["mixed"] == 0
    for name in ("partial", "in_flight"):
        assert runs[name]["mixed"] > 0
        assert "are mixed" in runs[name]["audit"]
        assert runs[name]["reprefilled_tokens"] > 0
    for name in ("sync", "one_step", "multi_version"):
        assert runs[name]["reprefilled_tokens"] == runs[name]["mixed"] == 0
    assert runs["sync"]["bubble_share"] > runs["multi_version"]["bubble_share"]
    assert runs["sync"]["max_staleness"] == 0
    assert runs["one_step"]["max_staleness"] == 1
    assert runs["sync"]["speedup_over_sync"] == {"by_tokens_per_s": 1.0, "by_step_time": 1.0}


# Output


def test_json_has_the_documented_form(tiny: Path, capsys: Capture) -> None:
    report = run_json(capsys, str(tiny))
    assert report["scenario"] == str(tiny)
    assert report["ok"] is True
    for run in report["paradigms"].values():
        for key in ("step_minutes", "rollout_only_share", "tokens_per_s", "mean_staleness"):
            assert isinstance(run[key], float)
        assert 0 <= run["rollout_only_share"] <= 1
        assert 0 <= run["bubble_share"] <= 1
        assert run["steps"] == 2
        assert run["issued"] >= run["trained"] == 3 * 8 * 4


def test_json_has_the_seconds_of_each_phase_of_a_step(tiny: Path, capsys: Capture) -> None:
    switch_s = 10.0  # each way
    publish_s = load_scenario(tiny).setup(ParadigmName.SYNC).params.costs().publish_time(8)
    for name, run in run_json(capsys, str(tiny))["paradigms"].items():
        phases, step_s = run["phase_seconds"], 60 * run["step_minutes"]
        shared = name in ("sync", "partial")
        assert phases["switch"] == pytest.approx(2 * switch_s if shared else 0.0)
        # The trainer's share of the step, which is measured apart, has the switch to it inside.
        training_s = (1 - run["rollout_only_share"]) * step_s
        assert phases["train"] + phases["switch"] / 2 == pytest.approx(training_s)
        assert phases["publish"] == pytest.approx(publish_s, rel=0.5)
        assert 0 < phases["install"] < step_s and 0 < phases["generate"] <= step_s * (1 + 1e-9)
        if name == "sync":  # one after the other: nothing of a step is left
            parts = phases["generate"] + phases["train"] + phases["switch"]
            assert parts == pytest.approx(step_s, rel=0.1)


def test_a_speedup_says_whether_it_is_of_tokens_or_of_steps(tiny: Path, capsys: Capture) -> None:
    runs = run_json(capsys, str(tiny))["paradigms"]
    sync = runs["sync"]
    for run in runs.values():
        assert run["speedup_over_sync"] == {
            "by_tokens_per_s": run["tokens_per_s"] / sync["tokens_per_s"],
            "by_step_time": sync["step_minutes"] / run["step_minutes"],
        }
    assert cli.main(["simulate", str(tiny)]) == 0
    table = capsys.readouterr().out
    assert "over sync, by tokens " in table and "over sync, by step " in table


def test_the_same_seed_gives_the_same_json(tiny: Path, capsys: Capture) -> None:
    one, two = (run_json(capsys, str(tiny), "--seed", "5") for _ in range(2))
    assert one == two
    assert run_json(capsys, str(tiny), "--seed", "6")["paradigms"] != one["paradigms"]


def test_a_paradigm_alone_runs_as_it_does_beside_others(tiny: Path, capsys: Capture) -> None:
    together = run_json(capsys, str(tiny))["paradigms"]["in_flight"]
    alone = run_json(capsys, str(tiny), "--paradigms", "in_flight")["paradigms"]["in_flight"]
    del together["speedup_over_sync"], alone["speedup_over_sync"]
    assert alone == together


def test_the_table_fits_a_hundred_columns_and_ends_in_words(tiny: Path, capsys: Capture) -> None:
    assert cli.main(["simulate", str(tiny)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert max(map(len, lines)) <= 100
    assert all(name in captured.out for name in PARADIGMS)
    assert "over sync" in captured.out
    assert "clean" in captured.out
    text = " ".join(captured.out.split())
    assert "multi_version trains" in text and "each trajectory comes from one version" in text


def test_one_paradigm_needs_no_comparison(tiny: Path, capsys: Capture) -> None:
    assert cli.main(["simulate", str(tiny), "--paradigms", "sync"]) == 0
    assert "sync trains" in capsys.readouterr().out


def test_list(capsys: Capture) -> None:
    assert cli.main(["simulate", "--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["default", "agentic", "moe", "paper-128", "paper-64", "scale"]


# Files


def test_what_is_written_can_be_audited_and_replayed(
    tiny: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "runs" / "first"
    report = run_json(capsys, str(tiny), "--out", str(out), "--set", "rollout.slots=3")
    assert sorted(p.name for p in out.iterdir()) == sorted(
        ["config.toml", "metrics.json", *PARADIGMS]
    )
    assert json.loads((out / "metrics.json").read_text()) == report
    for name in PARADIGMS:
        figures = json.loads((out / name / "metrics.json").read_text())
        assert figures["tokens_per_s"] == report["paradigms"][name]["tokens_per_s"]
    assert load_scenario(out / "config.toml").rollout.slots == 3
    assert cli.main(["audit", str(out)]) == 0
    assert cli.main(["replay", str(out)]) == 0
    assert "identical" in capsys.readouterr().out
    again = run_json(capsys, str(out / "config.toml"))
    assert again["paradigms"] == report["paradigms"]


def test_a_trace_has_one_process_a_paradigm(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")
    run_json(capsys, str(tiny), "--trace", str(path))
    events = json.loads(path.read_text())
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == PARADIGMS
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        assert event["ph"] in "XCM"
        if event["ph"] == "X":
            lane = lanes.setdefault((event["pid"], event["tid"]), [])
            lane.append((event["ts"], event["ts"] + event["dur"]))
    for spans in lanes.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    counters = {e["name"] for e in events if e["ph"] == "C"}
    assert counters == {"running", "ready groups", "staleness"}
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


# Bad input: exit code 2, one line, nothing written


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--set", "orchestration.max_staleness=-1"], "orchestration.max_staleness must be >= 0"),
        (["--set", "orchestration.max_stalenes=1"], "Did you mean `orchestration.max_staleness`?"),
        (["--set", "cluster.devices=0"], "cluster.devices must be >= 1: `0`."),
        (["--set", "cluster.train_devices=8"], "cluster.train_devices must be < cluster.devices"),
        (["--set", "nonsense"], "--set needs a key and a value"),
        (["--paradigms", "sync,asink"], "scenario.paradigms.1 must be one of"),
        (["--paradigms", ""], "scenario.paradigms.0 must be one of"),
        (["--seed", "x"], "Invalid value for '--seed'"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    tiny: Path, tmp_path: Path, args: list[str], message: str, capsys: Capture
) -> None:
    out, trace = tmp_path / "out", tmp_path / "trace.json"
    extra = ["--out", str(out), "--trace", str(trace)]
    assert cli.main(["simulate", str(tiny), *args, *extra]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny.toml"]


def test_a_scenario_that_is_not_toml(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "bad.toml"
    path.write_text('{"not": "TOML"}')
    assert cli.main(["simulate", str(path), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("error: not valid TOML: ")
    assert [p.name for p in tmp_path.iterdir()] == ["bad.toml"]


def test_an_output_directory_that_is_not_empty(tiny: Path, capsys: Capture) -> None:
    before = tiny.read_text()
    assert cli.main(["simulate", str(tiny), "--out", str(tiny.parent)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert [p.name for p in tiny.parent.iterdir()] == ["tiny.toml"]
    assert tiny.read_text() == before


@pytest.mark.parametrize("name", ["no/such/dir/trace.json", "."])
def test_a_trace_that_cannot_be_written(tiny: Path, name: str, capsys: Capture) -> None:
    out = tiny.parent / "out"
    args = ["--trace", str(tiny.parent / name), "--out", str(out)]
    assert cli.main(["simulate", str(tiny), *args]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not out.exists()


# Failure


def fail_in(paradigm: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one paradigm's run end with an error, halfway."""
    real = simulator.World.run

    def run(world: Any, *args: Any, **kwargs: Any) -> Any:
        if world._handle.__self__.settings.paradigm == paradigm:
            real(world, until_steps=1)
            raise error
        return real(world, *args, **kwargs)

    monkeypatch.setattr(simulator.World, "run", run)


def test_an_interruption_says_what_is_left(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    fail_in("one_step", KeyboardInterrupt(), monkeypatch)
    out, trace = tmp_path / "out", tmp_path / "trace.json"
    args = ["simulate", str(tiny), "--out", str(out), "--trace", str(trace)]
    assert cli.main(args) == 130
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"partial output in `{out}`; complete paradigms: sync" in captured.err
    assert captured.err.endswith("error: interrupted\n")
    assert json.loads(trace.read_text())
    assert cli.main(["audit", str(out / "sync")]) == 0
    assert cli.main(["audit", str(out)]) == 2


@pytest.mark.parametrize("error", [WorldError("impossible"), DoraError("broken")])
def test_a_run_that_breaks_down_is_a_failure(
    tiny: Path, error: DoraError, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    fail_in("multi_version", error, monkeypatch)
    trace = tiny.parent / "trace.json"
    assert cli.main(["simulate", str(tiny), "--seed", "3", "--trace", str(trace)]) == 1
    err = capsys.readouterr().err
    assert err == f"error: the simulation of `multi_version` failed (seed 3): {error}\n"
    assert sorted(p.name for p in tiny.parent.iterdir()) == ["tiny.toml"]


def test_a_run_that_halts_badly_fails(tiny: Path, capsys: Capture) -> None:
    args = ["--paradigms", "sync", "--set", "orchestration.train_timeout_s=0.001"]
    assert cli.main(["simulate", str(tiny), *args]) == 1
    assert "the run failed" in capsys.readouterr().out


def test_a_broken_promise_fails(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    class Blind(simulator.Audit):
        """Misses every start, and so finds that what was never issued is trained."""

        def observe(self, now: float, event: Any, commands: Any) -> None:
            super().observe(now, event, [c for c in commands if type(c).__name__ != "Start"])

    monkeypatch.setattr(simulator, "Audit", Blind)
    assert cli.main(["simulate", str(tiny), "--paradigms", "sync"]) == 1
    out = capsys.readouterr().out
    assert "BROKEN" in out and "sync: broken: " in out


def test_help_is_fast_and_shows_examples() -> None:
    code = (
        "import sys, dora_rl.cli as c; code = c.main(['simulate', '--help']);"
        "heavy = {'pydantic', 'rich', 'dora_rl.simulator'};"
        "many = f'{len(sys.modules)} modules' if len(sys.modules) > 150 else '';"  # 122 of late
        "sys.exit(code or ', '.join(sorted(heavy & set(sys.modules))) or many or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "dora-rl simulate paper-64 --paradigms sync,multi_version --json" in done.stdout


# Outputs that must not destroy anything


@pytest.mark.parametrize("victim", ["the scenario itself", "a directory", "the run directory"])
def test_a_trace_replaces_nothing_that_matters(
    victim: str, tiny: Path, tmp_path: Path, capsys: Capture
) -> None:
    folder, out = tmp_path / "folder", tmp_path / "run"
    folder.mkdir()
    trace = {"the scenario itself": tiny, "a directory": folder, "the run directory": out}[victim]
    before = tiny.read_text()
    assert cli.main(["simulate", str(tiny), "--trace", str(trace), "--out", str(out)]) == 2
    assert capsys.readouterr().err.count("\n") <= 4  # click shows its usage before an error
    assert tiny.read_text() == before
    assert not out.exists()


def test_a_trace_is_not_written_over_a_device(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert cli.main(["simulate", str(tiny), "--trace", str(pipe)]) == 2
    assert "not a regular file" in capsys.readouterr().err
    assert pipe.is_fifo()


def test_a_trace_follows_a_link(tiny: Path, tmp_path: Path) -> None:
    target, link = tmp_path / "real.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    assert cli.main(["simulate", str(tiny), "--paradigms", "sync", "--trace", str(link)]) == 0
    assert link.is_symlink()
    assert json.loads(target.read_text())


def test_a_run_that_measured_nothing_says_so(tiny: Path, capsys: Capture) -> None:
    assert cli.main(["simulate", str(tiny), "--set", "cluster.prompts=1"]) == 1
    assert "nothing was measured" in capsys.readouterr().err


def test_constants_of_other_devices_are_warned_of(tiny: Path, capsys: Capture) -> None:
    tiny.write_text(TINY + "[efficiency]\nswitch_s = 45.0\n")
    args = ["simulate", str(tiny), "--paradigms", "sync"]
    assert cli.main(args) == 0
    assert capsys.readouterr().err == ""
    assert cli.main([*args, "--set", "cluster.device=A100"]) == 0
    warning = capsys.readouterr().err
    assert warning.startswith(f"warning: constants of `{tiny}` are used for another model")
    assert "efficiency.switch_s" in warning and warning.count("\n") == 1
