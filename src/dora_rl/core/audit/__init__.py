"""An independent check of a run: a fold over what was reported and what was asked for.

`Audit` sees events and commands only, keeps its own books, and shares no code with the parts
of the core that decide. It serves live, as an observer, and offline, on a journal. Memory is
in the order of the outstanding work; the cost of an event does not depend on its history.
"""

from dora_rl.core.audit.fold import Audit
from dora_rl.core.audit.offline import audit_journal
from dora_rl.core.audit.report import AuditReport, Check, LengthBias, Promise, Spread

__all__ = [
    "Audit",
    "AuditReport",
    "Check",
    "LengthBias",
    "Promise",
    "Spread",
    "audit_journal",
]
