"""Objects that a run was started with from Python, and that no file of it holds.

Their names go into the ledger's facts. A resume needs them again, and says so.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dora_rl.core.protocol.errors import UserError
from dora_rl.runtime.config import RunConfig

GIVEN = "given"  # the key of the facts


def names_of(**objects: Any) -> tuple[str, ...]:
    """Those that were given."""
    return tuple(name for name, value in objects.items() if value is not None)


def check_given(
    run: Path, facts: Mapping[str, Any], config: RunConfig, objects: Mapping[str, Any]
) -> None:
    """Refuse to resume without an object that the run was started with."""
    wanted = facts[GIVEN] if GIVEN in facts else _not_configured(config)
    if all(objects.get(name) is not None for name in wanted):
        return
    again = ", ".join(f"{name}=…" for name in wanted)
    raise UserError(
        f"started from Python, with objects that its files do not hold ({', '.join(wanted)}): "
        f'`{run}`. Resume it from Python with the same: dora_rl.resume("{run}", {again})'
    )


def _not_configured(config: RunConfig) -> list[str]:
    """What an older dora-rl was given without writing it down."""
    task = config.task
    missing = {
        "prompts": task.prompts is None,
        "reward": task.reward is None and task.environment is None,
    }
    return [name for name, given in missing.items() if given]
