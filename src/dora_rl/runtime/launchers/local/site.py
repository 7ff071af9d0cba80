"""Where the processes of one machine find what they share. It is in no message."""

import json
from pathlib import Path
from typing import NamedTuple

from dora_rl.core.protocol.types import InstanceId
from dora_rl.store.rundir import CHECKPOINTS, EXCHANGE, TRAJECTORIES, WEIGHTS, copies_of


class Site(NamedTuple):
    """A run on this machine, as its workers are told on their command line."""

    model: str
    run: str
    parent: int
    """The process that has started the worker, which ends with it: the driver's, or a server's."""
    objects: int | None = None
    """An open socket: the worker's way to the object store of its cluster, if it has one."""
    scratch: str | None = None
    """A directory of this node for this worker alone, where the run's may be on another."""

    @classmethod
    def parse(cls, text: str) -> "Site":
        return cls(*json.loads(text))

    def encode(self) -> str:
        return json.dumps(self)

    @property
    def weights(self) -> Path:
        return Path(self.run, WEIGHTS)

    @property
    def trajectories(self) -> Path:
        return Path(self.run, TRAJECTORIES)

    @property
    def exchange(self) -> Path:
        return Path(self.run, EXCHANGE)

    def copies(self, instance: InstanceId) -> Path:
        """Where an instance keeps versions that it was sent."""
        if self.scratch is not None:
            return Path(self.scratch, "copies")
        return copies_of(self.exchange, instance)

    @property
    def checkpoints(self) -> Path:
        return Path(self.run, CHECKPOINTS)
