"""vLLM on the CPU, in its own environment: nothing of this project can be imported here.

The engine runs in this process, so that all threads are for the model. Prefix cache,
detokenisation and compilation are off: none of them belongs to what is compared.
"""

import math
import os
import time
from typing import Any

_WITH_AMX = ("ALL", "DEFAULT")  # values of the limit that name no instruction set


def amx_is_broken() -> bool:
    """As `dora_rl.models.cpu.guard` found, or as the user says by the limit of oneDNN."""
    if os.environ.get("DORA_RL_AMX") == "broken":
        return True
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "ALL"
    return "AMX" not in limit.upper() and limit.upper() not in _WITH_AMX


class Vllm:
    """A model in memory."""

    def __init__(self, directory: str, dtype: str, slots: int, context: int) -> None:
        import torch

        self._notes = []
        if amx_is_broken():
            # vLLM asks torch, not oneDNN, and its attention would die of SIGILL.
            torch.cpu._is_amx_tile_supported = lambda: False
            self._notes.append("AMX does not work or is switched off: vLLM runs without it")
        if "libiomp" in os.environ.get("LD_PRELOAD", ""):
            self._notes.append("Intel's OpenMP is preloaded, as vLLM recommends")
        from vllm import LLM  # type: ignore[import-not-found]

        self._llm = LLM(
            directory,
            dtype=dtype,
            enforce_eager=True,
            max_model_len=context,
            max_num_seqs=slots,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )

    def about(self) -> dict[str, Any]:
        import torch
        import vllm

        return {
            "version": vllm.__version__,
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
            "notes": self._notes,
        }

    def generate(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=1.0, max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        began = time.perf_counter()
        outputs = self._llm.generate(inputs, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        made = [output.outputs[0] for output in outputs]
        return {
            "seconds": seconds,
            "tokens": sum(len(one.token_ids) for one in made),
            "logprobs": sum(
                math.isfinite(place[token].logprob)
                for one in made
                for token, place in zip(one.token_ids, one.logprobs, strict=True)
            ),
        }


def load(**settings: Any) -> Vllm:
    return Vllm(**settings)
