"""What the world remembers of a trajectory, and of one placement of it with its drawn shape.

A `Job` is the trajectory itself and outlives its placements. A `Run` is one placement, named by
its fence, on one instance; it knows which weights truly sampled its tokens. Plain slotted
records: half a million of them are alive at once, and the instance is what changes them.
"""

from math import inf

from dora_rl.core.protocol.types import Segment
from dora_rl.simulator.workload import Turn

# Where a run is. Plain integers: they are compared for every join and leave.
QUEUED = 0  # waits for its first slot
RUNNING = 1  # in the batch
PAUSED = 2  # waits for its environment, without a slot
RETURNING = 3  # has begun, and waits for a slot
PARKED = 4  # stopped by command, its KV in host memory (or on its way there)
FROZEN = 5  # at the source of a migration, while its KV moves
KEPT = 6  # at the source of a migration, until it is released
DEAD = 7

# What a run expects of its environment.
NO_ANSWER = 0
AWAITED = 1
ANSWERED = 2  # while the run was parked or frozen: not reported yet

# How far the scoring of a job is.
UNSCORED = 0
SCORING = 1
SCORED = 2


class Job:
    """One trajectory: what is known beyond any placement. Its shape is with those that run."""

    __slots__ = ("reward_s", "saved", "saved_segments", "score_fence", "scoring", "total", "whole")

    def __init__(self, reward_s: float) -> None:
        self.reward_s = reward_s
        self.whole = False  # some placement has finished it
        self.total = 0  # tokens of the whole trajectory, prompt and observations included
        self.scoring = UNSCORED
        self.score_fence = 0  # of the last question; the answer carries it
        self.saved = 0  # generated tokens that survive the instance
        self.saved_segments: tuple[Segment, ...] = ()


class Run:
    """One placement. While it is in the batch, `done`, `left` and `context` are as of `joined`."""

    __slots__ = (
        "answer_at",
        "context",
        "debt",
        "digest",
        "done",
        "env",
        "fence",
        "group",
        "held",
        "job",
        "joined",
        "left",
        "on_host",
        "prompt",
        "segment_from",
        "segments",
        "state",
        "trajectory",
        "turn",
        "turns",
        "version",
        "was_parked",
    )

    def __init__(
        self,
        trajectory: int,
        fence: int,
        group: int,
        version: int,
        digest: str,
        job: Job,
        prompt_tokens: int,
        turns: tuple[Turn, ...],
    ) -> None:
        self.trajectory = trajectory
        self.fence = fence
        self.group = group
        self.version = version
        self.digest = digest
        self.job = job
        self.state = QUEUED
        self.prompt = self.context = self.debt = prompt_tokens
        self.turns = turns
        self.turn = 0
        self.left = turns[0].generate_tokens  # tokens to the end of the turn
        self.done = 0  # tokens generated
        self.joined = 0  # the instance's step counter when it joined the batch
        self.held = False  # its KV is on the device
        self.on_host = False  # its KV is in host memory
        self.was_parked = False  # before it was frozen
        self.env = NO_ANSWER
        self.answer_at = inf
        self.segments: tuple[Segment, ...] = ()  # closed ones
        self.segment_from = 0  # `done` when the open one began

    def skip(self, tokens: int, segments: tuple[Segment, ...]) -> None:
        """Begin after a saved prefix: its KV is owed, its samplers are known."""
        turns = self.turns
        last = len(turns) - 1
        rest, context = tokens, self.prompt + tokens
        turn = 0
        # A prefix that ends with a turn stands before the next one: the environment, if the
        # trajectory has one, has been brought to where it was.
        while turn < last and rest >= turns[turn].generate_tokens:
            rest -= turns[turn].generate_tokens
            context += turns[turn].observation_tokens
            turn += 1
        self.turn = turn
        self.left = turns[turn].generate_tokens - rest
        self.done = self.segment_from = tokens
        self.context = self.debt = context
        self.segments = segments

    def close_segment(self) -> None:
        """End the open segment here; the next tokens come from other weights."""
        self.segments = self.segments_at(self.done)
        self.segment_from = self.done

    def segments_at(self, done: int) -> tuple[Segment, ...]:
        """The segments when `done` tokens are generated, neighbours of equal weights joined."""
        tokens = done - self.segment_from
        segments = self.segments
        if not tokens:
            return segments
        if segments:
            version, digest, before = segments[-1]
            if version == self.version and digest == self.digest:
                return (*segments[:-1], Segment(version, digest, before + tokens))
        return (*segments, Segment(self.version, self.digest, tokens))

    def copy(self, fence: int, digest: str) -> "Run":
        """The same trajectory at the same place of its text, as a new placement without KV."""
        twin = Run(
            self.trajectory,
            fence,
            self.group,
            self.version,
            digest,
            self.job,
            self.prompt,
            self.turns,
        )
        twin.context = self.context
        twin.debt = self.debt
        twin.turn = self.turn
        twin.left = self.left
        twin.done = self.done
        twin.env = self.env
        twin.answer_at = self.answer_at
        twin.segments = self.segments_at(self.done)
        twin.segment_from = self.done
        return twin


def prefix_segments(segments: tuple[Segment, ...], tokens: int) -> tuple[Segment, ...]:
    """The segments of the first `tokens` tokens."""
    kept: list[Segment] = []
    for version, digest, length in segments:
        if tokens <= 0:
            break
        kept.append(Segment(version, digest, min(length, tokens)))
        tokens -= length
    return tuple(kept)
