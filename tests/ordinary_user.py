"""A Python program as an ordinary user runs it, whoever runs the tests.

Root becomes `nobody` in a child, in mounts of its own in which the interpreter, the package and a
directory of the test's can be reached, even if they are below a home directory that is closed.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from dora_rl.sandbox import linux

_NOBODY = 65534
_ROOT = Path(__file__).parents[1]
_PLACES = {Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parent, _ROOT}
_REFUSED = 77
_FOR_PROGRAM = "FOR_THE_PROGRAM_"


def run_as_ordinary_user(
    program: str, directory: Path, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run it with `directory` as its home, which is given to that user; skips where it cannot."""
    from tests.isolation import skip_weaker

    program = textwrap.dedent(program)
    command = [sys.executable, "-m", "tests.ordinary_user", str(directory), program]
    if os.geteuid() == 0:
        os.chown(directory, _NOBODY, _NOBODY)
    env = {**os.environ, "HOME": str(directory), "PYTHONPATH": str(_ROOT)}
    # For the program alone: as if this were not Linux, nobody could become who runs it.
    env |= {f"{_FOR_PROGRAM}{name}": value for name, value in environment.items()}
    done = subprocess.run(command, env=env, cwd=directory, capture_output=True, text=True)
    if done.returncode == _REFUSED:
        skip_weaker("root cannot become an ordinary user here: no namespaces of mounts")
    return done


def _become_nobody(directory: Path) -> bool:
    if not linux.unshare(linux.NEW_MOUNTS):
        return False
    if not linux.mount("", "/", linux.RECURSIVE | linux.PRIVATE):
        return False
    if not all(map(_open_way, sorted({*_PLACES, directory}))):
        return False
    os.chdir(directory)  # the one of the new mounts
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    return True


def _open_way(place: Path) -> bool:
    """Every directory above can be passed: one that is closed is covered by an open one."""
    for above in reversed(place.parents):
        if os.stat(above).st_mode & 0o001:
            continue
        kept = os.open(place, os.O_PATH)
        if not linux.mount("tmpfs", str(above), 0, "mode=0755"):
            return False
        os.makedirs(place, exist_ok=True)
        return linux.mount("", str(place), linux.BIND, source=f"/proc/self/fd/{kept}")
    return True


def main() -> None:
    directory, program = sys.argv[1:]
    if os.geteuid() == 0 and not _become_nobody(Path(directory)):
        sys.exit(_REFUSED)
    for name in [name for name in os.environ if name.startswith(_FOR_PROGRAM)]:
        os.environ[name.removeprefix(_FOR_PROGRAM)] = os.environ.pop(name)
    os.execv(sys.executable, [sys.executable, "-c", program])


if __name__ == "__main__":
    main()
