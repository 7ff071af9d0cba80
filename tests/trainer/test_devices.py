"""`train.device` as torch has it: what `auto` takes, and what is refused before anything starts."""

import io
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch

from dora_rl import cli
from dora_rl.core.protocol.errors import UserError
from dora_rl.runtime.prepare.devices import check_device, count_gpus
from dora_rl.trainer import devices
from dora_rl.trainer.errors import TrainerError
from dora_rl.trainer.settings import TrainSettings
from tests.models.random_models import make_model
from tests.trainer.samples import opened


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is one; child processes included."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_without_a_gpu_it_is_the_cpu(name: str, no_gpu: None) -> None:
    assert devices.resolve(name) == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "local_rank", "found"),
    [("auto", 0, "cuda:0"), ("auto", 1, "cuda:1"), ("cuda", 1, "cuda:1"), ("cpu", 1, "cpu")],
)
def test_each_process_has_a_gpu_of_its_own(
    name: str, local_rank: int, found: str, two_gpus: None
) -> None:
    device = devices.resolve(name, local_rank=local_rank, local_processes=2)
    assert device == torch.device(found)


def test_a_gpu_is_taken_by_its_number(two_gpus: None) -> None:
    assert devices.resolve("cuda:1") == torch.device("cuda:1")
    with pytest.raises(TrainerError, match=r"train.device is not there: `cuda:2`"):
        devices.resolve("cuda:2")


def test_a_trainer_without_its_gpu_does_not_open(tmp_path: Path, no_gpu: None) -> None:
    model = make_model(tmp_path / "model", "llama", seed=1)
    with (
        pytest.raises(TrainerError, match=r"train.device is not there: `cuda`; torch has no GPUs"),
        opened(model, tmp_path / "store", device="cuda"),
    ):
        pass
    assert not (tmp_path / "store").exists()


def test_a_run_is_refused_before_anything_is_written(tmp_path: Path, no_gpu: None) -> None:
    said, out = io.StringIO(), tmp_path / "run"
    with redirect_stderr(said):
        code = cli.main(["train", "--set", f"run.out={out}", "--set", "train.device=cuda"])
    assert code == 2
    assert "train.device is not there: `cuda`" in said.getvalue()
    assert "Use `auto` or `cpu`." in said.getvalue()
    assert not out.exists()


def test_torch_is_asked_only_where_it_matters(no_gpu: None) -> None:
    def never() -> int:
        raise AssertionError("an import of torch in a child process, for nothing")

    check_device(TrainSettings(), never)
    check_device(TrainSettings(device="cpu", processes=4), never)
    with pytest.raises(UserError, match=r"train.processes is more than there are GPUs: `4`"):
        check_device(TrainSettings(processes=4), lambda: 2)
    assert count_gpus() == 0
