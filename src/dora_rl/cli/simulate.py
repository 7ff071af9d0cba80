"""`dora-rl simulate`: the paradigms of a scenario side by side, in virtual time."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from dora_rl.core.protocol.settings import ParadigmName
    from dora_rl.observe.metrics import Summary
    from dora_rl.observe.trace import TraceFile
    from dora_rl.simulator.scenarios import Scenario
    from dora_rl.store.rundir import RunDirectory

_EPILOG = """\b
SCENARIO is the name of one that ships (see --list) or a TOML file, and `default` if left out.
Every paradigm meets the same lengths. Measured is the steady state, after the warm-up.

\b
Exit code: 0 if every run ended well and kept its promises, 1 if not, 2 for bad input.

\b
Examples:
  dora-rl simulate
  dora-rl simulate --list
  dora-rl simulate paper-64 --paradigms sync,multi_version --json
  dora-rl simulate default --set orchestration.max_staleness=2 --seed 7
  dora-rl simulate default --set model.lora_rank=16      (versions are LoRA adapters)
  dora-rl simulate agentic --trace trace.json      (open it in ui.perfetto.dev)
  dora-rl simulate my.toml --out runs/first        (then: dora-rl audit runs/first)
"""


@click.command(epilog=_EPILOG)
@click.argument("scenario", default="default")
@click.option("--paradigms", metavar="A,B", help="Run these only, in this order.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a value; repeatable."
)
@click.option("--seed", type=int, help="Draw other lengths and faults.")
@click.option("--json", "as_json", is_flag=True, help="Write the figures as JSON.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a timeline for Perfetto; replaces FILE.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write configuration, journals and figures into a new directory.",
)
@click.option("--list", "as_list", is_flag=True, help="List the scenarios that ship, and exit.")
@click.pass_context
def command(
    ctx: click.Context,
    scenario: str,
    paradigms: str | None,
    overrides: tuple[str, ...],
    seed: int | None,
    as_json: bool,
    trace: Path | None,
    out: Path | None,
    as_list: bool,
) -> None:
    """Run the paradigms of a scenario side by side in virtual time."""
    if as_list:
        _list_scenarios()
        return
    from dora_rl.cli._comparison import print_table, to_json
    from dora_rl.cli._output import check_output
    from dora_rl.simulator.scenarios import foreign_constants, load_scenario
    from dora_rl.store.rundir import RunDirectory, check_free

    names = None if paradigms is None else [name.strip() for name in paradigms.split(",")]
    loaded = load_scenario(scenario, overrides, paradigms=names, seed=seed)
    if out is not None:
        check_free(out)
    if trace is not None:
        check_output(trace, not_these=(scenario, out))
    warning = foreign_constants(scenario, loaded)
    if warning is not None:
        click.echo(f"warning: {warning}.", err=True)
    # Nothing is written before this line.
    run = None if out is None else RunDirectory.create(out, shared=True)
    about = {
        "scenario": scenario,
        "title": loaded.scenario.title,
        "seed": loaded.run.seed,
        "steps": loaded.run.steps,
        "warmup_steps": loaded.scenario.warmup_steps,
    }
    summaries = _run_all(loaded, about, run, trace)
    report = to_json(about, summaries)
    if run is not None:
        run.write_metrics(report)
    if as_json:
        click.echo(json.dumps(report, indent=2, allow_nan=False))
    else:
        print_table(f"{scenario}: {loaded.scenario.title}", summaries)
    unmeasured = [name for name, summary in summaries.items() if not summary.steps]
    for name in unmeasured:
        click.echo(
            f"error: nothing was measured of `{name}`: {summaries[name].end} before the warm-up "
            f"was over. Lower scenario.warmup_steps ({loaded.scenario.warmup_steps}).",
            err=True,
        )
    if unmeasured or not report["ok"]:
        ctx.exit(1)


def _list_scenarios() -> None:
    from dora_rl.simulator.scenarios import list_scenarios

    listings = list_scenarios()
    width = max(len(listing.name) for listing in listings)
    for listing in listings:
        click.echo(f"{listing.name:<{width}}  {listing.title}")


def _run_all(
    scenario: Scenario, about: dict[str, Any], run: RunDirectory | None, trace: Path | None
) -> dict[str, Summary]:
    from dora_rl.config import dump_toml
    from dora_rl.core.protocol.errors import DoraError, UserError

    summaries: dict[str, Summary] = {}
    paradigms = scenario.scenario.paradigms
    if run is not None:
        run.write_config(dump_toml(scenario))
    try:
        with ExitStack() as stack:
            file = None if trace is None else stack.enter_context(_trace_file(trace))
            progress = stack.enter_context(_progress(scenario))
            for paradigm in paradigms:
                summary = _run_one(scenario, paradigm, about, run, file, progress)
                summaries[paradigm] = summary
    except KeyboardInterrupt:
        _tell_partial(summaries, run, trace)
        raise
    except UserError:
        raise
    except DoraError as error:  # the world caught the core at something impossible
        _tell_partial(summaries, run, trace)
        done = list(summaries)
        raise click.ClickException(
            f"the simulation of `{paradigms[len(done)]}` failed (seed {about['seed']}): {error}"
        ) from error
    return summaries


def _run_one(
    scenario: Scenario,
    paradigm: ParadigmName,
    about: dict[str, Any],
    run: RunDirectory | None,
    file: TraceFile | None,
    progress: Callable[[str, int], None] | None,
) -> Summary:
    from dora_rl.core.history.journal import JournalWriter
    from dora_rl.simulator.simulate import settings_of, simulate

    with ExitStack() as stack:
        journal = section = timeline = None
        if run is not None:
            section = run.section(paradigm)
            write = stack.enter_context(section.journal())
            journal = JournalWriter(write, settings_of(scenario, paradigm), about)
        if file is not None:
            timeline = file.process(f"{paradigm}")
            stack.callback(timeline.end)
        result = simulate(
            scenario,
            paradigm,
            observers=[] if timeline is None else [timeline.observe],
            recorder=timeline,
            journal=journal,
            progress=None if progress is None else lambda _, steps: progress(paradigm, steps),
        )
    if section is not None:
        section.write_metrics({**about, **result.summary.to_json()})
    return result.summary


@contextmanager
def _trace_file(path: Path) -> Iterator[TraceFile]:
    """A trace that replaces `path` when it is whole, also after an interruption."""
    from dora_rl.observe.trace import TraceFile

    path = path.resolve()  # a link keeps its place; what it points to is replaced
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "w", encoding="utf-8") as text:
            file = TraceFile(text.write)
            try:
                yield file
            finally:
                file.close()
        os.replace(partial, path)
    except KeyboardInterrupt:
        os.replace(partial, path)
        raise
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def _progress(scenario: Scenario) -> Iterator[Callable[[str, int], None] | None]:
    """A bar on a terminal; nothing where stderr is not one."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    steps = scenario.run.steps
    columns = (TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TextColumn("steps"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        tasks: dict[str, Any] = {}

        def show(paradigm: str, done: int) -> None:
            if paradigm not in tasks:
                tasks[paradigm] = bar.add_task(paradigm, total=steps)
            bar.update(tasks[paradigm], completed=min(done, steps))

        yield show


def _tell_partial(
    summaries: dict[str, Summary], run: RunDirectory | None, trace: Path | None
) -> None:
    """Say what an ended run leaves behind."""
    if run is not None:
        whole = ", ".join(summaries) or "none"
        click.echo(f"partial output in `{run.path}`; complete paradigms: {whole}", err=True)
    if trace is not None and trace.exists():
        click.echo(f"partial trace in `{trace}`", err=True)
