"""`dora-rl bench`: measurements, as ratios within one run."""

import json
import sys

import click

from dora_rl.core.errors import UserError

_EPILOG = """\b
The world is a cheap driver in virtual time whose own cost is not counted: 4 slots on each
instance, a batch that is as large as the fleet, lognormal lengths, a report of every instance
each 10 s. Each size is warmed up until every slot is busy and two versions are live, and then
measured over whole train steps, so --events is rounded up.

\b
Examples:
  dora-rl bench orchestrator
  dora-rl bench orchestrator --instances 64,1024 --json
"""


@click.group()
def command() -> None:
    """Measure the orchestrator."""


@command.command(epilog=_EPILOG)
@click.option(
    "--instances",
    default="64,512,4096,8192",
    show_default=True,
    metavar="N,N,…",
    help="Numbers of instances to measure, in one run.",
)
@click.option(
    "--events",
    type=click.IntRange(min=1),
    default=150_000,
    show_default=True,
    help="Events to measure at each size, at least.",
)
@click.option("--json", "as_json", is_flag=True, help="Write the measurements as JSON.")
def orchestrator(instances: str, events: int, as_json: bool) -> None:
    """Events per second of the deciding core alone, on fleets of several sizes.

    Shows the cost per event, how it grows from the smallest to the largest fleet, and how
    long a full rebalance takes.
    """
    from dora_rl.benchmarks.orchestrator import check_sizes, measure

    sizes = check_sizes(_numbers(instances))
    shown = sys.stderr.isatty()

    def progress(line: str) -> None:
        if shown:
            click.echo(f"\r\x1b[K{line}", err=True, nl=False)

    result = measure(sizes, events, progress)
    if shown:
        click.echo("\r\x1b[K", err=True, nl=False)
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2))
    else:
        for line in result.summary():
            click.echo(line)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UserError(
            f"--instances must be whole numbers, separated by commas: `{text}`. Use 64,512."
        ) from None
