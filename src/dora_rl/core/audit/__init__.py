"""An independent check of a run: a fold over what was reported and what was asked for.

`Audit` sees events and commands only, keeps its own records, and shares no code with the parts
of the core that decide. It serves live, as an observer, and offline, on a journal. Memory is
in the order of the outstanding work; beside it, one byte for each group, a record for each version
and a count for each length that occurs are kept. The cost of an event does not depend on what was
before.
"""

from dora_rl.core.audit.fold import RECORDS, Audit
from dora_rl.core.audit.offline import audit_journal
from dora_rl.core.audit.report import AuditReport, Check, LengthBias, Promise, Spread

__all__ = [
    "RECORDS",
    "Audit",
    "AuditReport",
    "Check",
    "LengthBias",
    "Promise",
    "Spread",
    "audit_journal",
]
