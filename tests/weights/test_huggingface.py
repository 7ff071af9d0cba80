"""A Hugging Face model directory becomes a version; pickles do not."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dora_rl.transports.weights.shared_directory import WeightStore
from dora_rl.weights.errors import WeightsError
from tests.weights.samples import identical, weights

INDEX = "model.safetensors.index.json"


def save_shards(directory: Path, weight_map: dict[str, Any] | None = None) -> None:
    """The sample policy in two files with their index; the map can be another."""
    directory.mkdir(exist_ok=True)
    names = sorted(weights())
    files = {"model-00001-of-00002.safetensors": names[:3]}
    files["model-00002-of-00002.safetensors"] = names[3:]
    for file, held in files.items():
        save_file({name: weights()[name] for name in held}, directory / file)
    true_map = {name: file for file, held in files.items() for name in held}
    index = {"metadata": {"total_size": 1}, "weight_map": {**true_map, **(weight_map or {})}}
    (directory / INDEX).write_text(json.dumps(index))


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "store")


def refused(store: WeightStore, directory: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        store.publish_directory(0, directory)
    assert store.versions() == []
    return str(caught.value)


def test_one_file_is_published(store: WeightStore, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_file(weights(), model / "model.safetensors", metadata={"format": "pt"})
    (model / "config.json").write_text("{}")
    (model / "training_args.bin").write_bytes(b"never opened")
    manifest = store.publish_directory(3, model)
    shutil.rmtree(model)  # a copy, not a reference
    assert identical(store.load(3).tensors, weights())
    assert store.verify(3) == manifest
    assert manifest.digest == store.publish(4, weights()).digest


def test_shards_are_published(store: WeightStore, tmp_path: Path) -> None:
    save_shards(tmp_path / "model")
    manifest = store.publish_directory(3, tmp_path / "model")
    assert identical(store.load(3).tensors, weights())
    assert manifest.digest == store.publish(4, weights()).digest


def test_links_are_followed_as_in_a_hub_cache(store: WeightStore, tmp_path: Path) -> None:
    save_shards(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    store.publish_directory(0, tmp_path / "snapshot")
    assert identical(store.load(0).tensors, weights())
    assert not any(path.is_symlink() for path in store.path(0).iterdir())


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_pickle_is_refused_by_name_and_never_opened(
    store: WeightStore, tmp_path: Path, name: str
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / name).mkdir()  # opening it would fail
    message = refused(store, model)
    assert f"`{model / name}` is a pickle" in message
    assert "save_pretrained" in message


def test_an_index_that_names_a_pickle_is_refused(store: WeightStore, tmp_path: Path) -> None:
    save_shards(tmp_path / "model", {"scale": "pytorch_model-00001.bin"})
    message = refused(store, tmp_path / "model")
    assert "tensor `scale`" in message
    assert "in the pickle `pytorch_model-00001.bin`" in message


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/model.safetensors", "a\\b.safetensors", ".x.safetensors", 3]
)
def test_an_index_cannot_leave_its_directory(store: WeightStore, tmp_path: Path, file: Any) -> None:
    save_file({"scale": torch.ones(())}, tmp_path / "model.safetensors")
    save_shards(tmp_path / "model", {"scale": file})
    message = refused(store, tmp_path / "model")
    assert "tensor `scale`" in message
    assert "in the same directory" in message


def test_an_index_must_tell_the_truth(store: WeightStore, tmp_path: Path) -> None:
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    save_shards(tmp_path / "more", {"extra": second})
    assert f"tensor `extra` should be in `{tmp_path / 'more' / second}`" in refused(
        store, tmp_path / "more"
    )
    save_shards(tmp_path / "moved", {"scale": first})
    assert "tensor `scale` should be in" in refused(store, tmp_path / "moved")
    save_shards(tmp_path / "fewer")
    index = json.loads((tmp_path / "fewer" / INDEX).read_text())
    index["weight_map"].pop("scale")
    (tmp_path / "fewer" / INDEX).write_text(json.dumps(index))
    assert "tensor `scale` in" in refused(store, tmp_path / "fewer")
    (tmp_path / "fewer" / INDEX).write_text("{}")
    assert "weight_map in" in refused(store, tmp_path / "fewer")


def test_a_missing_shard_is_named(store: WeightStore, tmp_path: Path) -> None:
    save_shards(tmp_path / "model")
    (tmp_path / "model" / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors`: No such file" in refused(store, tmp_path / "model")


def test_two_models_in_one_directory_are_refused(store: WeightStore, tmp_path: Path) -> None:
    save_shards(tmp_path / "model")
    save_file(weights(1), tmp_path / "model" / "model.safetensors")
    assert "holds both" in refused(store, tmp_path / "model")


def test_a_directory_without_weights_is_refused(store: WeightStore, tmp_path: Path) -> None:
    assert "no `model.safetensors`" in refused(store, tmp_path)
    assert "No such file" in refused(store, tmp_path / "nowhere")


def test_weights_that_are_no_floats_or_no_numbers_are_refused(
    store: WeightStore, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"ids": torch.arange(3)}, path)
    message = refused(store, tmp_path)
    assert "tensor `ids` in" in message
    assert "`I64`" in message
    save_file({"w": torch.tensor([1.0, float("nan")])}, path)
    assert "tensor `w` is not finite" in refused(store, tmp_path)
