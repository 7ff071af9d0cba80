"""Exports: PEFT and transformers load and compute the same; others are refused, nothing is left."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from dora_rl.trainer import checkpoint
from dora_rl.trainer.errors import CheckpointError
from dora_rl.trainer.export import export
from dora_rl.trainer.model_directory import write_bytes
from dora_rl.trainer.settings import LoraSettings
from dora_rl.weights.adapter import CONFIG_FILE, TENSORS_FILE, tensor_names
from dora_rl.weights.files import map_tensors
from dora_rl.weights.huggingface import map_model
from tests.models.random_models import make_model, make_tokenizer
from tests.trainer.samples import VOCAB, batch_of, opened
from tests.weights.samples import identical, replace
from tests.weights.test_faults import Crash, faulty

torch.set_num_threads(1)
LORA = LoraSettings(rank=4, alpha=8.0)
SHARD = 9000  # bytes a file, so that several are written
KILLED = """
import os, signal, sys
from pathlib import Path
from dora_rl.trainer import export
from dora_rl.weights import tensors

def die(name, tensor):
    if name.endswith("norm.weight"):
        os.kill(os.getpid(), signal.SIGKILL)
    return tensors.ready(name, tensor)

export.ready = die
export.export(Path(sys.argv[1]), Path(sys.argv[2]), merge=True)
"""


def trained(
    root: Path,
    lora: LoraSettings | None = LORA,
    *,
    steps: int = 2,
    learning_rate: float = 0.05,
    **model: object,
) -> Path:
    """A checkpoint of a policy that has left its initial one."""
    shape = {"family": "qwen2", "seed": 1, **model}
    source = make_model(root / "model", **shape)  # type: ignore[arg-type]
    make_tokenizer().save(str(source / "tokenizer.json"))
    with opened(source, root / "store", lora=lora, learning_rate=learning_rate) as trainer:
        for step in range(steps):
            trainer.train(step, batch_of(step))
        trainer.save(root / "saved")
    return root / "saved"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("lora"))


@pytest.fixture
def own(adapter: Path, tmp_path: Path) -> Path:
    """A checkpoint with a base of its own, to be damaged."""
    saved = tmp_path / "run" / "step-2"
    base = shutil.copytree(adapter.parent / "model", tmp_path / "base")
    found = checkpoint.read(adapter)
    source = {"base_model_name_or_path": str(base)}
    config = json.dumps({**json.loads((adapter / CONFIG_FILE).read_bytes()), **source})
    shutil.copytree(adapter, saved)
    replace(saved / CONFIG_FILE, config.encode())
    state = saved / "trainer" / "state.json"
    content = {k: v for k, v in json.loads(state.read_bytes()).items() if k != "checksum"}
    digest = write_bytes(tmp_path / "config", config.encode())
    files = {**found.files, CONFIG_FILE: digest}
    replace(state, checkpoint._signed({**content, "files": files}))
    (tmp_path / "config").unlink()
    return saved


def visible(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if not name.startswith("."))


@torch.no_grad()
def logprobs(model: torch.nn.Module) -> torch.Tensor:
    """In float64: these models amplify a rounding of a float32 pass to more than 1e-5."""
    tokens = torch.arange(6 * 10).reshape(6, 10) * 7 % VOCAB
    return torch.log_softmax(model.double().eval()(input_ids=tokens).logits, -1)


SHAPES: dict[str, dict[str, object]] = {
    "plain": {},
    "tied": {"family": "qwen3", "tie_word_embeddings": True},
    "biases": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "some": {"lora": LoraSettings(rank=2, alpha=3.0, target_modules=("v_proj", "down_proj"))},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_merged_is_what_peft_computes(tmp_path: Path, shape: str) -> None:
    saved = trained(tmp_path, **SHAPES[shape])  # type: ignore[arg-type]
    done = export(saved, tmp_path / "adapter")
    assert (done.is_adapter, done.base) == (True, None)
    done = export(saved, tmp_path / "merged", merge=True)
    assert (done.is_adapter, done.base) == (False, tmp_path / "model")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    peft = PeftModel.from_pretrained(base, tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype is torch.float32
    wanted = logprobs(peft)
    assert (logprobs(merged) - wanted).abs().max() < 1e-5
    with peft.disable_adapter():
        assert (logprobs(peft) - wanted).abs().max() > 0.1
    state = peft.merge_and_unload().state_dict()
    for name, tensor in merged.state_dict().items():
        assert torch.allclose(tensor, state[name], rtol=1e-6, atol=1e-6), name
    assert not hasattr(merged, "peft_config")
    tied = merged.lm_head.weight is merged.model.embed_tokens.weight
    assert tied == (shape == "tied")


def test_transformers_loads_the_adapter_by_itself(adapter: Path, tmp_path: Path) -> None:
    export(adapter, tmp_path / "adapter")
    export(adapter, tmp_path / "merged", merge=True)
    found = logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "adapter"))
    wanted = logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert (found - wanted).abs().max() < 1e-5


def test_a_bf16_base_is_merged_in_float32_and_stays_bf16(tmp_path: Path) -> None:
    saved = trained(tmp_path, dtype="bfloat16")
    export(saved, tmp_path / "merged", merge=True)
    base, found = map_model(tmp_path / "model"), map_model(tmp_path / "merged")
    tensors = map_tensors(saved / TENSORS_FILE).tensors
    wanted = dict(base)
    for name in base:
        down, up = tensor_names(name.removesuffix(".weight"))
        if down in tensors:
            product = tensors[up].double() @ tensors[down].double()
            wanted[name] = (base[name].double() + 2.0 * product).bfloat16()
    assert found.keys() == base.keys()
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    moved = [name for name in base if not torch.equal(found[name], base[name])]
    assert len(moved) == 2 * len(LORA.target_modules)
    for name, tensor in wanted.items():
        # Rounded once: a last place apart where float32 and float64 fall on two sides of a half.
        assert (found[name] == tensor).float().mean() > 0.999, name
        assert torch.allclose(found[name].float(), tensor.float(), rtol=0.01, atol=1e-6), name
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype is torch.bfloat16


def test_a_merged_directory_has_the_files_of_its_base(adapter: Path, tmp_path: Path) -> None:
    base = adapter.parent / "model"
    done = export(adapter, tmp_path / "merged", merge=True)
    assert sorted(done.files) == visible(tmp_path / "merged") == visible(base)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "merged" / name).read_bytes() == (base / name).read_bytes()


def test_large_models_are_merged_into_shards(adapter: Path, tmp_path: Path) -> None:
    export(adapter, tmp_path / "one", merge=True)
    done = export(adapter, tmp_path / "many", merge=True, max_file_bytes=SHARD)
    assert "model.safetensors.index.json" in done.files
    assert identical(map_model(tmp_path / "many"), map_model(tmp_path / "one"))


@pytest.mark.parametrize("merge", [False, True])
def test_full_weights_are_exported_as_the_checkpoint_has_them(tmp_path: Path, merge: bool) -> None:
    saved = trained(tmp_path, None)
    done = export(saved, tmp_path / "deep" / "out", merge=merge)
    assert (done.is_adapter, done.base) == (False, None)
    assert "model.safetensors" in done.files
    assert visible(tmp_path / "deep" / "out") == sorted(done.files)
    assert sorted([*done.files, "trainer"]) == visible(saved)
    for name in done.files:
        assert (tmp_path / "deep" / "out" / name).read_bytes() == (saved / name).read_bytes()


def test_an_empty_directory_is_used_also_through_a_link(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    export(adapter, tmp_path / "link")
    assert TENSORS_FILE in visible(tmp_path / "empty")


# Refusals


def refused(saved: Path, out: Path) -> str:
    """Why it is refused to merge; nothing is made."""
    with pytest.raises(CheckpointError) as refusal:
        export(saved, out, merge=True)
    assert not out.exists()
    assert not list(out.parent.glob(".exporting-*"))
    return str(refusal.value)


def test_another_base_is_refused_by_its_digest(own: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    recorded = checkpoint.read(own).facts["model"]
    export(own, tmp_path / "before", merge=True)
    shutil.rmtree(base)
    make_model(base, "qwen2", seed=2)
    message = refused(own, tmp_path / "out")
    assert f"another base than there is in `{base}`" in message
    assert f"the checkpoint has `{recorded}`. Put back" in message
    shutil.rmtree(base)
    make_model(base, "qwen2", seed=1, num_hidden_layers=1)
    assert "another base" in refused(own, tmp_path / "out")
    export(own, tmp_path / "out")  # which does not need it


def test_a_base_that_is_gone_is_named(own: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "base")
    assert f"no model directory: `{tmp_path / 'base'}`" in refused(own, tmp_path / "out")


def test_the_tokenizer_is_the_one_of_training(own: Path, tmp_path: Path) -> None:
    before = (own / "tokenizer.json").read_bytes()
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    export(own, tmp_path / "out", merge=True)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == before


def test_a_damaged_checkpoint_is_refused(own: Path, tmp_path: Path) -> None:
    data = bytearray((own / TENSORS_FILE).read_bytes())
    data[-1] ^= 1
    replace(own / TENSORS_FILE, bytes(data))
    assert f"`{own / TENSORS_FILE}` was altered" in refused(own, tmp_path / "out")


def test_weights_that_overflow_are_refused(tmp_path: Path) -> None:
    lora = LoraSettings(rank=1, alpha=1e6)
    saved = trained(tmp_path, lora, dtype="float16", steps=1, learning_rate=1.0)
    message = refused(saved, tmp_path / "out")
    assert message.startswith(f"cannot export to `{tmp_path / 'out'}`: tensor `model.layers.")
    assert "is not finite" in message


# What comes in between


@pytest.mark.faults
@pytest.mark.parametrize("merge", [False, True])
def test_an_export_that_fails_anywhere_leaves_nothing(
    adapter: Path, tmp_path: Path, merge: bool
) -> None:
    out = tmp_path / "out"
    with faulty() as system:
        export(adapter, out, merge=merge)
    shutil.rmtree(out)
    for fail_at in range(1, len(system.calls) + 1):
        with faulty(fail_at, "early", errno.ENOSPC) as failing:
            try:
                export(adapter, out, merge=merge)
            except ValueError as error:
                assert os.strerror(errno.ENOSPC) in str(error)
                assert os.listdir(tmp_path) == [], failing.calls[fail_at - 1]
            else:  # closing what was only read
                assert failing.calls[fail_at - 1] == "close"
                shutil.rmtree(out)


@pytest.mark.faults
def test_an_export_that_dies_anywhere_shows_nothing_half(adapter: Path, tmp_path: Path) -> None:
    with faulty() as system:
        export(adapter, tmp_path / "out", merge=True)
    names = visible(tmp_path / "out")
    renamed = system.calls.index("rename") + 1
    left = 0
    for fail_at in range(1, len(system.calls) + 1):
        root = tmp_path / f"{fail_at}"
        root.mkdir()
        with faulty(fail_at, "crash"), pytest.raises(Crash):
            export(adapter, root / "out", merge=True)
        left += len(os.listdir(root)) - len(visible(root))
        if fail_at <= renamed:
            assert visible(root) == []
        else:
            assert visible(root / "out") == names
    assert left > 10


@pytest.mark.slow
def test_a_killed_export_leaves_nothing_visible(adapter: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(adapter), str(tmp_path / "out")]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    assert visible(tmp_path) == []
    (partial,) = tmp_path.glob(".exporting-*")
    assert (partial / "model.safetensors").stat().st_size > 0
    export(adapter, tmp_path / "out", merge=True)
    assert visible(tmp_path) == ["out"]
