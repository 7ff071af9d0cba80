"""What moving a running trajectory costs: its KV handed over, against its tokens read again.

Two engines of the same weights in two processes. For each length a trajectory runs on one of them
and continues on the other, once in each way, in an order that is reversed every time. Before each
way the target forgets what it has read:

    kv          export, send over a socket, import, until its next token is there
    reprefill   its tokens are submitted, until its next token is there

Then it continues where it was, as the reference that both continuations are compared with. Noise
depends on seed, trajectory and position alone, or there is none, so only rounding can make a
difference.
"""

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dora_rl.benchmarks.contestants import common, roster
from dora_rl.benchmarks.contestants.process import Contestant, start_all
from dora_rl.benchmarks.contestants.samples import median
from dora_rl.benchmarks.dtypes import DtypeChoice, open_in_best_dtype
from dora_rl.benchmarks.models import Model, check_model, context_of
from dora_rl.benchmarks.reporting import Reporter, repeats
from dora_rl.engines.registry import EngineName

DEFAULT_MODEL = "smollm2"
DEFAULT_TOKENS = (500, 1000, 2000, 4000)
DEFAULT_REPEATS = 5
DEFAULT_PHASE_SECONDS = 120.0
COMPARED = 8  # tokens after the move
_PROMPT = 64  # tokens; the rest was generated, as in a long response
_COMMAND = "dora-rl bench migration"
_PARTS = ("export_s", "transfer_s", "import_s")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured; refuses what cannot be."""

    model: str = DEFAULT_MODEL
    tokens: tuple[int, ...] = DEFAULT_TOKENS
    repeats: int = DEFAULT_REPEATS
    threads: int = field(default_factory=common.default_threads)
    dtype: str | None = None  # what this machine is good at
    phase_seconds: float = DEFAULT_PHASE_SECONDS  # of the moves of one length
    engine: EngineName = EngineName.EMBEDDED

    def __post_init__(self) -> None:
        common.check_numbers("--tokens", self.tokens, "500,1000")
        for tokens in self.tokens:
            common.check_number("--tokens", tokens, 2, "A prompt and a token after it.")
        common.check_number("--repeats", self.repeats)
        common.check_threads(self.threads)
        common.check_dtype(self.dtype)
        common.check_phase(self.phase_seconds)
        check_model(self.model)


@dataclass(frozen=True, slots=True)
class Move:
    """One trajectory, moved in both ways."""

    kv_s: float
    reprefill_s: float
    bytes: int
    parts_s: Mapping[str, float]  # of `kv_s`, but for the protocol
    kv_same: bool  # continued as if it had not moved
    reprefill_same: bool


@dataclass(frozen=True, slots=True)
class Length:
    """The moves of trajectories with so many tokens in the KV; figures are medians."""

    tokens: int
    moves: Sequence[Move]

    @property
    def kv_s(self) -> float:
        return median([move.kv_s for move in self.moves]) or 0.0

    @property
    def reprefill_s(self) -> float:
        return median([move.reprefill_s for move in self.moves]) or 0.0

    @property
    def ratio(self) -> float:
        """How many times as long reading again takes."""
        return self.reprefill_s / self.kv_s

    @property
    def bytes(self) -> int:
        return self.moves[0].bytes

    @property
    def megabytes_per_s(self) -> float:
        return self.bytes / self.kv_s / 1e6

    @property
    def mismatches(self) -> dict[str, int]:
        """Moves after which the next tokens were others than without the move."""
        return {
            "kv": sum(not move.kv_same for move in self.moves),
            "reprefill": sum(not move.reprefill_same for move in self.moves),
        }

    def to_json(self) -> dict[str, Any]:
        parts = {part: median([move.parts_s[part] for move in self.moves]) for part in _PARTS}
        return {
            "kv_s": self.kv_s,
            "reprefill_s": self.reprefill_s,
            "reprefill/kv": self.ratio,
            "bytes": self.bytes,
            "megabytes_per_s": self.megabytes_per_s,
            "kv_parts": parts,
            "mismatches": self.mismatches,
            "samples": [
                {"kv_s": move.kv_s, "reprefill_s": move.reprefill_s, **move.parts_s}
                for move in self.moves
            ],
        }


@dataclass(frozen=True, slots=True)
class Result:
    plan: Plan
    model: Model
    choice: DtypeChoice
    lengths: Sequence[Length]  # those that were measured
    notes: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model.to_json(),
            "engine": str(self.plan.engine),
            "dtype_choice": self.choice.to_json(),
            "threads": self.plan.threads,
            "repeats": self.plan.repeats,
            "compared_tokens": COMPARED,
            "tokens": {str(length.tokens): length.to_json() for length in self.lengths},
            "notes": list(self.notes),
        }

    def summary(self) -> list[str]:
        plan = self.plan
        lines = [
            f"{self.model.title}, {self.model.config.dtype}, {plan.engine} engine, "
            f"{plan.threads} threads, median of {plan.repeats}",
            f"{'tokens':>7} {'MB':>7} {'by KV ms':>9} {'MB/s':>7} {'read again ms':>13} "
            f"{'ratio':>7} {'differ: KV':>10} {'read again':>10}",
        ]
        for length in self.lengths:
            differ = length.mismatches
            lines.append(
                f"{length.tokens:>7,} {length.bytes / 1e6:>7.1f} {length.kv_s * 1e3:>9.1f} "
                f"{length.megabytes_per_s:>7,.0f} {length.reprefill_s * 1e3:>13.1f} "
                f"{length.ratio:>7.2f} {differ['kv']:>10} {differ['reprefill']:>10}"
            )
        lines.append(
            f"Differ: moves, of {plan.repeats}, after which one of the next {COMPARED} tokens was "
            "another than without the move."
        )
        return lines + [f"Note: {note}" for note in self.notes]


def measure(plan: Plan, reporter: Reporter | None = None) -> Result:
    """Start two engines with the same version, and move trajectories from one to the other."""
    reporter = reporter or Reporter()
    with common.ready(_COMMAND) as (work, notes), ExitStack() as stack:
        longest = max(plan.tokens) + 1 + COMPARED
        common.check_context(context_of(plan.model), longest, "--tokens and what follows")
        fingerprints = roster.check_engine(plan.engine, _COMMAND, "train")
        model, choice = open_in_best_dtype(plan.model, plan.dtype, work, reporter)
        notes += [choice.reason] if choice.reason else []
        weights = _publish(plan, model, work, fingerprints, reporter)
        source, target = _start(stack, plan, model, work, weights, longest, reporter)
        moves: dict[int, list[Move]] = {tokens: [] for tokens in sorted(plan.tokens)}

        def result() -> Result:
            lengths = [Length(tokens, list(made)) for tokens, made in moves.items() if made]
            return Result(plan, model, choice, lengths, notes)

        reporter.collects(lambda: result() if any(moves.values()) else None)
        run = _Run(plan, model, source, target, reporter)
        for tokens, made in moves.items():
            run.length(tokens, made)
            if len(made) < plan.repeats:
                few = common.fewer(len(made), plan.repeats, plan.phase_seconds)
                notes.append(f"{tokens} tokens: {few}")
        return result()


def _publish(plan: Plan, model: Model, work: Path, fingerprints: bool, reporter: Reporter) -> Path:
    """The model as version 0 of a store, which both engines install."""
    weights = work / "weights"
    with ExitStack() as stack:
        (publisher,) = start_all(stack, [roster.publisher(plan.threads)], work, reporter)
        reporter.phase("publishing the model")
        publisher.ask(
            "publish_model",
            directory=str(model.directory),
            weights=str(weights),
            fingerprints=fingerprints,
        )
    return weights


def _start(
    stack: ExitStack,
    plan: Plan,
    model: Model,
    work: Path,
    weights: Path,
    longest: int,
    reporter: Reporter,
) -> list[Contestant]:
    """Source and target, with a socket between them."""
    ends = [stack.enter_context(end) for end in socket.socketpair()]
    starts = [
        roster.mover(
            name,
            plan.engine,
            model,
            weights,
            threads=plan.threads,
            tokens=longest,
            fd=end.fileno(),
        )
        for name, end in zip(("source", "target"), ends, strict=True)
    ]
    sides = start_all(stack, starts, work, reporter)
    for end in ends:
        end.close()  # else a side that dies would not be missed by the other
    return sides


class _Run:
    """The moves, one after the other: only one side computes at a time."""

    def __init__(
        self, plan: Plan, model: Model, source: Contestant, target: Contestant, reporter: Reporter
    ) -> None:
        self._plan, self._model, self._reporter = plan, model, reporter
        self._source, self._target = source, target
        self._moves = 0

    def length(self, tokens: int, made: list[Move]) -> None:
        """Move trajectories of this length; each move is added to `made`."""
        plan = self._plan
        self._reporter.phase(f"{tokens} tokens")
        self._reporter.step("warming up")
        self._move(tokens)
        for repeat in repeats(plan.repeats, plan.phase_seconds):
            self._reporter.step(f"move {repeat + 1} of {plan.repeats}")
            made.append(self._move(tokens))

    def _move(self, tokens: int) -> Move:
        self._moves += 1
        name = self._moves
        ((*known,),) = common.prompts(f"move/{name}", self._model.config, 1, tokens)
        head = min(_PROMPT, tokens - 1)
        prompt, prefix = known[:head], known[head:]
        first = self._source.ask(
            "begin", trajectory=name, prompt=prompt, prefix=prefix, more=COMPARED
        )
        prefix = [*prefix, *first]
        ways = [self._by_kv, self._by_reprefill]
        done = {}
        for way in ways if name % 2 else reversed(ways):
            self._target.ask("empty")
            for side in (self._source, self._target):
                side.settle()
            done[way] = way(name, prompt, prefix)
        kv_s, kv_tokens, moved = done[self._by_kv]
        reprefill_s, reprefill_tokens, _ = done[self._by_reprefill]
        stayed = self._source.ask("go_on", trajectory=name, count=COMPARED)
        return Move(
            kv_s=kv_s,
            reprefill_s=reprefill_s,
            bytes=moved["bytes"],
            parts_s={part: moved[part] for part in _PARTS},
            kv_same=kv_tokens == stayed,
            reprefill_same=reprefill_tokens == stayed,
        )

    def _by_kv(
        self, name: int, prompt: list[int], prefix: list[int]
    ) -> tuple[float, list[int], dict[str, Any]]:
        began = time.perf_counter()
        self._target.send("take_over")
        self._source.send("hand_over", trajectory=name)
        sent = self._source.receive()
        taken = self._target.receive()
        seconds = time.perf_counter() - began
        return seconds, self._continued(name, taken["tokens"]), {**sent, **taken}

    def _by_reprefill(
        self, name: int, prompt: list[int], prefix: list[int]
    ) -> tuple[float, list[int], dict[str, Any]]:
        began = time.perf_counter()
        tokens = self._target.ask(
            "begin", trajectory=name, prompt=prompt, prefix=prefix, more=COMPARED - 1
        )
        seconds = time.perf_counter() - began
        return seconds, self._continued(name, tokens), {}

    def _continued(self, name: int, tokens: list[int]) -> list[int]:
        """All tokens that are compared; the trajectory is then gone from the target."""
        return tokens + list(
            self._target.ask("go_on", trajectory=name, count=COMPARED - len(tokens))
        )
