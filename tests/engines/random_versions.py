"""Versions of small random models, in a weight store, for whichever engine."""

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from dora_rl.models.config import ModelConfig, read_config
from dora_rl.models.tokenizer import Tokenizer, load_tokenizer
from dora_rl.transports.weights.shared_directory import WeightStore
from dora_rl.weights.adapter import Adapter, tensor_names
from dora_rl.weights.fingerprint import Fingerprint, probe
from dora_rl.weights.huggingface import map_model
from dora_rl.weights.tensors import weights_digest
from tests.models.random_models import make_model, make_tokenizer, random_model

SHAPE = {"vocab_size": 300, "max_position_embeddings": 96, "eos_token_id": 7}


class Models:
    """Four sets of weights of one model, in a weight store; written once."""

    def __init__(self, root: Path, family: str, **overrides: Any) -> None:
        self.directory = make_model(root / "model", family, seed=0, **{**SHAPE, **overrides})
        make_tokenizer().save(str(self.directory / "tokenizer.json"))
        self.config: ModelConfig = read_config(self.directory)
        tokenizer = load_tokenizer(self.directory)
        assert tokenizer is not None
        self.tokenizer: Tokenizer = tokenizer
        self.store = WeightStore(root / "store")
        self._family, self._overrides = family, {**SHAPE, **overrides}

    def model(self, n: int) -> PreTrainedModel:
        """The n-th set of weights as transformers have it."""
        return random_model(self._family, seed=n, **self._overrides)

    def tensors(self, n: int) -> dict[str, torch.Tensor]:
        tied = self.config.tied
        state = self.model(n).state_dict()
        return {k: v for k, v in state.items() if not tied or "lm_head" not in k}

    @property
    def base(self) -> Path | None:
        """The model that versions are adapters of, where they are."""
        return None

    def path(self, n: int) -> Path:
        if n not in self.store.versions():
            self.store.publish(n, self.tensors(n), fingerprint=fingerprint_of(self.model(n)))
        return self.store.path(n)


class AdapterModels(Models):
    """The same for LoRA adapters: four of one base, each far from the others."""

    ADAPTER_TARGETS = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    RANK, ALPHA = 3, 6.0

    @property
    def base(self) -> Path:
        return self.directory

    @cached_property
    def adapter(self) -> Adapter:
        base = map_model(self.directory)
        digest = weights_digest(base)
        return Adapter(digest, self.RANK, self.ALPHA, self.ADAPTER_TARGETS)

    def tensors(self, n: int) -> dict[str, torch.Tensor]:
        noise = torch.Generator().manual_seed(n)
        found = {}
        for module, (outputs, inputs) in self.config.linears(self.ADAPTER_TARGETS).items():
            down, up = tensor_names(module)
            found[down] = 0.2 * torch.randn(self.RANK, inputs, generator=noise)
            found[up] = 0.2 * torch.randn(outputs, self.RANK, generator=noise)
        return found

    def model(self, n: int) -> PreTrainedModel:
        """With the adapter added to the weights, which it is by definition."""
        model, tensors = super().model(0), self.tensors(n)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                down, up = tensor_names(name.removesuffix(".weight"))
                if down in tensors:
                    parameter += self.adapter.scale * tensors[up] @ tensors[down]
        return model

    def path(self, n: int) -> Path:
        if n not in self.store.versions():
            fingerprint = fingerprint_of(self.model(n))
            self.store.publish(n, self.tensors(n), fingerprint=fingerprint, adapter=self.adapter)
        return self.store.path(n)


def logprobs_of(model: PreTrainedModel, tokens: tuple[int, ...]) -> list[float]:
    """The log-probability of each token but the first, given those before it."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0].float()
    chosen = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])
    return [float(number) for number in chosen.squeeze(1)]


def fingerprint_of(model: PreTrainedModel) -> Fingerprint:
    """As the trainer records it."""
    tokens = probe(model.config.vocab_size)
    return Fingerprint(tokens, tuple(logprobs_of(model, tokens)))
