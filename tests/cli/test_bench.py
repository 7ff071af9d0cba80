"""`dora-rl bench`: what it shows, what it refuses, and what it leaves behind."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dora_rl
from dora_rl import cli
from dora_rl.benchmarks import (
    convergence,
    durability,
    engine,
    migration,
    models,
    modes,
    speculation,
    trl,
    versions,
)
from dora_rl.benchmarks.contestants import roster
from dora_rl.benchmarks.orchestrator import DEFAULT_EVENTS, DEFAULT_INSTANCES, GOAL, measure
from dora_rl.benchmarks.world import GROUP_SIZE, SLOTS, World, settings_for
from dora_rl.cli._quick import QUICK
from dora_rl.core.audit.invariants import check
from dora_rl.engines.vllm.environment import PYTHON as VLLM_PYTHON
from tests.benchmarks import stubs

TINY = ["bench", "orchestrator", "--instances", "16,4", "--events", "500"]


def test_the_table_names_every_size_and_the_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(TINY) == 0
    head, *rows, last = capsys.readouterr().out.splitlines()
    assert "events/s" in head and "p99" in head
    assert [row.split()[0] for row in rows] == ["4", "16"]
    assert "times as much on 16 instances as on 4" in last


def test_one_size_has_no_ratio_to_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "orchestrator", "--instances", "4", "--events", "100"]) == 0
    assert "times as much" not in capsys.readouterr().out


def test_json_holds_every_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*TINY, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["goal"] == GOAL
    assert report["within_goal"] == (report["cost_ratio"] <= GOAL)
    small, large = report["sizes"]
    assert (small["instances"], large["instances"]) == (4, 16)
    assert report["cost_ratio"] == large["mean_us"] / small["mean_us"]
    for size in report["sizes"]:
        assert size["events"] >= 500
        assert size["steps"] >= 1
        assert size["versions"] >= 1
        assert 0 < size["p50_us"] <= size["p99_us"] <= size["max_us"]
        assert size["events_per_s"] == pytest.approx(1e6 / size["mean_us"])
        rebalances = size["rebalances"]
        assert rebalances["count"] >= size["steps"]
        assert 0 < rebalances["mean_ms"] <= rebalances["max_ms"]
        assert sum(kind["share"] for kind in size["kinds"].values()) == pytest.approx(1)
        assert sum(kind["count"] for kind in size["kinds"].values()) == size["events"]
        assert {"TrajectoryFinished", "InstanceProgressed", "BatchTrained"} <= size["kinds"].keys()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--instances", "64,many"], "64,many"),
        (["--instances", "0"], "must be >= 2: `0`"),
        (["--instances", "-64"], "must be >= 2: `-64`"),
        (["--instances", "8,8"], "twice"),
        (["--instances", ""], "no sizes"),
        (["--events", "0"], "--events"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "orchestrator", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_the_defaults_of_the_command_are_those_of_the_measurement() -> None:
    from dora_rl.cli.bench import orchestrator

    defaults = {option.name: option.default for option in orchestrator.params}
    assert defaults["instances"] == ",".join(map(str, DEFAULT_INSTANCES))
    assert defaults["events"] == DEFAULT_EVENTS


def test_the_world_keeps_every_promise_and_scales_with_its_instances() -> None:
    worlds = [World(4), World(16)]
    for world in worlds:
        settings = settings_for(world.instances)
        assert settings.groups_per_step * GROUP_SIZE == world.instances * SLOTS
        for number in range(3000):
            world.obey(world.core.handle(world.now, world.next_event()))
            if number % 100 == 0:
                check(world.core.state)
        assert world.published >= 2
        assert not [name for name in world.core.state.counters if name.startswith("absorbed")]


def test_progress_is_told() -> None:
    told = stubs.Told()
    measure([4, 8], 100, told)
    assert told.lines[:2] == ["warming up 4 instances", "warming up 8 instances"]
    assert all(line.startswith("measuring") for line in told.lines[2:])


def test_progress_is_plain_lines_on_stderr_and_stdout_is_json_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([*TINY, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["complete"] is True
    assert err.splitlines()[:3] == [
        "warming up 4 instances",
        "warming up 16 instances",
        "measuring",
    ]
    assert "\x1b" not in err and "\r" not in err


# The benches of the embedded engine

ENGINE = ["bench", "engine", "--model", "tiny", "--batches", "2,1", "--new-tokens", "3"]


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ours and the machine are processes that answer at once; temporary files go to a folder."""
    monkeypatch.setattr(roster, "ours", lambda *given, **more: stubs.start(tmp_path, "ours"))
    monkeypatch.setattr(roster, "machine", lambda *given: stubs.start(tmp_path, "machine"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    return temporary


def test_engine_shows_a_table_and_leaves_nothing(
    stand_ins: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(ENGINE) == 0
    out, err = capsys.readouterr()
    title, _, head, one, two, *_ = out.splitlines()
    assert title.startswith("tiny, a random Llama, bfloat16")
    assert head.split() == ["batch", "ours", "tokens/s", "share", "ours"]
    assert one.split()[:2] == ["1", "2.0"] and two.split()[:2] == ["2", "4.0"]
    assert err.splitlines()[0] == "loading machine"
    assert list(stand_ins.iterdir()) == []


def test_engine_as_json(stand_ins: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*ENGINE, "--dtype", "float32", "--threads", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"]["dtype"] == "float32"
    assert list(report["batches"]) == ["1", "2"]
    assert report["limits"] == stubs.LIMITS


def test_versions_as_json(stand_ins: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["bench", "versions", "--model", "tiny", "--batch", "6", "--versions", "1,3", "--json"]
    assert cli.main(args) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["batch"] == 6
    assert report["ratios"] == {"3/1": 1.0}


@pytest.mark.slow
def test_migration_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["bench", "migration", "--model", "tiny", "--tokens", "9", "--repeats", "1", "--json"]
    assert cli.main([*args, "--threads", "1", "--dtype", "float32"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tokens"].keys() == {"9"}
    assert report["tokens"]["9"]["kv_s"] > 0


def test_a_contestant_that_dies_is_named_and_the_code_is_1(
    stand_ins: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = stand_ins.parent / "python"
    python.write_text("#!/bin/sh\necho no such instruction >&2\nkill -ILL $$\n")
    python.chmod(0o755)
    monkeypatch.setenv(VLLM_PYTHON, str(python))
    assert cli.main([*ENGINE, "--against", "vllm"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1] == (
        "error: vllm died of SIGILL when asked to `load`. Its last output: no such instruction"
    )
    assert list(stand_ins.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["engine", "--batches", "1,x"], "--batches must be whole numbers"),
        (["engine", "--batches", "-1"], "--batches must be >= 1: `-1`"),
        (["engine", "--against", "trt"], "no such contestant: `trt`. Use one of: hf, vllm."),
        (["engine", "--model", "gpt"], "no such model: `gpt`"),
        (["engine", "--model", "tiny", "--new-tokens", "9000"], "the context of this model is"),
        (["engine", "--threads", "0"], "--threads must be >= 1: `0`"),
        (["engine", "--repeats", "many"], "--repeats"),
        (["migration", "--tokens", "1,2,c"], "--tokens must be whole numbers"),
        (["migration", "--model", "tiny", "--tokens", "9000"], "the context of this model is"),
        (["migration", "--dtype", "fp8"], "--dtype must be one of bfloat16, float32: `fp8`"),
        (["versions", "--batch", "-32"], "--batch must be >= 1: `-32`"),
        (["versions", "--versions", "2,4"], "--versions must name 1"),
        (["versions", "--batch", "30"], "--batch must be a multiple of 4"),
        (["versions", "--engine", "vllm"], "holds one full set of weights"),
        (["versions", "--lora-rank", "8"], "Add --lora"),
    ],
)
def test_bad_input_of_the_engine_benches_is_one_line_and_code_2(
    args: list[str], message: str, stand_ins: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (error,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert message in error
    assert list(stand_ins.iterdir()) == []


def test_the_defaults_of_the_commands_are_those_of_the_plans() -> None:
    from dora_rl.cli.bench import command

    measured: dict[str, Any] = {
        "engine": engine,
        "migration": migration,
        "versions": versions,
        "speculation": speculation,
    }
    for name, module in measured.items():
        plan = module.Plan()
        for option in command.commands[name].params:
            if option.name in ("as_json", "quick", "threads", "dtype", "log_level"):
                continue
            wanted = getattr(plan, str(option.name))
            if isinstance(wanted, tuple):
                wanted = ",".join(map(str, wanted))
            assert option.default == wanted, (name, option.name)


@pytest.mark.parametrize("name", QUICK)
def test_every_bench_has_help_with_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", name, "--help"]) == 0
    assert f"\n    dora-rl bench {name}" in capsys.readouterr().out


def test_help_needs_no_torch_and_a_run_without_it_names_the_extra() -> None:
    code = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "safetensors"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from dora_rl import cli
codes = [cli.main(["bench", *args]) for args in (["--help"], ["engine", "--help"])]
for name in ("engine", "migration", "versions"):
    codes.append(cli.main(["bench", name, "--model", "tiny"]))
sys.exit(codes != [0, 0, 2, 2, 2])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("engine", "migration", "versions"):
        assert (
            f"error: torch and safetensors are not installed: `dora-rl bench {name}` needs them. "
            "Run: pip install 'dora-rl[engine]'"
        ) in done.stderr


# --quick


def test_quick_replaces_defaults_and_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(QUICK, "orchestrator", {"instances": "2,3", "events": 100})
    assert cli.main(["bench", "orchestrator", "--quick"]) == 0
    first, _, *rows, _ = capsys.readouterr().out.splitlines()
    assert first.startswith("Quick: ")
    assert [row.split()[0] for row in rows] == ["2", "3"]
    assert cli.main(["bench", "orchestrator", "--quick", "--instances", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [size["instances"] for size in report["sizes"]] == [4]  # what is given wins
    assert (report["quick"], report["complete"]) == (True, True)
    assert cli.main([*TINY, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["quick"] is False


def test_an_option_that_is_given_as_its_default_wins_too(
    monkeypatch: pytest.MonkeyPatch, stand_ins: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["bench", "engine", "--quick", "--batches", "1", "--repeats", "3", "--json"]
    assert cli.main(args) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model"]["title"], report["repeats"]) == ("tiny, a random Llama", 3)


def test_every_bench_has_quick_values_for_options_of_its_own() -> None:
    from dora_rl.cli.bench import command

    assert QUICK.keys() == command.commands.keys()
    for name, bench in command.commands.items():
        options = {str(option.name): option for option in bench.params}
        assert "quick" in options and "as_json" in options
        for option, value in QUICK[name].items():
            default = options[option].default
            if not isinstance(default, int | float | str):  # it depends on another option
                assert options[option].type.convert(value, None, None) == value, (name, option)
                continue
            assert type(value) is type(default) or isinstance(default, int), (name, option)
            assert value != default, (name, option)


@pytest.mark.parametrize("name", ["engine", "migration", "versions", "speculation", "trl"])
def test_quick_needs_no_model_that_has_to_be_fetched(name: str) -> None:
    assert QUICK[name]["model"] in (models.TINY, models.QUICKSTART)


def test_quick_makes_plans_that_can_be_measured() -> None:
    """Each with the quick values in place of the plan's own."""
    plans: dict[str, Any] = {
        "engine": engine.Plan,
        "migration": migration.Plan,
        "versions": versions.Plan,
        "speculation": speculation.Plan,
        "trl": trl.Plan,
        "modes": modes.Plan,
        "durability": durability.Plan,
        "convergence": convergence.Plan,
    }
    for name, plan in plans.items():
        values = {
            {"groups": "groups_per_step"}.get(key, key): tuple(map(int, value.split(",")))
            if key in ("batches", "tokens")
            else convergence.named_ways(value.split(","))
            if key == "ways"
            else value
            for key, value in QUICK[name].items()
        }
        plan(**values)


def test_quick_trl_without_its_environment_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dora_rl, "__file__", str(tmp_path / "src" / "dora_rl" / "x.py"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert cli.main(["bench", "trl", "--quick"]) == 2
    assert "Run: make venv-trl" in capsys.readouterr().err


@pytest.mark.parametrize("bench", [["engine", "--prompt-tokens"], ["migration", "--tokens"]])
def test_a_model_that_is_too_short_is_refused_before_anything_starts(
    bench: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    command, option = bench
    assert cli.main(["bench", command, "--model", "tiny", option, "1000000"]) == 2
    said = capfd.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1 and "context" in said.err
