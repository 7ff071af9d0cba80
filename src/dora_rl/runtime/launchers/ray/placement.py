"""Room for actors on the nodes: placement groups, and who is in them.

Each rollout instance has a group of its own. Elastic instances are guests in the trainer's, whose
bundles are the devices that are lent: Ray has counted them for the trainer, so a guest asks for
nothing. A group stays as long as a worker is in it. So a trainer that dies takes no guest along,
and its successor starts beside them, unless a node of the group is gone or about to go.
"""

from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dora_rl.runtime.launchers.ray.settings import CPU, GPU, Resources

_NO_ROOM = ("PENDING", "RESCHEDULING")  # states of a group


class Placement:
    """A group with `bundles` of these resources; there is none where nothing is asked for."""

    def __init__(self, resources: Resources, bundles: int = 1) -> None:
        self.bundles = bundles
        self.condemned = False
        """A node of it is about to go, or may be gone: nobody new is to enter."""
        self._resources = resources
        self._workers: set[object] = set()
        bundle = resources.bundle
        self._group = placement_group([bundle] * bundles, strategy="PACK") if bundle else None

    def enter(self, worker: object) -> None:
        self._workers.add(worker)

    def leave(self, worker: object) -> None:
        """The last one removes the group; who has left may leave again."""
        present = bool(self._workers)
        self._workers.discard(worker)
        if present and not self._workers and self._group is not None:
            with suppress(RayError, ValueError, RuntimeError):
                remove_placement_group(self._group)

    @property
    def lacks_room(self) -> bool:
        """Whether no node has room for it; asks the cluster."""
        return self._state in _NO_ROOM

    @property
    def takes_another(self) -> bool:
        """Whether somebody is in it, on nodes that are there to stay; asks the cluster."""
        return bool(self._workers) and not self.condemned and self._state not in _NO_ROOM

    @property
    def _state(self) -> str | None:
        return None if self._group is None else str(placement_group_table(self._group)["state"])

    def make_actor(
        self,
        kind: type,
        groups: dict[str, int],
        name: str,
        py_executable: str | None,
        bundle: int = 0,
        *,
        guest: bool = False,
    ) -> Any:
        """An actor in one of the bundles, which waits for the group, with these threads for calls.

        It is never restarted by Ray: the supervisor replaces it, under a new incarnation.
        """
        wanted = Resources(cpus=0) if guest else self._resources
        options: dict[str, Any] = {
            "num_cpus": wanted.bundle.get(CPU, 0),
            "num_gpus": wanted.bundle.get(GPU, 0),
            "resources": wanted.custom,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        if self._group is not None:
            where = PlacementGroupSchedulingStrategy(self._group, bundle)
            options["scheduling_strategy"] = where
        if py_executable is not None:
            options["runtime_env"] = {"py_executable": py_executable}
        remote: Any = ray.remote  # its types know no concurrency groups
        return remote(concurrency_groups=groups)(kind).options(name=name, **options).remote()
