"""What each operation of the virtual world costs in seconds: a roofline of model and device.

Invariants: every cost is a pure function of the parameters and of its arguments; `steps_time` is
the exact sum of single decode steps and `steps_within` is its inverse, both in constant time.
All quantities are SI: bytes, FLOP/s, bytes/s, seconds (durations carry `_s`).

Nothing here may know of the clock, of events, versions' identities, faults or paradigms.
"""

from __future__ import annotations

from math import sqrt

from dora_rl.simulator.cost_parameters import Device, Efficiency, Model

# A step counts as done when all but this share of it has passed. Virtual times are sums of
# floats, so an instant that means "after exactly k steps" may lie a few ulps early; 1e-6 of a
# step is far above that noise and far below anything the simulation could show.
STEP_TOLERANCE = 1e-6


class DecodeCost:
    """Time of decode steps on one instance, as plain floats: it is called millions of times.

    With batch n and total context C (cached tokens summed over the batch) one step takes

        memory(C)  = v * weights(n/v) + kv * C
        compute(C) = n * token + attention * C
        step(C)    = max(memory(C), compute(C)) + overhead

    where v is the number of versions in the batch, each of whose weights is read once. Every
    step adds n tokens to C, so both terms are affine in the step's index and cross at most once.

    Where versions are LoRA adapters, the base is read once for the whole batch:

        memory(C)  = weights(n) + v * adapter + kv * C
        compute(C) = n * (token + adapter's token) + attention * C

    and everything, the overhead too, takes `lora_decode_slowdown` times as long.
    """

    __slots__ = (
        "_attention_s",
        "_base_s",
        "_expert_miss",
        "_expert_s",
        "_gap_s",
        "_kv_s",
        "_overhead_s",
        "_shared_base",
        "_token_s",
        "_version_s",
    )

    def __init__(
        self, model: Model, device: Device, efficiency: Efficiency, devices_per_instance: int
    ) -> None:
        self._shared_base: bool = model.lora_rank is not None
        slowdown = efficiency.lora_decode_slowdown if self._shared_base else 1.0
        bandwidth = device.memory_bandwidth * devices_per_instance * efficiency.bandwidth_efficiency
        bandwidth /= slowdown
        flops = device.flops * devices_per_instance * efficiency.compute_efficiency
        flops /= efficiency.expert_imbalance * slowdown
        self._base_s: float = model.weight_bytes / bandwidth if self._shared_base else 0.0
        self._version_s: float = model.version_bytes / bandwidth
        self._expert_s: float = model.expert_parameters * model.bytes_per_parameter / bandwidth
        self._expert_miss: float = model.expert_miss
        self._kv_s: float = model.kv_bytes_per_token / bandwidth
        self._token_s: float = (model.flops_per_token + model.adapter_flops_per_token) / flops
        self._attention_s: float = model.attention_flops_per_pair / flops
        self._gap_s: float = self._kv_s - self._attention_s
        self._overhead_s: float = efficiency.decode_overhead_s * slowdown

    def _untouched_s(self, n: int, num_versions: int) -> float:
        """Time that reading all weights would take beyond those that the batch touches."""
        readers = 1 if self._shared_base else num_versions
        return float(readers * self._expert_s * self._expert_miss ** (n / readers))

    def step_time(self, n: int, context: float, num_versions: int = 1) -> float:
        """Seconds of one decode step for `n` sequences with `context` cached tokens in all."""
        memory = self._base_s + num_versions * self._version_s + self._kv_s * context
        if self._expert_s:
            memory -= self._untouched_s(n, num_versions)
        compute = n * self._token_s + self._attention_s * context
        return (memory if memory > compute else compute) + self._overhead_s

    def steps_time(self, n: int, context: float, k: int, num_versions: int = 1) -> float:
        """Seconds of the next `k` steps: the sum of `step_time(n, context + n*i)` for i < k."""
        if k <= 0:
            return 0.0
        memory = self._base_s + num_versions * self._version_s + self._kv_s * context
        if self._expert_s:
            memory -= self._untouched_s(n, num_versions)
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
        memory = self._base_s + num_versions * self._version_s + self._kv_s * context
        if self._expert_s:
            memory -= self._untouched_s(n, num_versions)
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
        self._token_s: float = (model.flops_per_token + model.adapter_flops_per_token) / flops
        self._pair_s: float = model.attention_flops_per_pair / flops
        self._weights_s: float = model.held_bytes(1) / bandwidth
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
        # Bound once: it is called for every trajectory.
        self.prefill_time = PrefillCost(model, device, self.efficiency, devices_per_instance).time
        self.kv_bytes_per_token: float = model.kv_bytes_per_token
        self._kv_network_s = self._network_s(self.kv_bytes_per_token, devices_per_instance)
        self._kv_park_s = self._host_s(self.kv_bytes_per_token, devices_per_instance)
        self.kv_capacity_tokens = self._kv_capacity_tokens()

    def _kv_capacity_tokens(self) -> int:
        usable = self.devices_per_instance * self.device.memory_bytes
        usable *= self.efficiency.kv_memory_fraction
        weights = self.model.held_bytes(self.version_slots)
        tokens = int((usable - weights) / self.kv_bytes_per_token)
        if tokens <= 0:
            what = "version(s) of the weights"
            if self.model.lora_rank is not None:
                what = "adapter(s) and their base"
            raise ValueError(
                f"no memory left for KV: {self.devices_per_instance} device(s) offer "
                f"{usable / 1e9:.1f} GB, {self.version_slots} {what} take "
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
        forward = model.flops_per_token + model.adapter_flops_per_token
        forward = forward * tokens + model.attention_flops_per_pair * attended_pairs
        # The backward pass costs twice the forward: gradients of activations and of weights.
        flops = 3 * forward * knobs.recompute_factor
        if model.lora_rank is not None:
            # The base has no gradients of weights; what is recomputed is a forward as ever.
            flops -= model.flops_per_token * tokens
        compute_s = flops / (self.device.flops * devices * knobs.train_efficiency)
        return compute_s + knobs.train_overhead_s + updates * knobs.update_overhead_s

    def publish_time(self, trainer_devices: int) -> float:
        """Seconds until a version's shards have left the trainer, sent in parallel."""
        streams = min(trainer_devices, self.efficiency.publish_streams)
        copy_s = self._network_s(self.model.version_bytes, streams)
        return self.efficiency.publish_latency_s + copy_s

    def install_time(self, *, from_host: bool = False) -> float:
        """Seconds to bring a published version onto one instance, each device its own shard.

        The base of adapters is there since the process started: `restart_s` has it inside.
        """
        copy = self._host_s if from_host else self._network_s
        copy_s = copy(self.model.version_bytes, self.devices_per_instance)
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
