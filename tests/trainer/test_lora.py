"""An adapter is trained instead of the weights: PEFT loads it, and the base never changes."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from dora_rl.models.errors import ModelError
from dora_rl.trainer.errors import CheckpointError
from dora_rl.trainer.model import load, other_weights
from dora_rl.trainer.settings import Dtype, LoraSettings, TrainSettings
from dora_rl.trainer.trainer import Trainer
from dora_rl.transports.weights.shared_directory import WeightStore
from dora_rl.weights.huggingface import map_model
from tests.engines.random_versions import fingerprint_of
from tests.models.random_models import make_model, make_tokenizer
from tests.trainer.samples import VOCAB, all_of, batch_of, opened, same

LORA = LoraSettings(rank=4, alpha=8.0)
FAST = {"learning_rate": 0.02}  # so that an adapter of few steps is far from the base


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    make_tokenizer().save(str(root / "tokenizer.json"))
    return make_model(root, "qwen3", seed=1, vocab_size=VOCAB, tie_word_embeddings=True)


def trained(trainer: Trainer, *steps: int) -> None:
    for step in steps:
        trainer.publish(step)
        trainer.train(step, batch_of(step, groups=2, version=max(0, step - 1)))


def base_of(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def test_peft_loads_a_version_and_a_checkpoint(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path / "store", lora=LORA, **FAST) as trainer:
        trained(trainer, 0, 1)
        trainer.publish(2)
        trainer.save(tmp_path / "saved")
    store = WeightStore(tmp_path / "store")
    recorded = store.manifest(2).fingerprint
    assert recorded is not None
    assert recorded.distance(fingerprint_of(base_of(model)).logprobs) > 0.1
    for directory in (store.path(2), tmp_path / "saved"):
        theirs = fingerprint_of(PeftModel.from_pretrained(base_of(model), str(directory)))
        assert recorded.distance(theirs.logprobs) < 1e-4
    # The directory of a checkpoint says where the base is, so that transformers finds it too.
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert recorded.distance(fingerprint_of(alone).logprobs) < 1e-4
    names = set(os.listdir(tmp_path / "saved"))
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert not {"config.json", "model.safetensors"} & names


def test_a_version_is_the_adapter_alone(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path / "store", lora=LORA, **FAST) as trainer:
        before = all_of(trainer)
        trained(trainer, 0, 1)
        after = all_of(trainer)
    frozen = [name for name in before if name.startswith("model.") and "lora" not in name]
    assert len(frozen) == len(map_model(model))
    assert same({n: before[n] for n in frozen}, {n: after[n] for n in frozen})
    moved = [name for name in before if "lora_B" in name]
    assert moved and not any(torch.equal(before[name], after[name]) for name in moved)
    moments = {name.removeprefix("exp_avg.") for name in after if name.startswith("exp_avg.")}
    assert moments == {name for name in before if "lora_" in name}
    store = WeightStore(tmp_path / "store")
    found = store.load(1)
    assert all(".lora_" in name for name in found.tensors)
    assert found.manifest.adapter is not None
    assert (found.manifest.adapter.rank, found.manifest.adapter.alpha) == (4, 8.0)
    assert store.manifest(0).digest != found.digest


def test_the_first_version_and_the_reference_are_the_base(model: Path) -> None:
    """A KL term is against the base without an adapter, of which no copy is made."""
    settings = TrainSettings(dtype=Dtype.FLOAT32)
    policy, source = load(model, settings, 1.0, lora=LORA, seed=3)
    plain, _ = load(model, settings, 1.0)
    base, first = plain.fingerprint(), policy.fingerprint()
    assert base is not None and first is not None and base.distance(first.logprobs) < 1e-6
    weights = [p.data_ptr() for p in policy.parameters() if not p.requires_grad]
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    changed = policy.fingerprint()
    assert changed is not None and base.distance(changed.logprobs) > 0.1
    with other_weights(policy, source.names, source.tensors):
        reference = policy.fingerprint()
        assert [p.data_ptr() for p in policy.parameters() if not p.requires_grad] == weights
    assert reference is not None and base.distance(reference.logprobs) < 1e-6


@pytest.mark.parametrize(
    "settings",
    [
        {"lora": LORA},
        {"lora": LoraSettings(rank=2, dropout=0.3), "activation_checkpointing": True},
        {"lora": LORA, "algorithm": {"preset": "ppo", "kl": "k3"}, "behaviour": "recompute"},
        {"lora": LORA, "publish_dtype": "bfloat16", "minibatches": 2},
    ],
    ids=["plain", "dropout", "ppo", "bf16"],
)
def test_restored_is_as_never_stopped(model: Path, tmp_path: Path, settings: Any) -> None:
    with opened(model, tmp_path / "store", **settings, **FAST) as trainer:
        trained(trainer, 0, 1)
        trainer.save(tmp_path / "saved")
        trained(trainer, 2, 3)
        digest, end = trainer.publish(4), all_of(trainer)
    torch.manual_seed(99)  # no step may depend on it
    with opened(model, tmp_path / "store", **settings, **FAST) as trainer:
        trainer.restore(tmp_path / "saved")
        trained(trainer, 2, 3)  # the store refuses other weights under a version that it has
        assert trainer.publish(4) == digest
        assert same(end, all_of(trainer))


def test_dropout_is_drawn_where_gradients_are_taken_alone(model: Path, tmp_path: Path) -> None:
    drops = LoraSettings(rank=4, alpha=8.0, dropout=0.5)
    ends = []
    for number, lora in enumerate((LORA, drops)):
        with opened(model, tmp_path / str(number), lora=lora, **FAST) as trainer:
            trained(trainer, 0, 1)
            policy = trainer._replica.policy
            assert policy.fingerprint() == policy.fingerprint()
            ends.append(policy.fingerprint())
    assert ends[0] is not None and ends[1] is not None
    assert ends[0].distance(ends[1].logprobs) > 1e-3


def test_the_noise_of_dropout_is_part_of_what_is_continued(model: Path, tmp_path: Path) -> None:
    """It is drawn for each pass: with other passes a step would be another one."""
    for dropout in (0.0, 0.3):
        lora = LORA.model_copy(update={"dropout": dropout})
        saved = tmp_path / f"saved-{dropout}"
        with opened(model, tmp_path / f"a-{dropout}", lora=lora, **FAST) as trainer:
            trainer.save(saved)
        more = {"token_budget": 64, **FAST}
        with opened(model, tmp_path / f"b-{dropout}", lora=lora, **more) as trainer:
            if not dropout:
                trainer.restore(saved)
                continue
            with pytest.raises(CheckpointError, match=r"train.token_budget was `2048` and is `64`"):
                trainer.restore(saved)


def test_an_adapter_beside_the_base_is_not_taken_along(model: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(model, base)
    (base / "adapter_config.json").write_text("{}")
    for name, lora in (("lora", LORA), ("full", None)):
        with opened(base, tmp_path / f"store-{name}", lora=lora, **FAST) as trainer:
            trainer.save(tmp_path / name)
    assert json.loads((tmp_path / "lora" / "adapter_config.json").read_text())["r"] == LORA.rank
    assert not (tmp_path / "full" / "adapter_config.json").exists()
    assert fingerprint_of(base_of(tmp_path / "full")) == fingerprint_of(base_of(model))


@pytest.mark.slow
def test_two_processes_train_the_same_adapter(model: Path, tmp_path: Path) -> None:
    found = []
    for processes in (1, 2):
        store = tmp_path / str(processes)
        more = {"processes": processes, "threads": 1, **FAST}
        with opened(model, store, lora=LORA, **more) as trainer:
            trained(trainer, 0, 1)
            trainer.publish(2)
            trainer.save(store / "saved")
        found.append(WeightStore(store).load(2).tensors)
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        assert torch.allclose(tensor, found[1][name], atol=1e-4), name


def refused(model: Path, tmp_path: Path, lora: LoraSettings | None) -> str:
    with (
        opened(model, tmp_path / "other", lora=lora, **FAST) as trainer,
        pytest.raises(CheckpointError) as error,
    ):
        trainer.restore(tmp_path / "saved")
    return str(error.value)


def test_a_checkpoint_of_another_adapter_is_refused(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path / "store", lora=LORA, **FAST) as trainer:
        trained(trainer, 0)
        trainer.save(tmp_path / "saved")
    assert "lora.rank was `4` and is `None`" in refused(model, tmp_path, None)
    other = make_model(tmp_path / "other model", "qwen3", seed=2, vocab_size=VOCAB)
    assert "trained from another model" in refused(other, tmp_path, LORA)
    for key, value in (("rank", 8), ("alpha", 1.0), ("dropout", 0.5)):
        was = getattr(LORA, key)
        said = refused(model, tmp_path, LORA.model_copy(update={key: value}))
        assert f"lora.{key} was `{was}` and is `{value}`" in said


@pytest.mark.parametrize(
    ("target", "words"),
    [("nope", "of the model: `nope`. Its layers have"), ("mlp", "but a Qwen3MLP: `mlp`")],
)
def test_a_target_that_is_not_there_is_refused(model: Path, target: str, words: str) -> None:
    lora = LoraSettings(rank=4, target_modules=("q_proj", target))
    with pytest.raises(ModelError, match=words):
        load(model, TrainSettings(dtype=Dtype.FLOAT32), 1.0, lora=lora)


def test_an_adapter_is_a_function_of_the_seed(model: Path) -> None:
    def first(seed: int, targets: tuple[str, ...]) -> dict[str, torch.Tensor]:
        lora = LoraSettings(rank=4, target_modules=targets)
        return load(model, TrainSettings(dtype=Dtype.FLOAT32), 1.0, lora=lora, seed=seed)[1].tensors

    one, again = first(1, ("q_proj",)), first(1, ("q_proj", "v_proj"))
    assert same(one, {name: again[name] for name in one})
    other = first(2, ("q_proj",))
    drawn = [name for name in one if "lora_A" in name]
    assert drawn and not any(torch.equal(one[name], other[name]) for name in drawn)
