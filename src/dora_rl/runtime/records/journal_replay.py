"""The journal is the truth: its events, through the core, give the state that the run had.

What is read is what the ledger has committed, from the last snapshot on or from the beginning. A
journal that was altered there, or a core that decides otherwise now, is refused.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from dora_rl.core.history.journal import (
    Written,
    check_between,
    handled_line,
    read_between,
    read_header,
    refused_line,
)
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.protocol.commands import Command
from dora_rl.core.protocol.errors import JournalError, RefusedEvent, UserError
from dora_rl.core.protocol.settings import Settings
from dora_rl.runtime.control.listeners import Listener
from dora_rl.store.rundir import CONFIG, JOURNAL, JournalFile


def check_header(run: Path, settings: Settings) -> Written:
    """What the journal was begun with must be what the run is configured with; where it ends."""
    path = run / JOURNAL
    if not path.is_file():
        raise JournalError(f"no journal at `{path}`. Put it back, or start a new run.")
    try:
        header, first = read_header(next(JournalFile(run.name, path).raw_lines(), ""))
    except JournalError as error:
        raise JournalError(f"`{path}` cannot be resumed: {error}") from None
    if header.settings != settings:
        raise UserError(
            f"`{run / CONFIG}` is not what the run was started with: the journal has "
            "other settings. Put it back as it was."
        )
    return first


def replay_between(
    run: Path,
    since: Written,
    until: Written,
    orchestrator: Orchestrator,
    listeners: Sequence[Listener],
) -> None:
    """Give the core, and what follows it, the events of the journal between two places."""
    journal = JournalFile(run.name, run / JOURNAL)

    def lines() -> Iterator[str]:
        return journal.raw_lines(since.bytes)

    try:
        if journal.size < until.bytes:
            raise JournalError(f"{journal.size} bytes are left of {until.bytes}: it was cut")
        check_between(lines(), since, until)
    except JournalError as error:
        raise JournalError(f"`{journal.path}` cannot be resumed: {error}") from None
    for entry in read_between(lines(), since, until):
        now, event = entry.now, entry.event
        commands: Sequence[Command] = ()
        reason = None
        try:
            commands = orchestrator.handle(now, event)
            line = handled_line(now, event, commands)
        except RefusedEvent as error:
            reason = str(error)
            line = refused_line(now, event, reason)
        if line != entry.text:
            raise UserError(
                f"this dora-rl decides otherwise than the one that wrote `{journal.path}` "
                f"(line {entry.line}). Resume with that version."
            )
        for listener in listeners:
            if reason is None:
                listener.observed(now, event, commands)
            else:
                listener.refused(now, event, reason)
