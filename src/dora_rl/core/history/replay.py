"""A journal through a fresh orchestrator: the same events must give the same commands.

Compared is the whole line, byte for byte. It reads lines and must not know files.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from dora_rl.core.history.journal import (
    Closing,
    Header,
    Record,
    handled_line,
    read_journal,
    refused_line,
)
from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.errors import RefusedEvent
from dora_rl.core.protocol.events import Event
from dora_rl.core.protocol.settings import Settings


class Decider(Protocol):
    """What is replayed: the orchestrator, or a stand-in."""

    def handle(self, now: float, event: Event) -> Sequence[Command]: ...


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where the core decided otherwise; both sides as they stand in a journal."""

    line: int
    now: float
    event: str
    expected: str
    got: str


@dataclass(frozen=True, slots=True)
class ReplayReport:
    paradigm: str
    records: int
    replayed: int
    refused: int
    end: str
    difference: Difference | None

    @property
    def ok(self) -> bool:
        return self.difference is None

    def summary(self) -> list[str]:
        """The report as lines for people."""
        found = self.difference
        if found is None:
            return [
                f"{self.paradigm}: identical, {self.replayed} events "
                f"({self.refused} refused), ended: {self.end}"
            ]
        return [
            f"{self.paradigm}: DIFFERENT at line {found.line}, "
            f"event {self.replayed} of {self.records}",
            f"  at {found.now:.6g} s: {found.event}",
            f"  expected: {found.expected}",
            f"  got:      {found.got}",
        ]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def _orchestrator(settings: Settings) -> Decider:
    from dora_rl.core.orchestrator import Orchestrator

    return Orchestrator(settings)


def replay(
    lines: Iterable[str], make: Callable[[Settings], Decider] = _orchestrator
) -> ReplayReport:
    """Feed a journal's events to what `make` builds, up to the first difference.

    The rest is still read, so that an altered journal is refused rather than called different.
    """
    header: Header | None = None
    closing: Closing | None = None
    decider: Decider | None = None
    difference: Difference | None = None
    replayed = refused = 0
    for entry in read_journal(lines):
        if isinstance(entry, Header):
            header = entry
            decider = make(entry.settings)
        elif isinstance(entry, Closing):
            closing = entry
        elif difference is None:
            assert decider is not None
            difference = _compare(decider, entry)
            replayed += 1
            refused += entry.refused is not None
    assert header is not None and closing is not None, "else the journal was refused"
    return ReplayReport(
        str(header.settings.paradigm),
        closing.records,
        replayed,
        refused,
        closing.reason,
        difference,
    )


def _compare(decider: Decider, record: Record) -> Difference | None:
    now, event = record.now, record.event
    try:
        got = handled_line(now, event, decider.handle(now, event))
    except RefusedEvent as error:
        got = refused_line(now, event, str(error))
    except Exception as error:  # the core crashed, and did not when this was written
        got = f"{type(error).__name__}: {error}"
    if got == record.text:
        return None
    return Difference(record.line, now, repr(event), *_abridged(record.text, got))


def _abridged(expected: str, got: str, around: int = 200) -> tuple[str, str]:
    """Both lines about the first byte that differs: a batch can fill many screens."""
    at = next(
        (i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b),
        min(len(expected), len(got)),
    )
    start = max(0, at - around)

    def cut(text: str) -> str:
        head = "..." if start else ""
        tail = "..." if len(text) > at + around else ""
        return f"{head}{text[start : at + around]}{tail}"

    return cut(expected), cut(got)
