"""What the sandbox of a worker holds on this machine, found by starting one."""

import functools

from dora_rl.machine.fast_paths import Unavailable, fast_path
from dora_rl.tasks.workers.births import start_nursery
from dora_rl.tasks.workers.wire import Isolation, Limits, Part, Program


def no_reward(response: str, example: object) -> float:
    """The reward of the trial, which nobody asks for."""
    return 0.0


@functools.cache
def sandbox() -> Isolation:
    """What is kept from a worker here."""
    part = Part(name="no_reward", function=f"{__name__}:no_reward")
    nursery = start_nursery(Program(kind="score", parts=(part,), limits=Limits()))
    nursery.close()
    return nursery.isolation


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


@fast_path("memory-limit")
def memory_limit() -> tuple[str, int]:
    return _held(sandbox().memory == "limited")


@fast_path("process-limit")
def process_limit() -> tuple[str, int]:
    return _held(sandbox().forks == "limited")
