"""`dora-rl scale`: another number of rollout instances for a run that is going on."""

import json
import time
from pathlib import Path

import click

_TAKE_S = 60.0  # for the run to take the request: it looks twice a second, between its commits

_EPILOG = """\b
Instances that are added join while the run goes on, on Ray as soon as a node has room for them.
Those that leave, of the highest numbers, hand their trajectories over or finish them: nothing is
lost. A resume starts with runtime.instances of the run's config.toml again.
Exit code: 0 if the run has taken the request, 1 if it has not in time, 2 for bad input.

\b
Examples:
  dora-rl scale runs/first --instances 4
  dora-rl scale runs/first --instances 1 --json
"""


@click.command(epilog=_EPILOG)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--instances", required=True, type=int, metavar="N", help="Rollout instances.")
@click.option("--json", "as_json", is_flag=True, help="Write what was asked for as JSON.")
@click.pass_context
def command(ctx: click.Context, run: Path, instances: int, as_json: bool) -> None:
    """Ask a running run for another number of rollout instances.

    RUN is the run directory of a `dora-rl train` that is going on.
    """
    from dora_rl.store.scale_request import check_request, is_taken, put_request, withdraw

    check_request(run, instances)
    put_request(run, instances)
    deadline = time.monotonic() + _TAKE_S
    try:
        while not is_taken(run) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        taken = is_taken(run)
        withdraw(run)
    if as_json:
        found = {"run": str(run), "instances": instances, "taken": taken}
        click.echo(json.dumps(found, indent=2))
    elif taken:
        click.echo(f"{run}: rollout instances are to be {instances}")
    if not taken:
        click.echo(f"error: `{run}` took no request for {_TAKE_S:.0f} s. Try again.", err=True)
        ctx.exit(1)
