"""Which launcher carries a run, by `runtime.kind`.

A launcher is imported when a run needs it: the driver of a local one needs no torch. One that
wraps another, such as a transport with faults, takes its place for the length of a `with` block.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from dora_rl.runtime.launchers.base import Runtime
from dora_rl.runtime.records.run_files import RunFiles

Launcher: TypeAlias = Callable[[RunFiles], Runtime]


def _inline(files: RunFiles) -> Runtime:
    from dora_rl.runtime.launchers.inline import InlineRuntime

    return InlineRuntime(files)


def _local(files: RunFiles) -> Runtime:
    from dora_rl.runtime.launchers.local.launcher import LocalRuntime

    return LocalRuntime(files)


def _ray(files: RunFiles) -> Runtime:
    from dora_rl.runtime.launchers.ray import installation

    installation.prepare_import(installation.address_of(files.config.runtime.ray.address))
    from dora_rl.runtime.launchers.ray.launcher import RayRuntime

    return RayRuntime(files)


_LAUNCHERS: dict[str, Launcher] = {"inline": _inline, "local": _local, "ray": _ray}


def launch(files: RunFiles) -> Runtime:
    """The launcher that carries this run."""
    return _LAUNCHERS[files.config.runtime.kind](files)


@contextmanager
def using(kind: str, launcher: Launcher) -> Iterator[None]:
    """Runs of this kind are carried by this launcher until the block ends."""
    before = _LAUNCHERS[kind]
    _LAUNCHERS[kind] = launcher
    try:
        yield
    finally:
        _LAUNCHERS[kind] = before
