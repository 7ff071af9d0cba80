"""The models that are measured: made, found, converted, refused."""

import json
from pathlib import Path

import pytest
import torch

from dora_rl.benchmarks.models import check_model, open_model, publish_versions
from dora_rl.core.protocol.errors import UserError
from dora_rl.transports.weights.shared_directory import WeightStore
from dora_rl.weights.huggingface import map_model


def test_tiny_is_what_it_is_said_to_be(tmp_path: Path) -> None:
    model = open_model("tiny", None, tmp_path)
    config = model.config
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (128, 352, 512)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (4, 4, 2)
    tensors = map_model(model.directory)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == config.tensors()
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert model.parameters == sum(t.numel() for t in tensors.values())
    assert model.to_json()["dtype"] == "bfloat16"


def test_tiny_is_the_same_every_time_but_for_rounding(tmp_path: Path) -> None:
    first, again = (open_model("tiny", "float32", tmp_path / name) for name in "ab")
    narrow = open_model("tiny", "bfloat16", tmp_path / "c")
    weights = [map_model(model.directory) for model in (first, again, narrow)]
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name])
        assert torch.equal(tensor.bfloat16(), weights[2][name])


def test_a_directory_is_taken_as_it_is_or_converted(tmp_path: Path) -> None:
    source = open_model("tiny", "bfloat16", tmp_path).directory
    for dtype in (None, "bfloat16"):
        assert open_model(str(source), dtype, tmp_path / "unused").directory == source
    assert not (tmp_path / "unused").exists()
    wide = open_model(str(source), "float32", tmp_path)
    assert wide.directory.is_relative_to(tmp_path) and wide.directory != source
    assert (wide.title, wide.config.dtype) == ("tiny", "float32")
    before, after = map_model(source), map_model(wide.directory)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].float(), tensor) for name, tensor in after.items())


def test_both_spellings_of_the_dtype_are_replaced(tmp_path: Path) -> None:
    source = open_model("tiny", "bfloat16", tmp_path).directory
    config = json.loads((source / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")
    (source / "config.json").write_text(json.dumps(config))
    made = open_model(str(source), "float32", tmp_path).directory
    written = json.loads((made / "config.json").read_text())
    assert written["dtype"] == "float32" and "torch_dtype" not in written


@pytest.mark.parametrize("name", ["smolm2", "", "no/such/directory"])
def test_a_model_that_is_not_there(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"no such model: `{name}`\. Use one of: smollm2, tiny"):
        open_model(name, None, tmp_path)


def test_a_known_model_may_be_absent_until_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    check_model("smollm2")
    with pytest.raises(UserError, match="Run: dora-rl fetch-model smollm2 --dtype float32"):
        open_model("smollm2", "float32", tmp_path)


def test_the_quickstarts_model_is_there_without_fetching(tmp_path: Path) -> None:
    model = open_model("quickstart", None, tmp_path)
    assert (model.directory / "tokenizer.json").is_file()
    assert model.title == "the quickstart's model"
    assert open_model("quickstart", "float32", tmp_path).config.dtype == "float32"


def test_versions_differ_and_the_first_is_the_model(tmp_path: Path) -> None:
    directory = open_model("tiny", None, tmp_path).directory
    store = WeightStore(tmp_path / "weights")
    publish_versions(store, directory, 3)
    assert store.versions() == [0, 1, 2]
    assert len({store.manifest(version).digest for version in store.versions()}) == 3
    given, first, second = map_model(directory), store.load(0).tensors, store.load(1).tensors
    for name, tensor in given.items():
        assert torch.equal(first[name], tensor)
        assert not torch.equal(second[name], tensor)
        assert second[name].dtype == tensor.dtype
        assert torch.allclose(second[name].float(), tensor.float(), rtol=0.15, atol=1e-3)
