"""Which rows a step feeds of each sequence, and what remains of those that were not to be.

A draft goes as far as the sequence may still get and free KV blocks reach; nobody is parked for
one. After the pass, KV and blocks are as if only the accepted tokens had been fed.
"""

from collections.abc import Sequence as Series

from dora_rl.engines.base import room
from dora_rl.engines.embedded.drafting import Drafter, TextDrafter
from dora_rl.engines.embedded.forwarding import Feed
from dora_rl.engines.embedded.scheduler import Scheduler
from dora_rl.engines.embedded.sequences import Sequence
from dora_rl.engines.speculation import NOTHING, Draft


class Speculator:
    """The drafts of one engine, and how many of their tokens were accepted."""

    def __init__(self, scheduler: Scheduler, context: int, drafter: Drafter | None = None) -> None:
        self.proposed = self.accepted = 0
        self._drafter = drafter or TextDrafter()
        self._scheduler = scheduler
        self._context = context

    def feeds(self, sequences: Series[Sequence]) -> list[Feed]:
        """What is fed of each."""
        drafts = self._drafter.propose(sequences) or [NOTHING] * len(sequences)
        return [self._feed(*both) for both in zip(sequences, drafts, strict=True)]

    def verified(self, feed: Feed, end: int, accepted: int) -> None:
        """The sequence has so many tokens of its draft, which was fed up to the place `end`."""
        if feed.draft.tokens:
            self._scheduler.settle(feed.line, end)
            self._drafter.verified(feed.line, feed.draft, accepted)
            self.proposed += len(feed.draft.tokens)
            self.accepted += accepted

    def withdraw(self, feed: Feed) -> Feed:
        """The draft is not looked at: the same without it."""
        if feed.draft.tokens:
            self._scheduler.settle(feed.line, feed.end, ahead=1)
        return Feed(feed.line)

    def ended(self, sequence: Sequence) -> None:
        self._drafter.ended(sequence)

    def _feed(self, sequence: Sequence, draft: Draft) -> Feed:
        if not draft.tokens:
            return Feed(sequence)
        request, response = sequence.request, len(sequence.own) - 1
        left = room(request.sampling.max_tokens, self._context, len(request.prompt), response)
        most = self._scheduler.lend(sequence, min(left - 1, len(draft.tokens)))
        return Feed(sequence, Draft(draft.tokens[:most], draft.probabilities[:most]))
