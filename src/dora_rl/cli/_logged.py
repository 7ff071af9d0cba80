"""`--log-level`, of every command that runs something."""

from typing import Any

import click
from click.core import ParameterSource

from dora_rl import logs

_HELP = (
    f"Write log lines to stderr: {', '.join(logs.LEVELS)}; as JSON with {logs.FORMAT}=json.  "
    "[default: none]"
)


class LoggedCommand(click.Command):
    """A command that logs to stderr while it runs, if `--log-level` or DORA_RL_LOG says so."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(
                ["--log-level"],
                metavar="LEVEL",
                envvar=logs.LEVEL,
                show_envvar=True,
                callback=_checked,
                help=_HELP,
            )
        )

    def invoke(self, ctx: click.Context) -> Any:
        with logs.to_stderr(ctx.params.pop("log_level")):
            return super().invoke(ctx)


class LoggedGroup(click.Group):
    """A group whose commands all are."""

    command_class = LoggedCommand


def _checked(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is None:
        return None
    by_environment = ctx.get_parameter_source("log_level") is ParameterSource.ENVIRONMENT
    return logs.check_level(value, logs.LEVEL if by_environment else "--log-level")
