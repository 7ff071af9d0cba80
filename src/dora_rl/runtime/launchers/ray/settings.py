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
    trainer: Resources = Resources()
    evaluator: Resources = Resources(cpus=0.0)

    @field_validator("address")
    @classmethod
    def _no_client(cls, address: str | None) -> str | None:
        if address is not None and "://" in address:
            raise ValueError(
                f"address must be that of the cluster itself: `{address}`. Use `host:port` on one "
                "of its nodes, or `ray job submit`"
            )
        return address
