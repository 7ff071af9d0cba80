"""Prompts arrive from their stream, in order."""

from dora_rl.core.events import PromptsAvailable
from dora_rl.core.handlers.common import absorb, refuse
from dora_rl.core.state import State


def prompts_available(state: State, event: PromptsAvailable) -> None:
    ledger = state.ledger
    if event.first < 0 or event.count < 0:
        refuse(event, "positions and counts of prompts are not negative")
    if event.first > ledger.prompts:
        refuse(event, f"prompts {ledger.prompts} to {event.first - 1} were skipped")
    if event.first < ledger.prompts or state.fetching is None:
        if event.first == ledger.prompts and not ledger.exhausted:
            refuse(event, "no prompts were asked for")
        return absorb(state, "duplicate")
    if not event.count and not event.exhausted:
        refuse(event, "no prompt came, and the stream is not exhausted")
    ledger.prompts += event.count
    ledger.exhausted = event.exhausted
    state.fetching = None
