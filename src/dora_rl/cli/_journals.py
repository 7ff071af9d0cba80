"""What `audit` and `replay` share: each journal of a run, proven whole, then read with progress."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click

from dora_rl.core.history.journal import verify_journal
from dora_rl.core.protocol.errors import JournalError
from dora_rl.store.rundir import JournalFile, find_journals

_LONG = 5_000_000  # bytes: below, it is done before a bar could be read
_TICK = 1 << 20


class Report(Protocol):
    @property
    def ok(self) -> bool: ...
    def to_json(self) -> dict[str, Any]: ...


R = TypeVar("R", bound=Report)
Read = Callable[[Iterator[str]], R]


def check_each(
    ctx: click.Context,
    run: Path,
    as_json: bool,
    label: str,
    read: Read[R],
    lines: Callable[[R], list[str]],
) -> None:
    """Read every journal of a run, show the reports as `lines`, and exit 1 if one is not ok."""
    journals = find_journals(run)
    for journal in journals:  # all of them first: bad input is refused before anything is shown
        _reading(journal, "Verifying", verify_journal)
    reports = {journal.name: _reading(journal, label, read) for journal in journals}
    ok = all(report.ok for report in reports.values())
    if as_json:
        runs = {name: report.to_json() for name, report in reports.items()}
        click.echo(json.dumps({"ok": ok, "runs": runs}, indent=2))
    else:
        for report in reports.values():
            for line in lines(report):
                click.echo(line)
    if not ok:
        ctx.exit(1)


T = TypeVar("T")


def _reading(journal: JournalFile, label: str, read: Callable[[Iterator[str]], T]) -> T:
    try:
        if journal.size < _LONG or not sys.stderr.isatty():
            return read(journal.lines())
        with click.progressbar(
            length=journal.size, label=f"{label} {journal.name}", file=sys.stderr
        ) as bar:
            return read(_ticking(journal.lines(), bar.update))
    except JournalError as error:
        raise JournalError(f"{journal.path}: {error}") from None


def _ticking(lines: Iterator[str], update: Callable[[int], None]) -> Iterator[str]:
    unseen = 0
    for line in lines:
        unseen += len(line)
        if unseen >= _TICK:
            update(unseen)
            unseen = 0
        yield line
    update(unseen)
