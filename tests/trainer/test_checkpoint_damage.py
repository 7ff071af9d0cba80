"""Checkpoints that were damaged or forged: refused by name, and the trainer is as before."""

import hashlib
import json
import os
import shutil
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dora_rl.trainer import checkpoint
from dora_rl.trainer.errors import CheckpointError
from dora_rl.trainer.trainer import Trainer
from tests.models.random_models import make_model
from tests.trainer.samples import all_of, batch_of, opened, same
from tests.weights.samples import forge, replace, replaced

torch.set_num_threads(1)
STATE = "trainer/state.json"
VERSION = "trainer/version-00000001"
HUGE = struct.pack("<Q", 1 << 40)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and a checkpoint of one step on it, with every kind of file."""
    root = tmp_path_factory.mktemp("saved")
    model = make_model(root / "model", "llama", seed=1, dtype="bfloat16", num_hidden_layers=1)
    (model / "tokenizer.json").write_text("{}")
    with opened(model, root / "store", {"preset": "ppo"}) as trainer:
        trainer.train(0, batch_of(0))
        trainer.save(root / "checkpoint")
    return model, root / "checkpoint"


@pytest.fixture(scope="module")
def trainer(
    saved: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trainer]:
    """One that has gone its own way; no refusal changes it, so that all tests can share it."""
    with opened(saved[0], tmp_path_factory.mktemp("store"), {"preset": "ppo"}) as trainer:
        trainer.train(0, batch_of(7))
        trainer.train(1, batch_of(8))
        yield trainer


@pytest.fixture
def bad(saved: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be spoilt."""
    return Path(shutil.copytree(saved[1], tmp_path / "bad"))


@contextmanager
def refused(trainer: Trainer, *named: str) -> Iterator[None]:
    """What is restored here is refused with these words, and leaves no trace."""
    before, report = all_of(trainer), trainer._replica.report
    with pytest.raises(CheckpointError) as caught:
        yield
    for word in named:
        assert word in str(caught.value)
    assert len(str(caught.value)) < 5000
    assert same(before, all_of(trainer))
    assert trainer._replica.report is report


def sign(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A changed state.json whose checksum is right: only what it says can give it away."""
    content = json.loads((directory / STATE).read_text())
    del content["checksum"]
    change(content)
    replace(directory / STATE, checkpoint._signed(content))


def exchange(directory: Path, name: str, data: bytes) -> None:
    """Another file under this name, and its digest in a state.json that is signed again."""
    replace(directory / name, data)
    digest = hashlib.sha256(data).hexdigest()
    sign(directory, lambda content: content["files"].update({name: digest}))


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_the_checkpoint_is_sound(saved: tuple[Path, Path], bad: Path, tmp_path: Path) -> None:
    """Else the tests below would refuse for another reason."""
    names = {str(path.relative_to(bad)) for path in files(bad)}
    assert names == {
        *("config.json", "generation_config.json", "tokenizer.json", "model.safetensors"),
        *(STATE, f"{VERSION}/manifest.json", f"{VERSION}/model.safetensors"),
    }
    sign(bad, lambda content: None)
    exchange(bad, "tokenizer.json", b"{ }")
    with opened(saved[0], tmp_path / "store", {"preset": "ppo"}) as trainer:
        trainer.restore(bad)
        assert trainer.step == 1


def test_a_bit_that_flips_anywhere_is_noticed(bad: Path, trainer: Trainer) -> None:
    for path in files(bad):
        data = path.read_bytes()
        for at in sorted({0, 7, len(data) // 3, len(data) // 2, len(data) - 2, len(data) - 1}):
            flipped = bytearray(data)
            flipped[at % len(data)] ^= 1 << at % 7
            with replaced(path, bytes(flipped)), refused(trainer, str(path)):
                trainer.restore(bad)


def test_a_file_that_lacks_its_end_is_noticed(bad: Path, trainer: Trainer) -> None:
    for path in files(bad):
        data = path.read_bytes()
        for length in sorted({0, 1, len(data) // 2, len(data) - 1}):
            with replaced(path, data[:length]), refused(trainer, str(path)):
                trainer.restore(bad)
        with replaced(path, data + b"\n"), refused(trainer, str(path)):
            trainer.restore(bad)


def test_a_file_that_is_missing_is_noticed(bad: Path, trainer: Trainer) -> None:
    for path in [*files(bad), bad / VERSION, bad / "trainer", bad]:
        away = bad.parent / "away"
        path.rename(away)
        with refused(trainer, path.name):
            trainer.restore(bad)
        away.rename(path)


def test_the_state_of_another_checkpoint_is_noticed(
    saved: tuple[Path, Path], bad: Path, tmp_path: Path, trainer: Trainer
) -> None:
    with opened(saved[0], tmp_path / "store", {"preset": "ppo"}) as other:
        other.train(0, batch_of(5))
        other.save(tmp_path / "other")
    shutil.rmtree(bad / VERSION)
    shutil.copytree(tmp_path / "other" / VERSION, bad / VERSION)
    with refused(trainer, VERSION, "of another checkpoint"):
        trainer.restore(bad)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../model/config.json", "/etc/passwd", "a/b", "config.json\0"]
)
def test_no_name_leads_out_of_the_directory(bad: Path, trainer: Trainer, name: str) -> None:
    sign(bad, lambda content: content["files"].update({name: "0" * 64}))
    with refused(trainer, str(bad / STATE), "must be plain names"):
        trainer.restore(bad)


@pytest.mark.parametrize("name", ["../../model.safetensors", "/etc/model.safetensors", "x.bin"])
def test_no_name_leads_out_of_the_version(bad: Path, trainer: Trainer, name: str) -> None:
    def rename(content: Any) -> None:
        content["files"][name] = content["files"].pop("model.safetensors")
        for tensor in content["tensors"].values():
            tensor["file"] = name

    forge(bad / VERSION, rename)
    with refused(trainer, f"{VERSION}/manifest.json", f"`{name}`"):
        trainer.restore(bad)


def pickled(path: Path) -> bytes:
    torch.save({"weight": torch.zeros(2)}, path)
    return path.read_bytes()


def test_a_pickle_is_never_opened(bad: Path, tmp_path: Path, trainer: Trainer) -> None:
    data = pickled(tmp_path / "pickle")
    exchange(bad, "model.safetensors", data)
    with refused(trainer, str(bad / "model.safetensors"), "is a pickle under another name"):
        trainer.restore(bad)
    os.rename(bad / "model.safetensors", bad / "pytorch_model.bin")
    sign(bad, lambda content: content["files"].pop("model.safetensors"))
    with refused(trainer, "pytorch_model.bin", "is a pickle"):
        trainer.restore(bad)


def test_a_pickle_as_the_state_is_never_opened(bad: Path, tmp_path: Path, trainer: Trainer) -> None:
    replace(bad / VERSION / "model.safetensors", pickled(tmp_path / "pickle"))
    with refused(trainer, f"{VERSION}/model.safetensors"):
        trainer.restore(bad)


def test_a_header_that_claims_to_be_huge_is_not_read(bad: Path, trainer: Trainer) -> None:
    path = bad / VERSION / "model.safetensors"
    with replaced(path, HUGE + path.read_bytes()[8:]), refused(trainer, str(path), str(1 << 40)):
        trainer.restore(bad)
    path = bad / "model.safetensors"
    exchange(bad, path.name, HUGE + path.read_bytes()[8:])
    with refused(trainer, str(path), str(1 << 40)):
        trainer.restore(bad)


def test_a_huge_state_is_not_read(bad: Path, trainer: Trainer) -> None:
    os.chmod(bad / STATE, 0o644)
    os.truncate(bad / STATE, 1 << 30)  # without blocks: it takes no room on the disk
    tracemalloc.start()
    try:
        with refused(trainer, str(bad / STATE), "the limit is"):
            trainer.restore(bad)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"format": 2, "x": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"format": 2, "x": NaN}',
        b'{"format": 2, "x": -Infinity}',
        b'{"format": 2, "x": 1e999}',
        b'{"format": 2, "format": 2}',
        b'{"format": 2, "x": ' + b"9" * 5000 + b"}",
        b'{"format": 2, "checksum": []}',
    ],
    ids=lambda data: repr(data[:30]),
)
def test_a_state_that_is_nonsense_is_refused(bad: Path, trainer: Trainer, data: bytes) -> None:
    replace(bad / STATE, data)
    with refused(trainer, str(bad / STATE)):
        trainer.restore(bad)


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1},
        {"step": True},
        {"step": 1.0},
        {"step": 1 << 70},
        {"step": None},
        {"updates": -1},
        {"updates": "1"},
        {"model": None},
        {"model": "0" * 64},
        {"settings": []},
        {"settings": {"x" * 10: "y" * 10_000}},
        {"report": {}},
        {"report": []},
        {"files": []},
        {"files": {"config.json": "0"}},
        {"files": {"config.json": None}},
        {"state": 1},
        {"state": "../../.."},
        {"state": None},
        {"more": 1},
    ],
    ids=str,
)
def test_a_state_that_says_nonsense_is_refused(bad: Path, trainer: Trainer, change: Any) -> None:
    sign(bad, lambda content: content.update(change))
    with refused(trainer, str(bad)):
        trainer.restore(bad)


@pytest.mark.parametrize(
    "key", ["step", "updates", "model", "settings", "report", "files", "state"]
)
def test_a_state_that_lacks_something_is_refused(bad: Path, trainer: Trainer, key: str) -> None:
    sign(bad, lambda content: content.pop(key))
    with refused(trainer, str(bad), key):
        trainer.restore(bad)


def test_what_is_no_file_is_not_waited_for(bad: Path, trainer: Trainer) -> None:
    for name in ("model.safetensors", STATE, f"{VERSION}/manifest.json"):
        os.rename(bad / name, bad / "away")
        os.mkfifo(bad / name)
        with refused(trainer, str(bad / name), "not a regular file"):
            trainer.restore(bad)
        os.unlink(bad / name)
        os.rename(bad / "away", bad / name)


def without(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def flattened(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({name: tensors[name].flatten()})


def narrowed(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({name: tensors[name].bfloat16()})


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without(f"master.{EMBEDDING}"), EMBEDDING),
        (flattened(f"master.{EMBEDDING}"), EMBEDDING),
        (narrowed(f"master.{EMBEDDING}"), EMBEDDING),
        (without("master.value_head.bias"), "value_head.bias"),
        (without("exp_avg.value_head.bias"), "exp_avg.value_head.bias"),
        (flattened("exp_avg_sq.value_head.weight"), "exp_avg_sq.value_head.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    saved: tuple[Path, Path], tmp_path: Path, trainer: Trainer, change: Any, named: str
) -> None:
    """Written by the project itself, so that every digest is right."""
    found = checkpoint.read(saved[1])
    tensors = found.state_tensors()
    change(tensors)
    checkpoint.write(tmp_path / "bad", saved[0], found.weights(), tensors, found.facts)
    with refused(trainer, f"`{named}`"):
        trainer.restore(tmp_path / "bad")
