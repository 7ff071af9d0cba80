"""The contract of an engine: what every implementation takes, returns, refuses and keeps.

An engine holds a few versions of one model and the trajectories that run on them. It decides
nothing about versions, groups or staleness: the caller does. Nothing here needs a
library beyond the standard one; `tests/engines/contract.py` is the same contract as a suite.

What every engine promises:

- Every token is sampled from the version that its trajectory names, and says so: `Sampled`
  carries the digest of the weights that are in memory.
- The log-probability that comes with a token is that of the distribution it was drawn from.
- Nothing is lost: what does not fit waits. What was generated can be submitted again, as a prefix,
  here or on any other engine of the same version, and continues from there.
- An episode of several turns is one trajectory of one version. Between turns it is held: it has
  no slot.
- A refusal names the value and changes nothing; the other trajectories continue.

What some can besides is in `Capabilities`. Callers ask there, never for an engine's name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol, TypeAlias

from dora_rl.core.protocol.types import TrajectoryId, Version
from dora_rl.engines.errors import RequestRefused

_MAX_SEED = 2**64 - 1  # a seed, like an id, enters the noise as eight bytes
_MAX_COUNT = 2**31 - 1


class FinishReason(StrEnum):
    STOP_TOKEN = "stop_token"  # the model's end of text, or one of `stop_token_ids`
    STOP_STRING = "stop_string"
    MAX_TOKENS = "max_tokens"
    CONTEXT = "context"  # the model's context is full


class ParkReason(StrEnum):
    ASKED = "asked"  # by `export_trajectory`
    KV_BUDGET = "kv_budget"  # by the engine itself: the KV memory is full


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a next token is drawn; the filters apply in the order of these fields.

    The log-probability that comes with a token is that of the distribution it was drawn from:
    after temperature and filters. With `raw_logprobs` the unfiltered one, at temperature 1,
    comes too. Temperature 0 is greedy: the most probable token, with log-probability 0.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    min_p: float = 0.0  # least probability, as a share of the largest
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # ends after the token that completes one; needs a tokenizer
    ignore_eos: bool = False
    raw_logprobs: bool = False

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            if isinstance(getattr(self, name), bool | str | None):
                raise RequestRefused(f"{name} must be a number: `{getattr(self, name)}`.")
        if not 0 <= self.temperature < float("inf"):
            raise RequestRefused(
                f"temperature must be >= 0 and finite: `{self.temperature}`. Use 0 for greedy."
            )
        if not _is_count(self.top_k):
            raise RequestRefused(
                f"top_k must be a whole number >= 0, below 2**31: `{self.top_k}`. "
                "Use 0 for no limit."
            )
        if not 0 < self.top_p <= 1:
            raise RequestRefused(f"top_p must be in (0, 1]: `{self.top_p}`. Use 1 for no limit.")
        if not 0 <= self.min_p <= 1:
            raise RequestRefused(f"min_p must be in [0, 1]: `{self.min_p}`. Use 0 for no limit.")
        if not _is_count(self.max_tokens) or self.max_tokens < 1:
            raise RequestRefused(
                f"max_tokens must be a whole number >= 1, below 2**31: `{self.max_tokens}`."
            )
        _check_tokens("stop_token_ids", self.stop_token_ids)
        if not isinstance(self.stop, tuple) or not all(map(_is_text, self.stop)):
            raise RequestRefused(
                f"stop must be a tuple of strings that are not empty: `{self.stop!r}`."
            )


@dataclass(frozen=True, slots=True)
class Request:
    """One trajectory to generate. `prefix` is what it generated before, elsewhere.

    The prefix is not reported again, counts towards `max_tokens`, and sets the position at
    which the noise continues. In an episode of several turns it is the whole response so far, with
    what was observed; the present turn began at its token `turn_start`.

    With `hold` a trajectory that ends is held instead of forgotten, until `extend` or `cancel`.
    With `held` it is so from the start: the last token of `prefix` ended its turn elsewhere.
    """

    trajectory: TrajectoryId
    version: Version
    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    prefix: tuple[int, ...] = ()
    hold: bool = False
    turn_start: int = 0
    held: bool = False

    def __post_init__(self) -> None:
        if type(self.trajectory) is not int or not 0 <= self.trajectory <= _MAX_SEED:
            raise RequestRefused(
                f"a trajectory id must be a whole number of 64 bits: `{self.trajectory}`."
            )
        if type(self.seed) is not int or not 0 <= self.seed <= _MAX_SEED:
            raise RequestRefused(f"seed must be a whole number of 64 bits: `{self.seed}`.")
        _check_tokens("prompt", self.prompt)
        _check_tokens("prefix", self.prefix)
        if not self.prompt:
            raise RequestRefused(
                f"the prompt of trajectory {self.trajectory} is empty. "
                "Give at least one token, such as the beginning of text."
            )
        if len(self.prefix) - bool(self.held) >= self.sampling.max_tokens:
            raise RequestRefused(
                f"the prefix of trajectory {self.trajectory} has {len(self.prefix)} tokens and "
                f"max_tokens is {self.sampling.max_tokens}: nothing is left to generate."
            )
        if type(self.hold) is not bool:
            raise RequestRefused(f"hold must be true or false: `{self.hold!r}`.")
        if not _is_count(self.turn_start) or self.turn_start > len(self.prefix):
            raise RequestRefused(
                f"turn_start must be within the prefix, from 0 to {len(self.prefix)}: "
                f"`{self.turn_start!r}`."
            )
        if type(self.held) is not bool or (
            self.held and not (self.hold and len(self.prefix) > self.turn_start)
        ):
            raise RequestRefused(
                f"held must be false, or true with `hold` and a prefix that ends with a turn: "
                f"`{self.held!r}`, hold `{self.hold}`, a prefix of {len(self.prefix)} tokens with "
                f"the turn from {self.turn_start} on."
            )


def room(max_tokens: int, context: int, prompt: int, response: int) -> int:
    """Tokens that a response of so many, sampled and observed, may still have after its prompt."""
    return min(max_tokens, context - prompt) - response


def check_extension(request: Request, response: int, tokens: tuple[int, ...], context: int) -> None:
    """Refuse what cannot be appended to a response of so many tokens, sampled and observed.

    Whether the tokens are of the vocabulary is the engine's to check.
    """
    name = f"trajectory {request.trajectory}"
    _check_tokens("an extension", tokens)
    if not tokens:
        raise RequestRefused(
            f"the extension of {name} is empty. Give what the environment said, or cancel it."
        )
    if len(tokens) >= room(request.sampling.max_tokens, context, len(request.prompt), response):
        raise RequestRefused(
            f"{name} has {response} tokens after its prompt, and `{len(tokens)}` more would leave "
            f"no room to answer: max_tokens is {request.sampling.max_tokens}, the context "
            f"{context} with a prompt of {len(request.prompt)}. Shorten them, or cancel it."
        )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _is_text(value: object) -> bool:
    """A string that is not empty and can be written down (half a surrogate pair cannot)."""
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value != ""


def _check_tokens(name: str, tokens: object) -> None:
    if not isinstance(tokens, tuple):
        raise RequestRefused(f"{name} must be a tuple of token ids: `{tokens!r}`.")
    for token in tokens:
        if not _is_count(token):
            raise RequestRefused(
                f"{name} must hold whole numbers from 0 up: `{token!r}`. Convert them with int()."
            )


@dataclass(frozen=True, slots=True)
class Sampled:
    """New tokens of one trajectory, and whether they are its last."""

    trajectory: TrajectoryId
    version: Version
    digest: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    raw_logprobs: tuple[float, ...] | None = None
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Parked:
    """The trajectory gave up its slot; its KV is in host memory."""

    trajectory: TrajectoryId
    reason: ParkReason


@dataclass(frozen=True, slots=True)
class Resumed:
    """A trajectory that the engine had parked for room has its slot again."""

    trajectory: TrajectoryId


@dataclass(frozen=True, slots=True)
class Failed:
    """The trajectory cannot continue (the model gave no number); it is no longer here."""

    trajectory: TrajectoryId
    reason: str


Output: TypeAlias = Sampled | Parked | Resumed | Failed


@dataclass(frozen=True, slots=True)
class VersionLoad:
    """What one version does here; tokens per second over the last few seconds."""

    digest: str
    running: int
    waiting: int
    parked: int
    tokens_per_s: float
    held: int = 0  # wait for `extend`, parked or not; in none of the other counts


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine does now. KV in tokens: what is in use, and what the budget admits."""

    slots: int
    version_slots: int
    kv_used_tokens: int
    kv_budget_tokens: int
    versions: Mapping[Version, VersionLoad]
    proposed_tokens: int = 0  # by speculation, since the engine was made
    accepted_tokens: int = 0  # of those: each saved its trajectory a step

    @property
    def running(self) -> int:
        return sum(version.running for version in self.versions.values())

    @property
    def waiting(self) -> int:
        return sum(version.waiting for version in self.versions.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What some engines can and others cannot; it does not change while an engine lives."""

    version_slots: int  # full sets of weights at once; with 1, a new version evicts the old
    kv_export: bool = False
    """A trajectory can be handed to another engine with its KV. Without, its tokens are read anew
    there, on the same version."""
    parking: bool = False
    """KV of what finds no room goes to host memory and comes back: nothing is computed twice.
    Without, it may be computed anew."""
    exact_noise: bool = False
    """Sampling noise is a function of (seed, trajectory, position): batch mates, instance and
    moves do not change a trajectory beyond rounding. Without, it is another sample of the same
    policy."""
    lora: bool = False  # versions can be adapters of one base


class Engine(Protocol):
    """One rollout instance. Not thread-safe: all calls come from one thread."""

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can."""

    def install(self, version: Version, directory: Path, evict: Version | None = None) -> str:
        """Load a version from the weight store; the digest of what is now in memory.

        Where a slot is free, `evict` stays. Where none is, `evict` is freed first; refused while
        a trajectory of it is here. What can be known before is refused before, with nothing
        changed: weights that are not there or not this model's. If the loading itself fails (for
        want of memory, say), `VersionRefused` is raised as well; the evicted version is gone,
        `load().versions` says so, and the engine continues to serve the others.

        Installing the same weights again under the same version does nothing.
        """

    def evict(self, version: Version) -> None:
        """Free a version's slot; refused while a trajectory of it is here. Unknown: no effect."""

    def submit(self, request: Request) -> None:
        """Queue a trajectory; it starts in the first step that has a slot for it."""

    def step(self) -> list[Output]:
        """At least one token for every running trajectory (prompts are read in chunks)."""

    def extend(self, trajectory: TrajectoryId, tokens: tuple[int, ...]) -> None:
        """Append what an environment said to a held trajectory, which then samples on.

        It queues at the place of its age and reads these tokens as a prompt is read. They count
        towards `max_tokens`, and stop strings and stop tokens do not look at them. Refused, with
        nothing changed, if it is not held, or if no room for one more token would be left.
        """

    def cancel(self, trajectory: TrajectoryId) -> bool:
        """Forget a trajectory; whether it was here."""

    def load(self) -> Load:
        """What the engine does now."""

    @property
    def context(self) -> int:
        """The most tokens that a trajectory can have, prompt included."""

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""

    def close(self) -> None:
        """Free everything; the engine must not be used again."""

    # With `capabilities.kv_export`; else they raise `Unsupported`.

    def export_trajectory(self, trajectory: TrajectoryId) -> bytes:
        """Park it and hand out all that it needs to continue elsewhere, its KV included.

        In the format of `dora_rl.engines.wire`: the mover compares the tokens in it.
        It stays here, parked: `cancel` when the move is done, `resume` when it is undone. One
        that is held is held where it is imported. If this fails, it continues as it was.
        """

    def import_trajectory(self, data: bytes) -> TrajectoryId:
        """Take over what another engine exported, and continue with it as if it had never moved.

        Refused if this engine does not hold the same version with the same digest; by `KvRefused`
        if it does, and cannot read such KV. Then the tokens can be submitted.
        """

    def resume(self, trajectory: TrajectoryId) -> None:
        """Let an exported trajectory continue here, as soon as there is a slot. Else does nothing.

        One that was held when it was exported, and not extended since, is held again.
        """
