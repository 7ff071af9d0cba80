"""`dora-rl doctor`: what this machine has, what falls back, what is missing, what would fail."""

import json
from pathlib import Path

import click

from dora_rl.cli import _benching as benching

_EPILOG = """\b
Looks at the processor, memory, disk and libraries, tries every fast path (each falls back where
the machine does not have it), the sandbox of rewards, and trains for one step; nothing is left
behind. DORA_RL_PORTABLE=1 switches every fast path off, as on a machine that has none of them.

\b
Exit code: 0 if dora-rl train works here, 1 if it would fail.

\b
Examples:
  dora-rl doctor
  dora-rl doctor --json
  dora-rl doctor --no-run
"""


@click.command(epilog=_EPILOG)
@click.option("--no-run", is_flag=True, help="Leave the training run of one step out.")
@benching.as_json
@click.pass_context
def command(ctx: click.Context, no_run: bool, as_json: bool) -> None:
    """Tell what this machine has, what falls back, what is missing and what would fail."""
    from dora_rl.doctor.examination import examine

    def tell(line: str) -> None:
        click.echo(f"looking at: {line}", err=True)

    report = examine(Path.cwd(), tell, run=not no_run)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        for line in report.lines():
            click.echo(line)
    ctx.exit(0 if report.ok else 1)
