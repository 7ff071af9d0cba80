"""A run that was stopped goes on; one that cannot is refused by name."""

import copy
import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dora_rl.core.audit import audit_journal
from dora_rl.core.history.replay import replay
from dora_rl.core.protocol.commands import Command, Start
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.events import Event, TrajectoryFinished, WeightsPublished
from dora_rl.observe.live import Status
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.display.progress import Follower
from dora_rl.runtime.execution import Run, execute
from dora_rl.runtime.launchers.inline import InlineRuntime
from dora_rl.runtime.prepare.plan import plan_resume, prepare, read_config
from dora_rl.runtime.records.resume import steps_to_redo
from dora_rl.runtime.records.run_files import Ending, RunFiles
from dora_rl.runtime.records.step_metrics import StepRecord, read_records
from dora_rl.store.ledger import Changes, CheckpointRow, Ledger, LedgerError
from dora_rl.store.rundir import LEDGER, TRAJECTORIES
from dora_rl.weights.versions import published_versions
from tests.runtime.harness import (
    PROMPTS,
    REWARDS,
    assert_sound,
    journal,
    lines,
    records,
    run,
    settings,
    trained,
    weights,
)

STEPS = 5
LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 16.0}}
LONG: dict[str, dict[str, Any]] = {
    "rollout": {"slots": 6, "max_tokens": 40, "stop": ["a"]},
    "run": {"steps": STEPS},
}
Moment = Callable[[Event], bool]


class Stopper(Listener):
    """Asks to stop at a moment, once."""

    def __init__(self, moment: Moment) -> None:
        self.moment = moment
        self.runtime: InlineRuntime | None = None
        self.asked = False

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if self.runtime is not None and not self.asked and self.moment(event):
            self.asked = True
            self.runtime.stop()


def stopped(plan: Any, moment: Moment) -> Ending:
    """Run until a moment; closed as `execute` does it."""
    stopper = Stopper(moment)
    with RunFiles(plan, listeners=[stopper]) as files:
        stopper.runtime = runtime = InlineRuntime(files)
        ending = runtime.run()
        files.close(ending, 1.0)
    assert stopper.asked
    assert ending == Ending(False, ending.reason, interrupted=True)
    return ending


def published(version: int) -> Moment:
    return lambda event: isinstance(event, WeightsPublished) and event.version == version


def finished(count: int) -> Moment:
    left = iter(range(count))

    def moment(event: Event) -> bool:
        return isinstance(event, TrajectoryFinished) and next(left, None) is None

    return moment


def plan_of(model: Path, out: Path, /, **sections: dict[str, Any]) -> Any:
    return prepare(read_config(settings(model, out, **{**LONG, **sections})), prompts=PROMPTS)


def go_on(directory: Path) -> Run:
    return execute(plan_resume(directory, prompts=PROMPTS))


MOMENTS: dict[str, Callable[[], Moment]] = {
    "before the first step": lambda: published(0),
    "in the first step": lambda: finished(1),
    "after step 1": lambda: published(1),
    "in step 3": lambda: finished(14),
    "after step 3": lambda: published(3),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_stopped_run_goes_on(moment: str, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    stopped(plan_of(model, out), MOMENTS[moment]())
    assert audit_journal(journal(out).lines()).ok
    assert replay(journal(out).lines()).ok
    first, before = lines(out), trained(out)
    issued = versions(out)
    ended = go_on(out)
    assert_sound(ended)
    assert not ended.ending.interrupted
    assert lines(out)[: len(first)] == first
    after = trained(out)
    assert after[: len(before)] == before
    assert [step for step, _, _ in after] == [step for step in range(STEPS) for _ in range(4)]
    for step, version, trajectory in after:
        assert 0 <= step - version <= 2
        assert issued.get(trajectory, version) == version  # it kept its version, and so its age
    assert [record.step for record in ended.steps] == list(range(1, STEPS + 1))


def versions(directory: Path) -> dict[int, int]:
    """The version of each trajectory that was started."""
    commands = [c for record in records(directory) for c in record.commands]
    return {c.trajectory: c.version for c in commands if isinstance(c, Start)}


def assert_consecutive(steps: Sequence[StepRecord]) -> None:
    """Each step takes the time since the one before it, whoever carried the run then."""
    times = [0.0, *(record.time_s for record in steps)]
    assert [record.step_s for record in steps] == pytest.approx(
        [after - before for before, after in pairwise(times)]
    )
    assert [record.step for record in steps] == list(range(1, STEPS + 1))


@pytest.mark.slow
@pytest.mark.parametrize("paradigm", ["multi_version", "sync"])
def test_a_step_after_a_resume_has_its_own_time_alone(
    paradigm: str, model: Path, tmp_path: Path
) -> None:
    sections = {"orchestration": {"paradigm": paradigm}, "rollout": {"slots": 2}}
    whole = execute(plan_of(model, tmp_path / "whole", **sections))
    stopped(plan_of(model, tmp_path / "run", **sections), published(3))
    ended = go_on(tmp_path / "run")
    for steps in (whole.steps, ended.steps):
        assert_consecutive(steps)
        assert all(record.deadline_stall_s <= record.step_s for record in steps)


def test_a_step_after_a_checkpoint_has_its_own_time_alone(model: Path, tmp_path: Path) -> None:
    """In one process that goes on anew at each checkpoint."""
    run = {**LONG["run"], "checkpoint_every": 2}
    assert_consecutive(execute(plan_of(model, tmp_path / "run", run=run)).steps)


def test_a_stopped_run_has_not_ended_well(model: Path, tmp_path: Path) -> None:
    def stop(record: StepRecord) -> None:
        if record.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    ended = execute(plan_of(model, tmp_path / "run"), watch=[stop])
    assert ended.ending.interrupted and ended.audit.ok
    assert not ended.ok
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["ok"] is False
    assert go_on(tmp_path / "run").ok


def test_steps_that_were_counted_from_0_are_read_and_go_on(model: Path, tmp_path: Path) -> None:
    """As an older dora-rl has written them."""
    out = tmp_path / "run"
    stopped(plan_of(model, out), published(3))
    metrics = out / "metrics.jsonl"
    older = [json.loads(line) for line in metrics.read_text().splitlines()]
    for record in older:
        record["step"] -= 1
    metrics.write_text("".join(json.dumps(record) + "\n" for record in older))
    assert [record.step for record in read_records(metrics)] == [1, 2, 3]
    assert [record.step for record in go_on(out).steps] == list(range(1, STEPS + 1))


class Shown(Listener):
    """How far the display says that a run is, when it is resumed and with every event after."""

    def __init__(self, status: Status) -> None:
        self.status = status
        self.at_first: tuple[int, list[float]] | None = None
        self.seen: list[int] = []

    def resumed(self, records: Sequence[Any], state: Any, placements: Any) -> None:
        self.at_first = self.status.steps_done, list(self.status.rewards)

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if self.at_first is not None:
            self.seen.append(self.status.steps_done)


def test_the_display_of_a_resumed_run_begins_where_it_was(model: Path, tmp_path: Path) -> None:
    stopped(plan_of(model, tmp_path / "run"), published(3))
    before = [record.reward_mean for record in read_records(tmp_path / "run" / "metrics.jsonl")]
    plan = plan_resume(tmp_path / "run", prompts=PROMPTS)
    follower = Follower(plan)
    assert (follower.status.steps_done, follower.status.rewards) == (3, before)
    shown = Shown(follower.status)
    execute(plan, listeners=[follower, shown])
    assert shown.at_first == (3, before)
    assert shown.seen == sorted(shown.seen) and set(shown.seen) == {3, 4, 5}


def test_what_was_written_is_not_written_again(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    stopped(plan_of(model, out), published(1))
    length = len(lines(out))
    go_on(out)
    starts = [
        command
        for record in records(out)[length:]
        for command in record.commands
        if isinstance(command, Start)
    ]
    assert any(command.prefix_tokens > 0 for command in starts)


def test_a_run_can_be_stopped_again_and_again(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    stopped(plan_of(model, out), published(1))
    stopped(plan_resume(out, prompts=PROMPTS), published(2))
    stopped(plan_resume(out, prompts=PROMPTS), published(4))
    ended = go_on(out)
    assert_sound(ended)
    assert [step for step, _, _ in trained(out)] == [s for s in range(STEPS) for _ in range(4)]


@pytest.mark.slow
def test_a_run_can_be_stopped_as_soon_as_it_goes_on(model: Path, tmp_path: Path) -> None:
    """Before it has trained anything; the last checkpoint is still the one to go on from."""
    out = tmp_path / "run"
    stopped(plan_of(model, out, run={"steps": STEPS, "keep_checkpoints": 1}), published(2))
    for _ in range(2):
        ending = stopped(plan_resume(out, prompts=PROMPTS), lambda event: True)
        assert ending.reason == "stopped after 2 steps"
        assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-2"]
    assert_sound(go_on(out))


@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 2), (2, 2)])
def test_a_run_goes_on_with_other_instances(
    before: int, after: int, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    stopped(plan_of(model, out, runtime={"instances": before}), finished(14))
    edit(out / "config.toml", f"instances = {before}", f"instances = {after}")
    assert_sound(go_on(out))


def test_stopping_does_not_change_what_sync_learns(model: Path, tmp_path: Path) -> None:
    """Without overlap the weights are a function of the seed, stopped or not."""
    sync = {"orchestration": {"paradigm": "sync"}}
    whole = execute(plan_of(model, tmp_path / "whole", **sync))
    stopped(plan_of(model, tmp_path / "stopped", **sync), finished(7))
    ended = go_on(tmp_path / "stopped")
    assert trained(ended.directory) == trained(whole.directory)
    assert ended.checkpoint is not None and whole.checkpoint is not None
    assert weights(ended.checkpoint) == weights(whole.checkpoint)


def test_a_run_of_adapters_goes_on_to_the_same_bits(model: Path, tmp_path: Path) -> None:
    sections = {"orchestration": {"paradigm": "sync"}, "model": LORA}
    whole = execute(plan_of(model, tmp_path / "whole", **sections))
    stopped(plan_of(model, tmp_path / "stopped", **sections), finished(7))
    ended = go_on(tmp_path / "stopped")
    assert_sound(ended)
    assert ended.checkpoint is not None and whole.checkpoint is not None
    assert weights(ended.checkpoint) == weights(whole.checkpoint)


@pytest.mark.parametrize("paradigm", ["one_step", "partial", "in_flight"])
def test_every_paradigm_goes_on(paradigm: str, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    stopped(plan_of(model, out, orchestration={"paradigm": paradigm}), finished(9))
    assert_sound(go_on(out))


def test_an_episode_begins_anew(model: Path, tmp_path: Path) -> None:
    task = {"reward": None, "environment": f"{REWARDS}:Counting"}
    out = tmp_path / "run"
    stopped(plan_of(model, out, task=task, rollout={"max_tokens": 60}), finished(6))
    assert_sound(go_on(out))


# Steps that are taken again with the weights that their batches were sampled from

RECOMPUTE = {"train": {"behaviour": "recompute"}}


class Committing(Listener):
    """Commits all the time, as a run in processes does, and sees what a resume would find."""

    def __init__(self) -> None:
        self.files: RunFiles | None = None
        self.redone: list[int] = []  # how many steps a trainer that dies now would take again
        self.missing: set[int] = set()  # versions that it would not find
        self.unleased: set[int] = set()  # versions that are there though the core let go of them

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        files = self.files
        if files is None:
            return
        files.committer.commit()
        if not isinstance(event, WeightsPublished):
            return
        state, there = files.orchestrator.state, set(published_versions(files.weights))
        steps = list(steps_to_redo(files.ledger, state.trainer.step))
        samplers = {
            segment.version
            for step in steps
            for sample in step.samples
            for segment in sample.trajectory.segments
        }
        self.redone.append(len(steps))
        self.missing |= samplers - there
        self.unleased |= there - state.versions.live.keys()


def committed(plan: Any) -> tuple[Committing, list[int]]:
    """A run with a commit at every event; the versions that it left."""
    seen = Committing()
    while True:
        with RunFiles(plan, listeners=[seen]) as files:
            runtime = InlineRuntime(files)
            seen.files = files
            ending = runtime.run()
            seen.files = None
            files.close(ending, 1.0)
        if not ending.paused:
            assert ending.ok, ending
            return seen, published_versions(files.weights)
        plan = replace(plan, resumed=True)


@pytest.mark.slow
@pytest.mark.parametrize("paradigm", ["sync", "in_flight"])
def test_what_sampled_a_step_stays_until_a_checkpoint_has_it(
    paradigm: str, model: Path, tmp_path: Path
) -> None:
    sections: dict[str, dict[str, Any]] = {
        "orchestration": {"paradigm": paradigm},
        "rollout": {"slots": 6, "max_tokens": 60, "stop": ["a"]},
        "run": {"steps": 7, "checkpoint_every": 5},
    }
    seen, left = committed(plan_of(model, tmp_path / "run", **sections, **RECOMPUTE))
    assert max(seen.redone) == 5
    assert not seen.missing
    assert seen.unleased  # else no version would have gone too early, and this shows nothing
    idle, left_by_other = committed(plan_of(model, tmp_path / "other", **sections))
    assert idle.missing and not idle.unleased  # nothing stays that nobody will load
    assert left == left_by_other


def test_a_run_that_does_not_last_ends_all_the_same(model: Path, tmp_path: Path) -> None:
    """It has nothing to go on from, neither at its checkpoints nor when it was stopped."""
    settings = {"steps": 3, "checkpoint_every": 1, "durable": False}
    ended = run(model, tmp_path / "run", run=settings)
    assert_sound(ended)
    assert len(ended.steps) == 3
    assert not (ended.directory / TRAJECTORIES).exists()
    stopped(plan_of(model, tmp_path / "stopped", run=settings), published(1))
    with pytest.raises(UserError, match=r"nothing to resume in .*: run\.durable is off"):
        plan_resume(tmp_path / "stopped", prompts=PROMPTS)


# Refusals


@pytest.fixture(scope="module")
def left(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("left") / "run"
    stopped(plan_of(model, out), published(2))
    return out


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def cut(file: Path, count: int = 7) -> None:
    file.write_bytes(file.read_bytes()[:-count])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)


def newest_version(run: Path) -> Path:
    return max((run / "weights").glob("version-*"))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no ledger": (lambda out: (out / LEDGER).unlink(), LEDGER),
    "not a run": (lambda out: (out / "config.toml").unlink(), "not a run"),
    "cut ledger": (lambda out: cut(out / LEDGER, 5000), LEDGER),
    "no checkpoint": (lambda out: shutil.rmtree(out / "checkpoints/step-2"), "step-2"),
    "cut checkpoint": (
        lambda out: cut(next((out / "checkpoints/step-2/trainer").rglob("model.safetensors"))),
        "step-2",
    ),
    "no version": (lambda out: shutil.rmtree(newest_version(out)), "version-"),
    "cut manifest": (lambda out: cut(newest_version(out) / "manifest.json"), "manifest.json"),
    "altered version": (
        lambda out: flip(newest_version(out) / "model.safetensors"),
        "model.safetensors",
    ),
    "no key of ours": (
        lambda out: edit(out / "config.toml", "weight_decay", "weight_deCay"),
        "config.toml",
    ),
    "no journal": (lambda out: (out / "journal.jsonl").unlink(), "journal.jsonl"),
    "cut journal": (lambda out: cut(out / "journal.jsonl", 500), "journal.jsonl"),
    "altered journal": (
        lambda out: edit(
            out / "journal.jsonl", '"TrajectoryFinished",0,', '"TrajectoryFinished",1,'
        ),
        "journal.jsonl",
    ),
    "altered core": (
        lambda out: edit(out / "config.toml", "max_staleness = 2", "max_staleness = 3"),
        "config.toml",
    ),
    "altered algorithm": (
        lambda out: edit(out / "config.toml", "learning_rate = 0.01", "learning_rate = 0.02"),
        "train.learning_rate: was `0.01`, is `0.02`",
    ),
    "altered rollout": (
        lambda out: edit(out / "config.toml", "max_tokens = 40", "max_tokens = 50"),
        "rollout.max_tokens: was `40`, is `50`",
    ),
    "altered seed": (
        lambda out: edit(out / "config.toml", "seed = 0", "seed = 1"),
        "run.seed: was `0`, is `1`",
    ),
}


def names(run: Path) -> set[str]:
    """But for the files that SQLite makes beside a database that it reads."""
    return {path.name for path in run.iterdir() if not path.name.startswith(f"{LEDGER}-")}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_run_is_refused_and_left_as_it_was(name: str, left: Path, tmp_path: Path) -> None:
    damage, said = DAMAGE[name]
    out = tmp_path / "run"
    shutil.copytree(left, out)
    damage(out)
    book = out / "journal.jsonl"
    before = book.read_bytes() if book.exists() else None
    files = names(out)
    with pytest.raises(UserError) as refusal:
        go_on(out)
    assert said in str(refusal.value), refusal.value
    assert (book.read_bytes() if book.exists() else None) == before
    assert names(out) == files


@pytest.mark.parametrize(
    "name", ["../../elsewhere/step-2", "{outside}/step-2", "..", "step-1", "step-2/../step-2", ""]
)
def test_a_checkpoint_by_a_forged_name_is_refused(name: str, left: Path, tmp_path: Path) -> None:
    """Though what it names is a whole checkpoint, and every row is sealed as it should be."""
    out = tmp_path / "run"
    shutil.copytree(left, out)
    for elsewhere in (tmp_path / "elsewhere" / "step-2", out / "checkpoints" / "step-1"):
        shutil.copytree(out / "checkpoints" / "step-2", elsewhere)
    forged = name.format(outside=tmp_path / "elsewhere")
    with Ledger.open(out / LEDGER) as ledger:
        ledger.commit(Changes(ledger.position, checkpoints=[CheckpointRow(2, forged)]))
    files = names(out)
    with pytest.raises(LedgerError) as refusal:
        go_on(out)
    assert f"`{out / LEDGER}`" in str(refusal.value)
    assert f"checkpoint of step 2 is named `{forged}`" in str(refusal.value)
    assert names(out) == files


def test_a_refused_run_can_still_be_resumed(left: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(left, out)
    shutil.move(out / "checkpoints/step-2", tmp_path)
    shutil.copytree(tmp_path / "step-2", out / "checkpoints/step-2")
    cut(next((out / "checkpoints/step-2/trainer").rglob("model.safetensors")))
    with pytest.raises(UserError):
        go_on(out)
    shutil.rmtree(out / "checkpoints/step-2")
    shutil.move(tmp_path / "step-2", out / "checkpoints")
    assert_sound(go_on(out))


def test_a_resumed_run_is_hidden_from_rewards_where_it_is(left: Path, tmp_path: Path) -> None:
    """Its configuration may name another place, or none."""
    moved = tmp_path / "moved"
    shutil.copytree(left, moved)
    assert plan_resume(moved, prompts=PROMPTS).task._hidden == (os.path.realpath(moved),)


def test_other_prompts_are_refused_unless_accepted(left: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(left, out)
    others = [{"prompt": "something else", "turns": 1}]
    with pytest.raises(UserError, match="prompts: the prompts changed"):
        plan_resume(out, prompts=others)
    with pytest.raises(UserError, match="--accept-changed prompts"):
        plan_resume(out, prompts=others, accept_changed=["reward"])
    with pytest.raises(UserError, match="`seed`"):
        plan_resume(out, prompts=others, accept_changed=["seed"])
    assert_sound(execute(plan_resume(out, prompts=others, accept_changed=["prompts"])))


def test_what_was_accepted_is_not_asked_for_again(left: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(left, out)
    others = [{"prompt": "something else", "turns": 1}]
    plan = plan_resume(out, prompts=others, accept_changed=["prompts"])
    with RunFiles(plan):
        pass  # it came to nothing
    with pytest.raises(UserError, match="prompts: the prompts changed"):
        plan_resume(out, prompts=others)
    stopped(plan, published(3))
    with pytest.raises(UserError, match="prompts: the prompts changed"):
        plan_resume(out, prompts=PROMPTS)
    assert_sound(execute(plan_resume(out, prompts=others)))


def test_a_directory_is_the_same_to_a_resume_from_elsewhere(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path.resolve() / "here", tmp_path.resolve() / "there"
    for place in (here, there):
        (place / "scores").mkdir(parents=True)
    monkeypatch.chdir(here)
    out = tmp_path / "run"
    task = {"writable": ["scores"]}
    stopped(plan_of(model, out, task=task), published(1))
    monkeypatch.chdir(there)
    plan = plan_resume(out, prompts=PROMPTS)
    assert plan.task.settings.writable == (str(here / "scores"),)
    assert_sound(execute(plan))


def test_a_setting_of_a_newer_version_is_no_change_unless_it_is_used(
    left: Path, tmp_path: Path
) -> None:
    """An older one neither wrote it into the configuration, nor into the ledger."""
    out = tmp_path / "run"
    shutil.copytree(left, out)
    with Ledger.open(out / LEDGER) as ledger:
        facts = copy.deepcopy(ledger.facts)
        del facts["config"]["task"]["writable"]
        ledger.set_facts(facts)
    edit(out / "config.toml", "writable = []\n", f"writable = [{str(tmp_path)!r}]\n")
    with pytest.raises(UserError, match=r"task\.writable: was `nothing`, is"):
        plan_resume(out, prompts=PROMPTS)
    edit(out / "config.toml", f"writable = [{str(tmp_path)!r}]\n", "")
    assert_sound(go_on(out))


def test_a_run_that_has_ended_has_nothing_to_resume(model: Path, tmp_path: Path) -> None:
    ended = run(model, tmp_path / "run", run={"steps": 1})
    with pytest.raises(UserError, match="nothing to resume"):
        plan_resume(ended.directory, prompts=PROMPTS)


def test_a_resumed_run_that_has_ended_has_nothing_to_resume(left: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(left, out)
    go_on(out)
    with pytest.raises(UserError, match="nothing to resume"):
        plan_resume(out, prompts=PROMPTS)


def test_a_secret_is_written_nowhere_and_given_again(model: Path, tmp_path: Path) -> None:
    secret = "sk-live-0123456789abcdefABCDEF"
    out = tmp_path / "run"
    task = {"eval_options": {"api_key": secret}}
    stopped(plan_of(model, out, task=task), published(2))
    for file in (path for path in out.rglob("*") if path.is_file()):
        assert secret.encode() not in file.read_bytes(), file
    with pytest.raises(UserError, match=r"--set task\.eval_options\.api_key=") as refusal:
        plan_resume(out, prompts=PROMPTS)
    assert secret not in str(refusal.value)
    with pytest.raises(UserError, match=r"no --set of `run\.seed`"):
        plan_resume(out, prompts=PROMPTS, secrets=["run.seed=3"])
    again = [f'task.eval_options.api_key="{secret}"']
    assert_sound(execute(plan_resume(out, prompts=PROMPTS, secrets=again)))
