"""Saving when the disk or the process comes in between: a checkpoint is whole or not there."""

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from dora_rl.trainer import checkpoint
from dora_rl.trainer.checkpoint_writer import CheckpointWriter
from dora_rl.trainer.errors import CheckpointError
from tests.models.random_models import make_model
from tests.trainer.samples import all_of, batch_of, opened, same
from tests.weights.samples import identical, weights
from tests.weights.test_faults import Crash, faulty

torch.set_num_threads(1)
pytestmark = pytest.mark.faults
STATE = {"exp_avg.a": torch.ones(2, 3), "exp_avg.b": torch.zeros(5)}
SHARD = 60  # bytes a file, so that several are written

Save = Callable[[Path, int], str | None]


def write(directory: Path, step: int) -> None:
    facts = {"step": step, "settings": {"a": 0.1}}
    source = directory.parent.parent / "model"
    checkpoint.write(directory, source, weights(step), STATE, facts, max_file_bytes=SHARD)


def in_the_foreground(directory: Path, step: int) -> str | None:
    try:
        write(directory, step)
    except CheckpointError as error:
        return str(error)
    return None


def in_the_background(directory: Path, step: int) -> str | None:
    saving = CheckpointWriter(directory, partial(write, directory, step))
    saving.wait()
    return saving.failure


def fresh(root: Path) -> Path:
    """A model, and one checkpoint; a second is to come beside it."""
    (root / "model").mkdir(parents=True)
    (root / "model" / "config.json").write_text('{"model_type": "llama"}')
    (root / "model" / "tokenizer.json").write_text("{}")
    (root / "model" / "tokenizer.model").write_text("")
    write(root / "saved" / "step-1", 1)
    return root / "saved"


def check_sound(saved: Path, steps: list[int]) -> None:
    """These are there and whole, and nothing else that can be seen."""
    names = sorted(name for name in os.listdir(saved) if not name.startswith("."))
    assert names == [f"step-{step}" for step in steps]
    for step in steps:
        found = checkpoint.read(saved / f"step-{step}")
        assert found.facts == {"step": step, "settings": {"a": 0.1}}
        assert identical(found.weights(), weights(step))
        assert identical(found.state_tensors(), STATE)


def calls(root: Path) -> list[str]:
    """All calls that saving makes to the file system."""
    saved = fresh(root)
    with faulty() as system:
        write(saved / "step-2", 2)
    return system.calls


def test_all_is_synced_before_the_rename(tmp_path: Path) -> None:
    made = calls(tmp_path)
    rename = made.index("rename")
    assert made.count("rename") == 1
    # Every new file has a sync of its own, and so has every directory that names one.
    created = len([path for path in (tmp_path / "saved" / "step-2").rglob("*") if path.is_file()])
    assert made[:rename].count("fsync") == created + 3
    assert "write" not in made[rename:]
    assert made[rename:].count("fsync") == 1


@pytest.mark.parametrize(
    ("save", "how", "code"),
    [
        (in_the_foreground, "early", errno.ENOSPC),
        (in_the_foreground, "late", errno.EIO),
        (in_the_background, "early", errno.EIO),
        (in_the_background, "late", errno.ENOSPC),
    ],
)
def test_a_save_that_fails_anywhere_leaves_nothing(
    tmp_path: Path, save: Save, how: str, code: int
) -> None:
    made = calls(tmp_path / "count")
    assert len(made) > 60
    saved = fresh(tmp_path)
    silent = 0
    for fail_at in range(1, len(made) + 1):
        with faulty(fail_at, how, code) as system:
            failure = save(saved / "step-2", 2)
        failed = system.calls[fail_at - 1]
        if failure is None:
            # Closing what was only read may fail: nothing can have been lost.
            silent += 1
            assert failed == "close", fail_at
        else:
            assert os.strerror(code) in failure, (fail_at, failed)
            assert f"cannot write the checkpoint `{saved / 'step-2'}`: " in failure
            assert not [name for name in os.listdir(saved) if name.startswith(".")], failed
            check_sound(saved, [1])
            write(saved / "step-2", 2)
        check_sound(saved, [1, 2])
        os.rename(saved / "step-2", tmp_path / f"done-{fail_at}")
    assert silent == 3  # the files that are copied


def test_a_process_that_dies_anywhere_leaves_nothing_half(tmp_path: Path) -> None:
    made = calls(tmp_path / "count")
    renamed = made.index("rename") + 1
    saved = fresh(tmp_path)
    left = 0
    for fail_at in range(1, len(made) + 1):
        with faulty(fail_at, "crash"), pytest.raises(Crash):
            write(saved / "step-2", 2)
        whole = fail_at > renamed
        check_sound(saved, [1, 2] if whole else [1])
        left += any(name.startswith(".") for name in os.listdir(saved))
        checkpoint.sweep(saved)
        assert sorted(os.listdir(saved)) == ["step-1", "step-2"][: 1 + whole]
        if not whole:
            write(saved / "step-2", 2)
        check_sound(saved, [1, 2])
        os.rename(saved / "step-2", tmp_path / f"done-{fail_at}")
    assert left > 50  # else there was nothing to sweep


def test_a_model_that_is_gone_is_named(tmp_path: Path) -> None:
    saved = fresh(tmp_path)
    (tmp_path / "model" / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot copy `.*model/config.json`: "):
        write(saved / "step-2", 2)
    (tmp_path / "model").rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match=r"cannot copy `.*model`: No such file"):
        write(saved / "step-2", 2)
    check_sound(saved, [1])


def test_what_is_no_number_is_not_saved(tmp_path: Path) -> None:
    saved = fresh(tmp_path)
    source, bad = tmp_path / "model", {"a": torch.tensor([1.0, float("nan")])}
    for these, state in ((bad, STATE), (weights(), bad)):
        with pytest.raises(CheckpointError, match=r"step-2`: tensor `a` is not finite"):
            checkpoint.write(saved / "step-2", source, these, state, {"step": 2})
    with pytest.raises(CheckpointError, match="step-2`: what the last step reported cannot"):
        checkpoint.write(saved / "step-2", source, weights(), STATE, {"step": 2, "x": float("inf")})
    check_sound(saved, [1])
    assert os.listdir(saved) == ["step-1"]


def test_the_trainer_outlives_every_failed_save(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", seed=1, num_hidden_layers=1)
    saved = tmp_path / "saved"
    saved.mkdir()
    with opened(model, tmp_path / "store") as trainer:
        trainer.train(0, batch_of(0))
        with faulty() as system:
            trainer.save(saved / "step-1")
        then = all_of(trainer)
        for fail_at in range(1, len(system.calls) + 1):
            with faulty(fail_at, "early", errno.ENOSPC) as failing:
                saving = trainer.begin_save(saved / "again")
                saving.wait()
            if saving.failure is None:
                assert failing.calls[fail_at - 1] == "close"
                os.rename(saved / "again", tmp_path / f"done-{fail_at}")
            assert os.listdir(saved) == ["step-1"]
        assert same(then, all_of(trainer))
        trainer.train(1, batch_of(1))
        after = all_of(trainer)
        trainer.save(saved / "step-2")
        trainer.restore(saved / "step-1")
        assert same(then, all_of(trainer))
        trainer.train(1, batch_of(1))
        assert same(after, all_of(trainer))
        trainer.restore(saved / "step-2")
        assert same(after, all_of(trainer))
