"""A request to a running run for another number of rollout instances: one file in its directory.

Whoever asks writes it; the run takes it away, which is the answer. The last request counts.
"""

import json
from pathlib import Path

from dora_rl.core.protocol.errors import UserError
from dora_rl.store import database
from dora_rl.store.durable_files import replace_file
from dora_rl.store.lock import is_held
from dora_rl.store.rundir import CONFIG, LEDGER

REQUEST = "scale.json"
MOST_INSTANCES = 1024


def check_request(run: Path, instances: int) -> None:
    """Refuse a number that no run can have, and a run that is not going on."""
    if not 1 <= instances <= MOST_INSTANCES:
        raise UserError(f"--instances must be from 1 to {MOST_INSTANCES}: `{instances}`.")
    if not (run / CONFIG).is_file():
        raise UserError(f"not a run: `{run}`. Give the directory of a run.")
    if not is_held(database.lock_of(run / LEDGER)):
        raise UserError(
            f"no durable run is going on in `{run}`. Resume it, with runtime.instances of its "
            f"{CONFIG} as you want it."
        )


def put_request(run: Path, instances: int) -> None:
    """Ask for so many instances."""
    replace_file(run / REQUEST, [json.dumps({"instances": instances}).encode()])


def is_taken(run: Path) -> bool:
    return not (run / REQUEST).exists()


def withdraw(run: Path) -> None:
    (run / REQUEST).unlink(missing_ok=True)


def take_request(run: Path) -> int | None:
    """What was asked for, once; None if nothing was, or if it is no such request."""
    try:
        content = (run / REQUEST).read_bytes()
    except FileNotFoundError:
        return None
    withdraw(run)
    try:
        instances = json.loads(content)["instances"]
    except (ValueError, TypeError, KeyError):
        return None
    valid = isinstance(instances, int) and 1 <= instances <= MOST_INSTANCES
    return instances if valid else None
