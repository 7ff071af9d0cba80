"""`dora-rl train`: what it says, what it writes, and how it refuses."""

import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tomli_w
import torch
from transformers import AutoModelForCausalLM

from dora_rl import cli
from dora_rl.cli import _training
from dora_rl.core.audit import Promise
from dora_rl.runtime.control.memory import memory_watch
from dora_rl.runtime.display import progress
from dora_rl.runtime.errors import RunFailed
from dora_rl.runtime.execution import Run, execute
from dora_rl.runtime.records.run_files import Ending
from dora_rl.runtime.records.step_metrics import StepRecord
from tests.models.random_models import make_model, make_tokenizer

STEPS = 3
REWARD = "def reward(response, example):\n    return len(response) % 5 / 4\n"
RUN_FILES = {"config.toml", "journal.jsonl", "metrics.jsonl", "metrics.json", "trace.json"}


class Done(NamedTuple):
    code: int
    out: str
    err: str


class Workshop(NamedTuple):
    """A directory with a model, prompts, a reward and a configuration; it is the working one."""

    path: Path
    config: dict[str, Any]

    def write(self, name: str = "small.toml", **sections: dict[str, Any]) -> str:
        config = {key: {**value, **sections.get(key, {})} for key, value in self.config.items()}
        (self.path / name).write_text(tomli_w.dumps(config))
        return name


def call(*args: str) -> Done:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.main(["train", *args])
    return Done(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    path = tmp_path_factory.mktemp("workshop")
    make_model(path / "model", "llama", seed=1, vocab_size=300)
    make_tokenizer(300).save(str(path / "model" / "tokenizer.json"))
    rows = [{"prompt": f"{number} is"} for number in range(20)]
    (path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "length_reward.py").write_text(REWARD)
    config = {
        "model": {"path": "model"},
        "task": {"prompts": "prompts.jsonl", "reward": "length_reward:reward", "reward_workers": 1},
        "train": {"learning_rate": 0.01},
        "rollout": {"slots": 8, "max_tokens": 12},
        "orchestration": {"groups_per_step": 2, "group_size": 2, "max_staleness": 2},
        "runtime": {"kind": "inline"},
        "run": {"steps": STEPS},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        yield Workshop(path, config)


@pytest.fixture(scope="module")
def finished(workshop: Workshop) -> tuple[Done, Run]:
    """One run, of which several tests look at what it left."""
    runs: list[Run] = []

    def remember(*args: Any, **options: Any) -> Run:
        runs.append(execute(*args, **options))
        return runs[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "execute", remember)
        done = call(workshop.write(), "--out", "runs/first")
    return done, runs[0]


def test_it_says_what_it_is_going_to_do(finished: tuple[Done, Run]) -> None:
    done, _ = finished
    assert (done.code, done.err) == (0, "")
    introduction = done.out.partition("\n\n")[0].splitlines()
    facts = dict(line.split(maxsplit=1) for line in introduction)
    assert facts["model"] == "model: llama, 35 k parameters"
    assert facts["task"] == "prompts.jsonl, scored by length_reward:reward"
    assert facts["algorithm"] == "grpo, 2 groups of 2 a step, learning rate 0.01"
    assert facts["paradigm"] == "multi_version, K = 2"
    assert facts["runtime"].startswith("inline: rollout 1 x ")
    assert facts["run"] == "runs/first, 3 steps"


def test_it_tells_of_every_step_and_of_the_end(finished: tuple[Done, Run]) -> None:
    done, run = finished
    _, steps, conclusion, audit, last = done.out.split("\n\n")
    told = [line for line in steps.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in told] == ["1/3", "2/3", "3/3"]
    (sample,) = [line for line in steps.splitlines() if line.startswith("sample ")]
    assert sample.startswith("sample of step 1  reward ")
    for line, record in zip(told, run.steps, strict=True):
        assert f"reward {record.reward_mean:.3f} " in line
        assert f"staleness {record.staleness_mean:.2f} max {record.staleness_max}" in line
    assert conclusion.startswith("3 steps in ")
    first, final = run.steps[0].reward_mean, run.steps[-1].reward_mean
    assert f"reward     {first:.3f} -> {final:.3f} " in conclusion
    assert f"max {max(r.staleness_max for r in run.steps)} (K = 2)" in conclusion
    assert audit.startswith("audit of multi_version: clean")
    assert all(line.startswith("  note: ") for line in audit.splitlines()[1:])
    assert "checkpoint runs/first/checkpoints/step-3" in last
    for command in (
        "audit runs/first --verbose",
        "replay runs/first",
        "train --set orchestration.paradigm=",
    ):
        assert f"dora-rl {command}" in last


def test_the_run_directory_is_whole(finished: tuple[Done, Run], workshop: Workshop) -> None:
    path = workshop.path / "runs/first"
    assert {file.name for file in path.iterdir()} >= RUN_FILES
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "reward_mean" in line] == [1, 2, 3]
    assert json.loads((path / "metrics.json").read_text())["trained"] == STEPS * 4


@pytest.mark.parametrize("command", ["audit", "replay"])
def test_other_commands_find_it_clean(
    command: str, finished: tuple[Done, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, "runs/first"]) == 0
    assert capsys.readouterr().err == ""


def test_the_checkpoint_is_a_trained_model(finished: tuple[Done, Run], workshop: Workshop) -> None:
    path = workshop.path / "runs/first/checkpoints/step-3"
    before = AutoModelForCausalLM.from_pretrained(workshop.path / "model").state_dict()
    after = AutoModelForCausalLM.from_pretrained(path).state_dict()
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_the_timeline_shows_training_and_rollout(
    finished: tuple[Done, Run], workshop: Workshop
) -> None:
    events = json.loads((workshop.path / "runs/first/trace.json").read_text())
    spans = [event for event in events if event["ph"] == "X"]
    assert [s["args"]["version"] for s in spans if s["cat"] == "train"] == [0, 1, 2]
    assert [s["args"]["version"] for s in spans if s["cat"] == "publish"] == [1, 2, 3]
    rollout = [s for s in spans if s["cat"] == "rollout"]
    tokens = sum(record.tokens for record in finished[1].steps)
    # A token takes 10 ms on the logical clock, and at least one step more begins and ends it.
    busy_s = sum(s["args"]["running"] * s["dur"] / 1e6 for s in rollout)
    assert busy_s == pytest.approx(tokens * 0.01, rel=0.5)


def test_json_is_all_that_goes_to_stdout(workshop: Workshop) -> None:
    done = call(workshop.write(), "--json", "--steps", "1", "--out", "runs/json")
    assert done.code == 0
    report = json.loads(done.out)
    assert report["ok"] and not report["interrupted"]
    assert report["steps"] == 1
    assert report["directory"] == "runs/json"
    assert report["checkpoint"] == "runs/json/checkpoints/step-1"
    assert report["first_step"] == report["last_step"]
    assert report["reward"]["first"] == report["first_step"]["reward_mean"]
    assert report["audit"]["verdict"] == "clean"
    assert report["summary"]["trained"] == 4
    assert report["evaluations"] == []
    assert "step 1/1  reward" in done.err


def test_evaluations_are_told_and_kept(workshop: Workshop) -> None:
    task = {"eval_prompts": "prompts.jsonl", "eval_every": 1, "eval_size": 3}
    done = call(workshop.write(task=task), "--steps", "1", "--out", "runs/eval")
    assert (done.code, done.err) == (0, "")
    first = next(x for x in done.out.splitlines() if x.startswith("evaluation of version 0"))
    assert "(3 responses, " in first
    before, after = (
        next(x for x in done.out.splitlines() if x.startswith(f"evaluation of version {version}"))
        .partition("reward ")[2]
        .split()[0]
        for version in (0, 1)
    )
    assert f"evaluation {before} (version 0) -> {after} (version 1)\n" in done.out


# Refusals


def task_of(**values: Any) -> dict[str, dict[str, Any]]:
    return {"task": values}


BAD: dict[str, tuple[dict[str, dict[str, Any]], list[str], str]] = {
    "unknown key": ({}, ["--set", "orchestration.max_stalness=1"], "max_staleness"),
    "negative K": ({}, ["--set", "orchestration.max_staleness=-1"], "`-1`"),
    "lonely groups": ({}, ["--set", "orchestration.group_size=1"], "group_size"),
    "no steps": ({}, ["--steps", "0"], "`0`"),
    "empty prompts": (task_of(prompts="empty.jsonl"), [], "empty.jsonl"),
    "no prompts": (task_of(prompts="none.jsonl"), [], "none.jsonl"),
    "no reward module": (task_of(reward="no_such_module:reward"), [], "no_such_module"),
    "no reward function": (task_of(reward="length_reward:none"), [], "none"),
    "no model": ({"model": {"path": "nowhere"}}, [], "`nowhere`"),
    "no tokenizer": ({"model": {"path": "mute"}}, [], "tokenizer"),
    "no weights": ({"model": {"path": "hollow"}}, [], "no `model.safetensors`"),
    "weights of another model": ({"model": {"path": "other"}}, [], "Is it another model's?"),
    "a reward of None": (task_of(reward="bad_rewards:nothing"), [], "returned no number: `None`"),
    "a reward that raises": (task_of(reward="bad_rewards:fails"), [], "raised KeyError: 'x'"),
    "an environment that fails": (
        {"task": {"environment": "bad_rewards:Room", "reward": "exact"}},
        [],
        "task.environment fails on the first prompt: reset raised KeyError: 'x'",
    ),
    "a long prompt": (task_of(prompts="long.jsonl"), [], "task.long_prompts=skip"),
    "too large a model": ({"model": {"path": "large"}}, [], "the run needs at least"),
    "a run": ({}, ["--out", "runs/first"], "--resume runs/first"),
    "full directory": ({}, ["--out", "model"], "not empty: `model`"),
    "a file": ({}, ["--out", "prompts.jsonl"], "`prompts.jsonl`"),
    "resume with more": ({}, ["--resume", "runs/first"], "--resume takes no CONFIG"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_anything_is_written(
    name: str, workshop: Workshop, finished: tuple[Done, Run]
) -> None:
    sections, args, message = BAD[name]
    if name == "too large a model" and not memory_watch().in_force:
        pytest.skip("the system does not tell how much memory is left")
    (workshop.path / "empty.jsonl").write_text("")
    make_mute(workshop.path)
    make_mistakes(workshop.path)
    config = workshop.write("bad.toml", **sections)
    before = sorted(workshop.path.rglob("*"))
    extra = [] if "--out" in args or "--resume" in args else ["--out", "runs/bad"]
    done = call(config, *args, *extra)
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("error: ") and done.err.count("\n") == 1
    assert message in done.err
    after = {path for path in workshop.path.rglob("*") if "__pycache__" not in path.parts}
    assert after <= set(before)


def make_mute(path: Path) -> None:
    """A model without a tokenizer."""
    if not (path / "mute").exists():
        (path / "mute").mkdir()
        for name in ("config.json", "model.safetensors"):
            (path / "mute" / name).symlink_to(path / "model" / name)


def make_mistakes(path: Path) -> None:
    (path / "bad_rewards.py").write_text(
        "def nothing(response): pass\n"
        "def fails(response): raise KeyError('x')\n"
        "class Room:\n"
        "    def reset(self, example): raise KeyError('x')\n"
        "    def step(self, text): pass\n"
    )
    rows = [{"prompt": "short"}, {"prompt": "long " * 5000}]
    (path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = json.loads((path / "model" / "config.json").read_text())
    for name, changes in {
        "hollow": {},
        "other": {"intermediate_size": 2 * config["intermediate_size"]},
        "large": {"num_hidden_layers": 1000, "intermediate_size": 2**24},
    }.items():
        (path / name).mkdir(exist_ok=True)
        (path / name / "config.json").write_text(json.dumps({**config, **changes}))
        shutil.copy(path / "model" / "tokenizer.json", path / name)
        if name == "other":
            shutil.copy(path / "model" / "model.safetensors", path / name)


def test_no_such_configuration(workshop: Workshop) -> None:
    done = call("absent.toml")
    assert (done.code, done.out) == (2, "")
    assert "absent.toml" in done.err and done.err.count("\n") == 1


def test_nothing_to_resume(workshop: Workshop) -> None:
    done = call("--resume", "model")
    assert (done.code, done.out) == (2, "")
    assert "`model`" in done.err and done.err.count("\n") == 1


def test_refusals_come_before_torch(workshop: Workshop) -> None:
    config = workshop.write("bad.toml", task={"reward": "no_such_module:reward"})
    code = f"""
import sys
from dora_rl.cli import main
assert main(["train", {config!r}]) == 2
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no_such_module" in done.stderr


# Ends


def ends_as(monkeypatch: pytest.MonkeyPatch, end: Run | BaseException) -> None:
    def fake(*args: Any, **options: Any) -> Run:
        if isinstance(end, BaseException):
            raise end
        return end

    monkeypatch.setattr(progress, "execute", fake)


def test_a_failed_run(
    monkeypatch: pytest.MonkeyPatch, workshop: Workshop, finished: tuple[Done, Run]
) -> None:
    ends_as(monkeypatch, RunFailed("the trainer was killed by signal 9."))
    done = call(workshop.write(), "--out", "runs/failed")
    assert done.code == 1
    assert done.err.startswith("error: the run failed: the trainer was killed by signal 9.")
    assert done.err.count("\n") == 1


def test_a_halted_run(
    monkeypatch: pytest.MonkeyPatch, workshop: Workshop, finished: tuple[Done, Run]
) -> None:
    ends_as(monkeypatch, replace(finished[1], ending=Ending(False, "no rollout instance")))
    done = call(workshop.write(), "--out", "runs/halted")
    assert done.code == 1
    assert done.err == (
        "error: the run failed: no rollout instance. "
        "Resume with: dora-rl train --resume runs/halted\n"
    )
    assert "FAILED: no rollout instance" in done.out
    assert "next" not in done.out.splitlines()  # nothing to try but what the error says


def on_a_terminal(args: list[str], cwd: Path) -> tuple[int, list[str]]:
    """The command in a process of its own, with all that it writes on one terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "dora_rl", *args],
        cwd=cwd,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"},
    )
    os.close(theirs)
    written = b""
    with suppress(OSError):  # EIO: nobody writes any more
        while data := os.read(ours, 1 << 16):
            written += data
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.decode())
    return process.wait(), [line for line in re.split(r"[\r\n]+", text) if line.strip()]


@pytest.mark.slow
@pytest.mark.parametrize("plain", [[], ["--plain"]])
def test_the_error_is_the_last_thing_on_the_screen(plain: list[str], workshop: Workshop) -> None:
    (workshop.path / "raising_reward.py").write_text(
        "def reward(response):\n    raise ValueError('no such thing')\n"
    )
    config = workshop.write(
        "raising.toml",
        task={"reward": "raising_reward:reward", "dry_run": False},
        orchestration={"max_wasted_batches": 1},
    )
    out = f"runs/raising{len(plain)}"
    code, lines = on_a_terminal(["train", config, "--out", out, *plain], workshop.path)
    assert code == 1
    assert lines[-1].startswith("error: the run failed: ") and "no such thing" in lines[-1]
    assert lines[-1].endswith(f"Resume with: dora-rl train --resume {out}")
    assert [line for line in lines if line.startswith("audit of ")]
    assert not any("holds" in line or line == "next" for line in lines)


def test_a_broken_promise(
    monkeypatch: pytest.MonkeyPatch, workshop: Workshop, finished: tuple[Done, Run]
) -> None:
    run = finished[1]
    checks = tuple(
        replace(check, breaches=2, promised=True) if check.promise is Promise.STALENESS else check
        for check in run.audit.checks
    )
    ends_as(monkeypatch, replace(run, audit=replace(run.audit, checks=checks)))
    done = call(workshop.write(), "--out", "runs/broken")
    assert done.code == 1
    assert "C3 staleness         BROKEN (2)" in done.out
    assert "a promise was broken" in done.err


def test_two_interrupts_end_at_once(monkeypatch: pytest.MonkeyPatch, workshop: Workshop) -> None:
    ends_as(monkeypatch, KeyboardInterrupt())
    done = call(workshop.write(), "--out", "runs/killed")
    assert done.code == 130
    assert done.err.split("\n")[-2:] == ["error: interrupted", ""]


def test_one_interrupt_saves_and_the_run_can_go_on(
    monkeypatch: pytest.MonkeyPatch, workshop: Workshop
) -> None:
    line = progress.step_line

    def interrupt(record: StepRecord, status: Any) -> str:
        if record.step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return line(record, status)

    with monkeypatch.context() as patch:
        patch.setattr(progress, "step_line", interrupt)
        done = call(workshop.write(), "--out", "runs/stopped")
    assert done.code == 130
    assert done.err.splitlines() == [
        "stopping: the step is finished, then all is saved",
        "stopped. Resume with: dora-rl train --resume runs/stopped",
    ]
    assert "checkpoint runs/stopped/checkpoints/step-1" in done.out
    assert "step 2/3" not in done.out

    done = call("--resume", "runs/stopped")
    assert (done.code, done.err) == (0, "")
    assert "run        runs/stopped, 3 steps (resumed)" in done.out
    assert "step 1/3" not in done.out and "step 3/3" in done.out
    assert cli.main(["audit", "runs/stopped"]) == 0
    events = json.loads((workshop.path / "runs/stopped/trace.json").read_text())
    trained = [x["args"]["version"] for x in events if x["ph"] == "X" and x["cat"] == "train"]
    assert sorted(set(trained)) == [0, 1, 2]


def test_more_steps_are_a_new_total(workshop: Workshop) -> None:
    assert call(workshop.write(), "--out", "runs/more", "--steps", "1").code == 0
    refused = call("--resume", "runs/more")
    assert refused.code == 2
    assert "1 steps trained. Give --steps a total above 1" in refused.err
    done = call("--resume", "runs/more", "--steps", "2")
    assert (done.code, done.err) == (0, "")
    assert "run        runs/more, 2 steps (resumed)" in done.out
    assert "step 2/2  reward" in done.out and "step 1/2  reward" not in done.out
    assert "2 steps, 1 of them since the resume in" in done.out
    for command in ("audit", "replay"):
        assert cli.main([command, "runs/more"]) == 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_the_display(
    monkeypatch: pytest.MonkeyPatch, workshop: Workshop, finished: tuple[Done, Run]
) -> None:
    run = finished[1]

    def fake(plan: Any, *, watch: Any, **more: Any) -> Run:
        for record in run.steps:
            for watcher in watch:
                watcher(record)
        return run

    monkeypatch.setattr(progress, "execute", fake)
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    with redirect_stdout(terminal):
        assert cli.main(["train", workshop.write(), "--out", "runs/shown"]) == 0
    shown = terminal.getvalue()
    assert "3/3 " in shown and "100%" in shown and "\x1b[" in shown
    assert "step 1/3  reward" not in shown
    with redirect_stdout(plain := Terminal()):
        assert cli.main(["train", workshop.write(), "--out", "runs/shown", "--plain"]) == 0
    assert "step 1/3  reward" in plain.getvalue() and "\x1b[" not in plain.getvalue()


def test_the_quickstart_is_what_runs_without_a_configuration() -> None:
    plan = _training.planned(None, [], Path("runs/none"), None)
    assert plan.config.model.path == "quickstart"
    assert plan.task.rewards[0].function == "dora_rl.tasks.chains:reward"
    assert plan.config.runtime.kind == "local"
    assert plan.config.warnings() == []
    assert any("593 k parameters" in line for line in _training.introduction(plan))


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0"), (999, "999"), (593_280, "593 k"), (1_500_000, "1.5 M"), (7_000_000_000, "7.0 B")],
)
def test_sizes_for_people(count: int, shown: str) -> None:
    assert _training.human(count) == shown
