"""`dora-rl train`: a run from its configuration to its checkpoint, watched as it goes."""

from pathlib import Path

import click

from dora_rl.cli._logged import LoggedCommand
from dora_rl.core.protocol.errors import UserError

_EPILOG = """\b
CONFIG is a TOML file with the sections [model] [task] [algorithm] [train] [rollout]
[orchestration] [runtime] [run]. Without it the quickstart is run: a tiny model learns sums of
heavy-tailed length on this machine's cores, in minutes.

\b
Everything is checked before anything is written. The run directory holds config.toml,
journal.jsonl, ledger.sqlite, metrics.jsonl and metrics.json, samples.jsonl (what the model wrote),
logs/ (of each worker; rewards.log: what rewards printed), trace.json (for ui.perfetto.dev) and
checkpoints/step-N, each a Hugging Face model directory (with [model.lora], a PEFT adapter's);
`dora-rl export` writes one without the trainer's state.

\b
Ctrl-C once finishes the step, saves, and says how to resume; twice ends at once. A run that was
killed, or failed, is resumed in the same way: what was complete is not generated again. A run
that gets short of memory (runtime.min_free_memory_mb) saves likewise, and fails.
Exit code: 0 if the run ended well and kept its promises, 1 if not, 2 for bad input,
130 when interrupted.

\b
Examples:
  dora-rl train
  dora-rl train --steps 10 --out runs/first
  dora-rl train --set orchestration.paradigm=sync
  dora-rl train my.toml --set train.learning_rate=1e-6 --set rollout.slots=128
  dora-rl train my.toml --plain > train.log
  dora-rl train --resume runs/first
  dora-rl train --resume runs/first --steps 20    (20 in all, though it was started for 10)
"""


@click.command(cls=LoggedCommand, epilog=_EPILOG)
@click.argument("config", required=False, metavar="[CONFIG.toml]", type=click.Path(path_type=Path))
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a value; repeatable."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The run directory, new or empty; runs/DATE-TIME if left out.",
)
@click.option(
    "--steps",
    type=int,
    metavar="N",
    help="Train this many steps in all; with --resume, the new and larger total.",
)
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Resume a run that was stopped or killed, or with --steps N one that has ended.",
)
@click.option(
    "--accept-changed",
    metavar="NAME,…",
    default="",
    help="With --resume: which of prompts, tokenizer, reward, environment, model may differ.",
)
@click.option("--json", "as_json", is_flag=True, help="Write the outcome as JSON.")
@click.option("--plain", is_flag=True, help="One line a step, also on a terminal.")
@click.pass_context
def command(
    ctx: click.Context,
    config: Path | None,
    overrides: tuple[str, ...],
    out: Path | None,
    steps: int | None,
    resume: Path | None,
    accept_changed: str,
    as_json: bool,
    plain: bool,
) -> None:
    """Train a language model with reinforcement learning."""
    from dora_rl.cli import _training

    if resume is not None:
        accepted = [name.strip() for name in accept_changed.split(",") if name.strip()]
        plan = _training.resumed(resume, config, overrides, out, steps, accepted)
    elif accept_changed:
        raise UserError("--accept-changed needs --resume RUN: a new run has nothing to compare.")
    else:
        plan = _training.planned(config, overrides, out, steps)
    code = _training.carry_out(plan, as_json=as_json, plain=plain)
    ctx.exit(code)
