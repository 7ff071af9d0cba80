"""A model that is sharded before it has memory: buffers and weights right, followers small."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from dora_rl.algorithms.settings import AlgorithmSettings
from dora_rl.models.errors import ModelError
from dora_rl.trainer.model import load
from dora_rl.trainer.replica import ReplicaSettings
from dora_rl.trainer.settings import TrainSettings
from tests.models.random_models import FAMILIES, make_model
from tests.patience import PATIENCE_S

RANKS = 4
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1e4,
}


@pytest.mark.parametrize("rope", [None, YARN, LLAMA3], ids=["default", "yarn", "llama3"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_model_is_the_one_that_transformers_load(
    family: str, tied: bool, rope: dict[str, Any] | None, tmp_path: Path
) -> None:
    more = {} if rope is None else {"rope_parameters": rope}
    directory = make_model(tmp_path, family, seed=3, tie_word_embeddings=tied, **more)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ours = load(directory, TrainSettings(), 1.0)[0].model
    for kind in ("named_parameters", "named_buffers"):
        found, wanted = dict(getattr(ours, kind)()), dict(getattr(theirs, kind)())
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    tokens = torch.arange(90)[None]
    with torch.no_grad():
        assert torch.equal(ours(input_ids=tokens).logits, theirs(input_ids=tokens).logits)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "llama", seed=1)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="its weights are quantised"):
        load(directory, TrainSettings(), 1.0)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure")
def test_a_follower_needs_memory_for_its_share_alone(tmp_path: Path) -> None:
    """Of four: a quarter, and on top of it the two or three layers that a pass gathers at once."""
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 24}
    model = make_model(tmp_path / "model", "llama", seed=1, **shape)
    whole = (model / "model.safetensors").stat().st_size
    settings = ReplicaSettings(
        model=str(model),
        store=str(tmp_path / "store"),
        train=TrainSettings(threads=1).model_dump(mode="json"),
        algorithm=AlgorithmSettings().model_dump(mode="json"),
        max_tokens=8,
        temperature=1.0,
        total_steps=1,
        seed=1,
    )
    told = msgspec.json.encode(settings).decode()
    command = [sys.executable, "-m", "tests.trainer.rank_memory", told, str(tmp_path / "meet")]
    # Of blocks below 32 MB glibc keeps what was freed, and a small model has no others.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 18)}
    ranks = [
        subprocess.Popen([*command, str(rank), str(RANKS)], stdout=subprocess.PIPE, env=environment)
        for rank in range(RANKS)
    ]
    leader, *followers = [json.loads(rank.communicate(timeout=PATIENCE_S)[0]) for rank in ranks]
    assert leader["published"] == pytest.approx(whole, rel=0.01)
    for follower in followers:
        assert 0.2 * whole < follower["load"] < 0.5 * whole, (follower, whole)
        assert follower["publish"] < 0.05 * whole, (follower, whole)
        assert follower["published"] == 0
    assert leader["publish"] > 0.9 * whole  # or the measure would be worth nothing
