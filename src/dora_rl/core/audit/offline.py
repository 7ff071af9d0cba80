"""The audit of a journal: the same fold, over what a run wrote."""

from collections.abc import Iterable

from dora_rl.core.audit.fold import Audit
from dora_rl.core.audit.report import AuditReport
from dora_rl.core.history.journal import Header, Record, read_journal


def audit_journal(lines: Iterable[str]) -> AuditReport:
    """Audit a journal; event N of the report is line N + 1 of the journal."""
    audit: Audit | None = None
    for entry in read_journal(lines):  # to its very end, where alterations show
        if isinstance(entry, Header):
            audit = Audit(entry.settings)
        elif isinstance(entry, Record):
            assert audit is not None
            if entry.refused is None:
                audit.observe(entry.now, entry.event, entry.commands)
            else:
                audit.observe_refused(entry.now, entry.event)
    assert audit is not None
    return audit.report()
