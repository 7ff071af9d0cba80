"""The policy: the model's own log-probabilities, without a mask, under the checkpoint's names."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from dora_rl.machine.fast_paths import PORTABLE
from dora_rl.models.errors import ModelError
from dora_rl.samples import Span
from dora_rl.trainer.batches import collate, make_batch
from dora_rl.trainer.model import Policy, _kind, attention, load, other_weights
from dora_rl.trainer.settings import TrainSettings
from dora_rl.weights.errors import WeightsError
from dora_rl.weights.huggingface import map_model
from tests.models.random_models import FAMILIES, make_model
from tests.trainer.samples import VOCAB, batch_of, sample

torch.set_num_threads(1)
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Policy]:
    root = tmp_path_factory.mktemp("models")
    train = TrainSettings(logprob_chunk=16)
    return {
        family: load(make_model(root / family, family, seed=1), train, TEMPERATURE)[0]
        for family in FAMILIES
    }


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=10)
@given(seed=st.integers(0, 99))
def test_a_padded_batch_without_a_mask_is_each_sequence_by_itself(
    policies: dict[str, Policy], family: str, seed: int
) -> None:
    policy = policies[family]
    batch = make_batch(batch_of(seed), vocab_size=VOCAB)
    rows = tuple(range(len(batch.samples)))
    micro = collate(batch, rows)
    assert micro.padding
    with torch.no_grad():
        found, entropy, _ = policy(
            micro.input_BT, micro.positions_T, micro.targets_T, micro.sampled_T
        )
        for row in rows:
            tokens, prompt = batch.tokens[row], batch.prompts[row]
            logits = policy.model(input_ids=tokens[None, :-1]).logits[0, prompt - 1 :]
            logprobs = torch.log_softmax(logits / TEMPERATURE, -1)
            wanted = logprobs.gather(1, tokens[prompt:, None]).squeeze(1)
            part = slice(batch.starts[row], batch.starts[row] + batch.responses[row])
            torch.testing.assert_close(found[part], wanted, rtol=1e-4, atol=1e-4)
            spread = -(logprobs.exp() * logprobs).sum(-1)
            torch.testing.assert_close(entropy[part], spread, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=10)
@given(seed=st.integers(0, 99))
def test_a_packed_row_is_each_sequence_by_itself(
    policies: dict[str, Policy], family: str, seed: int
) -> None:
    """Here by a mask that transformers make of the positions; `make test-gpu` has the kernel."""
    policy = policies[family]
    batch = make_batch(batch_of(seed), vocab_size=VOCAB)
    rows = tuple(range(len(batch.samples)))
    with torch.no_grad():
        found, wanted = (
            policy(m.input_BT, m.positions_T, m.targets_T, m.sampled_T, m.lengths)[0]
            for m in (collate(batch, rows, packed=packed) for packed in (True, False))
        )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_without_a_gpu_nothing_is_packed() -> None:
    kind = LlamaForCausalLM
    assert attention(torch.device("cpu"), TrainSettings(dtype="bfloat16"), kind) == "sdpa"


def test_only_a_model_that_supports_it_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where flash-attn is installed; the kernel itself is not run."""
    available = "transformers.utils.import_utils.is_flash_attn_2_available"
    monkeypatch.setattr(available, lambda: True)
    monkeypatch.delenv(PORTABLE, raising=False)
    gpu, train = torch.device("cuda"), TrainSettings(dtype="bfloat16")

    class Old(LlamaForCausalLM):
        _supports_flash_attn = False

    assert attention(gpu, train, _kind(LlamaConfig())) == "flash_attention_2"
    assert attention(gpu, train, Old) == "sdpa"
    assert attention(gpu, train, object) == "sdpa"
    monkeypatch.setenv(PORTABLE, "1")
    assert attention(gpu, train, LlamaForCausalLM) == "sdpa"


def test_observed_tokens_have_no_logprob_and_change_no_other(policies: dict[str, Policy]) -> None:
    policy = policies["qwen3"]
    results = []
    for observed in ((), (Span(1, 3),)):
        batch = make_batch([sample(0, observed=observed)], vocab_size=VOCAB)
        micro = collate(batch, (0,))
        results.append(
            policy(micro.input_BT, micro.positions_T, micro.targets_T, micro.sampled_T)[0]
        )
    plain, masked = results
    assert masked[1:3].tolist() == [0.0, 0.0]
    torch.testing.assert_close(masked[[0, 3]], plain[[0, 3]])
    masked.sum().backward()
    assert all(p.grad is not None for p in policy.parameters())
    policy.zero_grad()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_names_are_those_of_the_checkpoint(family: str, tied: bool, tmp_path: Path) -> None:
    directory = make_model(tmp_path, family, seed=1, dtype="bfloat16", tie_word_embeddings=tied)
    policy, source = load(directory, TrainSettings(), 1.0)
    assert sorted(source.names.values()) == sorted(map_model(directory))
    assert ("lm_head.weight" in source.names.values()) == (not tied)
    for name, parameter in policy.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, source.tensors[source.names[name]].float())


def test_other_weights_are_there_for_a_while(tmp_path: Path) -> None:
    policy, source = load(make_model(tmp_path / "a", "llama", seed=1), TrainSettings(), 1.0)
    other = map_model(make_model(tmp_path / "b", "llama", seed=2, dtype="bfloat16"))
    own = {name: p.detach().clone() for name, p in policy.named_parameters()}
    with pytest.raises(KeyError, match="stop"), other_weights(policy, source.names, other):
        for name, parameter in policy.named_parameters():
            assert torch.equal(parameter, other[source.names[name]].float())
        raise KeyError("stop")
    assert all(torch.equal(own[name], p) for name, p in policy.named_parameters())


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config.json in `.*`. Give a Hugging Face"):
        load(tmp_path, TrainSettings(), 1.0)
    directory = make_model(tmp_path / "pickled", "llama", seed=1)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="is a pickle"):
        load(directory, TrainSettings(), 1.0)
    directory = make_model(tmp_path / "unknown", "llama", seed=1)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "nonsense"}))
    with pytest.raises(ModelError, match="transformers cannot load"):
        load(directory, TrainSettings(), 1.0)


def test_a_head_that_is_tied_to_what_it_differs_from_is_refused(tmp_path: Path) -> None:
    """Training would begin with the embeddings as its head, which is another policy."""
    directory = make_model(tmp_path, "llama", seed=1, tie_word_embeddings=True)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    embeddings = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embeddings.clone()}, file, {"format": "pt"})
    load(directory, TrainSettings(), 1.0)  # written twice, and the same
    save_file({**tensors, "lm_head.weight": embeddings + 1}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"`lm_head.weight` and `model.embed_tokens.weight` diff"):
        load(directory, TrainSettings(), 1.0)


def test_a_model_with_buffers_in_its_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be computed anew instead, and be missing in what is published."""
    directory = make_model(tmp_path, "llama", seed=1)
    build = LlamaForCausalLM.__init__

    def with_buffer(self: LlamaForCausalLM, config: LlamaConfig) -> None:
        build(self, config)
        self.model.register_buffer("correction", torch.zeros(3))

    monkeypatch.setattr(LlamaForCausalLM, "__init__", with_buffer)
    load(directory, TrainSettings(), 1.0)  # in no file: nothing is lost
    file = directory / "model.safetensors"
    save_file({**load_file(file), "model.correction": torch.ones(3)}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"`model.correction` in the files of `.*` is a buffer"):
        load(directory, TrainSettings(), 1.0)


def test_a_model_that_caps_its_logits_is_refused(tmp_path: Path) -> None:
    """The head alone would give other probabilities than the model's."""
    small = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Gemma2Config(**small, **heads, final_logit_softcapping=0.01)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="changes its logits after the output layer"):
        load(tmp_path, TrainSettings(), 1.0)
