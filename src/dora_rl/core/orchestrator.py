"""The core's one entry: an event in, commands out, and all that it knows in a snapshot."""

from typing import Any

from dora_rl.core.actions.settle import settle
from dora_rl.core.actions.unanswered import unanswered_commands
from dora_rl.core.handlers import HANDLERS
from dora_rl.core.history.codec import decode, encode
from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.errors import RefusedEvent
from dora_rl.core.protocol.events import Event, StepLimitRaised
from dora_rl.core.protocol.settings import Settings
from dora_rl.core.state.run import State


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
        if state.halted and not isinstance(event, StepLimitRaised):
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

    def unanswered(self) -> list[Command]:
        """What was asked for and not answered, but for commands to instances."""
        return unanswered_commands(self.state)

    def snapshot(self) -> Any:
        """Everything known, as JSON-able data."""
        return encode(self.state)

    def load(self, snapshot: Any) -> None:
        """Continue exactly as the one that was saved; JournalError if it does not fit."""
        state = decode(State, snapshot)
        state.rebuild()
        self.state = state

    @classmethod
    def restore(cls, snapshot: Any) -> "Orchestrator":
        """A new orchestrator from a snapshot."""
        self = cls.__new__(cls)
        self.load(snapshot)
        return self
