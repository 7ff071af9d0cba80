"""The batch of one simulated engine, its queue, and what happens when the KV memory is full.

Between joins and leaves the batch is constant and every step adds one token to each member, so
nothing happens per token: a counter of decode steps is advanced lazily in closed form, and one
event is scheduled, at the earliest end of a turn or when the KV memory is full. Invariants:
runs leave the batch at exactly the step where their turn ends; KV that does not fit goes to
host memory and is never dropped; whatever changes the batch is followed by `settle` before time
advances.

Knows nothing of processes, commands, messages or other instances: it calls `emit`.
"""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from dora_rl.core.protocol.events import (
    Event,
    TrajectoryFailed,
    TrajectoryFinished,
    TrajectoryPaused,
    TrajectoryResumed,
)
from dora_rl.simulator.kv import KvMemory
from dora_rl.simulator.runs import (
    ANSWERED,
    AWAITED,
    DEAD,
    NO_ANSWER,
    PAUSED,
    QUEUED,
    RETURNING,
    RUNNING,
    Run,
)
from dora_rl.simulator.surroundings import Surroundings

# Room that must stay free for a join: a memory that is full to the brim would only swap.
KV_WATERMARK = 0.01


class Engine(KvMemory):
    """A batch of at most `slots` runs that decode in step, and the runs in line for it."""

    __slots__ = (
        "_advanced_at",
        "_around",
        "_clock",
        "_decode",
        "_dirty",
        "_ends",
        "_event_number",
        "_facts",
        "_joins",
        "_lag",
        "_plan_steps",
        "_prefill_time",
        "_returning",
        "_waiting",
        "_watermark",
        "accounted",
        "by_version",
        "context",
        "emit",
        "frontier",
        "frozen_until",
        "id",
        "paused",
        "reserved_slots",
        "runs",
        "size",
        "slots",
        "slow",
        "steps",
        "stops",
    )

    def __init__(self, id: int, slots: int, around: Surroundings) -> None:
        self.id = id
        self.slots = slots
        self._around = around
        self._clock = around.clock
        self._facts = around.facts
        self._decode = around.costs.decode
        self._prefill_time = around.costs.prefill_time
        self._watermark = int(around.costs.kv_capacity_tokens * KV_WATERMARK)
        self._event_number = 0  # of the event that is valid; never reset, so old ones stay void
        self._joins = 0
        self.emit: Callable[[Event], None]
        super().__init__(around.costs.kv_capacity_tokens)

    def clear(self) -> None:
        super().clear()
        self._event_number += 1
        self._plan_steps = 0
        self._dirty = False
        self._advanced_at = -1.0
        self._lag = 0.0
        self._ends: list[tuple[int, int, Run]] = []  # (step that ends its turn, order, run)
        self._waiting: deque[Run] = deque()
        self._returning: deque[Run] = deque()
        self.runs: dict[int, Run] = {}  # by fence, in order of arrival
        self.by_version: dict[int, int] = {}  # members of the batch
        self.size = 0  # of the batch
        self.accounted = 0  # of it, what usage knows
        self.context = 0  # tokens of the batch
        self.reserved_slots = 0
        self.steps = 0
        self.frontier = 0.0  # the time up to which `steps` are done; ahead of now in a prefill
        self.stops = 0  # reasons not to decode
        self.slow = 1.0
        self.frozen_until = 0.0
        self.paused: list[Run] = []  # runs that paused since somebody last looked

    # Before time advances

    def touch(self) -> None:
        """Something changed: settle before time advances."""
        if not self._dirty:
            self._dirty = True
            self._around.dirty.append(self)

    def settle(self) -> None:
        """Fill free slots, plan the next event, account for busy slots."""
        self._dirty = False
        if not self.stops:
            if self._returning or self._waiting:
                if self._advanced_at != self._clock.now:
                    self.advance(self._clock.now)
                self._admit()
            self._make_plan()
        if self.size != self.accounted:
            self._account(self.size)

    def _account(self, size: int) -> None:
        now = self._clock.now
        self._around.usage.change(now, size - self.accounted)
        self.accounted = size
        recorder = self._around.recorder
        if recorder is not None:
            recorder.slots(now, self.id, size, max(self.by_version, default=None))

    # Time

    def stop(self) -> None:
        """Decode no further; what is in the batch stays there."""
        if not self.stops:
            self.advance(self._clock.now)
            self._lag = self.frontier - self._clock.now
            self._event_number += 1
        self.stops += 1

    def go(self) -> None:
        """One reason less not to decode."""
        self.stops -= 1
        if not self.stops:
            self._advanced_at = self._clock.now
            self.frontier = self._clock.now + self._lag
            self.touch()

    def stall(self, seconds: float) -> None:
        """The batch waits for a prefill or a swap."""
        if self.stops:
            self._lag += seconds
        else:
            self.frontier += seconds

    def set_slow(self, factor: float) -> None:
        """From now on everything takes `factor` times as long."""
        self.advance(self._clock.now)
        self.slow = factor
        self.touch()

    def advance(self, now: float) -> None:
        """Do the decode steps that have been completed by `now`."""
        if self._advanced_at == now:
            return
        self._advanced_at = now
        size = self.size
        passed = now - self.frontier
        if not size or self.stops or passed <= 0.0:
            return
        num_versions = len(self.by_version)
        slow = self.slow
        k = self._decode.steps_within(size, self.context, passed / slow, num_versions)
        if k > self._plan_steps:
            k = self._plan_steps
        if k > 0:
            seconds = self._decode.steps_time(size, self.context, k, num_versions) * slow
            self.frontier = min(self.frontier + seconds, now)
            self._plan_steps -= k
            self.steps += k
            self.context += size * k
            self.used += size * k

    def _make_plan(self) -> None:
        """Schedule the one event at which the batch changes by itself."""
        self._event_number = number = self._event_number + 1
        size = self.size
        if not size:
            return
        ends = self._ends
        while True:
            end, _, run = ends[0]
            if run.state == RUNNING and run.joined + run.left == end:
                break
            heappop(ends)
        k = end - self.steps
        room = self.capacity - self.used
        if size > 1:
            room -= self.reserved_kv
        if room < k * size:
            k = room // size if room > 0 else 0
        self._plan_steps = k
        time = self.frontier
        if k:
            seconds = self._decode.steps_time(size, self.context, k, len(self.by_version))
            time += seconds * self.slow
        self._clock.at(time, self._due, number)

    def _due(self, number: int) -> None:
        if number != self._event_number:
            return
        self._advanced_at = self.frontier = self._clock.now
        k = self._plan_steps
        self._plan_steps = 0
        self.steps = steps = self.steps + k
        self.context += self.size * k
        self.used += self.size * k
        ends = self._ends
        while ends and ends[0][0] <= steps:
            end, _, run = heappop(ends)
            if run.state == RUNNING and run.joined + run.left == end:
                self._end_turn(run)
        size = self.size
        if self.capacity - self.used - self.reserved_kv < size and self._spare() < size:
            self._relieve()
        if not self._dirty:
            self._dirty = True
            self._around.dirty.append(self)

    # The batch

    def add(self, run: Run) -> None:
        """A placement arrives: it waits for a slot."""
        self.runs[run.fence] = run
        self._waiting.append(run)
        if self.size + self.reserved_slots < self.slots:
            self.touch()

    def line_up_first(self, runs: list[Run]) -> None:
        """These have begun, and are the next to get a slot."""
        for run in reversed(runs):
            run.state = RETURNING
            self._returning.appendleft(run)
        self.touch()

    def _admit(self) -> None:
        free = self.slots - self.size - self.reserved_slots
        returning, waiting = self._returning, self._waiting
        while free > 0:
            if returning:
                queue, state = returning, RETURNING
            elif waiting:
                queue, state = waiting, QUEUED
            else:
                return
            run = queue[0]
            if run.state != state:  # it ended, or moved, while it waited
                queue.popleft()
                continue
            # Most find far more room than they could need; the others are looked at closely.
            ample = self.capacity - self.used - self.reserved_kv - self._watermark - self.slots
            if run.context < ample or self._fits(run):
                queue.popleft()
                self._join(run)
                free -= 1
            elif run.state == state:
                return

    def _join(self, run: Run) -> None:
        tokens = run.debt
        context = run.context
        stall = 0.0
        if run.held:
            self.used += tokens
        else:
            prompt = run.prompt
            sharers = self.prompts.get(run.group, 0)
            self.prompts[run.group] = sharers + 1
            self.used += context - prompt if sharers else context
            if run.on_host:
                swapped = context - tokens - (prompt if sharers else 0)
                stall = self._around.costs.park_time(swapped) * self.slow
                run.on_host = False
            elif sharers:
                tokens -= prompt
                self._facts.shared_tokens += prompt
            run.held = True
        if tokens > 0:
            stall += self._prefill_time(tokens, context - tokens) * self.slow
            self._facts.prefilled_tokens += tokens
        run.debt = 0
        if not self.size and self.frontier < self._clock.now:
            self.frontier = self._clock.now
        self.frontier += stall
        self.size += 1
        self.context += context
        version = run.version
        self.by_version[version] = self.by_version.get(version, 0) + 1
        run.state = RUNNING
        run.joined = steps = self.steps
        self._joins = order = self._joins + 1
        heappush(self._ends, (steps + run.left, order, run))

    def leave(self, run: Run) -> None:
        """Take a running trajectory out of the batch; its KV stays."""
        grown = self.steps - run.joined
        run.done += grown
        run.left -= grown
        run.context += grown
        self._facts.generated_tokens += grown
        self.size -= 1
        self.context -= run.context
        left = self.by_version[run.version] - 1
        if left:
            self.by_version[run.version] = left
        else:
            del self.by_version[run.version]

    def remove(self, run: Run) -> None:
        """Forget a placement, wherever it stands."""
        if run.state == RUNNING:
            self.advance(self._clock.now)
            self.leave(run)
        self.drop(run)
        run.state = DEAD
        del self.runs[run.fence]
        self.touch()

    def _end_turn(self, run: Run) -> None:
        self.leave(run)
        job = run.job
        turns = run.turns
        trajectory, fence = run.trajectory, run.fence
        if run.turn == len(turns) - 1:
            self.drop(run)
            run.state = DEAD
            del self.runs[fence]
            job.whole = True
            job.total = run.context
            done = run.done
            self.emit(TrajectoryFinished(trajectory, fence, done, run.segments_at(done)))
            return
        run.state = PAUSED
        run.env = AWAITED
        self.paused.append(run)
        self.emit(TrajectoryPaused(trajectory, fence, run.turn + 1))
        hangs = self._around.hangs
        if hangs is None or not hangs(run):
            run.answer_at = self._clock.now + turns[run.turn].environment_s
            self._clock.at(run.answer_at, self.answer, run)

    def _fail(self, run: Run, reason: str) -> None:
        self.remove(run)
        self._facts.cancelled_tokens += run.done
        self.emit(TrajectoryFailed(run.trajectory, run.fence, reason))

    # Standing still, and continuing

    def answer(self, run: Run) -> None:
        """The environment has answered: the next turn wants a slot."""
        if run.state == DEAD or run.env != AWAITED:
            return
        if self.frozen_until > self._clock.now:
            self._clock.at(self.frozen_until, self.answer, run)
            return
        run.env = ANSWERED
        if run.state == PAUSED:
            self.go_on(run)

    def go_on(self, run: Run) -> None:
        """A run that stood still takes its place again: before its environment, or in line."""
        if run.env == AWAITED:
            run.state = PAUSED
            return
        if run.env == ANSWERED:
            turns = run.turns
            self.emit(TrajectoryResumed(run.trajectory, run.fence, run.turn + 1))
            observed = turns[run.turn].observation_tokens
            run.env = NO_ANSWER
            run.turn += 1
            run.left = turns[run.turn].generate_tokens
            run.context += observed
            run.debt += observed
        run.state = RETURNING
        self._returning.append(run)
        self.touch()

    # Memory

    def _spare(self) -> int:
        # A batch of one continues into what is reserved: nothing else could make room for it.
        room = self.capacity - self.used
        return room - self.reserved_kv if self.size > 1 else room

    def _fits(self, run: Run) -> bool:
        needed = self.missing(run)
        room = self.capacity - self.used - self.reserved_kv
        if self.size:
            return needed + max(self._watermark, self.size) < room
        if needed < room:
            return True
        self._offload_idle(run)
        needed = self.missing(run)
        if needed >= self.capacity:
            self._fail(run, "kv_capacity")
            return False
        return needed < self.capacity - self.used - self.reserved_kv

    def _relieve(self) -> None:
        """Send the youngest of the batch to host memory, one by one, until a step fits."""
        while self._spare() < self.size:
            run = next(run for run in reversed(self.runs.values()) if run.state == RUNNING)
            if self.size > 1:
                self.leave(run)
                run.state = RETURNING
                self._returning.appendleft(run)
                self._swap_out(run)
                continue
            self._offload_idle(run)
            if self.used >= self.capacity:
                self._fail(run, "kv_capacity")

    def _offload_idle(self, keep: Run) -> None:
        """Send the KV of every run that is not in the batch to host memory."""
        for run in self.runs.values():
            if run.held and run is not keep and run.state != RUNNING:
                self._swap_out(run)

    def _swap_out(self, run: Run) -> None:
        tokens = self.drop(run)
        run.on_host = True
        self._facts.preemptions += 1
        self.stall(self._around.costs.park_time(tokens) * self.slow)
