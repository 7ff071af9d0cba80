"""The trainer on a GPU: what the CPU computes, and checkpoints that go both ways.

Run by `make test-gpu`, on a machine that has one.
"""

from pathlib import Path

import pytest
import torch
from transformers.utils import is_flash_attn_2_available

from dora_rl.machine.fast_paths import PORTABLE
from tests.models.random_models import make_model
from tests.trainer.samples import batch_of, opened, weights_of

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason=f"torch {torch.__version__} finds no GPU here"),
]
CLOSE = 1e-3  # relative: float32 sums in another order, and TF32 is off
# Weights alone say little: Adam's first updates have the size of the learning rate, whatever the
# scale of the gradients.
MEASURED = ("grad_norm", "loss", "entropy_mean")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", seed=1, tie_word_embeddings=True)


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        float((one[name].cpu() - other[name].cpu()).norm()) <= CLOSE * float(one[name].norm())
        for name in one
    )


@pytest.mark.parametrize("algorithm", [{"preset": "grpo"}, {"preset": "ppo", "kl": "k3"}], ids=str)
def test_a_gpu_trains_what_the_cpu_does(
    model: Path, tmp_path: Path, algorithm: dict[str, object]
) -> None:
    found = {}
    for device in ("cpu", "cuda"):
        settings = {"algorithm": algorithm, "device": device, "behaviour": "recompute"}
        with opened(model, tmp_path / device, minibatches=2, **settings) as trainer:
            assert trainer._replica.policy.device.type == device
            trainer.publish(0)
            metrics = trainer.train(0, batch_of(0)).metrics
            trainer.publish(1)
            trainer.train(1, batch_of(1, version=1))
            assert all(
                moment.device.type == device for _, moment in trainer._replica._optimizer.moments()
            )
            found[device] = [metrics[name] for name in MEASURED], weights_of(trainer)
    assert found["cpu"][0] == pytest.approx(found["cuda"][0], rel=CLOSE, abs=1e-6)
    assert close(found["cpu"][1], found["cuda"][1])


@pytest.mark.parametrize(("first", "second"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_checkpoint_goes_to_the_other_device(
    model: Path, tmp_path: Path, first: str, second: str
) -> None:
    with opened(model, tmp_path / "a", device=first) as trainer:
        trainer.train(0, batch_of(0))
        trainer.save(tmp_path / "saved")
        trainer.train(1, batch_of(1))
        there = weights_of(trainer)
    with opened(model, tmp_path / "b", device=second) as trainer:
        trainer.restore(tmp_path / "saved")
        trainer.train(1, batch_of(1))
        assert close(there, weights_of(trainer))


@pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, and torch finds {GPUS}")
def test_two_gpus_train_what_one_does(model: Path, tmp_path: Path) -> None:
    found, measured = [], []
    for processes in (1, 2):
        store = tmp_path / str(processes)
        with opened(model, store, device="cuda", processes=processes, threads=1) as trainer:
            for step in range(2):
                metrics = trainer.train(step, batch_of(step)).metrics
                measured.append([metrics[name] for name in MEASURED])
            trainer.save(tmp_path / f"saved-{processes}")
        with opened(model, store, device="cuda:0") as trainer:
            trainer.restore(tmp_path / f"saved-{processes}")
            found.append(weights_of(trainer))
    for one, two in zip(measured[:2], measured[2:], strict=True):
        assert one == pytest.approx(two, rel=CLOSE, abs=1e-6)
    assert close(*found)


def test_packed_sequences_are_what_padded_ones_are(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The varlen kernel, against attention under padding; both compute in bfloat16."""
    if not is_flash_attn_2_available():
        pytest.skip("flash-attn is not installed: nothing is packed here")
    losses = []
    for name, portable in (("padded", "1"), ("packed", "")):
        monkeypatch.setenv(PORTABLE, portable)
        with opened(model, tmp_path / name, device="cuda", dtype="bfloat16") as trainer:
            assert trainer._replica.policy.packs == (name == "packed")
            metrics = trainer.train(0, batch_of(0)).metrics
            assert (metrics["padding_share"] == 0) == (name == "packed")
            losses.append((metrics["loss"], metrics["entropy_mean"], metrics["logprob_gap_mean"]))
    assert losses[0] == pytest.approx(losses[1], rel=0.03, abs=0.01)
