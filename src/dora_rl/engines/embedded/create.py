"""The embedded engine as the registry makes it."""

from dora_rl.engines.embedded.engine import EmbeddedEngine
from dora_rl.engines.embedded.settings import EngineSettings
from dora_rl.engines.registry import EngineOptions


def create(options: EngineOptions) -> EmbeddedEngine:
    settings = EngineSettings(
        slots=options.slots,
        version_slots=options.version_slots,
        kv_budget_tokens=options.kv_budget_tokens,
        kv_dtype=options.kv_dtype,
        prefill_chunk=options.prefill_chunk,
        deterministic=options.deterministic,
        native_kernels=options.native_kernels,
        bf16_products=options.bf16_products,
        speculation=options.speculation,
    )
    return EmbeddedEngine.for_model(options.model, settings, lora=options.lora_rank is not None)
