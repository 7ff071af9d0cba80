"""What a user may set of the embedded engine."""

from dataclasses import dataclass

from dora_rl.core.protocol.errors import SettingsError
from dora_rl.engines import kv_room
from dora_rl.engines.speculation import Speculation
from dora_rl.machine import cgroups
from dora_rl.models.config import ModelConfig
from dora_rl.models.linear import Layout
from dora_rl.models.native.library import why_unavailable
from dora_rl.models.native.products import bf16_dots, native_kernels

_OF_TORCH = (Layout.MAPPED, Layout.PACKED, Layout.TILED)
_SHARE_OF_MEMORY = 0.25  # that copies of the weights may take


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Sizes and forms; the defaults suit a laptop."""

    slots: int = 32  # trajectories that run at once
    version_slots: int = 4  # versions that are in memory at once
    kv_budget_tokens: int | None = None  # None: what the slots can use, within memory
    kv_dtype: str = "float32"
    block_tokens: int = kv_room.BLOCK_TOKENS
    prefill_chunk: int = 512  # prompt tokens read in one step, at most
    layout: Layout | None = None  # form of the weights; None: the fastest that fits
    deterministic: bool = False  # bit-exact whatever the batch; slower by torch
    # By the kernels of `models.native`. None: where they are faster, and not in the deterministic
    # mode, which must not depend on what a trial finds.
    native_kernels: bool | None = None
    # Where it is faster, what enters a product of bf16 weights is rounded to bf16. Never in the
    # deterministic mode.
    bf16_products: bool = True
    # Tokens are proposed and checked in one pass. AUTO: by the native kernels, and not in the
    # deterministic mode, whose runs count steps.
    speculation: Speculation = Speculation.AUTO

    def __post_init__(self) -> None:
        for name in ("slots", "version_slots", "block_tokens", "prefill_chunk"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise SettingsError(f"rollout.{name} must be a whole number >= 1: `{value}`.")
        budget = self.kv_budget_tokens
        if budget is not None and budget < self.block_tokens:
            raise SettingsError(
                f"rollout.kv_budget_tokens must hold at least one block of "
                f"{self.block_tokens} tokens: `{budget}`."
            )
        if self.layout is not None and self.layout not in _OF_TORCH:
            raise SettingsError(
                f"rollout.layout must be one of {', '.join(_OF_TORCH)}: `{self.layout}`."
            )
        if self.layout is not None and self.native_kernels:
            raise SettingsError(
                f"rollout.layout must be left out with rollout.native_kernels, which have their "
                f"own: `{self.layout}`."
            )
        if self.speculation not in list(Speculation):
            raise SettingsError(
                f"rollout.speculation must be one of {', '.join(Speculation)}: "
                f"`{self.speculation}`."
            )
        if self.kv_dtype not in ("float32", "bfloat16"):
            raise SettingsError(f"rollout.kv_dtype must be float32 or bfloat16: `{self.kv_dtype}`.")
        if self.deterministic and self.layout not in (None, Layout.TILED):
            raise SettingsError(
                f"rollout.layout must be tiled in the deterministic mode: `{self.layout}`."
            )

    def num_blocks(self, config: ModelConfig) -> int:
        """Blocks of the KV memory."""
        return kv_room.num_blocks(
            config,
            slots=self.slots,
            budget_tokens=self.kv_budget_tokens,
            dtype=self.kv_dtype,
            block_tokens=self.block_tokens,
        )

    def bf16_dots(self) -> bool:
        """Whether the kernels multiply bf16 weights by the processor's instructions for bf16."""
        return self.bf16_products and not self.deterministic and bf16_dots().in_force

    def speculates(self, *, native: bool) -> bool:
        """Whether tokens are proposed, with or without the native kernels."""
        if self.speculation is Speculation.AUTO:
            return native and not self.deterministic
        return self.speculation is Speculation.ON

    def layout_for(self, weights_bytes: int, copies: int) -> Layout:
        """The form of the weights, for so many sets of them of this size."""
        if self.native_kernels:
            _check_native()
            return Layout.NATIVE
        if self.layout is not None:
            return self.layout
        if self.deterministic:
            return Layout.TILED
        room = cgroups.usable_memory() * _SHARE_OF_MEMORY
        fits = self.native_kernels is None and weights_bytes * copies <= room
        if fits and native_kernels().in_force:
            return Layout.NATIVE
        return Layout.PACKED if 3 * weights_bytes * copies <= room else Layout.MAPPED


def _check_native() -> None:
    if reason := why_unavailable():
        raise SettingsError(
            f"rollout.native_kernels cannot be `true` on this machine: {reason}. Set it to false, "
            "or leave it out for the fastest that there is."
        )
