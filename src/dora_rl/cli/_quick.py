"""What `--quick` changes: defaults of the options of each `dora-rl bench`.

With them a bench takes two minutes at most on two cores without AVX-512, and needs nothing that
has to be fetched. What the user gives wins.
"""

from collections.abc import Mapping
from typing import Any

import click
from click.core import ParameterSource

# Phases are bounded, so that a slow machine takes fewer repeats and not more time.
_OF_AN_ENGINE = {"model": "tiny", "repeats": 2, "phase_seconds": 10.0}

QUICK: Mapping[str, Mapping[str, Any]] = {
    "orchestrator": {"instances": "64,512,2048", "events": 40_000},
    "engine": {"batches": "1,8,32", **_OF_AN_ENGINE},
    "migration": {"tokens": "250,1000", **_OF_AN_ENGINE},
    "versions": {"batch": 16, "new_tokens": 16, **_OF_AN_ENGINE},
    "trl": {
        "model": "quickstart",
        "steps": 2,
        "prompts": 2,
        "group_size": 4,
        "max_tokens": 32,
        "search_steps": 0,
    },
    "modes": {"steps": 4, "warmup_steps": 1, "rounds": 1, "search_steps": 0, "groups": 16},
    "durability": {"steps": 6, "warmup_steps": 2, "rounds": 1},
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


def quick_options(bench: str, ctx: click.Context, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the quick values in place of the defaults."""
    replaced = {
        name: value
        for name, value in QUICK[bench].items()
        if ctx.get_parameter_source(name) is ParameterSource.DEFAULT
    }
    return {**given, **replaced}
