"""A trainer that dies before it has served is replaced; one that can never serve ends the run."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from dora_rl.core.protocol.commands import Command, Halt
from dora_rl.core.protocol.events import Event
from dora_rl.runtime.control.listeners import Listener
from dora_rl.runtime.errors import RunFailed
from dora_rl.runtime.execution import Run, execute
from dora_rl.runtime.launchers.local.launcher import LocalRuntime
from dora_rl.runtime.prepare.plan import plan_resume
from dora_rl.runtime.records.run_files import Ending, RunFiles
from tests.runtime.harness import PROMPTS, WORKERS, assert_sound, run
from tests.runtime.test_local import ALONE, parts
from tests.runtime.test_resume import plan_of, published, stopped

# In trainer processes alone; `count` is how many of them were started, this one included.
FAULT = """
import sys
if {workers} & set(sys.orig_argv):
    import os, signal
    from dora_rl.runtime.control import messages as ms
    from dora_rl.runtime.workers import trainer

    def started():
        with open({starts!r}, "a+") as log:
            log.write("x")
            log.seek(0)
            return len(log.read())

    class Trainer(trainer.TrainerWorker):
        @classmethod
        def open(cls, *args, **kwargs):
            cls.count = count = started()
            {at_start}
            return super().open(*args, **kwargs)

        def handle(self, message):
            count = self.count
            if isinstance(message, ms.PublishVersion):
                {at_publication}
            if isinstance(message, ms.TrainOn):
                {at_training}
            yield from super().handle(message)

    trainer.TrainerWorker = Trainer
"""
DIES = "os.kill(os.getpid(), signal.SIGKILL)"
RAISES = "raise RuntimeError(f'no trainer here, says {os.getpid()}')"


class Replaced(Listener):
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def replaced(self, now: float, why: str) -> None:
        self.reasons.append(why)


class KilledAtTheEnd(Replaced):
    """Kills the trainer when the core has halted, before the last step is saved."""

    def observed(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if any(isinstance(command, Halt) for command in commands):
            (trainer,) = parts("trainer")
            trainer.kill()


class Faulty:
    """Trainers with a fault; how many were started."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory = tmp_path
        self._monkeypatch = monkeypatch

    def break_it(
        self, *, at_start: str = "pass", at_publication: str = "pass", at_training: str = "pass"
    ) -> None:
        directory = self._directory / f"fault-{len(list(self._directory.glob('fault-*')))}"
        directory.mkdir()
        self._monkeypatch.setenv("PYTHONPATH", str(directory))
        (directory / "sitecustomize.py").write_text(
            FAULT.format(
                workers=WORKERS,
                starts=str(self._directory / "starts"),
                at_start=at_start,
                at_publication=at_publication,
                at_training=at_training,
            )
        )

    @property
    def starts(self) -> int:
        return len((self._directory / "starts").read_text())


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faulty:
    return Faulty(tmp_path, monkeypatch)


def go(model: Path, out: Path, *listeners: Listener, durable: bool = True) -> Run:
    return run(model, out, *listeners, **{**ALONE, "run": {"steps": 2, "durable": durable}})


@pytest.mark.slow
@pytest.mark.parametrize("fault", [DIES, RAISES])
def test_one_that_dies_before_it_is_ready_is_replaced(
    fault: str, faulty: Faulty, model: Path, tmp_path: Path
) -> None:
    faulty.break_it(at_start=f"if count == 1: {fault}")
    seen = Replaced()
    ended = go(model, tmp_path / "run", seen)
    assert_sound(ended)
    assert faulty.starts == 2 and len(ended.steps) == 2
    (reason,) = seen.reasons
    assert reason.startswith("the trainer ended with ")


@pytest.mark.slow
def test_one_that_dies_before_it_has_published_anything_is_replaced(
    faulty: Faulty, model: Path, tmp_path: Path
) -> None:
    """Nobody but us has asked for the first version. There is nothing yet that could be lost."""
    faulty.break_it(at_publication=f"if count == 1: {DIES}")
    ended = go(model, tmp_path / "run", durable=False)
    assert_sound(ended)
    assert faulty.starts == 2


@pytest.mark.slow
def test_one_that_dies_before_the_last_step_is_saved_is_replaced(
    model: Path, tmp_path: Path
) -> None:
    seen = KilledAtTheEnd()
    ended = go(model, tmp_path / "run", seen)
    assert_sound(ended)
    assert ended.checkpoint is not None and ended.checkpoint.name == "step-2"
    assert seen.reasons == ["the trainer ended with signal SIGKILL"]


@pytest.mark.slow
def test_a_run_whose_last_batch_kills_its_trainers_is_saved(
    faulty: Faulty, model: Path, tmp_path: Path
) -> None:
    """The rejection ends the run, and ends it well: an earlier step was trained."""
    faulty.break_it(at_training=f"if message.step == 1: {DIES}")
    core = {"groups_per_step": 2, "group_size": 2, "max_train_attempts": 2}
    task = {"epochs": 1}
    sections = {**ALONE, "orchestration": core, "task": task, "run": {"steps": 9}}
    ended = run(model, tmp_path / "run", prompts=PROMPTS[:4], **sections)
    assert_sound(ended)
    assert len(ended.steps) == 1 and ended.audit.failed == 4
    assert ended.checkpoint is not None and ended.checkpoint.name == "step-1"


@pytest.mark.slow
def test_a_batch_that_kills_who_trains_it_is_rejected(
    faulty: Faulty, model: Path, tmp_path: Path
) -> None:
    """One that dies before it has seen the batch does not count."""
    faulty.break_it(
        at_start=f"if count in (2, 3): {DIES}", at_training=f"if count in (1, 4, 5): {DIES}"
    )
    core = {"groups_per_step": 2, "group_size": 2, "max_train_attempts": 2}
    ended = run(model, tmp_path / "run", **{**ALONE, "orchestration": core, "run": {"steps": 2}})
    assert_sound(ended)
    assert faulty.starts == 6
    assert ended.audit.failed == 4  # the trajectories of that batch


@pytest.mark.slow
def test_one_that_dies_before_a_resumed_run_is_ready_is_replaced(
    faulty: Faulty, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    stopped(plan_of(model, out, run={"steps": 4}), published(2))
    text = (out / "config.toml").read_text()
    (out / "config.toml").write_text(text.replace('kind = "inline"', 'kind = "local"'))
    faulty.break_it(at_start=f"if count < 3: {DIES}")
    ended = execute(plan_resume(out, prompts=PROMPTS))
    assert_sound(ended)
    assert faulty.starts == 3
    assert [record.step for record in ended.steps] == list(range(1, 5))


@pytest.mark.parametrize("moment", [0, 2])
def test_a_resumed_run_that_is_to_stop_before_it_is_ready_is_as_it_was(
    moment: int, model: Path, tmp_path: Path
) -> None:
    """The instances that its core knows are of the last life: nobody waits for their words."""
    out = tmp_path / "run"
    stopped(plan_of(model, out, runtime={"stop_timeout_s": 2.0}), published(moment))
    text = (out / "config.toml").read_text()
    (out / "config.toml").write_text(text.replace('kind = "inline"', 'kind = "local"'))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with RunFiles(plan_resume(out, prompts=PROMPTS)) as files:
        runtime = LocalRuntime(files)
        runtime.stop()
        ending = runtime.run()
        files.close(ending, 1.0)
    assert ending == Ending(False, f"stopped after {moment} steps", interrupted=True)
    after = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert {path: after[path] for path in before} == before
    assert {path.parent for path in after.keys() - before.keys()} <= {out / "logs"}


@pytest.mark.slow
def test_the_same_error_twice_ends_the_run(faulty: Faulty, model: Path, tmp_path: Path) -> None:
    faulty.break_it(at_start=RAISES)
    with pytest.raises(RunFailed, match=r"no trainer here.*twice in a row before it served"):
        go(model, tmp_path / "run")
    assert faulty.starts == 2


@pytest.mark.slow
def test_one_that_is_always_killed_ends_the_run(
    faulty: Faulty, model: Path, tmp_path: Path
) -> None:
    faulty.break_it(at_start=DIES)
    with pytest.raises(RunFailed, match=r"the trainer ended with signal SIGKILL, 4 times"):
        go(model, tmp_path / "run")
    assert faulty.starts == 4


@pytest.mark.slow
def test_one_that_can_never_publish_ends_the_run(
    faulty: Faulty, model: Path, tmp_path: Path
) -> None:
    """There is no batch to blame for it."""
    faulty.break_it(at_publication=DIES)
    with pytest.raises(RunFailed, match=r"the trainer ended with signal SIGKILL, 4 times"):
        go(model, tmp_path / "run")
    assert faulty.starts == 4
