"""Fast paths tried in a child process, so that one that kills its process is told as well."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable

from dora_rl.machine.fast_paths import Trial

_TIMEOUT_S = 180.0  # for all of them, most of it the import of torch from a cold disk


def in_child(names: Iterable[str]) -> dict[str, Trial]:
    """How each trial ended, in the order given."""
    wanted = list(names)
    found: dict[str, Trial] = {}
    while left := [name for name in wanted if name not in found]:
        lines, end = _run(left)
        for name, *trial in map(json.loads, lines):
            found[name] = Trial(*trial)
        culprit = next((name for name in left if name not in found), None)
        if culprit is not None:
            found[culprit] = Trial(False, end)
    return {name: found[name] for name in wanted}


def _run(names: list[str]) -> tuple[list[str], str]:
    """The lines that were printed, and what went wrong after them, if anything did."""
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "dora_rl.machine", *names],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        said, errors = child.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        said, _ = child.communicate()
        return said.splitlines(), f"the trial took more than {_TIMEOUT_S:g} s"
    except BaseException:
        child.kill()
        child.wait()
        raise
    return said.splitlines(), _end(child.returncode, errors)


def _end(code: int, errors: str) -> str:
    if code == 0:
        return ""
    if code < 0:
        return f"the trial died of {signal.Signals(-code).name}"
    return (errors.strip().splitlines() or [f"the trial ended with exit code {code}"])[-1]
