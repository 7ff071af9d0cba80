"""What the costs of the virtual world are computed from: model shape, device figures, efficiency.

Each is a checked, frozen table of a scenario. All quantities are SI: bytes, FLOP/s, bytes/s,
seconds (durations carry `_s`). What follows from them is computed in `costs`.
"""

from __future__ import annotations

import difflib
from math import pow
from types import MappingProxyType
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


class _Parameters(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Model(_Parameters):
    """The shape of a decoder, dense or mixture of experts, as far as it decides cost."""

    parameters: float = Field(gt=0, description="all weights, embeddings included")
    active_parameters: float | None = Field(
        default=None,
        gt=0,
        description="weights that one token uses; left out, all of them (a dense model)",
    )
    layers: int = Field(ge=1, description="decoder blocks")
    heads: int = Field(ge=1, description="query heads; they set the attention FLOPs")
    kv_heads: int = Field(ge=1, description="key/value heads; they set the KV bytes")
    head_dim: int = Field(ge=1, description="width of one head")
    bytes_per_parameter: float = Field(default=2, gt=0, le=8, description="2 = bf16, 1 = fp8")
    kv_bytes_per_element: float = Field(default=2, gt=0, le=8, description="2 = bf16, 1 = fp8")
    experts: int | None = Field(default=None, ge=2, description="routed experts per MoE block")
    experts_per_token: int | None = Field(
        default=None, ge=1, description="routed experts that one token visits"
    )
    lora_rank: int | None = Field(
        default=None,
        description="versions are LoRA adapters of this rank over one frozen base; left out, each "
        "is a full set of weights",
    )
    lora_parameters: float | None = Field(
        default=None, gt=0, description="weights of one adapter; left out, estimated from the rank"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Model:
        if self.active > self.parameters:
            raise ValueError(
                f"active_parameters must be <= parameters ({self.parameters:g}): "
                f"`{self.active:g}`. Leave it out for a dense model."
            )
        if self.kv_heads > self.heads:
            raise ValueError(f"kv_heads must be <= heads ({self.heads}): `{self.kv_heads}`.")
        if (self.experts is None) != (self.experts_per_token is None):
            raise ValueError("experts and experts_per_token go together: give both or neither.")
        if self.experts is not None and self.experts_per_token is not None:
            if self.experts_per_token >= self.experts:
                raise ValueError(
                    f"experts_per_token must be < experts ({self.experts}): "
                    f"`{self.experts_per_token}`. Leave both out for a dense model."
                )
            least = self.parameters * self.experts_per_token / self.experts
            if self.active < least:
                raise ValueError(
                    f"active_parameters must be >= parameters * experts_per_token / experts "
                    f"({least:g}): `{self.active:g}`. The experts that a token visits "
                    f"are part of its active parameters."
                )
        self._check_lora()
        return self

    def _check_lora(self) -> None:
        if self.lora_rank is None:
            if self.lora_parameters is not None:
                raise ValueError(
                    f"lora_parameters needs lora_rank: `{self.lora_parameters:g}`. Give the rank "
                    "as well, or leave both out for full weights."
                )
            return
        if self.lora_rank < 1:
            raise ValueError(
                f"lora_rank must be >= 1: `{self.lora_rank}`. Leave it out for full weights."
            )
        if self.adapter_parameters >= self.parameters:
            cause = "lora_rank" if self.lora_parameters is None else "lora_parameters"
            given = self.lora_rank if self.lora_parameters is None else self.lora_parameters
            raise ValueError(
                f"{cause} must make an adapter smaller than the model ({self.parameters:g} "
                f"parameters): `{given:g}` makes {self.adapter_parameters:g}. Use less, such as "
                "lora_rank = 16, or leave it out for full weights."
            )

    @property
    def active(self) -> float:
        """Weights that one token uses."""
        return self.parameters if self.active_parameters is None else self.active_parameters

    @property
    def weight_bytes(self) -> float:
        """Size of a full set of weights: of one version, or of the base of all adapters."""
        return self.parameters * self.bytes_per_parameter

    @property
    def adapter_parameters(self) -> float:
        """Weights of one adapter: rank x (inputs + outputs), summed over the matrices it adapts.

        Those are the attention projections and, in a dense model, the three matrices of the
        feed-forward block. Its width is not among the figures: the model is taken to be
        `heads * head_dim` wide, and what attention leaves of a layer's share of all parameters is
        the feed-forward block, so embeddings make the estimate 2 to 30% too large.
        """
        if self.lora_rank is None:
            return 0.0
        if self.lora_parameters is not None:
            return self.lora_parameters
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        ports = 2.0 * (wide + wide) + 2 * (wide + narrow)  # queries and output, keys and values
        if self.expert_parameters == 0 and self.active == self.parameters:
            attention = 2 * wide * wide + 2 * wide * narrow
            inner = max(0.0, self.parameters / self.layers - attention) / (3 * wide)
            ports += 3 * (wide + inner)
        return self.lora_rank * self.layers * ports

    @property
    def version_bytes(self) -> float:
        """What a further version adds to memory, and what moves to publish and to install it."""
        if self.lora_rank is None:
            return self.weight_bytes
        return self.adapter_parameters * self.bytes_per_parameter

    def held_bytes(self, num_versions: int) -> float:
        """Memory of so many versions on one instance."""
        if self.lora_rank is None:
            return self.weight_bytes * num_versions
        return self.weight_bytes + self.version_bytes * num_versions

    @property
    def adapter_flops_per_token(self) -> float:
        """Forward FLOPs that a token's adapter adds to those of the base."""
        return 2 * self.adapter_parameters

    @property
    def kv_bytes_per_token(self) -> float:
        """Size of one token's keys and values over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes_per_element

    @property
    def flops_per_token(self) -> float:
        """Forward FLOPs of one token without attention: a multiply and an add per weight."""
        return 2 * self.active

    @property
    def attention_flops_per_pair(self) -> float:
        """Forward FLOPs of one token attending to one token: the score and the weighted sum."""
        return 4 * self.layers * self.heads * self.head_dim

    @property
    def expert_miss(self) -> float:
        """Probability that one token leaves a given expert untouched (0 for a dense model)."""
        if self.experts is None or self.experts_per_token is None:
            return 0.0
        return 1 - self.experts_per_token / self.experts

    @property
    def expert_parameters(self) -> float:
        """Weights in routed experts, from total = shared + routed, active = shared + e/E routed.

        Without `experts` the split is unknown and every step is charged for all weights, which
        is right for a dense model and for batches that reach every expert.
        """
        miss = self.expert_miss
        return (self.parameters - self.active) / miss if miss else 0.0

    def weight_bytes_read(self, num_tokens: float) -> float:
        """Expected bytes of weights that a pass over `num_tokens` tokens must read.

        Tokens choose experts independently and uniformly, so an expert is missed by all of them
        with probability (1 - e/E)^n. Real routing is skewed and touches fewer.
        """
        missed = self.expert_parameters * pow(self.expert_miss, num_tokens)
        return (self.parameters - missed) * self.bytes_per_parameter


class Device(_Parameters):
    """One accelerator's public figures, per device and per direction."""

    flops: float = Field(gt=0, description="dense bf16 peak, FLOP/s")
    memory_bytes: float = Field(gt=0, description="device memory")
    memory_bandwidth: float = Field(gt=0, description="device memory, bytes/s")
    interconnect_bandwidth: float = Field(gt=0, description="between instances, bytes/s")
    host_bandwidth: float = Field(gt=0, description="between device and host memory, bytes/s")


# Vendor data sheets: dense (not sparse) bf16 peak, memory size and bandwidth of the SXM boards.
# The network is what such nodes usually carry, one adapter a device: 8 x 400 Gbit/s (Hopper),
# 8 x 200 Gbit/s (Ampere). The host link is PCIe x16 as commonly measured: gen5 ~55, gen4 ~25 GB/s.
DEVICES: MappingProxyType[str, Device] = MappingProxyType(
    {
        "A100": Device(
            flops=312e12,
            memory_bytes=80e9,
            memory_bandwidth=2.039e12,
            interconnect_bandwidth=25e9,
            host_bandwidth=25e9,
        ),
        "H100": Device(
            flops=989e12,
            memory_bytes=80e9,
            memory_bandwidth=3.35e12,
            interconnect_bandwidth=50e9,
            host_bandwidth=55e9,
        ),
        "H200": Device(
            flops=989e12,
            memory_bytes=141e9,
            memory_bandwidth=4.8e12,
            interconnect_bandwidth=50e9,
            host_bandwidth=55e9,
        ),
        # As H100 but for NVLink (400 instead of 900 GB/s), which only links devices inside one
        # instance: its share of a decode step is part of `decode_overhead_s`.
        "H800": Device(
            flops=989e12,
            memory_bytes=80e9,
            memory_bandwidth=3.35e12,
            interconnect_bandwidth=50e9,
            host_bandwidth=55e9,
        ),
    }
)


def device_named(name: str) -> Device:
    """The public figures of a device by its name, in any case."""
    device = DEVICES.get(name.upper())
    if device is None:
        near = difflib.get_close_matches(name.upper(), DEVICES, n=1, cutoff=0.3)
        hint = f" Did you mean `{near[0]}`?" if near else ""
        raise ValueError(
            f"unknown device: `{name}`.{hint} Known: {', '.join(DEVICES)}; or give its figures."
        )
    return device


def _device_by_name(value: object) -> object:
    return device_named(value) if isinstance(value, str) else value


NamedDevice = Annotated[Device, BeforeValidator(_device_by_name)]
"""For configuration: a table of figures, or the name of a device in `DEVICES`."""


# The engine gathers each sequence's adapter and launches further kernels in every layer, at a cost
# that hardly depends on how many adapters there are. Measured with vLLM, one adapter against none:
# 1.1 to 1.3 (Llama-3.1-8B on TPU v6e, pull request 15655), 1.5 with one as with four (Llama-2-7B on
# A100, pull request 11267), 2 with one as with four (a tiny model on CPU).
LORA_DECODE_SLOWDOWN = 1.3


class Efficiency(_Parameters):
    """How far reality stays below the data sheet, and the fixed costs it does not list."""

    compute_efficiency: float = Field(
        default=0.6, gt=0, le=1, description="share of peak FLOP/s that decode reaches"
    )
    bandwidth_efficiency: float = Field(
        default=0.75, gt=0, le=1, description="share of memory bandwidth that decode reaches"
    )
    prefill_efficiency: float = Field(
        default=0.5, gt=0, le=1, description="share of peak FLOP/s that prefill reaches"
    )
    train_efficiency: float = Field(
        default=0.35, gt=0, le=1, description="model FLOP utilisation of training"
    )
    transfer_efficiency: float = Field(
        default=0.8, gt=0, le=1, description="share of network and host links that copies reach"
    )
    kv_memory_fraction: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="share of device memory for weights and KV; the rest is activations",
    )
    expert_imbalance: float = Field(
        default=1.0,
        ge=1,
        description="load of the busiest member of an expert-parallel group over the mean; "
        "all wait for it, so it stretches rollout compute",
    )
    decode_overhead_s: float = Field(
        default=0.004,
        ge=0,
        description="fixed part of a decode step: launches, scheduling, all-reduce latency",
    )
    lora_decode_slowdown: float = Field(
        default=LORA_DECODE_SLOWDOWN,
        ge=1,
        description="a decode step with adapters in the batch over one without, however many",
    )
    recompute_factor: float = Field(
        default=4 / 3,
        ge=1,
        description="training FLOPs over forward and backward; 4/3 = one more forward, "
        "for activation recomputation or for the old log-probabilities",
    )
    train_overhead_s: float = Field(
        default=5.0, ge=0, description="fixed part of a train step: loading, packing, logging"
    )
    update_overhead_s: float = Field(
        default=0.5, ge=0, description="fixed part of an optimizer update: reduction and step"
    )
    publish_streams: int = Field(
        default=8, ge=1, description="trainer devices that send their shards at the same time"
    )
    publish_latency_s: float = Field(default=0.5, ge=0, description="gather, digest, announce")
    install_latency_s: float = Field(default=0.5, ge=0, description="pause, verify, swap")
    transfer_latency_s: float = Field(
        default=0.01, ge=0, description="metadata phase of a KV move, before the bulk copy"
    )
    switch_s: float = Field(
        default=10.0,
        ge=0,
        description="colocated devices between rollout and training: offload, reload, reshard",
    )
