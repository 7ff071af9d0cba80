"""`dora-rl chaos`: a real run under random faults, and its audit."""

import json
import time
from pathlib import Path
from typing import Any

import click

from dora_rl.cli import _benching as benching
from dora_rl.cli._logged import LoggedCommand

_EPILOG = """\b
Trains for real, the quickstart unless a CONFIG is named, with a reward that now and then raises,
hangs, dies or is not a number. Meanwhile, at random moments, processes are killed, stopped and
continued, the driver included; messages are duplicated; the disk is slow or full; files are
truncated or altered. A run that has ended is resumed; one that names a damaged file gets it
restored. At the end it is stopped as by Ctrl-C, and audited from its journal and its ledger.
OUT.log has its output, OUT.damaged the originals of damaged files.

\b
With --runtime ray it trains on a Ray cluster of several nodes of this machine, which it starts:
actors, raylets and whole nodes are killed as well, and nodes are added again. A process that
outlives its node or its run is a failure. OUT.ray has what the nodes print.

\b
Exit code: 0 if no promise was broken, 1 if one was or the run did not resume or stop as it should,
2 for bad input.

\b
Examples:
  dora-rl chaos
  dora-rl chaos --minutes 20 --seed 7 --out runs/storm
  dora-rl chaos --faults kill-driver,kill-trainer --every 4 --json
  dora-rl chaos --runtime ray --minutes 10 --seed 5
"""


@click.command(cls=LoggedCommand, epilog=_EPILOG)
@click.argument("config", required=False, metavar="[CONFIG.toml]", type=click.Path(path_type=Path))
@click.option(
    "--runtime",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="Where the workers run: processes of this machine, or of the nodes of a Ray cluster.",
)
@click.option(
    "--faults",
    metavar="NAME,…",
    default="",
    help="Which faults; by default all of --list that this machine supports.",
)
@click.option("--list", "as_list", is_flag=True, help="Show the faults, and end.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the faults.")
@click.option("--minutes", type=float, default=5.0, show_default=True)
@click.option(
    "--every", type=float, default=8.0, show_default=True, help="Mean seconds between two faults."
)
@click.option("--out", type=click.Path(path_type=Path), help="The run directory, new or empty.")
@benching.as_json
@click.pass_context
def command(
    ctx: click.Context,
    config: Path | None,
    runtime: str,
    faults: str,
    as_list: bool,
    seed: int,
    minutes: float,
    every: float,
    out: Path | None,
    as_json: bool,
) -> None:
    """Train under random faults, and audit the run."""
    from dora_rl.config import load_toml
    from dora_rl.extras import require
    from dora_rl.faultlab.faults import FAULTS, available, of_runtime
    from dora_rl.faultlab.storm import StormSettings, run_storm
    from dora_rl.runtime.errors import RunFailed

    if as_list:
        for name, (_, words) in FAULTS.items():
            click.echo(f"{name:<15} {words}")
        return
    require("dora-rl chaos", "engine", "train")
    names = tuple(name.strip() for name in faults.split(",") if name.strip())
    settings = StormSettings(
        config=load_toml(config) if config is not None else _quickstart(),
        out=out or Path(f"runs/chaos-{time.strftime('%Y%m%d-%H%M%S')}"),
        faults=names or tuple(available(runtime)),
        runtime=runtime,
        minutes=minutes,
        every_s=every,
        seed=seed,
    )

    def tell(line: str) -> None:
        click.echo(line, err=True)

    left_out = [name for name in of_runtime(runtime) if not names and name not in settings.faults]
    if left_out:
        tell(f"left out, not supported on this machine: {', '.join(left_out)}")
    try:
        with benching.children():
            result = run_storm(settings, tell)
    except RunFailed as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2))
    else:
        for line in result.summary():
            click.echo(line)
    ctx.exit(0 if result.ok else 1)


def _quickstart() -> dict[str, Any]:
    from dora_rl.cli._training import quickstart_config
    from dora_rl.config import load_toml

    data = load_toml(quickstart_config())
    return {**data, "task": {**data["task"], "reward": "dora_rl.faultlab.rewards:unreliable"}}
