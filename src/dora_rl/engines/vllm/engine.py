"""vLLM by the contract of engines: which request is where, what it may, and how it ends.

A trajectory is one request of vLLM for as long as it samples: from its submission, or from what an
environment said, to the end of its turn. Between turns vLLM has nothing of it; what was read before
is found in its prefix cache, if it is still there. Every request has an id of its own, so that what
was cancelled can never be taken for what came after it.

How a version comes in, and the proof that it is what serves, is in `versions`.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from dora_rl.core.protocol.types import TrajectoryId, Version
from dora_rl.engines import moving, wire
from dora_rl.engines.base import (
    Capabilities,
    Failed,
    FinishReason,
    Load,
    Output,
    Request,
    Sampled,
    VersionLoad,
    check_extension,
    room,
)
from dora_rl.engines.errors import RequestRefused, UnknownTrajectory, Unsupported
from dora_rl.engines.kv_room import blocks_for
from dora_rl.engines.rates import Rates
from dora_rl.engines.requests import (
    check_request,
    check_room,
    check_vocabulary,
    end_tokens,
    finish_reason,
)
from dora_rl.engines.version_slots import VersionSlots
from dora_rl.engines.vllm.backend import REFUSALS, Backend, Emitted
from dora_rl.engines.vllm.kv_connector import BlockKv, BlockLayout
from dora_rl.engines.vllm.settings import sampling_refusal
from dora_rl.engines.vllm.versions import Versions
from dora_rl.models.config import ModelConfig
from dora_rl.models.tokenizer import StopStrings, Tokenizer
from dora_rl.weights.loading import open_version


@dataclass(slots=True)
class _Live:
    """One trajectory that is here."""

    request: Request
    age: int
    response: list[int]  # sampled and observed
    turn_start: int
    stops: StopStrings | None
    id: str | None = None  # of vLLM's request, while it samples
    held: bool = False
    parked: bool = False  # asked for by an export, until it is resumed
    kv: BlockKv | None = None  # what vLLM had of it when it was parked


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What this engine was made for."""

    slots: int
    context: int
    block_size: int


@dataclass(slots=True, eq=False)
class VllmEngine:
    """One rollout instance in this process; see `dora_rl.engines.base.Engine`."""

    backend: Backend
    versions: Versions
    version_slots: VersionSlots
    config: ModelConfig
    limits: EngineLimits
    tokenizer: Tokenizer | None
    _live: dict[TrajectoryId, _Live] = field(init=False, default_factory=dict)
    _sampling: dict[str, _Live] = field(init=False, default_factory=dict)  # by vLLM's ids
    _ages: Iterator[int] = field(init=False, default_factory=count)
    _ids: Iterator[int] = field(init=False, default_factory=count)
    _rates: Rates = field(init=False, default_factory=Rates)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            version_slots=self.version_slots.count,
            kv_export=self.backend.kv_layout is not None,
            lora=self.versions.lora,
        )

    # Versions

    def install(self, version: Version, directory: Path, evict: Version | None = None) -> str:
        weights = open_version(directory)
        if self.version_slots.has(version, weights.digest, directory):
            return weights.digest
        gone = self.version_slots.to_evict(version, evict)
        self.versions.check(directory, weights)
        if gone is not None:
            self.evict(gone)
        self.versions.load(version, directory, weights)
        self.version_slots.digests[version] = weights.digest
        return weights.digest

    def evict(self, version: Version) -> None:
        here = [t for t, live in self._live.items() if live.request.version == version]
        self.version_slots.check_unused(version, here)
        if self.version_slots.digests.pop(version, None) is not None:
            self.versions.drop(version)
        self._rates.forget(version)

    # Trajectories

    def submit(self, request: Request) -> None:
        self.version_slots.digest(request.version)
        self._enter(request, None)

    def _enter(self, request: Request, kv: BlockKv | None) -> None:
        if request.trajectory in self._live:
            raise RequestRefused(
                f"trajectory {request.trajectory} is here already. Cancel it first, or use "
                "another id."
            )
        self._check(request)
        stops = None
        if request.sampling.stop and self.tokenizer is not None:
            stops = StopStrings(request.sampling.stop, self.tokenizer)
        live = _Live(request, next(self._ages), list(request.prefix), request.turn_start, stops)
        live.held, live.kv = request.held, kv
        if not live.held:
            self._start(live)
        self._live[request.trajectory] = live

    def _start(self, live: _Live) -> None:
        """Let vLLM sample on, after all that the trajectory has."""
        request, response = live.request, live.response
        sampling = request.sampling
        name = f"{request.trajectory}-{next(self._ids)}"
        longest = room(sampling.max_tokens, self.context, len(request.prompt), len(response))
        try:
            self.backend.add(
                name,
                [*request.prompt, *response],
                sampling,
                max_tokens=longest,
                stop_token_ids=end_tokens(request, self.config),
                seed=_seed(request, len(response)),
                salt=self.version_slots.digest(request.version),
                adapter=self.versions.adapter(request.version),
                priority=live.age,  # the oldest first, also after a turn
                kv=live.kv,
            )
        except REFUSALS as error:  # vLLM's own checks, beyond `_check`
            self.backend.abort(name)
            raise RequestRefused(
                f"vLLM refuses trajectory {request.trajectory}: {type(error).__name__}: {error}"
            ) from error
        live.id, live.kv = name, None
        self._sampling[name] = live

    def extend(self, trajectory: TrajectoryId, tokens: tuple[int, ...]) -> None:
        live = self._get(trajectory)
        if not live.held:
            raise RequestRefused(
                f"trajectory `{trajectory}` is not held: it samples. Submit it with `hold`, and "
                "extend it when its turn has ended."
            )
        check_extension(live.request, len(live.response), tokens, self.context)
        check_vocabulary(trajectory, tokens, self.config)
        before = len(live.response), live.turn_start
        live.response += tokens
        live.turn_start = len(live.response)
        try:
            if not live.parked:
                self._start(live)
        except RequestRefused:
            del live.response[before[0] :]
            live.turn_start = before[1]
            raise
        live.held = False

    def cancel(self, trajectory: TrajectoryId) -> bool:
        live = self._live.pop(trajectory, None)
        if live is not None:
            self._stop(live)
        return live is not None

    def _stop(self, live: _Live) -> None:
        """vLLM has no more of it, whether it had ended there or not."""
        if live.id is not None:
            del self._sampling[live.id]
            self.backend.abort(live.id)
            live.id = None

    # Moves

    def export_trajectory(self, trajectory: TrajectoryId) -> bytes:
        layout, live = self._layout(), self._get(trajectory)
        if live.id is not None:
            # A step that vLLM made and nobody heard of is not part of it.
            known = len(live.request.prompt) + len(live.response) - 1
            live.kv = self.backend.copy_kv(live.id, known)
            self._stop(live)
        live.parked = True
        kv = live.kv or layout.nothing()
        return wire.encode(
            moving.export(
                live.request,
                self.version_slots.digest(live.request.version),
                layout.kind,
                kv.blocks,
                kv.tokens,
                generated=live.response,
                turn_start=live.turn_start,
                held=live.held,
            )
        )

    def import_trajectory(self, data: bytes) -> TrajectoryId:
        layout, export = self._layout(), wire.decode(data)
        self.version_slots.check_import(export)
        tokens = export.kv_tokens
        blocks = moving.kv_of(export, layout.kind, layout.shape(max(0, tokens)))
        self._enter(export.request(), BlockKv(tokens, blocks))
        return export.trajectory

    def resume(self, trajectory: TrajectoryId) -> None:
        self._layout()
        live = self._get(trajectory)
        if live.parked and not live.held:
            self._start(live)
        live.parked = False

    def _layout(self) -> BlockLayout:
        """Of KV that can be handed over; refused where that cannot be."""
        if self.backend.kv_layout is None:
            raise Unsupported(
                "this engine cannot hand KV over: `capabilities.kv_export` is false. Submit the "
                "trajectory with what it has generated as its prefix."
            )
        return self.backend.kv_layout

    # Work

    def step(self) -> list[Output]:
        if self.idle:
            return []
        return [self._advance(emitted) for emitted in self.backend.step()]

    def _advance(self, emitted: Emitted) -> Output:
        live = self._sampling[emitted.request]
        request = live.request
        trajectory, sampling = request.trajectory, request.sampling
        if emitted.token is None:
            self.cancel(trajectory)
            return Failed(trajectory, f"vLLM ended it: {emitted.ended}")
        if not math.isfinite(emitted.logprob):
            self.cancel(trajectory)
            return Failed(trajectory, "the model's logits are not finite")
        live.response.append(emitted.token)
        finish = self._finish(live)
        if finish is None and emitted.ended is not None:
            self.cancel(trajectory)
            return Failed(trajectory, f"vLLM ended it: {emitted.ended}")
        self._rates.add(request.version, 1)
        if finish is not None:
            self._stop(live)
            live.held = request.hold
            if not live.held:
                del self._live[trajectory]
        return Sampled(
            trajectory=trajectory,
            version=request.version,
            digest=self.version_slots.digest(request.version),
            tokens=(emitted.token,),
            # Greedy draws from one token alone, whatever vLLM reports of it.
            logprobs=(0.0 if sampling.temperature == 0 else min(emitted.logprob, 0.0),),
            raw_logprobs=None if emitted.raw_logprob is None else (min(emitted.raw_logprob, 0.0),),
            finish=finish,
        )

    def _finish(self, live: _Live) -> FinishReason | None:
        stops, response = live.stops, live.response
        return finish_reason(
            live.request,
            self.config,
            self.context,
            token=response[-1],
            response=len(response),
            stops=lambda: stops is not None and stops.completed(response[live.turn_start :]),
        )

    @property
    def context(self) -> int:
        return self.limits.context

    @property
    def idle(self) -> bool:
        return not self._sampling

    def load(self) -> Load:
        held = Counter(live.request.version for live in self._live.values() if live.held)
        parked = Counter(
            live.request.version for live in self._live.values() if live.parked and not live.held
        )
        sampling = Counter(live.request.version for live in self._sampling.values())
        running = Counter(
            self._sampling[name].request.version
            for name in self.backend.running
            if name in self._sampling
        )
        versions = {
            version: VersionLoad(
                digest=digest,
                running=running[version],
                waiting=sampling[version] - running[version],
                parked=parked[version],
                tokens_per_s=self._rates.tokens_per_s(version),
                held=held[version],
            )
            for version, digest in self.version_slots.digests.items()
        }
        block = self.limits.block_size
        return Load(
            slots=self.limits.slots,
            version_slots=self.version_slots.count,
            kv_used_tokens=self.backend.used_blocks * block,
            kv_budget_tokens=self.backend.num_blocks * block,
            versions=versions,
        )

    def close(self) -> None:
        for trajectory in list(self._live):
            self.cancel(trajectory)
        self.version_slots.digests.clear()
        self.backend.close()

    # Inside

    def _get(self, trajectory: TrajectoryId) -> _Live:
        try:
            return self._live[trajectory]
        except KeyError:
            raise UnknownTrajectory(
                f"no trajectory `{trajectory}` is here. It may have finished or been cancelled."
            ) from None

    def _check(self, request: Request) -> None:
        """Refuse what this engine can never serve: vLLM would stop all requests for some of it."""
        has_tokenizer = self.tokenizer is not None
        check_request(request, self.config, self.context, has_tokenizer=has_tokenizer)
        sampling, block = request.sampling, self.limits.block_size
        if why := sampling_refusal(sampling.temperature, sampling.top_p, sampling.min_p):
            raise RequestRefused(f"trajectory {request.trajectory} cannot be sampled so: {why}")
        longest = min(len(request.prompt) + sampling.max_tokens, self.context)
        check_room(request, blocks_for(longest, block), self.backend.num_blocks, block)


def _seed(request: Request, position: int) -> int:
    """vLLM's noise begins anew with each request: one seed for each place that it begins at.

    On a CPU vLLM cannot use it: see `Backend`.
    """
    key = f"{request.seed}/{request.trajectory}/{position}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
