"""A trajectory inside the engine, and the prompt that it may share: data, no decisions.

The KV of a sequence has two parts: that of its prompt but the last token, shared by all
sequences of the same version and prompt, and its own: the last prompt token and all after it,
sampled or observed. Each part is in the pool (blocks), or in host memory (a plain tensor), or not
there yet.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from torch import Tensor

from dora_rl.core.protocol.types import TrajectoryId, Version, check_move
from dora_rl.engines.base import ParkReason, Request


class Stage(StrEnum):
    QUEUED = "queued"  # waits for a slot
    RUNNING = "running"  # has a slot, and its KV in the pool
    PARKED = "parked"  # no slot until it is resumed; its KV is in host memory
    HELD = "held"  # its turn has ended: no slot until it is extended; its KV is kept


STAGE_MOVES: dict[Stage, frozenset[Stage]] = {
    Stage.QUEUED: frozenset({Stage.RUNNING, Stage.PARKED, Stage.HELD}),
    Stage.RUNNING: frozenset({Stage.PARKED, Stage.HELD}),
    Stage.PARKED: frozenset({Stage.QUEUED, Stage.RUNNING}),
    Stage.HELD: frozenset({Stage.QUEUED, Stage.PARKED}),
}


@dataclass(slots=True, eq=False)
class Cached:
    """KV of consecutive tokens: `tokens` of them, in `blocks` of the pool or on the `host`."""

    tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    host: Tensor | None = None
    low: bool = True  # at the low end of the pool, with what is read by one row alone


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt without its last token, for all sequences of its version that begin with it."""

    version: Version
    tokens: tuple[int, ...]
    kv: Cached = field(default_factory=Cached)
    holders: int = 0  # sequences here with this prompt
    readers: int = 0  # those of them that run: while there are any it stays in the pool

    @property
    def known(self) -> tuple[int, ...]:
        """The tokens whose KV is its own."""
        return self.tokens

    @property
    def position(self) -> int:
        """Of the next token to read."""
        return self.kv.tokens

    @property
    def unread(self) -> int:
        """Tokens that are not in the KV yet."""
        return len(self.tokens) - self.kv.tokens

    @property
    def whole(self) -> bool:
        return self.unread == 0


@dataclass(slots=True, eq=False)
class Sequence:
    """One trajectory. `order` is its place in the order of arrival."""

    request: Request
    order: int
    prompt: Prompt
    own: list[int]  # the last prompt token and all after it
    kv: Cached = field(default_factory=Cached)
    stage: Stage = Stage.QUEUED
    parked_for: ParkReason | None = None  # one that is held can be parked too
    turn_start: int = field(init=False)  # index into `generated`

    def __post_init__(self) -> None:
        self.turn_start = self.request.turn_start

    def move_to(self, stage: Stage) -> None:
        self.stage = check_move(STAGE_MOVES, self.stage, stage, f"trajectory {self.id}")

    @property
    def version(self) -> Version:
        return self.request.version

    @property
    def id(self) -> TrajectoryId:
        return self.request.trajectory

    @property
    def generated(self) -> list[int]:
        """The response: sampled, and observed between turns."""
        return self.own[1:]

    @property
    def turn(self) -> list[int]:
        """What was sampled since the environment last spoke."""
        return self.own[1 + self.turn_start :]

    @property
    def known(self) -> list[int]:
        """The tokens whose KV is its own."""
        return self.own

    @property
    def position(self) -> int:
        """Of the next token to feed."""
        return len(self.prompt.tokens) + self.kv.tokens

    @property
    def unread(self) -> int:
        """Own tokens before the last that are not in the KV: to be read first."""
        return len(self.own) - 1 - self.kv.tokens

    @property
    def ready(self) -> bool:
        """Whether the next token can be sampled in the coming step."""
        return self.prompt.whole and self.unread == 0
