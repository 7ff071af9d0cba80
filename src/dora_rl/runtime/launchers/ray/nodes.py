"""Whether every node of a cluster has what workers need, asked before anything is written.

A worker on a node without the project, the model or an interpreter would fail there, or Ray would
try to start it for ever. So each node is asked once, by a task that needs none of them itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray._private.state import state
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dora_rl.config.text import one_line
from dora_rl.core.protocol.errors import UserError

_ANSWER_S = 60.0  # for all nodes; most of it is for Ray to start a process on each


def check_nodes(paths: Sequence[str], py_executable: str | None) -> None:
    """Refuse a cluster with a node that lacks one of the paths, or this project in its Python."""
    draining = state.get_draining_nodes()
    nodes = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"]}
    asked: dict[Any, str] = {}
    for node, address in nodes.items():
        if node not in draining:
            where = NodeAffinitySchedulingStrategy(node, soft=False)
            task = ray.remote(_question()).options(
                num_cpus=0, max_retries=0, scheduling_strategy=where
            )
            asked[task.remote(list(paths), py_executable)] = f"node {node} ({address})"
    answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S)
    for answer in answered:
        try:
            lack = ray.get(answer)
        except RayError as error:
            raise UserError(f"{asked[answer]} cannot run a task: {one_line(error)}") from error
        if lack is not None:
            raise UserError(f"{asked[answer]} cannot have workers: {lack}")
    if silent:
        raise UserError(
            f"{asked[silent[0]]} has not run a task within {_ANSWER_S:g} s: no worker would start "
            "there. Look into its Ray logs, or take it out of the cluster."
        )


def _question() -> Callable[[list[str], str | None], str | None]:
    """What is asked of a node. It travels as it is, since the node may not have this module."""

    def lacks(paths: list[str], py_executable: str | None) -> str | None:
        import os
        import shutil
        import subprocess
        import sys

        absent = next((path for path in paths if not os.path.exists(path)), None)
        if absent is not None:
            return (
                f"there is no `{absent}`. Put the run directory, the model and the interpreter "
                "where all nodes have them."
            )
        python = py_executable or sys.executable
        if shutil.which(python) is None:
            return f"there is no `{python}`. Set runtime.ray.py_executable to a Python there."
        look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('dora_rl') is None)"
        try:
            code = subprocess.run([python, "-c", look], capture_output=True, timeout=30).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"`{python}` does not work: {error}. Set runtime.ray.py_executable."
        if code:
            return (
                f"`{python}` has no dora_rl. Run: {python} -m pip install 'dora-rl[ray]', or set "
                "runtime.ray.py_executable to a Python that has it."
            )
        return None

    return lacks
