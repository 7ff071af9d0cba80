"""What the subcommands of `dora-rl bench` share: options, how they run, how a result is shown.

A subcommand checks its options and returns a `Measurement`; `measured` runs it. Interrupted, or
failed, it shows what was measured so far, marked as incomplete.
"""

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import click

from dora_rl.benchmarks.reporting import Reporter, Result
from dora_rl.cli import _progress, _quick
from dora_rl.cli._interrupts import INCOMPLETE, kills_interrupt
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.settings import ParadigmName
from dora_rl.engines.registry import EngineName

Function = TypeVar("Function", bound=Callable[..., Any])
as_json = click.option("--json", "as_json", is_flag=True, help="Write the measurements as JSON.")
QUICK = "Quick: smaller sizes and fewer repeats than by default, so the figures are rough."


def _unsaved(result: Any, document: dict[str, Any]) -> None:
    """The result is only shown."""


class Measurement(NamedTuple):
    """What is to be run; `save` is then given the result and its JSON, be it whole or not."""

    measure: Callable[[Reporter], Result]
    save: Callable[[Any, dict[str, Any]], None] = _unsaved


def measured(function: Callable[..., Measurement]) -> Callable[..., None]:
    """A subcommand of this function, named as the function is, with `--quick` and `--json`."""

    @functools.wraps(function)
    def run(*, quick: bool, as_json: bool, **options: Any) -> None:
        _run(function(**options), quick, as_json)

    return _quick.option(function.__name__)(as_json(run))


def _run(measurement: Measurement, quick: bool, as_json: bool) -> None:
    reporter = Reporter()

    def show(result: Result | None, complete: bool) -> None:
        if result is not None:
            document = {"complete": complete, "quick": quick, **result.to_json()}
            measurement.save(result, document)
            _show(result, document, as_json)

    try:
        with children(), _progress.shown() as progress:
            reporter = Reporter(progress.say)
            result = measurement.measure(reporter)
    except (KeyboardInterrupt, click.ClickException):
        show(reporter.so_far(), complete=False)
        raise
    show(result, complete=True)


def _show(result: Result, document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    marks = {INCOMPLETE: not document["complete"], QUICK: document["quick"]}
    for line in [*(mark for mark, true in marks.items() if true), *result.summary()]:
        click.echo(line)


@contextmanager
def children() -> Iterator[None]:
    """A kill ends child processes and temporary files as Ctrl-C does; a failed child is code 1."""
    from dora_rl.benchmarks.contestants.process import ContestantFailed
    from dora_rl.runtime.errors import RunFailed

    try:
        with kills_interrupt():
            yield
    except (ContestantFailed, RunFailed) as error:
        raise click.ClickException(str(error)) from error


engine = click.option(
    "--engine",
    type=click.Choice([str(name) for name in EngineName]),
    callback=lambda ctx, param, value: EngineName(value),
    default=str(EngineName.EMBEDDED),
    show_default=True,
    help="What generates.",
)


def _default_threads() -> int:
    from dora_rl.benchmarks.contestants.common import default_threads

    return default_threads()


def of_an_engine(
    repeats: int, phase_seconds: float, phase: str, counts: str = "median"
) -> Callable[[Function], Function]:
    """Options of every measurement that runs a model."""
    options = [
        click.option(
            "--model",
            default="smollm2",
            show_default=True,
            metavar="NAME|DIR",
            help="smollm2 (see dora-rl fetch-model), tiny (a random model, made for the run), "
            "quickstart, or a Hugging Face directory.",
        ),
        click.option(
            "--repeats",
            type=int,
            default=repeats,
            show_default=True,
            help=f"Measurements of each kind; the {counts} counts.",
        ),
        click.option(
            "--threads",
            type=int,
            default=_default_threads,
            help="Threads of each engine.  [default: 2, or 1 where there is one processor]",
        ),
        click.option(
            "--dtype",
            metavar="bfloat16|float32",
            help="Numbers of the weights.  [default: what this machine is good at, by a quick "
            "measurement, for smollm2 and tiny; else the model's own]",
        ),
        click.option(
            "--phase-seconds",
            type=float,
            default=phase_seconds,
            show_default=True,
            help=f"Bound on the repeats of {phase}: those that would not fit are left out.",
        ),
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


# Callbacks of options that are lists, separated by commas: each makes a tuple of what was typed.


def numbers(example: str) -> Callable[[click.Context, click.Parameter, str], tuple[int, ...]]:
    """Whole numbers; `example` is shown with an error."""

    def parse(_: click.Context, option: click.Parameter, text: str) -> tuple[int, ...]:
        try:
            return tuple(map(int, _split(text)))
        except ValueError:
            raise UserError(
                f"{option.opts[0]} must be whole numbers, separated by commas: `{text}`. "
                f"Use {example}."
            ) from None

    return parse


def optional(
    parse: Callable[[click.Context, click.Parameter, str], Any],
) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """None where nothing was typed."""
    return lambda ctx, option, text: None if text is None else parse(ctx, option, text)


def names(_: click.Context, option: click.Parameter, text: str) -> tuple[str, ...]:
    return _split(text)


def paradigms(_: click.Context, option: click.Parameter, text: str) -> tuple[ParadigmName, ...]:
    """Each once."""
    try:
        return tuple(dict.fromkeys(map(ParadigmName, _split(text))))
    except ValueError:
        known = ", ".join(ParadigmName)
        raise UserError(f"{option.opts[0]} must be of {known}: `{text}`.") from None


def _split(text: str) -> tuple[str, ...]:
    return tuple(entry.strip() for entry in text.split(",") if entry.strip())
