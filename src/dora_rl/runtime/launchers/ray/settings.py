"""`[runtime.ray]`: where the cluster is, and what each worker needs of it. Free of Ray."""

from pydantic import Field, field_validator

from dora_rl.config import ConfigModel

CPU, GPU = "CPU", "GPU"  # as Ray calls them


class Resources(ConfigModel):
    """What one worker occupies of its node; Ray counts it, and limits nothing."""

    cpus: float = Field(default=1.0, ge=0, description="its threads, unless they are set")
    gpus: float = Field(default=0.0, ge=0, description="the devices that it sees")
    custom: dict[str, float] = Field(
        default_factory=dict, description="resources that nodes were started with"
    )

    @field_validator("custom")
    @classmethod
    def _own_names(cls, custom: dict[str, float]) -> dict[str, float]:
        for name, amount in custom.items():
            if name.upper() in (CPU, GPU):
                raise ValueError(f"custom names no resource of Ray's own: `{name}`. Use cpus, gpus")
            if amount <= 0:
                raise ValueError(f"custom.{name} must be > 0: `{amount}`. Leave it out")
        return custom

    @property
    def bundle(self) -> dict[str, float]:
        """As a placement group has it; empty if nothing is asked for."""
        wanted = {CPU: self.cpus, GPU: self.gpus, **self.custom}
        return {name: amount for name, amount in wanted.items() if amount}

    def times(self, number: int) -> "Resources":
        """Of so many workers together."""
        custom = {name: number * amount for name, amount in self.custom.items()}
        return Resources(cpus=number * self.cpus, gpus=number * self.gpus, custom=custom)


class RewardWorkers(Resources):
    """Reward workers on the nodes, and what each of them occupies."""

    number: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="sandboxed workers on the nodes; 0: `task.reward_workers` beside the driver",
    )


class RaySettings(ConfigModel):
    """`[runtime.ray]`: of a run with `runtime.kind = "ray"`."""

    address: str | None = Field(
        default=None,
        min_length=1,
        description="`host:port` of a running cluster, or `auto`; else RAY_ADDRESS, else a cluster "
        "of this machine for this run alone",
    )
    py_executable: str | None = Field(
        default=None,
        min_length=1,
        description="the Python of workers on the nodes, if it is not that of their Ray",
    )
    rollout: Resources = Field(default=Resources(), description="of each rollout instance")
    trainer: Resources = Field(
        default=Resources(), description="of each training process (`train.processes`)"
    )
    evaluator: Resources = Resources(cpus=0.0)
    rewards: RewardWorkers = RewardWorkers()

    @field_validator("address")
    @classmethod
    def _no_client(cls, address: str | None) -> str | None:
        if address is not None and "://" in address:
            raise ValueError(
                f"address must be that of the cluster itself: `{address}`. Use `host:port` on one "
                "of its nodes, or `ray job submit`"
            )
        return address
