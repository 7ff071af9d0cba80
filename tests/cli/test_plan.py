"""`dora-rl plan`: what it prints, writes and refuses."""

import json
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dora_rl import cli
from dora_rl.cli import plan as command
from dora_rl.cli._interrupts import INCOMPLETE
from dora_rl.core.protocol.errors import DoraError, UserError
from dora_rl.runtime.prepare.plan import read_config
from dora_rl.simulator import planning
from dora_rl.simulator.cost_parameters import DEVICES
from dora_rl.simulator.planning import Question, search
from dora_rl.simulator.planning.shapes import SHAPES, model_named
from dora_rl.simulator.scenarios import load_scenario
from dora_rl.simulator.simulate import simulate
from tests.patience import PATIENCE_S

FLAGS = ["--model", "qwen2.5-1.5b", "--devices", "8", "--batch", "16x4", "--mean-length", "500"]
LONG_TAIL = [*FLAGS, "--max-length", "6000", "--set", "rollout.slots=8", "--budget", "inf"]
SMALL = [*LONG_TAIL, "--devices", "2", "--batch", "4x2", "--max-length", "1000"]
ALL_ALIKE = [*FLAGS, "--devices", "2", "--length-sigma", "0", "--set", "rollout.slots=8"]
ALL_ALIKE += ["--set", "efficiency.switch_s=0", "--budget", "inf"]

# The third simulation says that it is there, and takes for ever.
BLOCKING = """
import pathlib, sys, time
from dora_rl import cli
from dora_rl.simulator.planning import search

calls, simulate = [], search.simulate

def run(*args):
    calls.append(args)
    if len(calls) == 3:
        pathlib.Path(sys.argv[1]).touch()
        time.sleep(600)
    return simulate(*args)

search.simulate = run
sys.exit(cli.main(sys.argv[2:]))
"""

Capture = pytest.CaptureFixture[str]


def plan_json(capsys: Capture, *args: str) -> dict[str, Any]:
    assert cli.main(["plan", *args, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


@pytest.mark.slow
def test_json_has_the_documented_form_and_is_reproduced(capsys: Capture) -> None:
    report = plan_json(capsys, *LONG_TAIL)
    assert report["problem"]["devices"] == 8
    chosen = report["recommendation"]
    settings = chosen["settings"]
    assert settings["orchestration"]["paradigm"] == chosen["paradigm"] == "multi_version"
    assert settings["cluster"]["train_devices"] == chosen["train_devices"]
    assert chosen["train_devices"] + chosen["rollout_devices"] == 8
    assert report["asynchrony_pays"] is True and report["complete"] is True
    same = {"by_tokens_per_s": 1.0, "by_step_time": 1.0}
    assert report["comparison"]["sync"]["speedup_over_sync"] == same
    assert chosen["speedup_over_sync"]["by_tokens_per_s"] > 1.05
    phases = {"generate", "train", "publish", "install", "switch"}
    assert all(set(entry["phase_seconds"]) == phases for entry in report["candidates"])
    costs = report["fixed_costs"]
    assert costs["ranges"]["efficiency.switch_s"] == {"low": 2.0, "planned": 10.0, "high": 45.0}
    gains = costs["speedup_over_sync"]
    assert gains["planned"] == chosen["speedup_over_sync"]["by_tokens_per_s"]
    assert (costs["least"], costs["most"]) == (min(gains.values()), max(gains.values()))
    front = report["pareto"]
    assert all(entry in report["candidates"] for entry in front)
    rates = [entry["tokens_per_s"] for entry in front]
    ages = [entry["mean_staleness"] for entry in front]
    assert rates == sorted(rates) and ages == sorted(ages)
    small = plan_json(capsys, *SMALL)
    assert plan_json(capsys, *SMALL) == small
    assert plan_json(capsys, *SMALL, "--seed", "3")["candidates"] != small["candidates"]


@pytest.mark.slow
def test_the_text_fits_and_says_what_the_json_says(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "planned.toml"
    assert cli.main(["plan", *LONG_TAIL, "--out", str(out)]) == 0
    captured = capsys.readouterr()
    progress, _, rest = captured.err.partition("written: ")
    assert progress.startswith("planning\n") and rest.startswith(f"{out}; ")
    lines = captured.out.splitlines()
    assert max(map(len, lines)) <= 100
    text = " ".join(captured.out.split())
    assert "Recommended: multi_version, " in text and "x over the uncertain fixed costs)" in text
    assert "Over the uncertain fixed costs (switch_s 2 to 45 s, " in text
    assert "Throughput against staleness" in text and "The best of each paradigm" in text
    assert "The search simulates the problem at its full size." in text
    begin = lines.index("[orchestration]")
    end = next(i for i, line in enumerate(lines) if line.startswith("`multi_version` with"))
    settings = tomllib.loads("\n".join(lines[begin:end]))
    scenario = load_scenario(out)
    assert scenario.cluster.train_devices == settings["cluster"]["train_devices"]
    assert scenario.orchestration.max_staleness == settings["orchestration"]["max_staleness"]
    assert scenario.rollout.version_slots == settings["rollout"]["version_slots"]


def test_where_asynchrony_does_not_pay_sync_is_recommended(capsys: Capture) -> None:
    assert cli.main(["plan", *ALL_ALIKE]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Recommended: sync" in text
    assert "Asynchrony does not pay here: " in text
    assert '[orchestration] paradigm = "sync"' in text


def test_a_spent_budget_is_said(capsys: Capture) -> None:
    assert cli.main(["plan", *LONG_TAIL, "--budget", "1e-9"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "The budget ended the search: this is the best of 5 candidates" in text


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
        assert out.splitlines()[0] == INCOMPLETE
        assert "Best so far: " in out and "Recommended" not in out
        assert "Interrupted: this is the best of 3 candidates." in out


def test_an_interruption_after_sync_alone_recommends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    break_after(1, KeyboardInterrupt(), monkeypatch)
    out = tmp_path / "planned.toml"
    assert cli.main(["plan", *LONG_TAIL, "--out", str(out)]) == 130
    text = capsys.readouterr().out
    assert text.splitlines()[0] == INCOMPLETE
    assert "No recommendation yet." in text and "does not pay" not in text
    assert not out.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_shows_what_was_simulated(number: signal.Signals, tmp_path: Path) -> None:
    there = tmp_path / "there"
    with subprocess.Popen(
        [sys.executable, "-c", BLOCKING, str(there), "plan", *LONG_TAIL, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + PATIENCE_S
        while not there.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    report = json.loads(out)
    assert report["complete"] is False and report["cut"] == "interrupted"
    assert [entry["paradigm"] for entry in report["candidates"]] == ["sync", "multi_version"]
    assert err.startswith("planning\n")


def test_a_simulation_that_breaks_down_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    break_after(2, DoraError("impossible"), monkeypatch)
    assert cli.main(["plan", *LONG_TAIL, "--seed", "4"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("\nerror: a simulation of the plan failed (seed 4): impossible\n")


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
        (["--set", "rollout.slotz=3"], "Did you mean `rollout.slots`?"),
        ([*FLAGS, "--model", "qwen2-32b"], "Did you mean `qwen2.5-32b`?"),
        (["--model", "7e9", "--batch", "8x8"], "--devices is missing"),
        (["--devices", "8", "--batch", "8x8"], "--model is missing"),
        (["--model", "7e9", "--devices", "8"], "--batch is missing"),
        (["--devices", "8"], "--model and --batch are missing"),
        ([*FLAGS, "--model", "nan"], "--model must be 1e6 to 1e14 parameters: `nan`"),
        ([*FLAGS, "--model", "70e9", "--devices", "2"], "leave too little memory for KV"),
        ([*FLAGS, "--device", "H80"], "Did you mean `H800`?"),
        ([*FLAGS, "--batch", "512"], "not PROMPTSxRESPONSES"),
        ([*FLAGS, "--batch", "0x4"], "not PROMPTSxRESPONSES"),
        ([*FLAGS, "--mean-length", "nan"], "`nan` is not a number"),
        ([*FLAGS, "--mean-length", "4Q"], "`4Q` is not a number, such as 4000 or 4K"),
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


def test_numbers_may_have_units(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Question] = []

    def stop(question: Question) -> Any:
        asked.append(question)
        raise UserError("enough")

    monkeypatch.setattr(planning, "pose", stop)
    args = ["--model", "8B", "--devices", "1K", "--batch", "2kx16"]
    assert cli.main(["plan", *args, "--mean-length", "2.5K", "--max-length", "32k"]) == 2
    (question,) = asked
    assert (question.devices, question.batch) == (1000, (2000, 16))
    assert (question.mean_length, question.max_length) == (2500.0, 32_000.0)
    assert model_named("8B")[0]["parameters"] == 8e9


# --write: the plan as the configuration of a run


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("written") / "my.toml"
    assert cli.main(["plan", *SMALL, "--write", str(file)]) == 0
    return file


def test_a_plan_is_written_as_a_configuration_that_is_accepted(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tomllib.loads(written.read_text(encoding="utf-8"))
    assert data["orchestration"]["groups_per_step"] == 4
    assert data["orchestration"]["group_size"] == 2
    assert data["rollout"]["max_tokens"] == 1000 and data["rollout"]["slots"] == 8
    assert cli.main(["check", str(written)]) == 0
    assert "dora-rl train would start" in capsys.readouterr().out


def test_what_is_written_is_what_was_recommended(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["recommendation"]
    data = tomllib.loads(written.read_text(encoding="utf-8"))
    planned = found["settings"]["orchestration"]
    ours = {key: data["orchestration"].get(key, 0) for key in planned}
    assert ours == planned
    assert data["rollout"]["version_slots"] == found["settings"]["rollout"]["version_slots"]
    assert data["runtime"]["instances"] == found["rollout_devices"]  # of one device each


def test_every_value_says_where_it_is_from_and_the_command_makes_it_again(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    values = [line for line in text.splitlines() if "=" in line and not line.startswith("#")]
    assert values and all(line.partition("  # ")[2] for line in values)
    command = re.search(r"`(dora-rl plan .*?)`", text.replace("\n# ", " "))
    assert command is not None
    words = shlex.split(command[1])
    assert words[2:4] == ["--model", "qwen2.5-1.5b"] and "4x2" in words and "--write" not in words


def test_the_devices_that_it_names_are_settings_that_a_cluster_takes(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    overrides = re.findall(r"^#\s+--set (\S+)", text, re.M)
    assert any(key.startswith("runtime.ray.trainer.gpus=") for key in overrides)
    config = read_config(written, overrides)
    assert config.runtime.kind == "ray" and config.rollout.engine == "vllm"


def test_shared_devices_are_written_without_a_split(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    assert cli.main(["plan", *ALL_ALIKE, "--write", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    assert tomllib.loads(text)["orchestration"]["paradigm"] == "sync"
    assert "runtime.ray.trainer.gpus" not in text and "which training shares" in text
    read_config(file, re.findall(r"^#\s+--set (\S+)", text, re.M))


def test_a_file_is_not_overwritten_unless_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("# mine\n", encoding="utf-8")
    assert cli.main(["plan", *SMALL, "--write", str(file)]) == 2
    assert f"there is a file already: `{file}`" in capsys.readouterr().err
    assert file.read_text(encoding="utf-8") == "# mine\n"
    assert cli.main(["plan", *SMALL, "--write", str(file), "--overwrite"]) == 0
    assert "[orchestration]" in file.read_text(encoding="utf-8")
    assert cli.main(["plan", *SMALL, "--overwrite"]) == 2
    for flag in (["--out", str(file)], []):
        assert cli.main(["plan", str(file), "--write", str(file), "--overwrite", *flag]) == 2
