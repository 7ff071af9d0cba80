"""What the subcommands of `dora-rl bench` share: options, how they run, how a result is shown.

A subcommand checks its options and returns a `Measurement`; `measured` runs it. Interrupted, or
failed, it shows what was measured so far, marked as incomplete.
"""

import functools
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import click

from dora_rl.benchmarks.reporting import Reporter, Result
from dora_rl.cli import _progress
from dora_rl.cli._quick import help_of, quick_options
from dora_rl.core.errors import UserError
from dora_rl.core.settings import ParadigmName

Function = TypeVar("Function", bound=Callable[..., Any])
INCOMPLETE = "INCOMPLETE: it ended early; what follows was measured until then."
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
    name = function.__name__

    @functools.wraps(function)
    def run(*, quick: bool, as_json: bool, **given: Any) -> None:
        ctx = click.get_current_context()
        options = quick_options(name, ctx, given) if quick else given
        _run(function(**options), quick, as_json)

    return click.option("--quick", is_flag=True, help=help_of(name))(as_json(run))


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


def of_an_engine(repeats: int, phase_seconds: float, phase: str) -> Callable[[Function], Function]:
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
