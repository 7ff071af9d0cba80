"""An engine without a model: the whole contract in a few lines, for tests of what drives one.

Its model is a chain of hashes. Every token that it reads leaves eight bytes, made of the bytes
before and the token: that is its KV. The last eight give the logits of the next token. So the
tokens are a pure function of weights, prompt and noise, the distribution they are drawn from is
known exactly, and a KV that was lost, mixed up or made by other weights shows in the tokens.

First come, first served: the oldest starts first, is parked last and resumed first. Parking by an
export is not reported, since the caller knows. The KV of a held trajectory stays in the
budget until one that runs needs the room.

It has every ability but LoRA, and can be made without each, to stand for an engine without it.
"""

import hashlib
import json
import math
import struct
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import accumulate
from pathlib import Path

from dora_rl.core.protocol.types import TrajectoryId, Version
from dora_rl.engines import base, wire
from dora_rl.engines.base import FinishReason, Output, ParkReason, Request, Sampling
from dora_rl.engines.errors import (
    ImportRefused,
    KvRefused,
    RequestRefused,
    UnknownTrajectory,
    Unsupported,
    VersionRefused,
)
from dora_rl.engines.noise import uniform
from dora_rl.engines.rates import Rates

_ENTRY = 8  # bytes of KV a token
_SPREAD = 6.0  # between the least and the largest logit: uneven, and no token out of reach


def read_tokens(digest: str, tokens: Sequence[int], kv: bytes = b"") -> bytes:
    """The KV of `tokens` behind `kv`, under the weights of this digest."""
    made = bytearray()
    entry = kv[-_ENTRY:] or hashlib.blake2b(digest.encode(), digest_size=_ENTRY).digest()
    for token in tokens:
        entry = hashlib.blake2b(entry + token.to_bytes(8, "little"), digest_size=_ENTRY).digest()
        made += entry
    return bytes(made)


def logits_after(kv: bytes, vocab_size: int) -> list[float]:
    """The logits of the token that comes next."""
    block = hashlib.shake_128(kv[-_ENTRY:]).digest(2 * vocab_size)
    return [number * (_SPREAD / 0xFFFF) for number in struct.unpack(f"<{vocab_size}H", block)]


def distribution(logits: Sequence[float], sampling: Sampling) -> dict[int, float]:
    """The tokens that can be drawn, the most probable first, and their probabilities."""
    kept = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if sampling.temperature == 0:
        return {kept[0]: 1.0}
    top = logits[kept[0]]
    weights = {token: math.exp((logits[token] - top) / sampling.temperature) for token in kept}
    kept = kept[: sampling.top_k or None]
    sums = list(accumulate(weights[token] for token in kept))
    kept = kept[: bisect_left(sums, sampling.top_p * sums[-1]) + 1]
    kept = [token for token in kept if weights[token] >= sampling.min_p]
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept if weights[token]}


def draw(chances: dict[int, float], noise: float) -> int:
    """The token at which the summed probabilities pass `noise`."""
    sums = list(accumulate(chances.values()))
    return list(chances)[min(bisect_right(sums, noise), len(sums) - 1)]


class _State(Enum):
    WAITING = auto()  # for a slot; its KV, if it has any, in host memory
    RUNNING = auto()
    NO_ROOM = auto()  # parked by the engine
    ASKED = auto()  # parked by request
    HELD = auto()  # between turns
    HELD_ASKED = auto()  # between turns, and parked by request


_PARKED = {_State.HELD: _State.HELD_ASKED, _State.HELD_ASKED: _State.HELD_ASKED}  # else: ASKED
_RESUMED = {_State.ASKED: _State.WAITING, _State.HELD_ASKED: _State.HELD}
_EXTENDED = {_State.HELD: _State.WAITING, _State.HELD_ASKED: _State.ASKED}


@dataclass(slots=True)
class _Live:
    request: Request
    kv: bytes = b""
    state: _State = _State.WAITING
    on_host: bool = True  # its KV, if it has any
    tokens: list[int] = field(init=False)  # the prompt and all that came after it
    turn_start: int = field(init=False)  # index into `generated`

    def __post_init__(self) -> None:
        if self.request.held:
            self.state = _State.HELD
        self.tokens = [*self.request.prompt, *self.request.prefix]
        self.turn_start = self.request.turn_start

    @property
    def version(self) -> Version:
        return self.request.version

    @property
    def cached(self) -> int:
        return len(self.kv) // _ENTRY

    @property
    def generated(self) -> tuple[int, ...]:
        return tuple(self.tokens[len(self.request.prompt) :])


@dataclass(kw_only=True, eq=False)
class FakeEngine(base.Engine):
    """Keeps the contract of `Engine` without weights; a directory gives it a digest alone."""

    slots: int = 8
    version_slots: int = 2
    context: int = 256
    kv_budget_tokens: int = 2048
    prefill_chunk: int = 64
    vocab_size: int = 32
    eos: int = 0
    kv_export: bool = True
    parking: bool = True
    exact_noise: bool = True
    kernels: str = "plain"  # engines of others cannot read its KV
    decode: Callable[[Sequence[int]], str] | None = None
    clock: Callable[[], float] = time.monotonic
    _digests: dict[Version, str] = field(init=False, default_factory=dict)
    _live: dict[TrajectoryId, _Live] = field(init=False, default_factory=dict)  # by arrival
    _failing: set[TrajectoryId] = field(init=False, default_factory=set)
    _exports_fail: set[TrajectoryId] = field(init=False, default_factory=set)
    _loads_fail: int = field(init=False, default=0)
    _draws: int = field(init=False, default=0)
    _rates: Rates = field(init=False)

    def __post_init__(self) -> None:
        self._rates = Rates(self.clock)

    @property
    def capabilities(self) -> base.Capabilities:
        return base.Capabilities(
            version_slots=self.version_slots,
            kv_export=self.kv_export,
            parking=self.parking,
            exact_noise=self.exact_noise,
        )

    def install(self, version: Version, directory: Path, evict: Version | None = None) -> str:
        digest = _digest_of(directory)
        here = self._digests.get(version)
        if here not in (None, digest):
            raise VersionRefused(
                f"version {version} is here with the digest `{here}`, and "
                f"`{directory}` has `{digest}`. Evict it first."
            )
        if here is None and len(self._digests) >= self.version_slots:
            if evict not in self._digests:
                raise VersionRefused(
                    f"no slot for version {version}: all {self.version_slots} are taken, by "
                    f"{', '.join(map(str, self._digests))}. Evict one first."
                )
            self.evict(evict)
        if self._loads_fail:
            self._loads_fail -= 1
            raise VersionRefused(f"version {version} was asked not to load by a test.")
        self._digests[version] = digest
        return digest

    def evict(self, version: Version) -> None:
        for trajectory, live in self._live.items():
            if live.version == version:
                raise VersionRefused(f"version {version} still has trajectory `{trajectory}` here.")
        self._digests.pop(version, None)
        self._rates.forget(version)

    def submit(self, request: Request) -> None:
        self._digest(request.version)
        self._check(request)
        self._live[request.trajectory] = _Live(request)

    def step(self) -> list[Output]:
        outputs: list[Output] = [*self._start(), *self._make_room()]
        self._clear_away()
        for live in self._in(_State.RUNNING):
            outputs += self._advance(live)
        return outputs

    def extend(self, trajectory: TrajectoryId, tokens: tuple[int, ...]) -> None:
        live = self._get(trajectory)
        if live.state not in _EXTENDED:
            raise RequestRefused(
                f"trajectory `{trajectory}` is not held: it is {live.state.name.lower()}. "
                "Submit it with `hold`, and extend it when its turn has ended."
            )
        base.check_extension(live.request, len(live.generated), tokens, self.context)
        self._check_vocabulary(trajectory, tokens)
        live.tokens += tokens
        live.turn_start = len(live.generated)
        live.state = _EXTENDED[live.state]

    def cancel(self, trajectory: TrajectoryId) -> bool:
        self._failing.discard(trajectory)
        return self._live.pop(trajectory, None) is not None

    def resume(self, trajectory: TrajectoryId) -> None:
        self._require_kv_export()
        live = self._get(trajectory)
        live.state = _RESUMED.get(live.state, live.state)

    def export_trajectory(self, trajectory: TrajectoryId) -> bytes:
        self._require_kv_export()
        live = self._get(trajectory)
        if trajectory in self._exports_fail:
            raise RequestRefused(f"trajectory {trajectory} was asked not to export by a test.")
        live.state = _PARKED.get(live.state, _State.ASKED)
        live.on_host = True
        return wire.encode(
            wire.Export(
                model=self._kind,
                trajectory=trajectory,
                version=live.version,
                digest=self._digests[live.version],
                prompt=live.request.prompt,
                generated=live.generated,
                seed=live.request.seed,
                sampling=live.request.sampling,
                hold=live.request.hold,
                held=live.state is _State.HELD_ASKED,
                turn_start=live.turn_start,
                kv_tokens=live.cached,
                kv_dtype="uint8",
                kv_shape=(live.cached, _ENTRY),
                kv=(live.kv,),
            )
        )

    def import_trajectory(self, data: bytes) -> TrajectoryId:
        self._require_kv_export()
        export = wire.decode(data)
        name = f"trajectory {export.trajectory}"
        try:
            digest = self._digest(export.version)
            self._check(export.request())
        except (RequestRefused, VersionRefused) as error:
            raise ImportRefused(f"{name} cannot continue here: {error}") from None
        if export.digest != digest:
            raise ImportRefused(
                f"{name} is of `{export.digest}`, and version {export.version} here is `{digest}`. "
                "Move it to an engine with the same."
            )
        if export.model != self._kind:
            raise KvRefused(
                f"the KV of {name} is of a `{export.model}`, and this is a `{self._kind}`. Move it "
                "to an engine of the same kind."
            )
        kv = b"".join(export.kv)
        tokens = (*export.prompt, *export.generated)[: len(kv) // _ENTRY]
        if (export.kv_shape, kv) != ((len(tokens), _ENTRY), read_tokens(digest, tokens)):
            raise ImportRefused(f"the KV of {name} is not that of its tokens. Export it again.")
        self._live[export.trajectory] = _Live(export.request(), kv)
        return export.trajectory

    def load(self) -> base.Load:
        versions = {}
        for version, digest in self._digests.items():
            states = [live.state for live in self._live.values() if live.version == version]
            versions[version] = base.VersionLoad(
                digest=digest,
                running=states.count(_State.RUNNING),
                waiting=states.count(_State.WAITING),
                parked=states.count(_State.NO_ROOM) + states.count(_State.ASKED),
                tokens_per_s=self._rates.tokens_per_s(version),
                held=states.count(_State.HELD) + states.count(_State.HELD_ASKED),
            )
        used = sum(live.cached for live in self._live.values() if not live.on_host)
        return base.Load(self.slots, self.version_slots, used, self.kv_budget_tokens, versions)

    @property
    def idle(self) -> bool:
        return not self._in(_State.WAITING, _State.RUNNING, _State.NO_ROOM)

    def close(self) -> None:
        self._live.clear()
        self._digests.clear()

    def fail_next(self, trajectory: TrajectoryId) -> None:
        """For tests: the trajectory fails in the next step that it runs in."""
        self._get(trajectory)
        self._failing.add(trajectory)

    def fail_exports(self, trajectory: TrajectoryId) -> None:
        """For tests: the trajectory cannot be exported."""
        self._exports_fail.add(trajectory)

    def fail_next_load(self) -> None:
        """For tests: the next install fails when it loads, after it has evicted."""
        self._loads_fail += 1

    @property
    def _kind(self) -> str:
        return f"fake of {self.vocab_size} tokens, {self.kernels}"

    def _require_kv_export(self) -> None:
        if not self.kv_export:
            raise Unsupported(
                "this engine cannot hand KV over: `capabilities.kv_export` is false. Submit the "
                "trajectory with what it has generated as its prefix."
            )

    def _get(self, trajectory: TrajectoryId) -> _Live:
        if trajectory not in self._live:
            raise UnknownTrajectory(f"no trajectory `{trajectory}` is here. It may have ended.")
        return self._live[trajectory]

    def _digest(self, version: Version) -> str:
        if version not in self._digests:
            raise VersionRefused(f"version `{version}` is not installed here. Install it first.")
        return self._digests[version]

    def _in(self, *states: _State) -> list[_Live]:
        return [live for live in self._live.values() if live.state in states]

    def _check(self, request: Request) -> None:
        name = f"trajectory {request.trajectory}"
        tokens = (*request.prompt, *request.prefix)
        # The last token is never read, so that its KV is never held.
        need = min(len(request.prompt) + request.sampling.max_tokens, self.context) - 1
        if request.trajectory in self._live:
            raise RequestRefused(f"{name} is already here. Cancel it first, or take another id.")
        self._check_vocabulary(request.trajectory, (*tokens, *request.sampling.stop_token_ids))
        if len(tokens) - request.held >= self.context:
            raise RequestRefused(
                f"{name} has {len(tokens)} tokens, and the context is {self.context}. Shorten it."
            )
        if need > self.kv_budget_tokens:
            raise RequestRefused(
                f"{name} may need the KV of {need} tokens, and the budget is "
                f"{self.kv_budget_tokens}. Lower max_tokens, or raise the budget."
            )
        if request.sampling.stop and self.decode is None:
            raise RequestRefused(
                f"stop needs a tokenizer: `{request.sampling.stop}`. Give `decode`."
            )

    def _check_vocabulary(self, trajectory: TrajectoryId, tokens: Sequence[int]) -> None:
        strange = [token for token in tokens if not 0 <= token < self.vocab_size]
        if strange:
            raise RequestRefused(
                f"trajectory {trajectory} has a token outside the vocabulary: `{strange[0]}`."
            )

    def _after_step(self, live: _Live) -> int:
        """The KV that it holds once it has taken a step."""
        return min(live.cached + self.prefill_chunk, len(live.tokens))

    def _start(self) -> list[base.Resumed]:
        """Slots for those that wait, oldest first; none overtakes one that does not fit."""
        running = self._in(_State.RUNNING)
        room = self.kv_budget_tokens - sum(map(self._after_step, running))
        resumed = []
        for live in self._in(_State.WAITING, _State.NO_ROOM)[: self.slots - len(running)]:
            room -= self._after_step(live)
            if room < 0:
                break
            if live.state is _State.NO_ROOM:
                resumed.append(base.Resumed(live.request.trajectory))
            live.state, live.on_host = _State.RUNNING, False
        return resumed

    def _make_room(self) -> list[base.Parked]:
        """Park the youngest until the rest can take a step; the oldest always can."""
        running = self._in(_State.RUNNING)
        parked = []
        while sum(map(self._after_step, running)) > self.kv_budget_tokens:
            youngest = running.pop()
            if not self.parking:  # it waits, and is read anew
                youngest.state, youngest.kv = _State.WAITING, b""
                continue
            youngest.state, youngest.on_host = _State.NO_ROOM, True
            parked.append(base.Parked(youngest.request.trajectory, ParkReason.KV_BUDGET))
        return parked

    def _clear_away(self) -> None:
        """KV of those without a slot goes to host memory while the running need its room."""
        room = self.kv_budget_tokens - sum(map(self._after_step, self._in(_State.RUNNING)))
        others = [live for live in self._live.values() if live.state is not _State.RUNNING]
        resting = [live for live in others if not live.on_host]
        while sum(live.cached for live in resting) > room:
            resting.pop().on_host = True

    def _advance(self, live: _Live) -> list[Output]:
        request, digest = live.request, self._digests[live.version]
        trajectory, sampling = request.trajectory, request.sampling
        if trajectory in self._failing:
            self.cancel(trajectory)
            return [base.Failed(trajectory, "asked to fail by a test")]
        new = live.tokens[live.cached : self._after_step(live)]
        live.kv += read_tokens(digest, new, live.kv)
        if live.cached < len(live.tokens):
            return []
        logits = logits_after(live.kv, self.vocab_size)
        chances = distribution(logits, sampling)
        self._draws += 1
        place = len(live.generated) if self.exact_noise else self._draws
        token = draw(chances, uniform(request.seed, trajectory, place))
        live.tokens.append(token)
        self._rates.add(live.version, 1)
        finish = self._finish(live)
        if finish and request.hold:
            live.state = _State.HELD
        elif finish:
            self.cancel(trajectory)
        logprobs = (math.log(chances[token]),)
        raw = (logits[token] - math.log(sum(map(math.exp, logits))),)
        named = (trajectory, live.version, digest, (token,), logprobs)
        return [base.Sampled(*named, raw if sampling.raw_logprobs else None, finish)]

    def _finish(self, live: _Live) -> FinishReason | None:
        sampling, token = live.request.sampling, live.tokens[-1]
        if token in sampling.stop_token_ids or (token == self.eos and not sampling.ignore_eos):
            return FinishReason.STOP_TOKEN
        if sampling.stop and self.decode:
            text = self.decode(live.generated[live.turn_start :])
            if any(stop in text for stop in sampling.stop):
                return FinishReason.STOP_STRING
        if len(live.generated) >= sampling.max_tokens:
            return FinishReason.MAX_TOKENS
        return FinishReason.CONTEXT if len(live.tokens) >= self.context else None


def _digest_of(directory: Path) -> str:
    path = directory / "manifest.json"
    try:
        digest = json.loads(path.read_text(encoding="utf-8"))["digest"]
        if isinstance(digest, str) and digest:
            return digest
        raise ValueError(f"`{digest}`")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise VersionRefused(f"`{path}` names no digest: {error}. Give a stored version.") from None
