"""`dora-rl check`: everything that is tried before a run, and what the first prompt comes to."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dora_rl.cli._logged import LoggedCommand

if TYPE_CHECKING:
    from dora_rl.runtime.prepare.plan import Plan
    from dora_rl.runtime.prepare.preflight import Preflight

_EPILOG = """\b
CONFIG is as for `dora-rl train`; without it the quickstart is checked. Nothing is written and
nothing is trained. Shown are the first prompt as the model sees it, with its special tokens, and
what the reward gives for a response: the row's answer, or an empty one. No model is run.
Exit code: 0 if `dora-rl train` would start, 2 for bad input.

\b
Examples:
  dora-rl check
  dora-rl check examples/custom_reward/custom_reward.toml
  dora-rl check my.toml --set rollout.max_tokens=1024 --json
"""


@click.command(cls=LoggedCommand, epilog=_EPILOG)
@click.argument("config", required=False, metavar="[CONFIG.toml]", type=click.Path(path_type=Path))
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a value; repeatable."
)
@click.option("--json", "as_json", is_flag=True, help="Write what was found as JSON.")
def command(config: Path | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Try a configuration without training: model, memory, first prompt, reward."""
    import json

    from dora_rl.cli._training import quickstart_config
    from dora_rl.runtime.prepare.plan import prepare, read_config
    from dora_rl.runtime.prepare.preflight import preflight

    plan = prepare(read_config(config or quickstart_config(), overrides))
    found = to_json(plan, preflight(plan))
    for warning in plan.config.warnings():
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for line in lines(found):
        click.echo(line)


def to_json(plan: "Plan", found: "Preflight") -> dict[str, Any]:
    """What was found, for programs."""
    tried, needed = found.tried, found.footprint
    return {
        "model": {"path": plan.config.model.path, "family": found.model.family},
        "context_tokens": found.model.context,
        "prompt": tried.shown,
        "prompt_tokens": len(tried.tokens),
        "max_tokens": plan.config.rollout.max_tokens,
        "response": tried.response,
        "reward": tried.reward,
        "reward_parts": tried.parts,
        "memory": {"trainer": needed.trainer, "versions": needed.versions, "kv": needed.kv},
        "needed": str(needed),
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The same for a reader."""
    prompt: str = found["prompt"]
    room = max(0, found["context_tokens"] - found["prompt_tokens"])  # 0: it will be left out
    parts = ", ".join(f"{name} {value:g}" for name, value in found["reward_parts"].items())
    reward = "not tried (task.dry_run)" if found["reward"] is None else f"{found['reward']:g}"
    return [
        f"model    {found['model']['path']}: {found['model']['family']}",
        f"memory   at least {found['needed']}",
        f"tokens   prompt {found['prompt_tokens']}, response up to "
        f"{min(found['max_tokens'], room)} (rollout.max_tokens {found['max_tokens']}), "
        f"context {found['context_tokens']}",
        "prompt   the first one, as the model sees it:",
        *(f"  | {line if line.isprintable() else repr(line)}" for line in prompt.split("\n")),
        f"reward   {reward} for the response {found['response']!r}{f': {parts}' if parts else ''}",
        "ok       dora-rl train would start",
    ]
