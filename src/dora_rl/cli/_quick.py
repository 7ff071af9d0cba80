"""What `--quick` changes: defaults of the options of each `dora-rl bench`.

With them a bench takes two minutes at most on two cores without AVX-512, and needs nothing that
has to be fetched. What the user gives wins.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., Any])

# Phases are bounded, so that a slow machine takes fewer repeats and not more time.
_OF_AN_ENGINE = {"model": "tiny", "repeats": 2, "phase_seconds": 10.0}

QUICK: Mapping[str, Mapping[str, Any]] = {
    "orchestrator": {"instances": "64,512,2048", "events": 40_000},
    "control": {"instances": 200, "tokens": 2000, "save_period": 20.0, "seconds": 30.0},
    "engine": {"batches": "1,8,32", **_OF_AN_ENGINE},
    "migration": {"tokens": "250,1000", **_OF_AN_ENGINE},
    "versions": {"batch": 16, "new_tokens": 16, **_OF_AN_ENGINE},
    "speculation": {
        "model": "quickstart",
        "batches": "1,4",
        "prompts": 2,
        "repeats": 1,
        "phase_seconds": 30.0,
    },
    "trl": {
        "model": "quickstart",
        "steps": 2,
        "prompts": 2,
        "group_size": 4,
        "max_tokens": 32,
        "search_steps": 0,
    },
    "modes": {"steps": 8, "warmup_steps": 3, "rounds": 1, "search_steps": 0, "groups": 16},
    "resume": {"events": "10000,100000", "repeats": 3},
    "durability": {"steps": 6, "warmup_steps": 2, "rounds": 1},
    "transports": {"parameters": "10", "receivers": "1,2", "versions": 2},
    "convergence": {"ways": "sync,multi_version:3", "seeds": 2, "steps": 4, "eval_size": 32},
}


def help_of(bench: str) -> str:
    options = ", ".join(
        f"--{name.replace('_', '-')} {value:g}"
        if isinstance(value, float)
        else f"--{name.replace('_', '-')} {value}"
        for name, value in QUICK[bench].items()
    )
    return f"Rough figures in two minutes or less. Unless given otherwise: {options}."


def option(bench: str) -> Callable[[Function], Function]:
    """The option `--quick` of this bench; what the user gives wins over its values."""
    return click.option(
        "--quick",
        is_flag=True,
        is_eager=True,  # before the options whose defaults it replaces
        callback=functools.partial(_replace_defaults, bench),
        help=help_of(bench),
    )


def _replace_defaults(bench: str, ctx: click.Context, _: click.Parameter, quick: bool) -> bool:
    if quick:
        ctx.default_map = dict(QUICK[bench])
    return quick
