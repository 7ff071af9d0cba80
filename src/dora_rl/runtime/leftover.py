"""What a stopped run left for its next life, and how its books are read again.

The journal is the truth: its events, through a fresh core, give the state that the run had. The
checkpoint and `resume.msgpack` bring what the core must not know. A journal that was altered, or
a core that decides otherwise now, is refused.
"""

from pathlib import Path
from typing import Any

import msgspec

from dora_rl.core.errors import JournalError, UserError
from dora_rl.core.journal import Header, Record, handled_line, read_journal, verify_journal
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.runtime import messages as ms
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.listening import Listener
from dora_rl.runtime.shelf import Item
from dora_rl.store.rundir import CONFIG, JournalFile, find_journals

RESUME_FILE = "resume.msgpack"


class Leftover(msgspec.Struct, frozen=True, kw_only=True):
    """What a stopped run needs besides its journal and its checkpoint."""

    checkpoint: str
    now: float
    items: tuple[Item, ...]
    prefixes: tuple[ms.Prefix, ...]
    config: dict[str, dict[str, Any]]
    """What of the configuration must stay: see `what_stays`."""
    task: str
    """The fingerprint of prompts, tokenizer, rewards and environment."""


def what_stays(config: RunConfig) -> dict[str, dict[str, Any]]:
    """All but where the parts live, where the run is, and what is kept of it."""
    sections: dict[str, dict[str, Any]] = config.model_dump(mode="json", exclude={"runtime"})
    sections["run"] = {key: sections["run"][key] for key in ("steps", "seed")}
    return sections


def check_unaltered(run: Path, config: RunConfig, leftover: Leftover) -> None:
    """Refuse to go on under another configuration."""
    now = what_stays(config)
    for section, values in leftover.config.items():
        for key, value in values.items():
            if now.get(section, {}).get(key) != value:
                raise UserError(
                    f"`{run / CONFIG}` is not what the run was started with: {section}.{key} was "
                    f"`{value}` and is `{now.get(section, {}).get(key)}`. Put it back as it was."
                )


def read_leftover(run: Path) -> Leftover:
    """What a stopped run left for its next life; UserError if it was not stopped to be resumed."""
    file = run / RESUME_FILE
    if not (run / CONFIG).is_file():
        raise UserError(f"not a run: `{run}`. Give the directory of a run that was stopped.")
    if not file.is_file():
        raise UserError(
            f"nothing to resume in `{run}`: {RESUME_FILE} is missing. "
            "A run can be resumed after one Ctrl-C, when it has saved."
        )
    try:
        leftover = msgspec.msgpack.decode(file.read_bytes(), type=Leftover)
    except msgspec.MsgspecError as error:
        raise UserError(f"cannot be read: `{file}`: {error}. Start a new run.") from None
    checkpoint = run / "checkpoints" / leftover.checkpoint
    if not checkpoint.is_dir():
        raise UserError(f"no checkpoint at `{checkpoint}`. Put it back, or start a new run.")
    return leftover


def read_journal_again(run: Path, orchestrator: Orchestrator, listeners: list[Listener]) -> None:
    """Bring a fresh core, and whoever listens, to where the run was stopped."""
    journal = _journal(run)
    try:
        verify_journal(journal.lines())
    except JournalError as error:
        raise JournalError(f"`{journal.path}` cannot be resumed: {error}") from None
    for entry in read_journal(journal.lines()):
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


def _journal(run: Path) -> JournalFile:
    return find_journals(run)[0]
