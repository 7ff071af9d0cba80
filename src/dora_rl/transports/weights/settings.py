"""`[runtime.weights]`: how versions travel. Free of torch."""

from typing import Literal

from pydantic import Field

from dora_rl.config import ConfigModel

TransportName = Literal["directory"]


class WeightTransportSettings(ConfigModel):
    """`[runtime.weights]`: from the trainer to the instances."""

    transport: TransportName = Field(
        default="directory", description="instances map the files of the run directory"
    )
    delta: bool = Field(
        default=False,
        description="instances keep a copy of the last version, and read what changed alone; pays "
        "where the run directory is on a network",
    )
