"""Versions of small random models, in a weight store, for whichever engine."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from dora_rl.models.config import ModelConfig, read_config
from dora_rl.models.tokenizer import Tokenizer, load_tokenizer
from dora_rl.transports.weights.shared_directory import WeightStore
from dora_rl.weights.fingerprint import Fingerprint, probe
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

    def path(self, n: int) -> Path:
        if n not in self.store.versions():
            self.store.publish(n, self.tensors(n), fingerprint=fingerprint_of(self.model(n)))
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
