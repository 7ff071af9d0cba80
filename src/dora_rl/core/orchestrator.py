"""The core's one entry: an event in, commands out, and all that it knows in a snapshot."""

from typing import Any

from dora_rl.core.codec import decode, encode
from dora_rl.core.commands import Command
from dora_rl.core.duties import settle
from dora_rl.core.errors import RefusedEvent
from dora_rl.core.events import Event
from dora_rl.core.handlers import HANDLERS
from dora_rl.core.outstanding import outstanding
from dora_rl.core.settings import Settings
from dora_rl.core.state import State


class Orchestrator:
    """Decides for a whole run. The same events at the same times give the same commands."""

    def __init__(self, settings: Settings) -> None:
        self.state = State.fresh(settings)

    @property
    def settings(self) -> Settings:
        return self.state.settings

    def handle(self, now: float, event: Event) -> list[Command]:
        """Take one event in; raise `RefusedEvent`, with nothing changed, if it makes no sense.

        `now` is the world's monotonic clock; a value below the last one counts as the last.
        """
        handler = HANDLERS.get(type(event))
        if handler is None:
            raise RefusedEvent(f"not an event: `{event!r}`")
        state = self.state
        if state.halted:
            return []
        before = state.now
        if now > before:
            state.now = now
        try:
            handler(state, event)
        except RefusedEvent:
            state.now = before
            raise
        settle(state)
        out, state.out = state.out, []
        return out

    def outstanding(self) -> list[Command]:
        """What was asked for and not answered, but for commands to instances."""
        return outstanding(self.state)

    def snapshot(self) -> Any:
        """Everything known, as JSON-able data."""
        return encode(self.state)

    @classmethod
    def restore(cls, snapshot: Any) -> "Orchestrator":
        """An orchestrator that goes on exactly as the one that was saved."""
        self = cls.__new__(cls)
        self.state = decode(State, snapshot)
        self.state.rebuild()
        return self
