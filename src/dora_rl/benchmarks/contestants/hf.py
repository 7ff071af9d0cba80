"""`generate` of transformers, as its users call it: cache, sampling, default attention.

Log-probabilities of the sampled tokens are taken within the loop. Keeping all logits, the other
way that transformers offers, costs more time and gigabytes.
"""

import math
import time
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)


class Hf:
    """A model in memory, in the numbers that its directory names."""

    def __init__(self, directory: str, threads: int, dtype: str) -> None:
        torch.set_num_threads(threads)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, dtype), local_files_only=True
        )
        self._model = loaded.eval()

    def about(self) -> dict[str, Any]:
        return {
            "version": transformers.__version__,
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
            "attention": self._model.config._attn_implementation,
            "notes": [],
        }

    def generate(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        # No end of text: every sequence has the same length.
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens,
            use_cache=True,
            eos_token_id=None,
            pad_token_id=0,
        )
        self._model.generation_config = config
        kept = _Logprobs()
        began = time.perf_counter()
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            made = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                logits_processor=LogitsProcessorList([_Keep(kept)]),
                stopping_criteria=StoppingCriteriaList([_Gather(kept)]),
            )
            logprobs = torch.stack(kept.logprobs).flatten().tolist()
            tokens = made[:, ids.shape[1] :].flatten().tolist()
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "tokens": len(tokens),
            "logprobs": sum(math.isfinite(value) for value in logprobs),
        }


class _Logprobs:
    def __init__(self) -> None:
        self.logits_BV = torch.empty(0)
        self.logprobs: list[Tensor] = []


class _Keep(LogitsProcessor):
    """Sees the logits before a token is drawn."""

    def __init__(self, kept: _Logprobs) -> None:
        self._kept = kept

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._kept.logits_BV = scores
        return scores


class _Gather(StoppingCriteria):
    """Sees the sequences after it was drawn, and never stops them."""

    def __init__(self, kept: _Logprobs) -> None:
        self._kept = kept

    def __call__(self, input_ids: Tensor, scores: Any, **more: Any) -> Tensor:
        logits_BV = self._kept.logits_BV
        chosen_B = logits_BV.gather(1, input_ids[:, -1:]).squeeze(1)
        self._kept.logprobs.append(chosen_B - logits_BV.logsumexp(1))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def load(**settings: Any) -> Hf:
    return Hf(**settings)
