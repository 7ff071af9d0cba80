"""What the sandbox of a worker holds on this machine, found by starting one."""

import functools

from dora_rl.machine.fast_paths import Unavailable, fast_path
from dora_rl.sandbox.protocol import Isolation, Limits, Program
from dora_rl.sandbox.zygote_start import start_zygote


class Idle:
    """The service of the trial, which nobody asks for anything."""

    spent = False

    def __init__(self, program: Program) -> None: ...

    def handle(self, request: bytes) -> bytes:
        return b""


@functools.cache
def sandbox() -> Isolation:
    """What is kept from a worker here."""
    zygote = start_zygote(Program(service=f"{__name__}:Idle", functions=(), limits=Limits()))
    zygote.close()
    return zygote.isolation


def _held(what: bool) -> tuple[str, int]:
    if not what:
        raise Unavailable("the system refused it to a worker")
    return "in force in a worker", 0


@fast_path("namespaces")
def namespaces() -> tuple[str, int]:
    return _held(sandbox().processes == "apart")


@fast_path("network-namespace")
def network_namespace() -> tuple[str, int]:
    return _held(sandbox().network == "namespace")


@fast_path("landlock")
def landlock() -> tuple[str, int]:
    return _held(sandbox().writes == "scratch")


@fast_path("seccomp")
def seccomp() -> tuple[str, int]:
    return _held(sandbox().calls == "filtered")


@fast_path("capabilities")
def capabilities() -> tuple[str, int]:
    return _held(sandbox().privileges == "none")


@fast_path("untraceable")
def untraceable() -> tuple[str, int]:
    return _held(sandbox().answers == "own")


@fast_path("read-only-mounts")
def read_only_mounts() -> tuple[str, int]:
    return _held(sandbox().attributes == "mounts")


@fast_path("private-files")
def private_files() -> tuple[str, int]:
    return _held(sandbox().private == "hidden")


@fast_path("memory-limit")
def memory_limit() -> tuple[str, int]:
    return _held(sandbox().memory == "limited")


@fast_path("process-limit")
def process_limit() -> tuple[str, int]:
    return _held(sandbox().forks == "limited")
