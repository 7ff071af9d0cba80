"""Fast paths tried in a child process, so that one that kills its process is told as well."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping

from dora_rl.machine.fast_paths import Trial

_TIMEOUT_S = 180.0  # most of it the import of torch from a cold disk


def in_child(
    names: Iterable[str], environment: Mapping[str, str] | None = None
) -> dict[str, Trial]:
    """How each trial ended, in the order given; `environment` is added to this process's."""
    wanted = list(names)
    found: dict[str, Trial] = {}
    while left := [name for name in wanted if name not in found]:
        said, failure = python("-m", "dora_rl.machine", *left, environment=environment)
        for name, *trial in map(json.loads, said.splitlines()):
            found[name] = Trial(*trial)
        culprit = next((name for name in left if name not in found), None)
        if culprit is not None:
            found[culprit] = Trial(False, failure or "the trial printed nothing")
    return {name: found[name] for name in wanted}


def python(
    *arguments: str, timeout_s: float = _TIMEOUT_S, environment: Mapping[str, str] | None = None
) -> tuple[str, str]:
    """What a child interpreter printed, and what went wrong, if anything did."""
    child = subprocess.Popen(
        [sys.executable, "-P", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(environment or {})},
    )
    try:
        said, errors = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        said, _ = child.communicate()
        return said, f"it took more than {timeout_s:g} s"
    except BaseException:
        child.kill()
        child.wait()
        raise
    return said, _failure(child.returncode, errors)


def _failure(code: int, errors: str) -> str:
    if code == 0:
        return ""
    if code < 0:
        return f"it died of {signal.Signals(-code).name}"
    return (errors.strip().splitlines() or [f"it ended with exit code {code}"])[-1]
