"""What each operation of the virtual world costs in seconds: a roofline of model and device.

Invariants: every cost is a pure function of the parameters and of its arguments; `steps_time` is
the exact sum of single decode steps and `steps_within` is its inverse, both in constant time.
All quantities are SI: bytes, FLOP/s, bytes/s, seconds (durations carry `_s`).

Nothing here may know of the clock, of events, versions' identities, faults or paradigms.
"""

from __future__ import annotations

import difflib
from math import pow, sqrt
from types import MappingProxyType
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

# A step counts as done when all but this share of it has passed. Virtual times are sums of
# floats, so an instant that means "after exactly k steps" may lie a few ulps early; 1e-6 of a
# step is far above that noise and far below anything the simulation could show.
STEP_TOLERANCE = 1e-6


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
        return self

    @property
    def active(self) -> float:
        """Weights that one token uses."""
        return self.parameters if self.active_parameters is None else self.active_parameters

    @property
    def weight_bytes(self) -> float:
        """Size of one version's weights."""
        return self.parameters * self.bytes_per_parameter

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


class DecodeCost:
    """Time of decode steps on one instance, as plain floats: it is called millions of times.

    With batch n and total context C (cached tokens summed over the batch) one step takes

        memory(C)  = v * weights(n/v) + kv * C
        compute(C) = n * token + attention * C
        step(C)    = max(memory(C), compute(C)) + overhead

    where v is the number of versions in the batch, each of whose weights is read once. Every
    step adds n tokens to C, so both terms are affine in the step's index and cross at most once.
    """

    __slots__ = (
        "_attention_s",
        "_expert_miss",
        "_expert_s",
        "_gap_s",
        "_kv_s",
        "_overhead_s",
        "_token_s",
        "_weights_s",
    )

    def __init__(
        self, model: Model, device: Device, efficiency: Efficiency, devices_per_instance: int
    ) -> None:
        bandwidth = device.memory_bandwidth * devices_per_instance * efficiency.bandwidth_efficiency
        flops = device.flops * devices_per_instance * efficiency.compute_efficiency
        flops /= efficiency.expert_imbalance
        self._weights_s: float = model.weight_bytes / bandwidth
        self._expert_s: float = model.expert_parameters * model.bytes_per_parameter / bandwidth
        self._expert_miss: float = model.expert_miss
        self._kv_s: float = model.kv_bytes_per_token / bandwidth
        self._token_s: float = model.flops_per_token / flops
        self._attention_s: float = model.attention_flops_per_pair / flops
        self._gap_s: float = self._kv_s - self._attention_s
        self._overhead_s: float = efficiency.decode_overhead_s

    def step_time(self, n: int, context: float, num_versions: int = 1) -> float:
        """Seconds of one decode step for `n` sequences with `context` cached tokens in all."""
        memory = num_versions * self._weights_s + self._kv_s * context
        if self._expert_s:
            memory -= num_versions * self._expert_s * self._expert_miss ** (n / num_versions)
        compute = n * self._token_s + self._attention_s * context
        return (memory if memory > compute else compute) + self._overhead_s

    def steps_time(self, n: int, context: float, k: int, num_versions: int = 1) -> float:
        """Seconds of the next `k` steps: the sum of `step_time(n, context + n*i)` for i < k."""
        if k <= 0:
            return 0.0
        memory = num_versions * self._weights_s + self._kv_s * context
        if self._expert_s:
            memory -= num_versions * self._expert_s * self._expert_miss ** (n / num_versions)
        compute = n * self._token_s + self._attention_s * context
        gap = memory - compute
        growth = n * self._gap_s
        last_gap = gap + growth * (k - 1)
        added = 0.5 * n * k * (k - 1)
        if gap >= 0.0 and last_gap >= 0.0:
            return k * (memory + self._overhead_s) + self._kv_s * added
        if gap <= 0.0 and last_gap <= 0.0:
            return k * (compute + self._overhead_s) + self._attention_s * added
        # The first `j` steps lie on one side, the others on the other. Where rounding puts the
        # crossing one step off, both terms are equal there, so the sum does not change.
        j = int(-gap / growth) + 1
        before = 0.5 * n * j * (j - 1)
        after = added - before
        total = k * self._overhead_s
        if gap > 0.0:
            total += j * memory + self._kv_s * before
            return total + (k - j) * compute + self._attention_s * after
        total += j * compute + self._attention_s * before
        return total + (k - j) * memory + self._kv_s * after

    def steps_within(self, n: int, context: float, seconds: float, num_versions: int = 1) -> int:
        """The largest k with `steps_time(n, context, k) <= seconds`, up to `STEP_TOLERANCE`."""
        if seconds <= 0.0:
            return 0
        memory = num_versions * self._weights_s + self._kv_s * context
        if self._expert_s:
            memory -= num_versions * self._expert_s * self._expert_miss ** (n / num_versions)
        compute = n * self._token_s + self._attention_s * context
        gap = memory - compute
        growth = n * self._gap_s
        if gap > 0.0 or (gap == 0.0 and growth >= 0.0):
            step, slope = memory, n * self._kv_s
        else:
            step, slope = compute, n * self._attention_s
        step += self._overhead_s
        done = 0
        if gap * growth < 0.0:
            j = int(-gap / growth) + 1
            before = j * step + 0.5 * slope * j * (j - 1)
            if seconds > before:
                done = j
                seconds -= before
                if gap > 0.0:
                    slope = n * self._attention_s
                    step = compute + slope * j + self._overhead_s
                else:
                    slope = n * self._kv_s
                    step = memory + slope * j + self._overhead_s
        # step*x + slope*x(x-1)/2 = seconds, in the form that does not cancel for b >= 0. Its
        # relative error is a few ulps, so the tolerance also absorbs what a correction would.
        a = 0.5 * slope
        b = step - a
        root = sqrt(b * b + 4.0 * a * seconds)
        x = 2.0 * seconds / (b + root) if b >= 0.0 else (root - b) / (2.0 * a)
        return done + int(x + STEP_TOLERANCE)


class PrefillCost:
    """Time to compute the KV of new tokens on one instance, also as plain floats."""

    __slots__ = ("_expert_miss", "_expert_s", "_kv_s", "_pair_s", "_token_s", "_weights_s")

    def __init__(
        self, model: Model, device: Device, efficiency: Efficiency, devices_per_instance: int
    ) -> None:
        bandwidth = device.memory_bandwidth * devices_per_instance * efficiency.bandwidth_efficiency
        flops = device.flops * devices_per_instance * efficiency.prefill_efficiency
        flops /= efficiency.expert_imbalance
        self._token_s: float = model.flops_per_token / flops
        self._pair_s: float = model.attention_flops_per_pair / flops
        self._weights_s: float = model.weight_bytes / bandwidth
        self._expert_s: float = model.expert_parameters * model.bytes_per_parameter / bandwidth
        self._expert_miss: float = model.expert_miss
        self._kv_s: float = model.kv_bytes_per_token / bandwidth

    def time(self, tokens: int, context: int = 0) -> float:
        """Seconds for `tokens` new tokens of one sequence behind `context` cached ones.

        A token attends to all before it and to itself, hence the quadratic term.
        """
        if tokens <= 0:
            return 0.0
        pairs = tokens * (context + 0.5 * (tokens + 1))
        compute = tokens * self._token_s + pairs * self._pair_s
        memory = self._weights_s + self._kv_s * context
        if self._expert_s:
            memory -= self._expert_s * self._expert_miss**tokens
        return compute if compute > memory else memory


class Costs:
    """Every duration and limit of one kind of instance and of the trainer that feeds it."""

    __slots__ = (
        "_kv_network_s",
        "_kv_park_s",
        "decode",
        "device",
        "devices_per_instance",
        "efficiency",
        "kv_bytes_per_token",
        "kv_capacity_tokens",
        "model",
        "prefill_time",
        "version_slots",
    )

    def __init__(
        self,
        model: Model,
        device: Device,
        efficiency: Efficiency | None = None,
        *,
        devices_per_instance: int = 1,
        version_slots: int = 1,
    ) -> None:
        if devices_per_instance < 1:
            raise ValueError(f"devices_per_instance must be >= 1: `{devices_per_instance}`.")
        if version_slots < 1:
            raise ValueError(f"version_slots must be >= 1: `{version_slots}`.")
        self.model = model
        self.device = device
        self.efficiency = efficiency if efficiency is not None else Efficiency()
        self.devices_per_instance = devices_per_instance
        self.version_slots = version_slots
        self.decode = DecodeCost(model, device, self.efficiency, devices_per_instance)
        # Bound once: the method of the slotted part is called for every trajectory.
        self.prefill_time = PrefillCost(model, device, self.efficiency, devices_per_instance).time
        self.kv_bytes_per_token: float = model.kv_bytes_per_token
        self._kv_network_s = self._network_s(self.kv_bytes_per_token, devices_per_instance)
        self._kv_park_s = self._host_s(self.kv_bytes_per_token, devices_per_instance)
        self.kv_capacity_tokens = self._kv_capacity_tokens()

    def _kv_capacity_tokens(self) -> int:
        usable = self.devices_per_instance * self.device.memory_bytes
        usable *= self.efficiency.kv_memory_fraction
        weights = self.model.weight_bytes * self.version_slots
        tokens = int((usable - weights) / self.kv_bytes_per_token)
        if tokens <= 0:
            raise ValueError(
                f"no memory left for KV: {self.devices_per_instance} device(s) offer "
                f"{usable / 1e9:.1f} GB, {self.version_slots} version(s) of the weights take "
                f"{weights / 1e9:.1f} GB. Raise devices_per_instance or lower version_slots."
            )
        return tokens

    def train_time(
        self, tokens: float, devices: int, updates: int = 1, attended_pairs: float = 0.0
    ) -> float:
        """Seconds of one train step over `tokens` tokens in `updates` optimizer updates.

        `attended_pairs` is the sum of L(L+1)/2 over the sequences; 0 leaves attention out.
        """
        model, knobs = self.model, self.efficiency
        forward = model.flops_per_token * tokens + model.attention_flops_per_pair * attended_pairs
        # The backward pass costs twice the forward: gradients of activations and of weights.
        flops = 3 * forward * knobs.recompute_factor
        compute_s = flops / (self.device.flops * devices * knobs.train_efficiency)
        return compute_s + knobs.train_overhead_s + updates * knobs.update_overhead_s

    def publish_time(self, trainer_devices: int) -> float:
        """Seconds until a version's shards have left the trainer, sent in parallel."""
        streams = min(trainer_devices, self.efficiency.publish_streams)
        return self.efficiency.publish_latency_s + self._network_s(self.model.weight_bytes, streams)

    def install_time(self, *, from_host: bool = False) -> float:
        """Seconds to bring a published version onto one instance, each device its own shard."""
        copy = self._host_s if from_host else self._network_s
        copy_s = copy(self.model.weight_bytes, self.devices_per_instance)
        return self.efficiency.install_latency_s + copy_s

    def kv_transfer_time(self, tokens: float) -> float:
        """Seconds to move the KV of `tokens` tokens to another instance."""
        return self.efficiency.transfer_latency_s + tokens * self._kv_network_s

    def park_time(self, tokens: float) -> float:
        """Seconds to move the KV of `tokens` tokens to host memory, or back."""
        return self.efficiency.transfer_latency_s + tokens * self._kv_park_s

    def switch_time(self) -> float:
        """Seconds that colocated devices need between rollout and training."""
        return self.efficiency.switch_s

    def _network_s(self, num_bytes: float, links: int) -> float:
        bandwidth = self.device.interconnect_bandwidth * links
        return num_bytes / (bandwidth * self.efficiency.transfer_efficiency)

    def _host_s(self, num_bytes: float, links: int) -> float:
        bandwidth = self.device.host_bandwidth * links
        return num_bytes / (bandwidth * self.efficiency.transfer_efficiency)
