"""Everything that depends on the processor, the build of torch, the kernel or the system.

A fast path is tried once in a process, where it is used, by a function that `fast_path` wraps:

    @fast_path("onednn-order")
    def onednn_order(inputs, outputs):
        ...                          # raises if it is not to be had, or is slower
        return "how fast it is", 32  # what was found, and the bound up to which it serves

    if rows <= onednn_order(576, 3072).value: ...

The caller goes the portable way if the trial says no. `FAST_PATHS` lists them all, with what is
done instead; `dora-rl doctor` tries each, and a run reports those that its workers tried. With
DORA_RL_PORTABLE=1 every trial says no, as on a machine that has none of them and is not Linux.
"""

import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable
from typing import NamedTuple, ParamSpec

PORTABLE = "DORA_RL_PORTABLE"

Arguments = ParamSpec("Arguments")


class Unavailable(Exception):
    """The machine does not have it, or it is slower here; the message says which."""


class Trial(NamedTuple):
    """How the trial of a fast path ended."""

    in_force: bool
    finding: str  # what was measured, or why it is not in force
    value: int = 0  # the bound up to which it serves, where it has one


class FastPath(NamedTuple):
    gives: str
    otherwise: str  # what is done where it is not to be had
    tried_by: str  # the function that tries it, as `module:name`, below this package
    guards: bool = False  # it keeps something from workers, rather than saves time
    fix: str = ""  # how to get it


_USER_NAMESPACES = (
    "root, or user namespaces: `sysctl kernel.unprivileged_userns_clone=1`, "
    "`user.max_user_namespaces` above 0, `kernel.apparmor_restrict_unprivileged_userns=0`"
)
_KERNEL = "a Linux kernel that offers it, outside of a container that forbids it"

FAST_PATHS = {
    "cpu-affinity": FastPath(
        gives="threads for the cores that this process may use",
        otherwise="threads for every core of the machine",
        tried_by="machine.processor:affinity",
    ),
    "cgroup-limits": FastPath(
        gives="threads and KV memory for what a container's cgroup allows",
        otherwise="threads and KV memory for the whole machine",
        tried_by="machine.cgroups:cgroup_limits",
        fix="cgroups, as Linux has them",
    ),
    "native-kernels": FastPath(
        gives="a pass of the embedded engine is one call of kernels compiled for this processor",
        otherwise="a pass is some hundred operations of torch",
        tried_by="models.native.products:native_kernels",
        fix="a C compiler: cc, gcc or clang, or the one that CC names",
    ),
    "bf16-dots": FastPath(
        gives="those kernels multiply bf16 weights by the processor's instructions for bf16",
        otherwise="they widen the weights and multiply in fp32",
        tried_by="models.native.products:bf16_dots",
        fix="a processor with avx512_bf16, and a C compiler",
    ),
    "native-training": FastPath(
        gives="the trainer's norms, attention and gates by kernels compiled for this processor; "
        "prompts that responses share are computed once",
        otherwise="they are operations of torch, and every response has its own prompt",
        tried_by="trainer.native.layers:native_training",
        fix="a C compiler: cc, gcc or clang, or the one that CC names",
    ),
    "heap-reuse": FastPath(
        gives="the trainer's process keeps memory that it frees, up to 1 GB",
        otherwise="the system clears memory anew for every result of some megabytes",
        tried_by="machine.heap:heap_reuse",
        fix="Linux with glibc",
    ),
    "amx": FastPath(
        gives="bf16 products by the processor's matrix unit",
        otherwise="products by vector instructions",
        tried_by="models.cpu:amx",
        fix="a processor with amx_bf16, on a host that passes it on",
    ),
    "onednn-order": FastPath(
        gives="bf16 weights in oneDNN's order, half the bytes of fp32, where few rows decode",
        otherwise="fp32 copies of the weights",
        tried_by="models.linear:onednn_order",
        fix="a processor with avx512bw or avx_ne_convert",
    ),
    "bf16-products": FastPath(
        gives="bf16 weights that are mapped from their file are multiplied as they are",
        otherwise="slices of them are converted and multiplied in fp32",
        tried_by="models.linear:bf16_products",
        fix="a processor with avx512_bf16 or amx_bf16",
    ),
    "bf16-kv": FastPath(
        gives="blocks of KV memory in bfloat16 (`rollout.kv_dtype`) are multiplied as they are",
        otherwise="they are converted and multiplied in fp32",
        tried_by="engines.embedded.attention:bf16_kv",
        fix="a processor with avx512_bf16 or amx_bf16",
    ),
    "bf16-training": FastPath(
        gives='`train.dtype = "auto"` trains in bfloat16',
        otherwise="it trains in float32",
        tried_by="trainer.dtypes:bf16_training",
        fix="a processor with avx512_bf16 or amx_bf16, or a GPU",
    ),
    "stacked-steps": FastPath(
        gives="live versions of a small model, and adapters, are stepped in one batched product",
        otherwise="they are stepped one after the other",
        tried_by="models.stacking:stacked_steps",
    ),
    "parent-death": FastPath(
        gives="the kernel ends a worker at once when its driver dies",
        otherwise="a worker looks for its driver twice a second",
        tried_by="machine.parent:parent_death",
        fix=_KERNEL,
    ),
    "memory-watch": FastPath(
        gives="a run that gets short of memory saves and stops before the kernel kills it",
        otherwise="memory is not watched",
        tried_by="runtime.control.memory:memory_watch",
        fix="/proc, as Linux has it",
    ),
    "worker-fork": FastPath(
        gives="a worker of a run starts in milliseconds, as a fork that has its imports",
        otherwise="it starts as a fresh interpreter, and imports for seconds",
        tried_by="runtime.launchers.local.forkserver_client:worker_fork",
        fix="Linux 5.3 or newer",
    ),
    "fork": FastPath(
        gives="a worker of rewards starts in milliseconds, as a fork",
        otherwise="it starts as a fresh interpreter that imports the reward again",
        tried_by="sandbox.worker_process:fork_workers",
        fix="Linux",
    ),
    "namespaces": FastPath(
        gives="rewards and environments see and signal no process but their own",
        otherwise="they run as processes of the user",
        tried_by="sandbox.trial:namespaces",
        guards=True,
        fix=_USER_NAMESPACES,
    ),
    "network-namespace": FastPath(
        gives="rewards and environments have no network at all",
        otherwise="seccomp refuses sockets, or else Python's own sockets do",
        tried_by="sandbox.trial:network_namespace",
        guards=True,
        fix=_USER_NAMESPACES,
    ),
    "landlock": FastPath(
        gives="rewards and environments write nothing but their own directory",
        otherwise="read-only mounts keep it so, or else they write where the user may",
        tried_by="sandbox.trial:landlock",
        guards=True,
        fix="Linux 5.13 or newer with Landlock",
    ),
    "read-only-mounts": FastPath(
        gives="rewards and environments change no mode, owner or time of files outside their own",
        otherwise="seccomp refuses that in their own directory too, or else nothing does",
        tried_by="sandbox.trial:read_only_mounts",
        guards=True,
        fix="Linux 5.12 or newer, and namespaces",
    ),
    "private-files": FastPath(
        gives="rewards and environments see neither keys in the home directory nor the run's files",
        otherwise="they can read them, and lock what they can read",
        tried_by="sandbox.trial:private_files",
        guards=True,
        fix="namespaces",
    ),
    "seccomp": FastPath(
        gives="rewards and environments cannot open sockets, trace processes or signal all at once",
        otherwise="a namespace, or else Python's own sockets, keep the network from them",
        tried_by="sandbox.trial:seccomp",
        guards=True,
        fix=_KERNEL,
    ),
    "capabilities": FastPath(
        gives="rewards and environments have no privileges, not even root's",
        otherwise="they have the user's",
        tried_by="sandbox.trial:capabilities",
        guards=True,
        fix=_KERNEL,
    ),
    "untraceable": FastPath(
        gives="code that a reward runs cannot trace its worker, nor take its files or memory",
        otherwise="it can; an answer that it forges lacks the worker's seal and is refused",
        tried_by="sandbox.trial:untraceable",
        guards=True,
        fix=_KERNEL,
    ),
    "memory-limit": FastPath(
        gives="a reward that takes too much memory fails alone",
        otherwise="memory of rewards and environments is not limited",
        tried_by="sandbox.trial:memory_limit",
        guards=True,
        fix="Linux",
    ),
    "process-limit": FastPath(
        gives="a reward that forks without end fails alone",
        otherwise="the number of its processes is not limited",
        tried_by="sandbox.trial:process_limit",
        guards=True,
        fix="Linux 6.14 or newer, and namespaces",
    ),
    "orphan-list": FastPath(
        gives="processes that a reward leaves behind are found and killed",
        otherwise="those of its process group are",
        tried_by="sandbox.worker_process:orphan_list",
        guards=True,
        fix="/proc/thread-self/children, as Linux has it",
    ),
    "call-watch": FastPath(
        gives="`dora-rl chaos` can slow down and fill the disk of a run",
        otherwise="it leaves these faults out",
        tried_by="sandbox.linux:call_watch",
        fix="Linux 5.5 or newer on x86_64 or aarch64",
    ),
}

_log = logging.getLogger(__name__)
_OFF = Trial(False, f"switched off by {PORTABLE}")
_tried: dict[str, Trial] = {}


def portable() -> bool:
    """Whether every fast path is switched off."""
    return os.environ.get(PORTABLE, "") not in ("", "0")


def on_linux() -> bool:
    """Whether what only Linux has may be used."""
    return sys.platform == "linux" and not portable()


def fast_path(
    name: str,
) -> Callable[[Callable[Arguments, tuple[str, int]]], Callable[Arguments, Trial]]:
    """Make a trial of a function that returns what it found, or raises.

    The trial is made once for the same arguments; whatever it raises is its finding.
    """

    def decorate(attempt: Callable[Arguments, tuple[str, int]]) -> Callable[Arguments, Trial]:
        known: dict[object, Trial] = {}

        @functools.wraps(attempt)
        def trial(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Trial:
            # The switch is a part of the key, so that tests can turn it.
            off = portable()
            key = (off, args, tuple(kwargs.items()))
            if key not in known:
                try:
                    known[key] = _OFF if off else Trial(True, *attempt(*args, **kwargs))
                except Exception as error:
                    known[key] = Trial(False, _one_line(error))
                if not known[key].in_force:
                    _tell(name, known[key])
            _tried[name] = known[key]
            return known[key]

        return trial

    return decorate


def _tell(name: str, trial: Trial) -> None:
    """Warn where the sandbox is weaker without it, not where it only costs time."""
    path = FAST_PATHS.get(name)
    if path is not None:
        level = logging.WARNING if path.guards else logging.INFO
        _log.log(level, "%s is not in force: %s; %s", name, trial.finding, path.otherwise)


def tried() -> dict[str, Trial]:
    """The trials that this process has made so far, by the name of the fast path."""
    return dict(_tried)


def attempt(name: str) -> Trial:
    """Try a fast path of the list now, as its user would."""
    module, _, function = FAST_PATHS[name].tried_by.partition(":")
    trial: Callable[[], Trial] = getattr(importlib.import_module(f"dora_rl.{module}"), function)
    return trial()


def _one_line(error: Exception) -> str:
    words = " ".join(str(error).split())
    first = words if len(words) <= 200 else f"{words[:199]}…"
    return first if isinstance(error, Unavailable) else f"{type(error).__name__}: {first}"
