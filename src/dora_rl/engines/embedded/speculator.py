"""Which rows a step feeds of each sequence, and what remains of those that were not to be.

A draft goes as far as the sequence may still get and free KV blocks reach; nobody is parked for
one. After the pass, KV and blocks are as if only the accepted tokens had been fed.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Series
from functools import partial
from itertools import accumulate

from dora_rl.core.protocol.types import Version
from dora_rl.engines.base import Request, room
from dora_rl.engines.embedded.drafting import Drafter
from dora_rl.engines.embedded.forwarding import Feed
from dora_rl.engines.embedded.scheduler import Scheduler
from dora_rl.engines.embedded.sequences import Prompt, Sequence
from dora_rl.engines.speculation import NOTHING, TYPICAL, Draft, PassCosts
from dora_rl.models.linear import best_time

_TRIAL_ROWS = (1, 2, 4, 8, 16)
_TRIALS = 4


class Speculator:
    """The drafts of one engine, and how many of their tokens were accepted."""

    def __init__(self, scheduler: Scheduler, context: int, drafter: Drafter) -> None:
        self.proposed = self.accepted = 0
        self.costs = TYPICAL
        self._drafter = drafter
        self._scheduler = scheduler
        self._context = context

    def feeds(self, sequences: Series[Sequence]) -> list[Feed]:
        """What is fed of each."""
        drafts = self._drafter.propose(sequences, self.costs) or [NOTHING] * len(sequences)
        return [self._feed(*both) for both in zip(sequences, drafts, strict=True)]

    def verified(self, feed: Feed, accepted: int) -> None:
        """The sequence has so many tokens of its draft, and their KV."""
        if feed.draft.tokens:
            self._scheduler.settle(feed.line)
            self._drafter.verified(feed.line, feed.draft, accepted)
            self.proposed += len(feed.draft.tokens)
            self.accepted += accepted

    def withdraw(self, feed: Feed) -> Feed:
        """The draft is not looked at: the same without it."""
        if feed.draft.tokens:
            self._scheduler.settle(feed.line, ahead=1)
        return Feed(feed.line)

    def ended(self, sequence: Sequence) -> None:
        self._drafter.ended(sequence)

    def _feed(self, sequence: Sequence, draft: Draft) -> Feed:
        if not draft.tokens:
            return Feed(sequence)
        request, response = sequence.request, len(sequence.own) - 1
        left = room(request.sampling.max_tokens, self._context, len(request.prompt), response)
        most = self._scheduler.lend(sequence, min(left - 1, len(draft.tokens)))
        return Feed(sequence, draft.cut(most))


def measured_costs(
    draw: Callable[[list[Feed]], object], scheduler: Scheduler, version: Version, context: int
) -> PassCosts | None:
    """What drawing the tokens of a few numbers of rows takes here.

    None without room to try, in KV or in the context, or where the clock is too coarse to tell.

    In processor time of one thread: the workers of a run start beside each other. A row reads one
    block; what long contexts add is the same for every row.
    """
    most = _TRIAL_ROWS[-1]
    sequence = Sequence(Request(0, version, (0,)), 0, Prompt(version, ()), [0])
    try:
        if context < most or scheduler.lend(sequence, most - 1) < most - 1:
            return None
        draws = [
            partial(draw, [Feed(sequence, Draft((0,) * (rows - 1), (0.0,) * (rows - 1)))])
            for rows in _TRIAL_ROWS
        ]
        rounds = [[best_time([one], 1, time.thread_time) for one in draws] for _ in range(_TRIALS)]
    finally:
        scheduler.settle(sequence)
    seconds = tuple(accumulate(map(min, *rounds), max))  # noise takes no rows away
    return PassCosts(_TRIAL_ROWS, seconds) if seconds[0] > 0 else None
