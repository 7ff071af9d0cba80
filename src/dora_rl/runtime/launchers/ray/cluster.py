"""The connection to a cluster: one of this machine for the length of a run, or one that runs.

Whoever has called `ray.init` before keeps that connection; it is used, and left as it is.
"""

import logging
import math
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray._private import worker as ray_worker

from dora_rl.config.text import one_line
from dora_rl.core.protocol.errors import UserError
from dora_rl.machine import processor
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.launchers.ray.installation import address_of, listens_beyond
from dora_rl.runtime.launchers.ray.settings import CPU, RaySettings

_LOOPBACK = "127.0.0.1"
_ANSWER_S = 5.0  # for the address to answer at all: Ray itself tries for a minute
_STORE_BYTES = 100 << 20  # of our own cluster's object store: only messages go through it
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}


@contextmanager
def connected(config: RunConfig) -> Iterator[None]:
    """Be connected inside, to a cluster that can have the run."""
    if ray.is_initialized():
        check_resources(config.runtime.ray)
        yield
        return
    address = address_of(config.runtime.ray.address)
    try:
        with _signals_kept():
            if address is None:
                _start(config)
            else:
                _join(address)
        # Else raylets complain on stdout of workers that die, which the run's own log has.
        ray_worker._worker_logs_enabled = False
        check_resources(config.runtime.ray)
        yield
    finally:
        with _signals_kept():
            ray.shutdown()


def check_cluster(config: RunConfig) -> None:
    """Refuse an address that does not answer, or a cluster that lacks what the run asks for.

    A cluster of our own has what it is started with: there is nothing to ask.
    """
    if address_of(config.runtime.ray.address) is not None or ray.is_initialized():
        with connected(config):
            pass


def check_resources(settings: RaySettings) -> None:
    """Refuse a run whose trainer, or whose instances, fit on no node that is there.

    Instances that find no room now wait for a node that has it.
    """
    nodes: list[dict[str, float]] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for role, wanted in (("trainer", settings.trainer), ("rollout", settings.rollout)):
        bundle = wanted.bundle
        if not any(_fits(bundle, node) for node in nodes):
            largest = {name: max(node.get(name, 0.0) for node in nodes) for name in bundle}
            raise UserError(
                f"runtime.ray.{role} asks for more than any node of the cluster has: "
                f"`{_shown(bundle)}`; the most on one of {len(nodes)} is {_shown(largest)}. Lower "
                "it, or add a node."
            )


def _fits(bundle: Mapping[str, float], node: Mapping[str, float]) -> bool:
    return all(node.get(name, 0.0) >= amount for name, amount in bundle.items())


def _shown(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())


def _start(config: RunConfig) -> None:
    """A cluster that ends with this process. As in `local`, workers may be more than cores."""
    settings, instances = config.runtime.ray, config.runtime.instances
    needed: dict[str, float] = {CPU: 0.0}
    everyone = [*[settings.rollout] * instances, settings.trainer, settings.evaluator]
    for resources in everyone:
        for name, amount in {CPU: resources.cpus, **resources.custom}.items():
            needed[name] = needed.get(name, 0.0) + amount
    cpus = max(processor.cores(), math.ceil(needed.pop(CPU)))
    with _refused("a cluster of this machine could not be started"):
        ray.init(
            "local",
            num_cpus=cpus,
            resources=needed,
            object_store_memory=_STORE_BYTES,
            include_dashboard=False,
            _node_ip_address=_LOOPBACK,
            # A machine that is busy takes long to start a process; the supervisor is the judge.
            _system_config={
                "worker_register_timeout_seconds": math.ceil(config.runtime.start_timeout_s)
            },
            **_QUIET,
        )
    node = ray.util.get_node_ip_address()
    if node != _LOOPBACK:
        raise listens_beyond(node)


def _join(address: str) -> None:
    what = f"no Ray cluster can be used at runtime.ray.address: `{address}`"
    host, _, port = address.rpartition(":")
    if port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
        except OSError as error:
            why = error.strerror or "no answer"
            raise UserError(f"{what}: {why}. Start it with `ray start --head`.") from None
    with _refused(what):
        ray.init(address, **_QUIET)


@contextmanager
def _refused(what: str) -> Iterator[None]:
    try:
        yield
    except (ConnectionError, OSError, RuntimeError, TimeoutError, ValueError) as error:
        raise UserError(f"{what}: {one_line(error)}") from error


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself, which asks a run to stop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[signal.Signals, Any] = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
