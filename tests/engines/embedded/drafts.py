"""Drafts for tests, whose random models repeat nothing: by an engine that looks ahead."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from dora_rl.engines.base import Sampled
from dora_rl.engines.embedded import EmbeddedEngine
from dora_rl.engines.embedded import sequences as inside
from dora_rl.engines.embedded.forwarding import TorchForwarder
from dora_rl.engines.embedded.speculator import Speculator
from dora_rl.engines.speculation import Draft, PassCosts, Speculation

Spoil = Callable[[list[int]], list[int]]
_AHEAD = 6  # tokens that are looked up at once


class LookingAhead:
    """Proposes what an engine without speculation draws next, as `spoil` leaves it."""

    def __init__(self, engine: EmbeddedEngine, spoil: Spoil) -> None:
        self._engine = twin(engine)
        self._spoil = spoil
        self._known: dict[inside.Sequence, list[int]] = {}
        self.log: list[tuple[int, int]] = []  # proposed and accepted, of each draft

    def propose(self, sequences: Sequence[inside.Sequence], costs: PassCosts) -> list[Draft]:
        tokens = [tuple(self._spoil(self._right(sequence))) for sequence in sequences]
        return [Draft(one, (0.5,) * len(one)) for one in tokens]

    def verified(self, sequence: inside.Sequence, draft: Draft, accepted: int) -> None:
        assert draft.tokens
        self.log.append((len(draft.tokens), accepted))

    def ended(self, sequence: inside.Sequence) -> None:
        self._known.pop(sequence, None)

    def _right(self, sequence: inside.Sequence) -> list[int]:
        own = sequence.own
        known = self._known.get(sequence, [])
        if known[: len(own)] != own or len(known) == len(own):
            known = self._known[sequence] = own + self._look_ahead(sequence)
        return known[len(own) :]

    def _look_ahead(self, sequence: inside.Sequence) -> list[int]:
        request = replace(
            sequence.request,
            prefix=tuple(sequence.generated),
            turn_start=sequence.turn_start,
            hold=False,
            held=False,
        )
        self._engine.submit(request)
        found: list[int] = []
        while not self._engine.idle and len(found) < _AHEAD:
            for output in self._engine.step():
                if isinstance(output, Sampled):  # one that fails has nothing ahead
                    found += output.tokens
        self._engine.cancel(request.trajectory)
        return found


def twin(engine: EmbeddedEngine) -> EmbeddedEngine:
    """An engine of the same versions, whatever they are by then, without speculation."""
    other = EmbeddedEngine(
        engine.config,
        replace(engine.settings, speculation=Speculation.OFF, slots=1),
        engine._tokenizer,
    )
    other._versions, other._version_slots = engine._versions, engine._version_slots
    other._by_torch = TorchForwarder(
        engine.config, engine._versions, other._pool, exact=engine.settings.deterministic
    )
    return other


def look_ahead(engine: EmbeddedEngine, spoil: Spoil) -> LookingAhead:
    """Let the engine have such drafts."""
    drafter = LookingAhead(engine, spoil)
    engine._speculator = Speculator(engine._scheduler, engine.context, drafter)
    return drafter


def spoilt(vocab_size: int, seed: int = 0) -> Spoil:
    """Cut short, lengthened, or with a token changed; some are right."""
    rng = random.Random(seed)

    def spoil(tokens: list[int]) -> list[int]:
        tokens = tokens[: rng.randint(0, _AHEAD)]
        if rng.random() < 0.5:
            tokens += [rng.randrange(vocab_size) for _ in range(rng.randint(0, 3))]
        if tokens and rng.random() < 0.3:
            tokens[rng.randrange(len(tokens))] = rng.randrange(vocab_size)
        return tokens

    return spoil
