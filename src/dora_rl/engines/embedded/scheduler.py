"""Who runs, who waits, who is parked and who is held: slots and KV blocks of one engine.

First come, first served: a trajectory never overtakes an older one, and when the KV memory is
full the youngest gives way. Its KV moves to host memory and comes back: nothing is dropped and
nothing computed twice. Before one that runs gives way, all KV that nobody reads now does. Since
every admitted request fits the memory alone, the oldest always gets on, so every trajectory ends.
"""

import heapq
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from dora_rl.core.protocol.types import TrajectoryId, Version
from dora_rl.engines.base import Output, Parked, ParkReason, Request, Resumed
from dora_rl.engines.embedded.kv import KvPool
from dora_rl.engines.embedded.sequences import Cached, Prompt, Sequence, Stage

_COMPACT_SLACK = 16  # holes that cost less to read over than to close
_STALE_ORDERS = 64  # of sequences that left the queue otherwise than by a slot


class Scheduler:
    """All sequences of one engine, and the pool that they live in."""

    def __init__(self, pool: KvPool, slots: int) -> None:
        self.pool = pool
        self.slots = slots
        self.sequences: dict[TrajectoryId, Sequence] = {}
        self.running: dict[int, Sequence] = {}  # by order, the oldest first
        self._prompts: dict[tuple[Version, tuple[int, ...]], Prompt] = {}
        self._candidates: dict[int, Sequence] = {}  # wait for a slot, by order
        self._by_age: list[int] = []  # their orders as a heap; those that left are skipped
        self._arrivals = 0
        self._holes = False  # blocks came back since the last look

    def add(self, request: Request) -> Sequence:
        """Queue a new sequence."""
        sequence = Sequence(
            request=request,
            order=self._arrivals,
            prompt=self._hold(request.version, request.prompt[:-1]),
            own=[request.prompt[-1], *request.prefix],
        )
        self._arrivals += 1
        self.sequences[sequence.id] = sequence
        self._enter(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and free what it held."""
        self._leave(sequence)
        self._release(sequence.kv)
        self._let_go(sequence.prompt)
        del self.sequences[sequence.id]

    def park(self, sequence: Sequence, reason: ParkReason) -> None:
        """Move the KV to host memory and give up the slot. Parked already: only the reason."""
        sequence.parked_for = reason
        if sequence.stage is Stage.HELD:
            self._offload(sequence.kv)
            return
        if sequence.stage is not Stage.PARKED:
            self._offload(sequence.kv)
            self._leave(sequence)
            sequence.move_to(Stage.PARKED)
        if reason is ParkReason.KV_BUDGET:
            self._enter(sequence)
        else:
            self._candidates.pop(sequence.order, None)

    def resume(self, sequence: Sequence) -> None:
        """Queue a sequence that was parked by request again, unless it is held."""
        if sequence.parked_for is ParkReason.ASKED:
            sequence.parked_for = None
            if sequence.stage is Stage.PARKED:
                self._queue(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Out of its slot, or out of the queue, with its KV where it is."""
        self._leave(sequence)
        sequence.move_to(Stage.HELD)
        self._holes = True

    def extend(self, sequence: Sequence, tokens: Iterable[int]) -> None:
        """Append to a held sequence and queue it, or park it if it was asked to be."""
        sequence.own += tokens
        sequence.turn_start = len(sequence.generated)
        if sequence.parked_for is None:
            self._queue(sequence)
        else:
            sequence.move_to(Stage.PARKED)

    def kv_of(self, sequence: Sequence) -> Tensor:
        """A copy of all KV of a sequence without a slot: that of its prompt, then its own."""
        parts = [self._peek(sequence.prompt.kv)]
        if sequence.prompt.whole:
            parts.append(self._peek(sequence.kv))
        return torch.cat(parts, 2)

    def bring(self, sequence: Sequence, kv_L2TKD: Tensor) -> None:
        """Give a new sequence the KV that it had elsewhere."""
        prompt = sequence.prompt
        before = len(prompt.tokens)
        if prompt.kv.tokens == 0 and not prompt.readers:
            self._release(prompt.kv)
            prompt.kv.tokens = min(before, kv_L2TKD.shape[2])
            prompt.kv.host = kv_L2TKD[:, :, :before]
        sequence.kv.tokens = max(0, kv_L2TKD.shape[2] - before)
        if sequence.kv.tokens:
            sequence.kv.host = kv_L2TKD[:, :, before:]

    def schedule(self) -> list[Output]:
        """Give slots and blocks for the coming step; what was parked or resumed for it."""
        outputs: list[Output] = []
        self._grow(outputs)
        self._admit(outputs)
        self._compact()
        return outputs

    def lend(self, sequence: Sequence, tokens: int) -> int:
        """Free blocks for tokens after the next one, until `settle`; how many have room."""
        blocks, pool = sequence.kv.blocks, self.pool
        wanted = pool.blocks_for(len(sequence.own) + tokens)
        while len(blocks) < wanted and pool.free:
            blocks.append(pool.take_low())
        return min(tokens, len(blocks) * pool.block_tokens - len(sequence.own))

    def settle(self, sequence: Sequence, ahead: int = 0) -> None:
        """Give back the blocks beyond those for what is cached and so many tokens ahead."""
        kv = sequence.kv
        kept = self.pool.blocks_for(kv.tokens + ahead)
        self.pool.give_back(kv.blocks[kept:])
        del kv.blocks[kept:]

    @property
    def idle(self) -> bool:
        return not self.running and not self._candidates

    def _grow(self, outputs: list[Output]) -> None:
        """A block for the next token of every running sequence, the oldest first."""
        for sequence in list(self.running.values()):
            wanted = self.pool.blocks_for(len(sequence.own))
            while sequence.stage is Stage.RUNNING and len(sequence.kv.blocks) < wanted:
                if self._make_room(1):
                    sequence.kv.blocks.append(self.pool.take_low())
                    continue
                youngest = next(reversed(self.running.values()))
                self.park(youngest, ParkReason.KV_BUDGET)
                outputs.append(Parked(youngest.id, ParkReason.KV_BUDGET))

    def _admit(self, outputs: list[Output]) -> None:
        while len(self.running) < self.slots and (sequence := self._oldest_candidate()):
            parked = sequence.stage is Stage.PARKED
            # One that gave way waits until the others could grow, lest it give way again.
            slack = len(self.running) if parked else 0
            if not self._make_room(self._blocks_to_start(sequence) + slack, keep=sequence):
                return
            heapq.heappop(self._by_age)
            del self._candidates[sequence.order]
            self._start(sequence)
            if parked:
                outputs.append(Resumed(sequence.id))

    def _start(self, sequence: Sequence) -> None:
        prompt, own = sequence.prompt, sequence.kv
        prompt.readers += 1
        if not prompt.kv.blocks:
            prompt.kv.low = prompt.holders == 1
        self._holes |= bool(own.blocks)  # others may have started beyond what was held
        self._provide(prompt.kv, len(prompt.tokens))
        self._provide(own, len(sequence.own))
        sequence.parked_for = None
        sequence.move_to(Stage.RUNNING)
        self.running[sequence.order] = sequence
        self.running = dict(sorted(self.running.items()))

    def _blocks_to_start(self, sequence: Sequence) -> int:
        prompt = self.pool.blocks_for(len(sequence.prompt.tokens))
        own = self.pool.blocks_for(len(sequence.own))
        return prompt - len(sequence.prompt.kv.blocks) + own - len(sequence.kv.blocks)

    def _make_room(self, blocks: int, keep: Sequence | None = None) -> bool:
        """Whether so many blocks are free, KV that nobody reads now being moved out."""
        if self.pool.free >= blocks:
            return True
        kept = (keep.kv, keep.prompt.kv) if keep else ()
        resting = [kv for kv in self._at_rest() if kv not in kept]
        if self.pool.free + sum(len(kv.blocks) for kv in resting) < blocks:
            return False
        for kv in resting:
            if self.pool.free < blocks:
                self._offload(kv)
        return True

    def _at_rest(self) -> Iterator[Cached]:
        """KV in the pool that nobody reads now, in the order in which it gives way."""
        for prompt in self._prompts.values():
            if prompt.readers == 0 and prompt.kv.blocks:
                yield prompt.kv
        for stage in (Stage.HELD, Stage.QUEUED):  # what is queued is needed sooner
            for sequence in reversed(self.sequences.values()):
                if sequence.stage is stage and sequence.kv.blocks:
                    yield sequence.kv

    def _queue(self, sequence: Sequence) -> None:
        sequence.move_to(Stage.QUEUED)
        self._enter(sequence)

    def _enter(self, sequence: Sequence) -> None:
        if sequence.order not in self._candidates:
            self._candidates[sequence.order] = sequence
            heapq.heappush(self._by_age, sequence.order)
            if len(self._by_age) > 2 * len(self._candidates) + _STALE_ORDERS:
                self._by_age = sorted(self._candidates)

    def _oldest_candidate(self) -> Sequence | None:
        while self._by_age and self._by_age[0] not in self._candidates:
            heapq.heappop(self._by_age)
        return self._candidates[self._by_age[0]] if self._by_age else None

    def _leave(self, sequence: Sequence) -> None:
        """Out of the slot, or out of the queue."""
        self._candidates.pop(sequence.order, None)
        if self.running.pop(sequence.order, None) is not None:
            sequence.prompt.readers -= 1

    def _hold(self, version: Version, tokens: tuple[int, ...]) -> Prompt:
        prompt = self._prompts.setdefault((version, tokens), Prompt(version, tokens))
        prompt.holders += 1
        return prompt

    def _let_go(self, prompt: Prompt) -> None:
        prompt.holders -= 1
        if not prompt.holders:
            self._release(prompt.kv)
            del self._prompts[prompt.version, prompt.tokens]

    def _offload(self, kv: Cached) -> None:
        if kv.blocks:
            if kv.tokens:
                kv.host = self.pool.read(kv.blocks, kv.tokens)
            self._give_back(kv)

    def _give_back(self, kv: Cached) -> None:
        self.pool.give_back(kv.blocks)
        self._holes |= bool(kv.blocks)
        kv.blocks.clear()

    def _peek(self, kv: Cached) -> Tensor:
        return kv.host if kv.host is not None else self.pool.read(kv.blocks, kv.tokens)

    def _provide(self, kv: Cached, tokens: int) -> None:
        """Blocks for so many tokens, with what was in host memory."""
        while len(kv.blocks) < self.pool.blocks_for(tokens):
            kv.blocks.append(self.pool.take_low() if kv.low else self.pool.take_high())
        if kv.host is not None:
            self.pool.write(kv.blocks, kv.host)
            kv.host = None

    def _release(self, kv: Cached) -> None:
        self._give_back(kv)
        kv.host = None
        kv.tokens = 0

    def _compact(self) -> None:
        """Close the holes between what is read: attention reads over them."""
        if not self._holes:
            return
        self._holes = False
        read = [sequence.kv for sequence in self.running.values()]
        read += [prompt.kv for prompt in self._prompts.values() if prompt.readers]
        for low in (True, False):
            self._close_holes([kv for kv in read if kv.low is low], low=low)

    def _close_holes(self, holders: Iterable[Cached], *, low: bool) -> None:
        places = [(block, kv, i) for kv in holders for i, block in enumerate(kv.blocks)]
        if not places:
            return
        first, last = min(places)[0], max(places)[0]
        if last - first + 1 <= 1.5 * len(places) + _COMPACT_SLACK:
            return
        # What rests may do so for long, and every step would read over it.
        for kv in list(self._at_rest()):
            if any(block < last if low else block > first for block in kv.blocks):
                self._offload(kv)
        for block, kv, i in sorted(places, key=lambda place: place[0], reverse=low):
            target = self.pool.take_low() if low else self.pool.take_high()
            if (target > block) == low:
                self.pool.give_back([target])
                return
            self.pool.move(block, target)
            kv.blocks[i] = target
            self.pool.give_back([block])
