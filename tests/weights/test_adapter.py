"""A version that is an adapter: what it is of is part of it, and no file may say otherwise."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dora_rl.transports.weights.shared_directory import WeightStore
from dora_rl.weights import adapter as adapters
from dora_rl.weights.adapter import Adapter, module_of, tensor_names
from dora_rl.weights.errors import WeightsError

ADAPTER = Adapter(base="a" * 64, rank=2, alpha=4.0, targets=("q_proj", "v_proj"))
DOWN, UP = tensor_names("model.layers.0.self_attn.q_proj")
TENSORS = {DOWN: torch.ones(2, 8), UP: torch.zeros(8, 2)}


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "store")


def test_it_is_read_as_it_was_published(store: WeightStore) -> None:
    published = store.publish(3, TENSORS, adapter=ADAPTER)
    loaded = store.load(3)
    assert loaded.manifest == published == store.verify(3)
    assert loaded.manifest.adapter == ADAPTER
    assert sorted(path.name for path in store.path(3).iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
    ]


@pytest.mark.parametrize(
    "change", [{"base": "b" * 64}, {"rank": 4}, {"alpha": 8.0}, {"targets": ("q_proj",)}]
)
def test_the_same_tensors_of_another_adapter_are_another_version(
    store: WeightStore, change: dict[str, Any]
) -> None:
    one = store.publish(0, TENSORS, adapter=ADAPTER)
    other = store.publish(1, TENSORS, adapter=replace(ADAPTER, **change))
    plain = store.publish(2, TENSORS)
    assert len({one.digest, other.digest, plain.digest}) == 3
    with pytest.raises(WeightsError, match="version 0 is published with other weights"):
        store.publish(0, TENSORS, adapter=replace(ADAPTER, **change))
    assert store.publish(0, TENSORS, adapter=ADAPTER) == one


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes() + b" "),
        lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), "r": 4})),
    ],
    ids=["gone", "longer", "other rank"],
)
def test_a_config_that_says_otherwise_is_refused(store: WeightStore, damage: Any) -> None:
    """vLLM and PEFT read it, and would compute something else."""
    store.publish(0, TENSORS, adapter=ADAPTER)
    damage(store.path(0) / "adapter_config.json")
    with pytest.raises(WeightsError, match=r"adapter_config\.json"):
        store.load(0)


def test_a_config_beside_full_weights_is_refused(store: WeightStore) -> None:
    store.publish(0, TENSORS)
    (store.path(0) / "adapter_config.json").write_bytes(ADAPTER.config())
    with pytest.raises(WeightsError, match="is not in the manifest"):
        store.load(0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": 0}, "rank of it must be from 1 to 512: `0`"),
        ({"rank": 2.0}, "rank of it must be a whole number"),
        ({"alpha": 0.0}, "alpha of it must be a number > 0: `0.0`"),
        ({"alpha": "1"}, "alpha of it"),
        ({"targets": "q_proj"}, "targets of it must be a list"),
        ({"targets": ["../q"]}, "a tensor of a name that is not allowed"),
        ({"base": "x"}, "base of it must be 64 hexadecimal digits"),
        ({"more": 1}, "it has an unknown key: `more`"),
    ],
)
def test_a_hostile_entry_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(WeightsError, match=words):
        adapters.decode({**ADAPTER.encoded(), **change}, "it")
    assert adapters.decode(ADAPTER.encoded(), "it") == ADAPTER


def test_names_are_those_of_peft() -> None:
    assert DOWN == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert module_of(DOWN) == module_of(UP) == "model.layers.0.self_attn.q_proj"
    assert module_of("model.layers.0.self_attn.q_proj.weight") is None
