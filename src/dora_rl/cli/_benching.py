"""What the subcommands of `dora-rl bench` share: options, progress, how a result is shown."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol, TypeVar

import click

from dora_rl.core.errors import UserError
from dora_rl.core.settings import ParadigmName

Progress = Callable[[str], None]
Function = TypeVar("Function", bound=Callable[..., Any])

as_json = click.option("--json", "as_json", is_flag=True, help="Write the measurements as JSON.")


class Result(Protocol):
    def to_json(self) -> dict[str, Any]: ...
    def summary(self) -> list[str]: ...


def of_an_engine(repeats: int) -> Callable[[Function], Function]:
    """Options of every measurement that runs a model."""
    options = [
        click.option(
            "--model",
            default="smollm2",
            show_default=True,
            metavar="NAME|DIR",
            help="smollm2 (see dora-rl fetch-model), tiny (a random model, made for the run), or "
            "a Hugging Face directory.",
        ),
        click.option(
            "--repeats",
            type=int,
            default=repeats,
            show_default=True,
            help="Measurements of each kind; the median counts.",
        ),
        click.option(
            "--threads",
            type=int,
            help="Threads of each engine.  [default: 2, or 1 where there is one processor]",
        ),
        click.option(
            "--dtype",
            metavar="bfloat16|float32",
            help="Numbers of the weights.  [default: the model's own, bfloat16 for the named ones]",
        ),
        as_json,
    ]

    def add(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def lengths(function: Function) -> Function:
    """Options of the measurements that generate batches."""
    new = click.option(
        "--new-tokens",
        type=int,
        default=32,
        show_default=True,
        help="Tokens that each sequence generates.",
    )
    prompt = click.option(
        "--prompt-tokens", type=int, default=32, show_default=True, help="Tokens of each prompt."
    )
    return prompt(new(function))


def numbers(option: str, text: str, example: str) -> tuple[int, ...]:
    """A list of whole numbers, as it was typed."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UserError(
            f"{option} must be whole numbers, separated by commas: `{text}`. Use {example}."
        ) from None


def names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def paradigms(text: str) -> tuple[ParadigmName, ...]:
    """Paradigms, as they were typed."""
    try:
        return tuple(dict.fromkeys(ParadigmName(name) for name in names(text)))
    except ValueError:
        known = ", ".join(ParadigmName)
        raise UserError(f"--paradigms must be of {known}: `{text}`.") from None


def show(result: Result, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2))
    else:
        for line in result.summary():
            click.echo(line)


@contextmanager
def progress() -> Iterator[Progress]:
    """One line on a terminal, written over and over and gone at the end."""
    shown = sys.stderr.isatty()

    def tell(line: str) -> None:
        if shown:
            click.echo(f"\r\x1b[K{line}", err=True, nl=False)

    try:
        yield tell
    finally:
        tell("")


@contextmanager
def children() -> Iterator[None]:
    """A kill ends child processes and temporary files as Ctrl-C does; a failed child is code 1."""
    from dora_rl.benchmarks.contestants.process import ContestantFailed
    from dora_rl.runtime.errors import RunFailed

    signals = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, _interrupt) for number in signals]
    try:
        yield
    except (ContestantFailed, RunFailed) as error:
        raise click.ClickException(str(error)) from error
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
