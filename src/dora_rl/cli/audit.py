"""`dora-rl audit`: the promises of a run, checked from what it wrote."""

from pathlib import Path

import click

from dora_rl.cli._journals import check_each
from dora_rl.core.audit import AuditReport, audit_journal

_EPILOG = """\b
Checked are: one version for each trajectory (C1), nothing lost (C2), staleness within K (C3),
trained once, leases, verified installs, one live placement, migrations and fencing.
`partial` and `in_flight` do not promise C1 and C3: what they do instead is counted and noted,
and does not fail the audit. Event N of a report is line N + 1 of the journal.

\b
Exit code: 0 if every promise holds, 1 if one is broken, 2 if RUN cannot be read.

\b
Examples:
  dora-rl simulate default --out runs/first
  dora-rl audit runs/first
  dora-rl audit runs/first --verbose
  dora-rl audit runs/first/multi_version --json
  dora-rl audit runs/first/in_flight/journal.jsonl
"""


@click.command(epilog=_EPILOG)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Write the report as JSON.")
@click.option(
    "--verbose", "-v", is_flag=True, help="Show counts and every promise of a clean run too."
)
@click.pass_context
def command(ctx: click.Context, run: Path, as_json: bool, verbose: bool) -> None:
    """Check the promises of a run from what it wrote.

    RUN is a run directory, with one paradigm or several inside, or a journal. The audit
    keeps its own records: it shares nothing with the code that decided. A run that kept its
    promises gets one line, and notes where there are some.
    """
    lines = AuditReport.summary if verbose else AuditReport.brief
    check_each(ctx, run, as_json, "Auditing", audit_journal, lines)
