"""`dora-rl replay`: a journal through the core again."""

from pathlib import Path

import click

from dora_rl.cli._journals import check_each
from dora_rl.core.history.replay import ReplayReport, replay

_EPILOG = """\b
Every event is given to a fresh core at its time, and the commands are compared with the
recorded ones, byte for byte. The first difference is shown with its line.

\b
Exit code: 0 if all are identical, 1 at a difference, 2 if RUN cannot be read.

\b
Examples:
  dora-rl simulate default --out runs/first
  dora-rl replay runs/first
  dora-rl replay runs/first/sync/journal.jsonl --json
"""


@click.command(epilog=_EPILOG)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Write the report as JSON.")
@click.pass_context
def command(ctx: click.Context, run: Path, as_json: bool) -> None:
    """Run a journal through the core again; any difference is an error.

    RUN is a run directory, with one paradigm or several inside, or a journal.
    """
    check_each(ctx, run, as_json, "Replaying", replay, ReplayReport.summary)
