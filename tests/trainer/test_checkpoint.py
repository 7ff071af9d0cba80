"""Checkpoints: transformers loads them, training continues to the bit, others are refused."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from dora_rl.trainer import checkpoint
from dora_rl.trainer.errors import CheckpointError
from dora_rl.weights.huggingface import map_model
from tests.models.random_models import make_model, make_tokenizer
from tests.trainer.samples import all_of, batch_of, opened, same, weights_of
from tests.trainer.test_trainer import state_of
from tests.weights.samples import identical, replace

torch.set_num_threads(1)
PPO = {"preset": "ppo", "kl": "k3"}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    make_model(root, "qwen3", seed=1, dtype=request.param, tie_word_embeddings=True)
    make_tokenizer().save(str(root / "tokenizer.json"))
    return root


@pytest.mark.parametrize("after", [0, 1])
def test_training_goes_on_to_the_bit(model: Path, tmp_path: Path, after: int) -> None:
    train: dict[str, Any] = {"schedule": "cosine", "warmup_steps": 1, "minibatches": 2}
    with opened(model, tmp_path / "a", PPO, **train) as trainer:
        for step in range(after):
            last = trainer.train(step, batch_of(step))
        trainer.save(tmp_path / "saved")
        saved = weights_of(trainer)
        wanted = [trainer.train(step, batch_of(step)) for step in range(after, after + 2)]
        end = state_of(trainer)
    with opened(model, tmp_path / "b", PPO, **train) as trainer:
        trainer.train(0, batch_of(99))
        trainer.restore(tmp_path / "saved")
        assert trainer.step == after
        assert identical(saved, weights_of(trainer))
        if after:
            assert trainer.train(0, batch_of(0)) == last
        found = [trainer.train(step, batch_of(step)) for step in range(after, after + 2)]
        assert [r.metrics for r in found] == [r.metrics for r in wanted]
        assert identical(end, state_of(trainer))


TRAINING = st.fixed_dictionaries(
    {
        "algorithm": st.sampled_from([PPO, *({"preset": p} for p in ("grpo", "gspo", "dapo"))]),
        "behaviour": st.sampled_from(["engine", "recompute"]),
        "schedule": st.sampled_from(["constant", "linear", "cosine"]),
        "warmup_steps": st.integers(0, 5),
        "minibatches": st.integers(1, 3),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "max_grad_norm": st.sampled_from([0.01, 1.0]),
        "dtype": st.sampled_from(["float32", "bfloat16"]),
        "publish_dtype": st.sampled_from([None, "float32", "bfloat16"]),
    }
)


# All that a step can remember, and a warm-up that the checkpoint cuts in two.
ALL_AT_ONCE: dict[str, Any] = {
    "algorithm": PPO,
    "behaviour": "recompute",
    "schedule": "cosine",
    "warmup_steps": 4,
    "minibatches": 2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.01,
    "dtype": "bfloat16",
    "publish_dtype": None,
}


@settings(max_examples=2)
@example(training=ALL_AT_ONCE, seed=0)
@given(training=TRAINING, seed=st.integers(0, 1000))
def test_restored_is_as_never_stopped(model: Path, training: dict[str, Any], seed: int) -> None:
    """Whatever the settings: three steps, a checkpoint and two steps, in one process or in two."""

    def go_on(first: int, last: int) -> list[dict[str, float]]:
        reports = []
        for step in range(first, last):
            trainer.publish(step)
            samples = batch_of(seed + step, groups=2, version=max(0, step - 1))
            reports.append(trainer.train(step, samples).metrics)
        return reports

    with tempfile.TemporaryDirectory() as root, torch.random.fork_rng(devices=[]):
        saved = Path(root, "saved")
        with opened(model, Path(root, "store"), **training) as trainer:
            go_on(0, 3)
            trainer.save(saved)
            wanted = go_on(3, 5)
            trainer.publish(5)
            end = all_of(trainer)
        torch.manual_seed(seed)  # no step may depend on it
        with opened(model, Path(root, "store"), **training) as trainer:
            trainer.restore(saved)
            # The store refuses other weights under a version that it has.
            assert go_on(3, 5) == wanted
            trainer.publish(5)
            assert same(end, all_of(trainer))


def test_transformers_loads_what_was_saved(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path / "store") as trainer:
        trainer.train(0, batch_of(0))
        trainer.save(tmp_path / "deep" / "saved")
        wanted = weights_of(trainer)
    found = tmp_path / "deep" / "saved"
    assert [path.name for path in found.parent.iterdir()] == ["saved"]
    assert (found / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert identical(map_model(found), wanted)
    loaded = AutoModelForCausalLM.from_pretrained(found)
    state = {name: loaded.state_dict()[name] for name in wanted}
    assert identical(state, wanted)
    assert torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)


def test_weights_of_another_dtype_are_loaded_as_they_are(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", seed=1, dtype="bfloat16")
    with opened(model, tmp_path / "store", publish_dtype="float32") as trainer:
        trainer.train(0, batch_of(0))
        trainer.save(tmp_path / "saved")
        wanted = weights_of(trainer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert identical({name: loaded[name] for name in wanted}, wanted)


def test_large_models_are_saved_in_shards(tmp_path: Path) -> None:
    source = make_model(tmp_path / "model", "llama", seed=1)
    weights = map_model(source)
    facts = {"step": 3, "settings": {}}
    checkpoint.write(tmp_path / "saved", source, weights, {}, facts, max_file_bytes=9000)
    assert len(list((tmp_path / "saved").glob("model-*-of-*.safetensors"))) > 1
    assert identical(map_model(tmp_path / "saved"), weights)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert identical({name: loaded[name] for name in weights}, weights)
    assert checkpoint.read(tmp_path / "saved").facts == facts


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and a checkpoint of one step on it."""
    root = tmp_path_factory.mktemp("saved")
    model = make_model(root / "model", "llama", seed=1)
    with opened(model, root / "store", minibatches=2) as trainer:
        trainer.train(0, batch_of(0))
        trainer.save(root / "checkpoint")
    return model, root / "checkpoint"


@pytest.mark.parametrize(
    ("algorithm", "train", "named"),
    [
        (None, {"learning_rate": 0.5}, "train.learning_rate was `0.001` and is `0.5`"),
        (None, {"minibatches": 1}, "train.minibatches was `2` and is `1`"),
        ({"preset": "rloo"}, {}, "algorithm.advantage was `grpo` and is `rloo`"),
    ],
)
def test_other_settings_are_refused_by_name(
    saved: tuple[Path, Path], tmp_path: Path, algorithm: Any, train: Any, named: str
) -> None:
    with opened(saved[0], tmp_path, algorithm, **{"minibatches": 2, **train}) as trainer:
        before = state_of(trainer)
        with pytest.raises(CheckpointError, match=named):
            trainer.restore(saved[1])
        assert identical(before, state_of(trainer))
        assert trainer.step == 0


def test_how_a_step_is_computed_may_change(saved: tuple[Path, Path], tmp_path: Path) -> None:
    train: dict[str, Any] = {"minibatches": 2, "token_budget": 50, "logprob_chunk": 5}
    with opened(saved[0], tmp_path, **train) as trainer:
        trainer.restore(saved[1])
        assert trainer.step == 1


def test_another_model_is_refused(saved: tuple[Path, Path], tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", "llama", seed=2)
    with (
        opened(other, tmp_path / "store", minibatches=2) as trainer,
        pytest.raises(CheckpointError, match="was trained from another model"),
    ):
        trainer.restore(saved[1])


def test_nothing_is_overwritten(saved: tuple[Path, Path], tmp_path: Path) -> None:
    with opened(saved[0], tmp_path, minibatches=2) as trainer:
        with pytest.raises(CheckpointError, match=r"exists\. Name a new"):
            trainer.save(saved[1])
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match="cannot write the checkpoint"):
            trainer.save(tmp_path / "file" / "saved")


def test_no_checkpoint_at_all(saved: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is missing or damaged"):
        checkpoint.read(tmp_path)
    bad = Path(shutil.copytree(saved[1], tmp_path / "bad"))
    path = bad / "trainer" / "state.json"
    replace(path, json.dumps({**json.loads(path.read_text()), "format": 99}).encode())
    with pytest.raises(CheckpointError, match="has the format `99`"):
        checkpoint.read(bad)
