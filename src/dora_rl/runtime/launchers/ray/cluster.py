"""The connection to a cluster: one of this machine for the length of a run, or one that runs.

Whoever has called `ray.init` before keeps that connection; it is used, and left as it is.
"""

import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray._private import worker as ray_worker

from dora_rl.config.text import one_line
from dora_rl.core.protocol.errors import UserError
from dora_rl.machine import processor
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.launchers.ray.installation import address_of, listens_beyond
from dora_rl.runtime.launchers.ray.nodes import check_nodes
from dora_rl.runtime.launchers.ray.settings import CPU, Resources

_LOOPBACK = "127.0.0.1"
_ANSWER_S = 5.0  # for the address to answer at all: Ray itself tries for a minute
_ANY_NUMBER = 1 << 20  # of workers that need nothing
_STORE_BYTES = 100 << 20  # of our own cluster's object store, if only messages go through it
_START_S = 300  # for a process of Ray's to start, where no run says otherwise
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}


@contextmanager
def connected(config: RunConfig) -> Iterator[None]:
    """Be connected inside, to a cluster that can have the run."""
    if ray.is_initialized():
        check_resources(config)
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
        check_resources(config)
        yield
    finally:
        with _signals_kept():
            ray.shutdown()


def check_cluster(config: RunConfig, paths: Sequence[str]) -> None:
    """Refuse an address that does not answer, or a cluster that lacks what the run asks for.

    So is one with a node that lacks one of these paths. A cluster of our own has what it is
    started with: there is nothing to ask.
    """
    if address_of(config.runtime.ray.address) is not None or ray.is_initialized():
        with connected(config):
            check_nodes(paths, config.runtime.ray.py_executable)


def check_resources(config: RunConfig) -> None:
    """Refuse a run whose trainer, or whose instances, fit on no nodes that are there.

    Instances that find no room now wait for a node that has it.
    """
    nodes: list[dict[str, float]] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    settings, ranks = config.runtime.ray, config.train.processes
    roles: dict[str, Resources] = {"trainer": settings.trainer, "rollout": settings.rollout}
    if settings.rewards.number:
        roles["rewards"] = settings.rewards
    for role, wanted in roles.items():
        bundle = wanted.bundle
        places = sum(_places(bundle, node) for node in nodes)
        if role == "trainer" and 0 < places < ranks:
            raise UserError(
                f"train.processes are more than the cluster has room for: `{ranks}`, each with "
                f"{_shown(bundle)}; there is room for {places} on {len(nodes)} nodes. Lower it or "
                "runtime.ray.trainer, or add a node."
            )
        if not places:
            largest = {name: max(node.get(name, 0.0) for node in nodes) for name in bundle}
            raise UserError(
                f"runtime.ray.{role} asks for more than any node of the cluster has: "
                f"`{_shown(bundle)}`; the most on one of {len(nodes)} is {_shown(largest)}. Lower "
                "it, or add a node."
            )


def _places(bundle: Mapping[str, float], node: Mapping[str, float]) -> int:
    """How many of such workers a node has room for, if it has nothing else."""
    rooms = [int(node.get(name, 0.0) // amount) for name, amount in bundle.items()]
    return min(rooms, default=_ANY_NUMBER)


def _shown(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())


def _start(config: RunConfig) -> None:
    """A cluster that ends with this process. As in `local`, workers may be more than cores."""
    settings, instances = config.runtime.ray, config.runtime.instances
    needed: dict[str, float] = {CPU: 0.0}
    trainer = settings.trainer.times(config.train.processes)
    everyone = [*[settings.rollout] * instances, trainer, settings.evaluator]
    everyone.append(settings.rewards.times(settings.rewards.number))
    for resources in everyone:
        for name, amount in {CPU: resources.cpus, **resources.custom}.items():
            needed[name] = needed.get(name, 0.0) + amount
    cpus = max(processor.cores(), math.ceil(needed.pop(CPU)))
    by_objects = "object_store" in (
        config.runtime.weights.transport,
        config.runtime.kv.transport,
    )
    _start_here(
        cpus,
        needed,
        None if by_objects else _STORE_BYTES,
        math.ceil(config.runtime.start_timeout_s),
    )


@contextmanager
def machine_cluster(cpus: int, store_bytes: int) -> Iterator[None]:
    """Be connected inside to a cluster of this machine that has this object store."""
    try:
        with _signals_kept():
            _start_here(cpus, {}, store_bytes, _START_S)
        yield
    finally:
        with _signals_kept():
            ray.shutdown()


def _start_here(
    cpus: int, resources: dict[str, float], store_bytes: int | None, start_s: int
) -> None:
    with _refused("a cluster of this machine could not be started"):
        ray.init(
            "local",
            num_cpus=cpus,
            resources=resources,
            object_store_memory=store_bytes,  # None: Ray takes a share of the memory
            include_dashboard=False,
            _node_ip_address=_LOOPBACK,
            _system_config={
                # A machine that is busy takes long to start a process; the supervisor is the judge.
                "worker_register_timeout_seconds": start_s,
                "worker_niceness": 0,  # as in `local`; else all else on this machine comes first
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
            _greet(host.strip("[]"), int(port))
        except OSError as error:
            why = error.strerror or str(error) or "no answer"
            raise UserError(f"{what}: {why}. Start it with `ray start --head`.") from None
    with _refused(what):
        ray.init(address, **_QUIET)


def _greet(host: str, port: int) -> None:
    """An `OSError` unless a gRPC server answers there in time: Ray itself would try for minutes.

    Both ends of HTTP/2 begin with their settings: a frame of type 4, after the client's preface.
    """
    with socket.create_connection((host, port), _ANSWER_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return  # it would wait for another greeting
        connection.settimeout(_ANSWER_S)
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        header = b""
        while len(header) < 9 and (more := connection.recv(9 - len(header))):
            header += more
        if len(header) < 9 or header[3] != 4:
            raise OSError("what listens there is no Ray cluster")


@contextmanager
def _refused(what: str) -> Iterator[None]:
    try:
        yield
    except (ConnectionError, OSError, RuntimeError, TimeoutError, ValueError) as error:
        why = one_line(error)
        if "Version mismatch" in why:
            why = f"{why.rstrip('.')}. Install the cluster's versions of Ray and Python here."
        raise UserError(f"{what}: {why}") from error


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
