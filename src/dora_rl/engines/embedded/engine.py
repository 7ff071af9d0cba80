"""The embedded engine: the contract, kept with a model in this process's memory.

Everything that the outside may call is here, with its refusals; who runs is decided by the
scheduler, and the arithmetic is elsewhere.
"""

from collections.abc import Sequence as Series
from contextlib import suppress
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
    VersionLoad,
    check_extension,
)
from dora_rl.engines.embedded import moving
from dora_rl.engines.embedded.drafting import TextDrafter
from dora_rl.engines.embedded.forwarding import Chunk, Feed, Forwarder, TorchForwarder
from dora_rl.engines.embedded.kv import KvPool
from dora_rl.engines.embedded.native_forwarding import NativeForwarder
from dora_rl.engines.embedded.sampler import Draw, SamplingPlans, sample
from dora_rl.engines.embedded.scheduler import Scheduler
from dora_rl.engines.embedded.sequences import Prompt, Sequence, Stage
from dora_rl.engines.embedded.settings import EngineSettings
from dora_rl.engines.embedded.speculator import Speculator, measured_costs
from dora_rl.engines.embedded.versions import AdapterVersions, FullVersions, Versions
from dora_rl.engines.errors import (
    RequestRefused,
    UnknownTrajectory,
    VersionRefused,
)
from dora_rl.engines.kv_room import blocks_needed
from dora_rl.engines.noise import uniform
from dora_rl.engines.rates import Rates
from dora_rl.engines.requests import check_request, check_room, check_vocabulary, finish_reason
from dora_rl.engines.version_slots import VersionSlots
from dora_rl.models import cpu
from dora_rl.models.config import ModelConfig, read_config
from dora_rl.models.tokenizer import StopStrings, Tokenizer, load_tokenizer
from dora_rl.weights.loading import open_version

_EXACT_CHUNK = 64  # prompt tokens of an exact pass: each row reads copies of its blocks


class EmbeddedEngine:
    """One rollout instance in this process; see `dora_rl.engines.base.Engine`."""

    def __init__(
        self,
        config: ModelConfig,
        settings: EngineSettings | None = None,
        tokenizer: Tokenizer | None = None,
        base: Path | None = None,
    ) -> None:
        """With `base`, a model directory, versions are LoRA adapters of the weights there."""
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
        self._versions: Versions = FullVersions(config, self.settings)
        if base is not None:
            with torch.inference_mode():
                self._versions = AdapterVersions(base, config, self.settings)
        self._by_torch = TorchForwarder(config, self._versions, self._pool, exact=exact)
        self._native: NativeForwarder | None = None
        self._version_slots = VersionSlots(self.settings.version_slots)
        self._stops: dict[TrajectoryId, StopStrings] = {}
        self._plans = SamplingPlans()
        drafter = TextDrafter(self.settings.speculation)
        self._speculator = Speculator(self._scheduler, config.context, drafter)
        self._measured = False  # what its drafts cost
        self._rates = Rates()

    @classmethod
    def for_model(
        cls, directory: str | Path, settings: EngineSettings | None = None, *, lora: bool = False
    ) -> "EmbeddedEngine":
        """An engine for the versions of the model in a Hugging Face directory, or its adapters."""
        base = Path(directory) if lora else None
        return cls(read_config(directory), settings, load_tokenizer(directory), base)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            version_slots=self.settings.version_slots,
            kv_export=True,
            parking=True,
            exact_noise=True,
            lora=self._versions.lora,
        )

    # Versions

    def install(self, version: Version, directory: Path, evict: Version | None = None) -> str:
        weights = open_version(directory)
        if self._version_slots.has(version, weights.digest, directory):
            return weights.digest
        gone = self._version_slots.to_evict(version, evict)
        self._versions.check(directory, weights)
        try:
            if gone is not None:
                self.evict(gone)
            with torch.inference_mode():
                self._versions.load(version, weights)
        except (RuntimeError, MemoryError) as error:  # torch's own, of memory above all
            raise VersionRefused(
                f"version {version} could not be loaded from `{directory}`: "
                f"{type(error).__name__}: {error}. Here are versions "
                f"{sorted(self._version_slots.digests)}. Free memory, or lower "
                "rollout.version_slots or rollout.kv_budget_tokens."
            ) from error
        self._version_slots.digests[version] = weights.digest
        self._measure(version)
        return weights.digest

    def evict(self, version: Version) -> None:
        here = [s.id for s in self._scheduler.sequences.values() if s.version == version]
        self._version_slots.check_unused(version, here)
        self._version_slots.digests.pop(version, None)
        with torch.inference_mode():
            self._versions.drop(version)
        self._rates.forget(version)

    # Trajectories

    def submit(self, request: Request) -> None:
        self._version_slots.digest(request.version)
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
        digest = self._version_slots.digest(sequence.version)
        kv = self._scheduler.kv_of(sequence)
        return wire.encode(moving.export(self.config, sequence, digest, kv))

    def import_trajectory(self, data: bytes) -> TrajectoryId:
        export = wire.decode(data)
        request = export.request()
        self._version_slots.check_import(export)
        kv = moving.kv_of(self.config, export, self._pool.keys_LNKDT.dtype)
        self.submit(request)
        self._scheduler.bring(self._sequence(request.trajectory), kv)
        return request.trajectory

    # Work

    def step(self) -> list[Output]:
        with torch.inference_mode():
            outputs = self._scheduler.schedule()
            if chunks := self._next_chunks():
                self._forwarder().read(chunks)
            ready = [s for s in self._scheduler.running.values() if s.ready]
            if ready:
                ready.sort(key=lambda s: s.version)
                outputs += self._decode(ready)
        return outputs

    @property
    def context(self) -> int:
        return self.config.context

    @property
    def idle(self) -> bool:
        return self._scheduler.idle

    def load(self) -> Load:
        versions = {}
        for version, digest in self._version_slots.digests.items():
            stages = [s.stage for s in self._scheduler.sequences.values() if s.version == version]
            versions[version] = VersionLoad(
                digest=digest,
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
            proposed_tokens=self._speculator.proposed,
            accepted_tokens=self._speculator.accepted,
        )

    def close(self) -> None:
        for sequence in list(self._scheduler.sequences.values()):
            self._forget(sequence)
        for version in list(self._version_slots.digests):
            self.evict(version)

    # Inside

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

    def _forwarder(self) -> Forwarder:
        """By the form of the weights that are here."""
        if not self._versions.native:
            return self._by_torch
        if self._native is None:
            self._native = NativeForwarder(self.config, self._versions, self._pool)
        return self._native

    def _measure(self, version: Version) -> None:
        """What rows cost, by the first version that comes; the deterministic mode takes no time."""
        if self._measured or not self._speculates or self.settings.deterministic:
            return
        self._measured = True
        # The version is live already: what fails here for want of memory is only not measured.
        with torch.inference_mode(), suppress(RuntimeError, MemoryError):
            found = measured_costs(self._draw, self._scheduler, version, self.context)
            self._speculator.costs = found or self._speculator.costs

    def _decode(self, sequences: list[Sequence]) -> list[Output]:
        feeds = (
            self._speculator.feeds(sequences)
            if self._speculates
            else [Feed(sequence) for sequence in sequences]
        )
        draw = self._draw(feeds)
        if not all(draw.finite) and not self._versions.native:
            # One row's NaN may have reached the others: again, with every row by itself.
            for feed in feeds:
                self._forwarder().withdraw(feed.line, feed.end)
            feeds = [self._speculator.withdraw(feed) for feed in feeds]
            draw = self._draw(feeds, exact=True)
        outputs, row = list[Output](), 0
        for feed in feeds:
            outputs.append(self._advance(feed, draw, row))
            row += feed.count
        return outputs

    def _draw(self, feeds: list[Feed], *, exact: bool = False) -> Draw:
        """A token after each token that is fed, whether what is fed before it is right or not."""
        plan = self._plans.plan([f.line.request.sampling for f in feeds for _ in range(f.count)])
        noise = [
            uniform(feed.line.request.seed, feed.line.id, len(feed.line.own) - 1 + index)
            for feed in feeds
            for index in range(feed.count)
        ]
        return sample(self._forwarder().next_logits(feeds, exact=exact), plan, noise)

    def _advance(self, feed: Feed, draw: Draw, row: int) -> Output:
        """Take the token drawn at `row`, and further ones while those before were as proposed."""
        sequence = feed.line
        if not draw.finite[row]:
            self._forget(sequence)
            return Failed(sequence.id, "the model's logits are not finite")
        taken, finish = self._accept(feed, draw, row)
        rows = slice(row, row + taken)
        output = Sampled(
            trajectory=sequence.id,
            version=sequence.version,
            digest=self._version_slots.digest(sequence.version),
            tokens=tuple(draw.tokens[rows]),
            logprobs=tuple(draw.logprobs[rows]),
            raw_logprobs=_all_there(draw.raw_logprobs[rows]),
            finish=finish,
        )
        self._rates.add(sequence.version, taken)
        if finish is not None and sequence.request.hold:
            self._scheduler.hold(sequence)
        elif finish is not None:
            self._forget(sequence)
        return output

    def _accept(self, feed: Feed, draw: Draw, row: int) -> tuple[int, FinishReason | None]:
        """How many of the tokens drawn from `row` on the sequence now has, and why it ended."""
        sequence, end = feed.line, feed.end
        taken, finish = 0, None
        for proposed in (*feed.draft.tokens, None):
            if not draw.finite[row + taken]:
                break  # it fails in the step that feeds this token alone
            token = draw.tokens[row + taken]
            taken += 1
            sequence.own.append(token)
            finish = self._finish(sequence)
            if token != proposed or finish is not None:
                break
        sequence.kv.tokens += taken
        if taken < feed.count:
            self._forwarder().withdraw(sequence, end)
        self._speculator.verified(feed, taken - 1)
        return taken, finish

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

    def _forget(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        self._stops.pop(sequence.id, None)
        if self._speculates:
            self._speculator.ended(sequence)

    @property
    def _speculates(self) -> bool:
        return self.settings.speculates(native=self._versions.native)

    def _sequence(self, trajectory: TrajectoryId) -> Sequence:
        try:
            return self._scheduler.sequences[trajectory]
        except KeyError:
            raise UnknownTrajectory(
                f"no trajectory `{trajectory}` is here. It may have finished or been cancelled."
            ) from None


def _all_there(logprobs: Series[float | None]) -> tuple[float, ...] | None:
    """All of them or, where they were not asked for, none."""
    there = tuple(value for value in logprobs if value is not None)
    return there if len(there) == len(logprobs) else None
