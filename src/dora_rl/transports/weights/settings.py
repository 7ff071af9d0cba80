"""`[runtime.weights]`: how versions travel. Free of torch."""

from typing import Literal

from pydantic import Field

from dora_rl.config import ConfigModel


class WeightTransportSettings(ConfigModel):
    """`[runtime.weights]`: from the trainer to the instances."""

    transport: Literal["directory", "process_group", "object_store"] | None = Field(
        default=None,
        description="instances map the files of the run directory, the trainer broadcasts them, or "
        "instances pull them from the object store of a Ray cluster; else the last on a cluster "
        "that runs, and the first elsewhere",
    )
    delta: bool | None = Field(
        default=None,
        description="instances keep a copy of the last version and are sent what changed alone; "
        "else with `process_group`: files that are mapped are not sent at all",
    )
    backend: Literal["gloo", "nccl"] = Field(
        default="gloo", description="of `process_group`: through the CPU, or between GPUs"
    )
    timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="a version that has not arrived by then has failed (`process_group`), or is "
        "mapped from the run directory (`object_store`)",
    )

    @property
    def deltas(self) -> bool:
        return self.transport == "process_group" if self.delta is None else self.delta
