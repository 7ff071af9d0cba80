"""`[runtime.kv]`: how running trajectories travel."""

from typing import Literal

from pydantic import Field

from dora_rl.config import ConfigModel


class KvTransportSettings(ConfigModel):
    """`[runtime.kv]`: from one instance to another."""

    transport: Literal["directory", "object_store"] | None = Field(
        default=None,
        description="through the run directory, or the object store of a Ray cluster; else the "
        "latter on a cluster that runs",
    )
    timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="of `object_store`: what has not arrived by then is read again instead",
    )
