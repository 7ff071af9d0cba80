"""The examination: each topic is a function that yields findings. It changes nothing.

What may kill a process (an instruction that the processor lacks) is tried in a child. The last
topic is a training run of one step, which is the only proof that there is.
"""

import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from dora_rl import extras
from dora_rl.core.protocol.errors import UserError
from dora_rl.doctor.report import Finding, Report, Status
from dora_rl.engines.vllm import environment
from dora_rl.machine import processor
from dora_rl.machine.fast_paths import FAST_PATHS, PORTABLE, portable
from dora_rl.machine.trials import in_child, python
from dora_rl.runtime.config import RuntimeSettings
from dora_rl.runtime.control import memory

_GB = 1 << 30
_MIN_DISK = 256 << 20  # for a run of the quickstart: versions, checkpoints, journal
_RUN_S = 600.0  # a guard against a run that hangs
_NEEDED = ("engine", "train")  # by `dora-rl train`
_WHO_NEEDS = {
    "tasks": "prompts of `reasoning_gym:` and the reward `math_verify`",
    "datasets": "prompts that are Hugging Face datasets",
    "plot": "`dora-rl bench convergence --plot`",
    "smollm2": "`dora-rl fetch-model smollm2`",
}
_SMALL_RUN = (
    *("--steps", "1", "--plain", "--set", "orchestration.groups_per_step=2"),
    *("--set", "task.eval_size=4", "--set", "run.checkpoint_every=1"),
)

Progress = Callable[[str], object]


def examine(directory: Path, progress: Progress, *, run: bool = True) -> Report:
    """Look at this machine, as a run in this directory would find it."""
    findings = [*_machine(), *_room(directory)]
    progress("libraries")
    findings += _libraries()
    torch_there = not extras.missing(*_NEEDED)
    progress("fast paths")
    findings += _fast_paths(torch_there)
    findings += _extras()
    if run and torch_there:
        progress("a training run of one step")
        findings += _short_run(directory)
    return Report(tuple(findings))


def _machine() -> Iterator[Finding]:
    def found(name: str, text: str) -> Finding:
        return Finding("machine", name, Status.OK, text)

    flags = ", ".join(processor.telling_flags()) or "instruction sets are not told"
    yield found("processor", f"{processor.model_name()} ({flags})")
    yield found("cores", str(processor.cores()))
    yield found("system", platform.platform())
    yield found("python", f"{platform.python_version()}, {sys.executable}")
    if portable():
        yield found("switch", f"{PORTABLE} is set: every fast path is switched off")
    yield _memory()


def _memory() -> Finding:
    left = memory.left() if memory.memory_watch().in_force else None
    if left is None:
        return Finding("machine", "memory", Status.OK, "the system does not tell what is left")
    least = RuntimeSettings().min_free_memory_mb
    if left.size >= least * memory.MB:
        return Finding("machine", "memory", Status.OK, str(left))
    return Finding(
        "machine",
        "memory",
        Status.FAILS,
        f"{left}, and a run wants {least} MB",
        "free some, or set runtime.min_free_memory_mb=0",
    )


def _room(directory: Path) -> Iterator[Finding]:
    """Where a run writes: its directory, and the one for temporary files."""
    yield _place(
        "run directory", directory, "run from a directory that you may write, or use --out"
    )
    yield _place("temporary files", Path(tempfile.gettempdir()), "set TMPDIR to one with room")


def _place(name: str, path: Path, fix: str) -> Finding:
    try:
        with tempfile.NamedTemporaryFile(dir=path, prefix=".dora-rl-doctor-"):
            free = shutil.disk_usage(path).free
    except OSError as error:
        return Finding("disk", name, Status.FAILS, f"`{path}`: {error.strerror}", fix)
    status = Status.OK if free >= _MIN_DISK else Status.FAILS
    return Finding("disk", name, status, f"{free / _GB:.1f} GB are free in `{path}`", fix)


def _libraries() -> Iterator[Finding]:
    for extra, names in extras.missing(*_NEEDED).items():
        listed = ", ".join(names)
        yield Finding(
            "libraries", extra, Status.FAILS, f"not installed: {listed}", extras.install(extra)
        )
    if "torch" not in extras.missing("engine").get("engine", []):
        said, failure = python("-m", "dora_rl.doctor.torch_build")
        status = Status.FAILS if failure else Status.OK
        fix = "install a build of torch for this processor: see https://pytorch.org"
        yield Finding("libraries", "torch", status, failure or said.strip(), fix)
    for name in ("transformers", "safetensors", "tokenizers", "numpy"):
        try:
            yield Finding("libraries", name, Status.OK, metadata.version(name))
        except metadata.PackageNotFoundError:
            continue  # it is named above


def _fast_paths(torch_there: bool) -> Iterator[Finding]:
    needs_torch = ("engines.", "models.", "trainer.")
    names = [
        n for n, p in FAST_PATHS.items() if torch_there or not p.tried_by.startswith(needs_torch)
    ]
    for name, trial in in_child(names).items():
        path = FAST_PATHS[name]
        topic = "sandbox of rewards and environments" if path.guards else "fast paths"
        if trial.in_force:
            yield Finding(topic, name, Status.OK, f"{path.gives} ({trial.finding})")
        else:
            text = f"{path.otherwise} ({trial.finding})"
            fix = f"unset {PORTABLE}" if portable() else path.fix
            yield Finding(topic, name, Status.FALLS_BACK, text, fix)


def _extras() -> Iterator[Finding]:
    missing = extras.missing(*_WHO_NEEDS)
    for extra, needs in _WHO_NEEDS.items():
        if extra in missing:
            text = f"not installed: {', '.join(missing[extra])}; for {needs}"
            yield Finding("extras", extra, Status.MISSING, text, extras.install(extra))
        else:
            yield Finding("extras", extra, Status.OK, needs)
    yield _vllm()


def _vllm() -> Finding:
    """It has an environment of its own."""
    needs = "`rollout.engine=vllm` and `dora-rl bench engine --against vllm`"
    try:
        python = environment.find_python()
        version = environment.check(python)
    except UserError as error:
        said = str(error).rstrip(".")
        return Finding("extras", "vllm", Status.MISSING, f"{said}; for {needs}", "make venv-vllm")
    return Finding("extras", "vllm", Status.OK, f"{needs}: vLLM {version}, {python}")


def _short_run(directory: Path) -> Iterator[Finding]:
    """The quickstart for one step, where runs are written."""
    try:
        place = tempfile.mkdtemp(prefix=".dora-rl-doctor-", dir=directory)
    except OSError:
        return  # said above
    try:
        began = time.monotonic()
        out = os.path.join(place, "run")
        _, failure = python("-m", "dora_rl", "train", *_SMALL_RUN, "--out", out, timeout_s=_RUN_S)
        took = f"one step of the quickstart, {time.monotonic() - began:.1f} s with the start"
        status = Status.FAILS if failure else Status.OK
        yield Finding("run", "training", status, failure or took, "the message says what to do")
    finally:
        shutil.rmtree(place, ignore_errors=True)
