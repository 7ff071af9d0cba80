"""The embedded engine: the contract, kept with a model in this process's memory.

Everything that the outside may call is here, with its refusals; who runs is decided by the
scheduler, and the arithmetic is elsewhere.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from dora_rl.core.protocol.types import TrajectoryId, Version
from dora_rl.engines import wire
from dora_rl.engines.base import (
    Capabilities,
    Failed,
    FinishReason,
    Load,
    Output,
    ParkReason,
    Request,
    Sampled,
    Sampling,
    VersionLoad,
    check_extension,
)
from dora_rl.engines.embedded import moving
from dora_rl.engines.embedded.exactness import check_exact
from dora_rl.engines.embedded.forwarding import Chunk, Forwarder
from dora_rl.engines.embedded.kv import KvPool
from dora_rl.engines.embedded.sampler import Draw, SamplingPlan, sample
from dora_rl.engines.embedded.scheduler import Scheduler
from dora_rl.engines.embedded.sequences import Prompt, Sequence, Stage
from dora_rl.engines.embedded.settings import EngineSettings
from dora_rl.engines.errors import (
    ImportRefused,
    RequestRefused,
    UnknownTrajectory,
    VersionRefused,
)
from dora_rl.engines.fit import check_tensors
from dora_rl.engines.kv_room import blocks_needed
from dora_rl.engines.noise import uniform
from dora_rl.engines.rates import Rates
from dora_rl.engines.requests import check_request, check_room, check_vocabulary, finish_reason
from dora_rl.models import cpu
from dora_rl.models.config import ModelConfig, read_config
from dora_rl.models.decoder import Decoder, build
from dora_rl.models.linear import Layout, onednn_order
from dora_rl.models.stacking import stacked_steps
from dora_rl.models.tokenizer import StopStrings, Tokenizer, load_tokenizer
from dora_rl.weights.loading import LoadedWeights, open_version

# A version up to this size is stepped together with the others: see docs/engine.md.
_STACKED_BYTES = 32 << 20
_EXACT_CHUNK = 64  # prompt tokens of an exact pass: each row reads copies of its blocks


@dataclass(frozen=True, slots=True)
class _Live:
    """A version in memory."""

    decoder: Decoder
    digest: str


class EmbeddedEngine:
    """One rollout instance in this process; see `dora_rl.engines.base.Engine`."""

    def __init__(
        self,
        config: ModelConfig,
        settings: EngineSettings | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        cpu.guard()
        self.config = config
        self.settings = settings or EngineSettings()
        self._tokenizer = tokenizer
        exact = self.settings.deterministic
        chunk = self.settings.prefill_chunk
        self._chunk = min(chunk, _EXACT_CHUNK) if exact else chunk
        self._pool = KvPool(
            config,
            self.settings.num_blocks(config),
            self.settings.block_tokens,
            getattr(torch, self.settings.kv_dtype),
        )
        self._scheduler = Scheduler(self._pool, self.settings.slots)
        self._forwarder = Forwarder(config, self._pool, exact=exact)
        self._live: dict[Version, _Live] = {}
        self._tried = False  # whether products are exact here
        self._small = False  # so that a step is bound by the number of operations
        self._stops: dict[TrajectoryId, StopStrings] = {}
        self._plan: tuple[list[Sampling], SamplingPlan] | None = None
        self._rates = Rates()

    @classmethod
    def for_model(
        cls, directory: str | Path, settings: EngineSettings | None = None
    ) -> "EmbeddedEngine":
        """An engine for the versions of the model in a Hugging Face directory."""
        return cls(read_config(directory), settings, load_tokenizer(directory))

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            version_slots=self.settings.version_slots,
            kv_export=True,
            parking=True,
            exact_noise=True,
        )

    # Versions

    def install(self, version: Version, directory: Path, evict: Version | None = None) -> str:
        weights = open_version(directory)
        if version in self._live:
            digest = self._live[version].digest
            if digest != weights.digest:
                raise VersionRefused(
                    f"version {version} is here with the digest `{digest}`: `{directory}` has "
                    f"`{weights.digest}`. A version never changes; give the weights a new one."
                )
            return digest
        full = len(self._live) >= self.settings.version_slots
        if full and evict not in self._live:
            raise VersionRefused(
                f"all {self.settings.version_slots} version slots are taken, by versions "
                f"{sorted(self._live)}. Evict one to install version {version}."
            )
        check_tensors(self.config, directory, weights.tensors)
        try:
            if full and evict is not None:
                self.evict(evict)
            self._load(version, weights)
        except (RuntimeError, MemoryError) as error:  # torch's own, of memory above all
            self._live.pop(version, None)
            self._forwarder.stack({})  # it may hold what is gone; the others are stepped apart
            raise VersionRefused(
                f"version {version} could not be loaded from `{directory}`: "
                f"{type(error).__name__}: {error}. Here are versions {sorted(self._live)}. Free "
                "memory, or lower rollout.version_slots or rollout.kv_budget_tokens."
            ) from error
        return weights.digest

    def _load(self, version: Version, weights: LoadedWeights) -> None:
        """Build a version from its weights; from then on it is live."""
        nbytes = sum(tensor.nbytes for tensor in weights.tensors.values())
        layout = self.settings.layout_for(nbytes)
        in_bf16 = any(tensor.dtype == torch.bfloat16 for tensor in weights.tensors.values())
        narrow = self._narrow_rows() if in_bf16 and layout is Layout.PACKED else 0
        with torch.inference_mode():
            decoder = build(self.config, weights.tensors, layout, narrow_rows=narrow)
            if self.settings.deterministic and not self._tried:  # the others have its shapes
                check_exact(decoder, self.settings.block_tokens)
                self._tried = True
        self._live[version] = _Live(decoder, weights.digest)
        self._small = layout is Layout.PACKED and nbytes <= _STACKED_BYTES
        self._restack()

    def evict(self, version: Version) -> None:
        if here := [s.id for s in self._scheduler.sequences.values() if s.version == version]:
            raise VersionRefused(
                f"version {version} has {len(here)} trajectories here, `{here[0]}` among them. "
                "Let them end, or move or cancel them first."
            )
        if self._live.pop(version, None) is not None:
            self._restack()
        self._rates.forget(version)

    # Trajectories

    def submit(self, request: Request) -> None:
        self._live_version(request.version)
        if request.trajectory in self._scheduler.sequences:
            raise RequestRefused(
                f"trajectory {request.trajectory} is here already. Cancel it first, or use "
                "another id."
            )
        self._check(request)
        if request.sampling.stop and self._tokenizer is not None:
            self._stops[request.trajectory] = StopStrings(request.sampling.stop, self._tokenizer)
        sequence = self._scheduler.add(request)
        if request.held:
            self._scheduler.hold(sequence)

    def _check(self, request: Request) -> None:
        """Refuse what this model and this memory can never serve."""
        has_tokenizer = self._tokenizer is not None
        check_request(request, self.config, self.context, has_tokenizer=has_tokenizer)
        block, longest = self._pool.block_tokens, request.sampling.max_tokens
        needed = blocks_needed(len(request.prompt), longest, self.context, block)
        check_room(request, needed, self._pool.num_blocks, block)

    def extend(self, trajectory: TrajectoryId, tokens: tuple[int, ...]) -> None:
        sequence = self._sequence(trajectory)
        if sequence.stage is not Stage.HELD:
            raise RequestRefused(
                f"trajectory `{trajectory}` is not held: it is {sequence.stage}. Submit it with "
                "`hold`, and extend it when its turn has ended."
            )
        response = len(sequence.own) - 1
        check_extension(sequence.request, response, tokens, self.context)
        check_vocabulary(trajectory, tokens, self.config)
        self._scheduler.extend(sequence, tokens)

    def cancel(self, trajectory: TrajectoryId) -> bool:
        sequence = self._scheduler.sequences.get(trajectory)
        if sequence is None:
            return False
        self._forget(sequence)
        return True

    def resume(self, trajectory: TrajectoryId) -> None:
        self._scheduler.resume(self._sequence(trajectory))

    def export_trajectory(self, trajectory: TrajectoryId) -> bytes:
        sequence = self._sequence(trajectory)
        self._scheduler.park(sequence, ParkReason.ASKED)
        digest = self._live[sequence.version].digest
        kv = self._scheduler.kv_of(sequence)
        return wire.encode(moving.export(self.config, sequence, digest, kv))

    def import_trajectory(self, data: bytes) -> TrajectoryId:
        export = wire.decode(data)
        request = export.request()
        live = self._live.get(request.version)
        if live is None or export.digest != live.digest:
            here = f"has the digest `{live.digest}` here" if live else "is not installed here"
            raise ImportRefused(
                f"trajectory {export.trajectory} was sampled from version {export.version} with "
                f"the digest `{export.digest}`, which {here}. Move it to an instance of the "
                "same weights."
            )
        kv = moving.kv_of(self.config, export, self._pool.keys_LNKDT.dtype)
        self.submit(request)
        self._scheduler.bring(self._sequence(request.trajectory), kv)
        return request.trajectory

    # Work

    def step(self) -> list[Output]:
        with torch.inference_mode():
            outputs = self._scheduler.schedule()
            decoders = self._decoders()
            if chunks := self._next_chunks():
                self._forwarder.read(decoders, chunks)
            ready = [s for s in self._scheduler.running.values() if s.ready]
            if ready:
                ready.sort(key=lambda s: s.version)
                outputs += self._advance(ready, self._draw(decoders, ready))
        return outputs

    @property
    def context(self) -> int:
        return self.config.context

    @property
    def idle(self) -> bool:
        return self._scheduler.idle

    def load(self) -> Load:
        versions = {}
        for version, live in self._live.items():
            stages = [s.stage for s in self._scheduler.sequences.values() if s.version == version]
            versions[version] = VersionLoad(
                digest=live.digest,
                running=stages.count(Stage.RUNNING),
                waiting=stages.count(Stage.QUEUED),
                parked=stages.count(Stage.PARKED),
                tokens_per_s=self._rates.tokens_per_s(version),
                held=stages.count(Stage.HELD),
            )
        return Load(
            slots=self.settings.slots,
            version_slots=self.settings.version_slots,
            kv_used_tokens=self._pool.used_tokens,
            kv_budget_tokens=self._pool.num_blocks * self._pool.block_tokens,
            versions=versions,
        )

    def close(self) -> None:
        for sequence in list(self._scheduler.sequences.values()):
            self._forget(sequence)
        self._live.clear()
        self._restack()

    # Inside

    def _decoders(self) -> dict[Version, Decoder]:
        return {version: live.decoder for version, live in self._live.items()}

    def _restack(self) -> None:
        several = self._small and len(self._live) > 1 and stacked_steps().in_force
        with torch.inference_mode():
            self._forwarder.stack(self._decoders() if several else {})

    def _next_chunks(self) -> list[Chunk]:
        """What is to be read in this step, the oldest first, within the chunk size."""
        chunks: list[Chunk] = []
        left = self._chunk
        running = self._scheduler.running.values()
        # A prompt that several wait for is one line.
        lines: dict[Prompt | Sequence, None] = dict.fromkeys(
            s if s.prompt.whole else s.prompt for s in running
        )
        for line in lines:
            if count := min(line.unread, left):
                chunks.append(Chunk(line, count))
                left -= count
        return chunks

    def _draw(self, decoders: dict[Version, Decoder], sequences: list[Sequence]) -> Draw:
        plan = self._sampling_plan(sequences)
        noise = [uniform(s.request.seed, s.id, len(s.own) - 1) for s in sequences]
        draw = sample(self._forwarder.next_logits(decoders, sequences), plan, noise)
        if not all(draw.finite):
            # One row's NaN may have reached the others: again, with every row by itself.
            logits = self._forwarder.next_logits(decoders, sequences, exact=True)
            draw = sample(logits, plan, noise)
        return draw

    def _advance(self, sequences: Iterable[Sequence], draw: Draw) -> list[Output]:
        outputs: list[Output] = []
        for row, sequence in enumerate(sequences):
            if not draw.finite[row]:
                outputs.append(Failed(sequence.id, "the model's logits are not finite"))
                self._forget(sequence)
                continue
            sequence.kv.tokens += 1
            sequence.own.append(draw.tokens[row])
            finish = self._finish(sequence)
            raw = draw.raw_logprobs[row]
            outputs.append(
                Sampled(
                    trajectory=sequence.id,
                    version=sequence.version,
                    digest=self._live[sequence.version].digest,
                    tokens=(draw.tokens[row],),
                    logprobs=(draw.logprobs[row],),
                    raw_logprobs=None if raw is None else (raw,),
                    finish=finish,
                )
            )
            self._rates.add(sequence.version, 1)
            if finish is not None and sequence.request.hold:
                self._scheduler.hold(sequence)
            elif finish is not None:
                self._forget(sequence)
        return outputs

    def _finish(self, sequence: Sequence) -> FinishReason | None:
        stops = self._stops.get(sequence.id)
        return finish_reason(
            sequence.request,
            self.config,
            self.context,
            token=sequence.own[-1],
            response=len(sequence.own) - 1,
            stops=lambda: stops is not None and stops.completed(sequence.turn),
        )

    def _sampling_plan(self, sequences: list[Sequence]) -> SamplingPlan:
        wishes = [s.request.sampling for s in sequences]
        if self._plan is None or self._plan[0] != wishes:
            self._plan = wishes, SamplingPlan(wishes)
        return self._plan[1]

    def _forget(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        self._stops.pop(sequence.id, None)

    def _sequence(self, trajectory: TrajectoryId) -> Sequence:
        try:
            return self._scheduler.sequences[trajectory]
        except KeyError:
            raise UnknownTrajectory(
                f"no trajectory `{trajectory}` is here. It may have finished or been cancelled."
            ) from None

    def _live_version(self, version: Version) -> _Live:
        try:
            return self._live[version]
        except KeyError:
            raise VersionRefused(
                f"version {version} is not installed; here are {sorted(self._live)}. "
                "Install it first."
            ) from None

    def _narrow_rows(self) -> int:
        """Rows up to which weights in bf16 are multiplied as such."""
        return onednn_order(self.config.hidden_size, 2 * self.config.intermediate_size).value
