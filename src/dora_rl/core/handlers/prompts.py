"""Prompts arrive from their stream, in order."""

from dora_rl.core.handlers.common import absorb, refuse
from dora_rl.core.protocol.events import PromptsAvailable
from dora_rl.core.state.run import State


def prompts_available(state: State, event: PromptsAvailable) -> None:
    work = state.work
    if event.first < 0 or event.count < 0:
        refuse(event, "positions and counts of prompts are not negative")
    if event.first > work.prompts:
        refuse(event, f"prompts {work.prompts} to {event.first - 1} were skipped")
    if event.first < work.prompts or state.fetching is None:
        if event.first == work.prompts and not work.exhausted:
            refuse(event, "no prompts were asked for")
        return absorb(state, "duplicate")
    if not event.count and not event.exhausted:
        refuse(event, "no prompt came, and the stream is not exhausted")
    work.prompts += event.count
    work.exhausted = event.exhausted
    state.fetching = None
