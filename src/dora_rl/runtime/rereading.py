"""The journal is the truth: its events, through a fresh core, give the state that the run had.

What is read is what the ledger vouches for. A journal that was altered, or a core that decides
otherwise now, is refused.
"""

from pathlib import Path

from dora_rl.core.commands import Halt
from dora_rl.core.errors import JournalError, UserError
from dora_rl.core.journal import (
    Header,
    Record,
    Written,
    closed,
    handled_line,
    read_journal,
    verify_journal,
)
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.runtime.listening import Listener
from dora_rl.store.ledger import Position
from dora_rl.store.rundir import CONFIG, JOURNAL, JournalFile

_GOES_ON = "goes on"


def read_journal_again(
    run: Path, position: Position, orchestrator: Orchestrator, listeners: list[Listener]
) -> Halt | None:
    """Bring a fresh core, and whoever listens, to where the run was last committed.

    How it was halted there, if it was.
    """
    halted: Halt | None = None
    if not position.records:
        return halted
    journal = JournalFile(run.name, run / JOURNAL)
    if not journal.path.is_file():
        raise JournalError(f"no journal at `{journal.path}`. Put it back, or start a new run.")
    vouched = Written(position.records, position.bytes, position.sha256)
    try:
        verify_journal(closed(journal.raw_lines(), vouched, _GOES_ON))
    except JournalError as error:
        raise JournalError(f"`{journal.path}` cannot be resumed: {error}") from None
    for entry in read_journal(closed(journal.raw_lines(), vouched, _GOES_ON)):
        if isinstance(entry, Header):
            if entry.settings != orchestrator.settings:
                raise UserError(
                    f"`{run / CONFIG}` is not what the run was started with: the journal has "
                    "other settings. Put it back as it was."
                )
        elif isinstance(entry, Record):
            if entry.refused is not None:
                for listener in listeners:
                    listener.refused(entry.now, entry.event, entry.refused)
                continue
            commands = orchestrator.handle(entry.now, entry.event)
            if handled_line(entry.now, entry.event, commands) != entry.text:
                raise UserError(
                    f"this dora-rl decides otherwise than the one that wrote `{journal.path}` "
                    f"(line {entry.line}). Resume with that version."
                )
            for listener in listeners:
                listener.observed(entry.now, entry.event, commands)
            halted = next((c for c in commands if isinstance(c, Halt)), halted)
    return halted
