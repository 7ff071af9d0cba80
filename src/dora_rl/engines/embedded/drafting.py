"""Drafts for the sequences of a step, from what was written to their prompts.

Texts are a sequence's own, its prompt and its siblings': those of the same version and prompt that
are here, or ended here while one of them still was. They are counted when a step has few sequences,
some tokens a step, so that a full batch pays nothing and a straggler is never held up.
"""

from collections import deque
from collections.abc import Sequence as Series
from dataclasses import dataclass, field
from typing import Protocol

from dora_rl.core.protocol.types import TrajectoryId
from dora_rl.engines.embedded.sequences import Prompt, Sequence
from dora_rl.engines.speculation import (
    Acceptance,
    Continuations,
    Draft,
    PassCosts,
    Speculation,
    most_sequences,
    worthwhile,
)

_COUNTED_A_STEP = 128  # tokens of one sequence's texts: a tenth of a millisecond
_MOST_COUNTED = 8192  # tokens of a prompt's texts: some ten megabytes
_MOST_WAITING = 64  # texts that wait to be counted: full batches count none, and may never end


class Drafter(Protocol):
    """Proposes tokens. It may propose anything: each is checked before it is believed."""

    def propose(self, sequences: Series[Sequence], costs: PassCosts) -> Series[Draft]:
        """A draft for each of the sequences of a step, or none for any."""

    def verified(self, sequence: Sequence, draft: Draft, accepted: int) -> None:
        """So many tokens of its draft were the ones drawn, before another was or it ended."""

    def ended(self, sequence: Sequence) -> None:
        """It is no longer here."""


@dataclass(slots=True)
class _Reader:
    """A sequence: how many of its own tokens are counted, and how well its drafts do."""

    counted: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)


class _Texts:
    """What was written to one prompt."""

    def __init__(self, prompt: Prompt) -> None:
        self.continuations = Continuations()
        self.readers: dict[TrajectoryId, _Reader] = {}
        # Texts, from a token on; the oldest give way.
        self._uncounted: deque[tuple[Series[int], int]] = deque(maxlen=_MOST_WAITING)
        self.add(prompt.tokens[-_MOST_COUNTED // 2 :], 0)

    def reader(self, sequence: Sequence) -> _Reader:
        found = self.readers.get(sequence.id)
        if found is None:
            found = self.readers[sequence.id] = _Reader()
        return found

    def add(self, text: Series[int], counted: int) -> None:
        self._uncounted.append((text, counted))

    def catch_up(self, sequence: Sequence) -> None:
        """Count what the sequence has written since, then some of what others had."""
        if self.continuations.counted > _MOST_COUNTED:
            self.continuations.clear()
            self._uncounted.clear()
        reader, own = self.reader(sequence), sequence.own
        reader.counted = self._count(own, max(reader.counted, len(own) - _MOST_COUNTED // 2))
        if self._uncounted:
            text, counted = self._uncounted.popleft()
            if (counted := self._count(text, counted)) < len(text):
                self._uncounted.appendleft((text, counted))

    def _count(self, text: Series[int], start: int) -> int:
        stop = min(len(text), start + _COUNTED_A_STEP)
        self.continuations.count(text, start, stop)
        return stop


class TextDrafter:
    """See `Drafter`: by counts of what followed the same few tokens before."""

    def __init__(self, mode: Speculation) -> None:
        self._mode = mode
        self._texts: dict[Prompt, _Texts] = {}

    def propose(self, sequences: Series[Sequence], costs: PassCosts) -> Series[Draft]:
        if len(sequences) > most_sequences(self._mode, costs):
            return ()
        for sequence in sequences:
            self._texts_of(sequence.prompt).catch_up(sequence)
        return [self._draft(sequence, len(sequences), costs) for sequence in sequences]

    def verified(self, sequence: Sequence, draft: Draft, accepted: int) -> None:
        acceptance = self._texts[sequence.prompt].reader(sequence).acceptance
        acceptance.add(draft.probabilities, accepted)

    def ended(self, sequence: Sequence) -> None:
        texts = self._texts_of(sequence.prompt)
        reader = texts.readers.pop(sequence.id, None)
        texts.add(sequence.own, reader.counted if reader else 0)
        if not sequence.prompt.holders:
            del self._texts[sequence.prompt]

    def _texts_of(self, prompt: Prompt) -> _Texts:
        if prompt not in self._texts:
            self._texts[prompt] = _Texts(prompt)
        return self._texts[prompt]

    def _draft(self, sequence: Sequence, sequences: int, costs: PassCosts) -> Draft:
        texts = self._texts[sequence.prompt]
        acceptance = texts.reader(sequence).acceptance
        draft = texts.continuations.likely(sequence.own, acceptance.trust)
        draft = draft.cut(worthwhile(draft.probabilities, sequences, costs))
        if not draft.tokens:
            acceptance.fade()
        return draft
