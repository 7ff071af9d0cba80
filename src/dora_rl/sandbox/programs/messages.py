"""What is said between `run_python` and its supervisor, one message each way."""

import msgspec

from dora_rl.sandbox.protocol import Isolation


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A program and its limits."""

    code: bytes
    scratch: bytes  # a directory of its own, as the system names it
    timeout_s: float
    memory_mb: int


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """The program is over, and so is all that it started."""

    returncode: int
    timed_out: bool
    seconds: float
    gaps: tuple[str, ...]


def gaps(isolation: Isolation, *, forks_limited: bool, orphans_found: bool) -> tuple[str, ...]:
    """What the system did not keep from a program, in words for a log.

    Not the same as of a worker: a program is no Python of ours, and knows nothing to be forged.
    """
    alone = isolation.processes == "apart"
    words = {
        "the network": isolation.network not in ("namespace", "filter"),
        "unlimited memory": isolation.memory == "unlimited",
        "other processes of the user": not alone,
        "any number of processes": isolation.forks == "unlimited" and not forks_limited,
        "files outside the scratch directory, to read": isolation.writes == "mounts",
        "files outside the scratch directory, to read and to write": isolation.writes == "anywhere",
        "modes, owners and times of the user's files": isolation.attributes == "open",
        "processes that outlive it by leaving its process group": not alone and not orphans_found,
    }
    return tuple(what for what, open_ in words.items() if open_)
