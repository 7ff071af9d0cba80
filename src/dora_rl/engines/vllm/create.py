"""The vLLM engine as the registry makes it."""

from typing import Any

import torch

from dora_rl.config.text import one_line
from dora_rl.core.protocol.errors import SettingsError, UserError
from dora_rl.engines import kv_room
from dora_rl.engines.registry import EngineOptions
from dora_rl.engines.version_slots import VersionSlots
from dora_rl.engines.vllm.backend import Backend
from dora_rl.engines.vllm.engine import EngineLimits, VllmEngine
from dora_rl.engines.vllm.settings import VllmSettings
from dora_rl.engines.vllm.versions import AdapterVersions, FullVersion, Versions
from dora_rl.models import cpu
from dora_rl.models.config import ModelConfig, read_config
from dora_rl.models.tokenizer import load_tokenizer
from dora_rl.weights.fingerprint import probe

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for


def create(options: EngineOptions) -> VllmEngine:
    """Refuses what vLLM does not do; starts it without weights."""
    if options.version_slots > 1 and options.lora_rank is None:
        raise SettingsError(
            "vLLM holds one full set of weights: `rollout.version_slots` and a spare slot make "
            f"`{options.version_slots}`. Set rollout.version_slots = 1, or model.lora."
        )
    if options.deterministic:
        raise SettingsError(
            "rollout.deterministic is for the embedded engine: vLLM's results depend on the batch."
        )
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise SettingsError(
            f"rollout.device is `{options.device}`, and torch {torch.__version__} of vLLM's "
            "environment finds no GPU. Name a Python with vLLM's build for GPUs by "
            "rollout.vllm.python, or use `auto`."
        )
    settings = VllmSettings.model_validate(options.extra)
    config = read_config(options.model)
    context = min(settings.context or config.context, config.context)
    dtype = settings.dtype or config.dtype
    cpu.guard()
    backend = Backend(_arguments(options, settings, config, context=context, dtype=dtype))
    _try_out(backend, options, config)
    versions: Versions = FullVersion(backend, config, dtype)
    if options.lora_rank is not None:
        versions = AdapterVersions(backend, options.model, config, dtype)
    return VllmEngine(
        backend,
        versions,
        VersionSlots(options.version_slots),
        config,
        EngineLimits(options.slots, context, settings.block_size),
        load_tokenizer(options.model),
    )


def _try_out(backend: Backend, options: EngineOptions, config: ModelConfig) -> None:
    """One pass, with whatever weights there are: vLLM starts with shapes that it has no kernel for.

    Every install would fail for it, and every successor of the worker be given up in turn.
    """
    try:
        backend.prompt_logprobs(probe(config.vocab_size))
    except RuntimeError as error:
        raise UserError(
            f"vLLM cannot compute the model in `{options.model}`: {one_line(error)}. Use another "
            "model, or rollout.engine = `embedded`."
        ) from error


def _arguments(
    options: EngineOptions,
    settings: VllmSettings,
    config: ModelConfig,
    *,
    context: int,
    dtype: str,
) -> dict[str, Any]:
    """vLLM's `EngineArgs` from the sections of a configuration."""
    return {
        "model": str(options.model),
        "dtype": dtype,
        "max_num_seqs": options.slots,
        "block_size": settings.block_size,
        "enforce_eager": settings.enforce_eager,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        **_lengths(options, settings, config, context, dtype),
        **_weights(options),
        **settings.arguments,
    }


def _weights(options: EngineOptions) -> dict[str, Any]:
    """Full sets of weights come by the engine; a base is there from the start."""
    if options.lora_rank is None:
        return {"load_format": "dummy"}
    return {
        "load_format": "safetensors",
        "enable_lora": True,
        "max_loras": options.version_slots,
        "max_cpu_loras": options.version_slots,
        "max_lora_rank": next(rank for rank in _RANKS if rank >= options.lora_rank),
    }


def _lengths(
    options: EngineOptions, settings: VllmSettings, config: ModelConfig, context: int, dtype: str
) -> dict[str, int]:
    """The longest sequence, how much of it is read at once, and the room for KV.

    Without a budget, a GPU's room is what its memory leaves, and a CPU's what the slots can use.
    With a small one no request may get as long as the context; vLLM wants to be told.
    """
    room: dict[str, int] = {}
    longest = context
    if options.kv_budget_tokens is not None or not torch.cuda.is_available():
        block = settings.block_size
        blocks = kv_room.num_blocks(
            config,
            slots=options.slots,
            budget_tokens=options.kv_budget_tokens,
            dtype=dtype,
            context=context,
            block_tokens=block,
        )
        longest = min(context, blocks * block)
        # vLLM keeps one block for itself.
        room["kv_cache_memory_bytes"] = (blocks + 1) * block * kv_room.token_bytes(config, dtype)
    return {
        "max_model_len": longest,
        "long_prefill_token_threshold": min(options.prefill_chunk, longest),
        **room,
    }
