"""`dora-rl export`: the policy of a run as a directory that other tools load."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from dora_rl.trainer.export import Exported

_EPILOG = """\b
Of a run that trained full weights, DIR is a Hugging Face model directory. Of a LoRA run it is the
adapter as PEFT saves it, with the path of its base; with --merge it is base + alpha / rank * B A,
computed in float32 and stored in the dtype of the base, which loads without PEFT. A run of full
weights has nothing to merge: --merge says so, and exports the same.

\b
The checkpoint is checked to the byte first, and with --merge the base too: one with other weights
than the adapter was trained on is refused. DIR appears whole or not at all; a killed export leaves
at most a hidden .exporting-… beside it, which may be removed.
Needs: pip install 'dora-rl[engine]'
Exit code: 0 if it is there, 2 for bad input.

\b
Examples:
  dora-rl export runs/first --out models/first
  dora-rl export runs/first --step 40 --out models/first-40
  dora-rl export runs/lora --merge --out models/merged --json
"""


@click.command(epilog=_EPILOG)
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write it here: a directory that is new or empty.",
)
@click.option("--step", type=int, metavar="N", help="Of checkpoints/step-N; else of the last.")
@click.option("--merge", is_flag=True, help="Add a LoRA adapter to its base: full weights.")
@click.option("--json", "as_json", is_flag=True, help="Write what was exported as JSON.")
def command(run: Path, out: Path, step: int | None, merge: bool, as_json: bool) -> None:
    """Write the policy of a run's checkpoint, without the trainer's state.

    RUN is a run directory of `dora-rl train`.
    """
    from dora_rl import extras
    from dora_rl.cli._interrupts import kills_interrupt
    from dora_rl.store.rundir import check_free, check_outside, find_checkpoint

    step, checkpoint = find_checkpoint(run, step)
    check_outside(run, out)
    check_free(out)
    extras.require("dora-rl export", "engine")
    from dora_rl.trainer.export import export

    with kills_interrupt():
        done = export(checkpoint, out, merge=merge)
    if merge and done.base is None:
        click.echo(f"note: `{run}` trained full weights: there is no adapter to merge", err=True)
    if as_json:
        merged = done.base is not None
        found = {"out": str(out), "step": step, "merged": merged, "files": list(done.files)}
        click.echo(json.dumps(found, indent=2))
    else:
        click.echo(f"{out}: step {step}, {_what(done)}, {len(done.files)} files")


def _what(done: "Exported") -> str:
    if done.base is not None:
        return f"adapter merged into {done.base}"
    return "LoRA adapter" if done.is_adapter else "full weights"
