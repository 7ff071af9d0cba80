"""A run in a process of its own that is killed at a point that a test names.

What a death leaves behind are the files as they are: so a life may also keep them at every point,
for as many resumes and one life.

The points are before and after everything that changes a file for good: rename, removal, a commit
of the ledger, a publication, and the install of a version; and before each fsync, since a process
that dies after it leaves the same files. They are counted from the start, so that the same number
is the same point of the same run.
"""

import hashlib
import os
import shutil
import signal
import threading
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import transformers.models.auto.modeling_auto  # seconds, once and not in each life
import transformers.models.llama.modeling_llama  # noqa: F401

import dora_rl.runtime.launchers.inline  # noqa: F401
from dora_rl.engines.embedded.engine import EmbeddedEngine
from dora_rl.runtime.execution import execute
from dora_rl.runtime.prepare.plan import plan_resume, prepare, read_config
from dora_rl.store.ledger import Ledger
from dora_rl.store.snapshot_files import SnapshotFiles
from dora_rl.transports.samples import shared_directory
from dora_rl.transports.weights.shared_directory import WeightStore
from tests.patience import PATIENCE_S
from tests.runtime.harness import PROMPTS, settings

LABEL = "point.txt"  # beside a state that is kept: where the run was in it
_PROCESSES = get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__])


class Points:
    """Counts the points that the process passes, and kills it at one of them.

    Up to there, the files of the run `out` are kept in the directory `keep`, once in each state.
    """

    def __init__(self, out: Path, kill_at: int | None, keep: Path | None) -> None:
        self.passed = 0
        self._out = out
        self._kill_at = kill_at
        self._keep = keep
        self._lock = threading.Lock()  # files are synced on several threads at once

    def at(self, label: str) -> None:
        with self._lock:
            self._pass(label)

    def _pass(self, label: str) -> None:
        with open(_log(self._out), "a", encoding="utf-8") as log:
            log.write(f"{label}\n")
        if self._keep is not None and self._out.exists():
            kept = self._keep / digest(self._out)
            if not kept.exists():
                shutil.copytree(self._out, kept)
                (kept / LABEL).write_text(f"{self.passed}: {label}")
        if self.passed == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.passed += 1

    def around(self, owner: Any, name: str) -> None:
        """A point before each call of a function, and one after."""
        original = getattr(owner, name)
        label = f"{getattr(owner, '__name__', owner)}.{name}"

        def call(*args: Any, **kwargs: Any) -> Any:
            self.at(f"before {label}")
            result = original(*args, **kwargs)
            self.at(f"after {label}")
            return result

        setattr(owner, name, call)

    def before(self, owner: Any, name: str) -> None:
        """A point before each call of a function."""
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.at(f"before {owner.__name__}.{name}")
            return original(*args, **kwargs)

        setattr(owner, name, call)

    def everywhere(self) -> None:
        self.before(os, "fsync")
        for name in ("rename", "replace", "truncate", "unlink"):
            self.around(os, name)
        self.around(shutil, "rmtree")
        self.around(Ledger, "commit")
        self.around(SnapshotFiles, "keep_only")
        self.around(WeightStore, "publish")
        self.around(EmbeddedEngine, "install")


def _live(
    model: Path, out: Path, sections: dict[str, Any], kill_at: int | None, keep: Path | None
) -> None:
    shared_directory.FILE_BYTES = 1000  # a few trajectories: files of records come and go
    Points(out, kill_at, keep).everywhere()
    if (out / "ledger.sqlite").exists():
        with Ledger.read(out / "ledger.sqlite") as ledger:
            if "ended" in ledger.facts:
                return  # killed when all was done
        plan = plan_resume(out, prompts=PROMPTS)
    else:
        shutil.rmtree(out, ignore_errors=True)
        plan = prepare(read_config(settings(model, out, **sections)), prompts=PROMPTS)
    ended = execute(plan)
    assert ended.ok, ended.ending


def live(
    model: Path,
    out: Path,
    sections: dict[str, Any],
    kill_at: int | None = None,
    keep: Path | None = None,
) -> int:
    """One life of a run; the exit code: 0, or -9 if it was killed at that point.

    `keep` gets a directory for each state that the files of the run are in at a point.
    """
    process = _PROCESSES.Process(target=_live, args=(model, out, sections, kill_at, keep))
    process.start()
    process.join(PATIENCE_S)
    code = process.exitcode
    process.kill()
    assert code is not None, "it hangs"
    return code


def labels(out: Path) -> list[str]:
    """The points that the lives of a run have passed."""
    return _log(out).read_text(encoding="utf-8").splitlines()


def _log(out: Path) -> Path:
    return out.with_suffix(".points")


def digest(directory: Path) -> str:
    """Of all names and contents: the name of a state that is kept."""
    found = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        name = str(path.relative_to(directory)).encode()
        found.update(b"%d %d %b%b" % (len(name), len(content), name, content))
    return found.hexdigest()


def rows(out: Path) -> dict[str, list[tuple[Any, ...]]]:
    """All that the ledger says."""
    with Ledger.read(out / "ledger.sqlite") as ledger:
        parts: dict[str, Callable[[], Any]] = {
            "batches": ledger.batches,
            "versions": ledger.versions,
            "checkpoints": ledger.checkpoints,
            "payloads": ledger.payloads,
            "prefixes": ledger.prefixes,
        }
        found = {name: [tuple(row) for row in read()] for name, read in parts.items()}
        return {**found, "snapshot": [ledger.snapshot()], "position": [ledger.position]}
