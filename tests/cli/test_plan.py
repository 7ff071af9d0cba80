"""`dora-rl plan`: what it prints, writes and refuses."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dora_rl import cli
from dora_rl.cli import plan as command
from dora_rl.core.errors import DoraError
from dora_rl.simulator.costs import DEVICES
from dora_rl.simulator.planning import search
from dora_rl.simulator.planning.shapes import SHAPES
from dora_rl.simulator.scenarios import load_scenario
from dora_rl.simulator.simulate import simulate

FLAGS = ["--model", "qwen2.5-1.5b", "--devices", "8", "--batch", "16x4", "--mean-length", "500"]
LONG_TAIL = [*FLAGS, "--max-length", "6000", "--set", "cluster.slots=8", "--budget", "inf"]
SMALL = [*LONG_TAIL, "--devices", "2", "--batch", "4x2", "--max-length", "1000"]
ALL_ALIKE = [*FLAGS, "--devices", "2", "--length-sigma", "0", "--set", "cluster.slots=8"]
ALL_ALIKE += ["--set", "efficiency.switch_s=0", "--budget", "inf"]

Capture = pytest.CaptureFixture[str]


def plan_json(capsys: Capture, *args: str) -> dict[str, Any]:
    assert cli.main(["plan", *args, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_json_has_the_documented_form_and_is_reproduced(capsys: Capture) -> None:
    report = plan_json(capsys, *LONG_TAIL)
    assert report["problem"]["devices"] == 8
    chosen = report["recommendation"]
    settings = chosen["settings"]
    assert settings["orchestration"]["paradigm"] == chosen["paradigm"] == "multi_version"
    assert settings["cluster"]["train_devices"] == chosen["train_devices"]
    assert chosen["train_devices"] + chosen["rollout_devices"] == 8
    assert report["asynchrony_pays"] is True and report["complete"] is True
    assert report["comparison"]["sync"]["gain_over_sync"] == 1.0
    assert chosen["gain_over_sync"] > 1.05
    front = report["pareto"]
    assert all(entry in report["candidates"] for entry in front)
    rates = [entry["tokens_per_s"] for entry in front]
    ages = [entry["mean_staleness"] for entry in front]
    assert rates == sorted(rates) and ages == sorted(ages)
    small = plan_json(capsys, *SMALL)
    assert plan_json(capsys, *SMALL) == small
    assert plan_json(capsys, *SMALL, "--seed", "3")["candidates"] != small["candidates"]


def test_the_text_fits_and_says_what_the_json_says(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "planned.toml"
    assert cli.main(["plan", *LONG_TAIL, "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith(f"written: {out}; ")
    lines = captured.out.splitlines()
    assert max(map(len, lines)) <= 100
    text = " ".join(captured.out.split())
    assert "Recommended: multi_version, " in text
    assert "Throughput against staleness" in text and "The best of each paradigm" in text
    assert "The search simulates the problem at its full size." in text
    begin = lines.index("[orchestration]")
    settings = tomllib.loads("\n".join(lines[begin : lines.index("", begin + 7)]))
    scenario = load_scenario(out)
    assert scenario.cluster.train_devices == settings["cluster"]["train_devices"]
    assert scenario.orchestration.max_staleness == settings["orchestration"]["max_staleness"]


def test_where_asynchrony_does_not_pay_sync_is_recommended(capsys: Capture) -> None:
    assert cli.main(["plan", *ALL_ALIKE]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Recommended: sync" in text
    assert "Asynchrony does not pay here: " in text
    assert '[orchestration] paradigm = "sync"' in text


def test_a_spent_budget_is_said(capsys: Capture) -> None:
    assert cli.main(["plan", *LONG_TAIL, "--budget", "1e-9"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "The budget ended the search: this is the best of 2 candidates" in text


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_an_interruption_shows_the_best_so_far(
    as_json: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    break_after(3, KeyboardInterrupt(), monkeypatch)
    assert cli.main(["plan", *LONG_TAIL, *as_json]) == 130
    out = capsys.readouterr().out
    if as_json:
        assert json.loads(out)["cut"] == "interrupted"
    else:
        assert "Interrupted: this is the best of 3 candidates." in out


def test_a_simulation_that_breaks_down_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    break_after(2, DoraError("impossible"), monkeypatch)
    assert cli.main(["plan", *LONG_TAIL, "--seed", "4"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: a simulation of the plan failed (seed 4): impossible\n"


def break_after(count: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(1000))

    def run(*args: Any) -> Any:
        if next(calls) == count:
            raise error
        return simulate(*args)

    monkeypatch.setattr(search, "simulate", run)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nope"], "no such scenario: `nope`"),
        (["--set", "cluster.train_devices=3"], "cluster.train_devices is not for --set here"),
        (["--set", "orchestration.max_staleness=3"], "Use --max-staleness-limit."),
        (["--set", "cluster.slotz=3"], "Did you mean `cluster.slots`?"),
        (["--model", "qwen2-32b", "--devices", "8"], "Did you mean `qwen2.5-32b`?"),
        (["--model", "7e9"], "--devices is missing"),
        (["--devices", "8"], "--model is missing"),
        (["--model", "nan", "--devices", "8"], "--model must be 1e6 to 1e14 parameters: `nan`"),
        (["--model", "70e9", "--devices", "2"], "leave too little memory for KV"),
        ([*FLAGS, "--device", "H80"], "Did you mean `H800`?"),
        ([*FLAGS, "--batch", "512"], "not PROMPTSxRESPONSES"),
        ([*FLAGS, "--batch", "0x4"], "not PROMPTSxRESPONSES"),
        ([*FLAGS, "--mean-length", "nan"], "`nan` is not a number"),
        ([*FLAGS, "--max-length", "100"], "mean must be < max (100)"),
        ([*FLAGS, "--lengths", "x"], "--lengths goes without --mean-length"),
        ([*FLAGS, "--devices-per-instance", "3"], "must be a multiple of"),
        ([*FLAGS, "--train-step-minutes", "1e-6"], "--train-step-minutes must be >= "),
        ([*FLAGS, "--max-staleness-limit", "-1"], "--max-staleness-limit"),
        ([*FLAGS, "--budget", "0"], "--budget"),
        ([*FLAGS, "--out", "no/such/directory/x.toml"], "no such directory"),
        (["--lengths", "no-such-file"], "no such file of lengths: `no-such-file`"),
    ],
)
def test_bad_input_is_refused_in_one_line(args: list[str], message: str, capsys: Capture) -> None:
    assert cli.main(["plan", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1


def test_help_is_light_and_names_what_is_known() -> None:
    code = (
        "import sys, dora_rl.cli as c; code = c.main(['plan', '--help']);"
        "heavy = {'pydantic', 'rich', 'dora_rl.simulator'};"
        "sys.exit(code or ', '.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "dora-rl plan --model qwen2.5-32b --device H800 --devices 64" in done.stdout
    epilog = command.command.epilog or ""
    assert all(name in epilog for name in (*SHAPES, *DEVICES))
