"""What a simulated cluster is, declared: sizes, model, devices, periods, faults.

Plain data with ranges; scenarios are composed of it. Knows nothing of the core's settings.
"""

from math import inf

from pydantic import BaseModel, ConfigDict, Field

from dora_rl.simulator.cost_parameters import Efficiency, Model, NamedDevice
from dora_rl.simulator.costs import Costs
from dora_rl.simulator.faults import FaultParams


class WorldParams(BaseModel):
    """One cluster: rollout instances, a trainer, and how well things go."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    instances: int = Field(ge=1, description="rollout replicas")
    slots: int = Field(default=64, ge=1, description="trajectories in one instance's batch")
    version_slots: int = Field(default=1, ge=1, description="versions one instance can hold")
    devices_per_instance: int = Field(default=1, ge=1)
    train_devices: int = Field(
        default=0, ge=0, description="devices of the trainer alone; 0: it uses the instances' own"
    )
    elastic_instances: int = Field(
        default=0, ge=0, description="instances on the trainer's devices, which sleep at first"
    )
    model: Model
    device: NamedDevice
    efficiency: Efficiency = Efficiency()

    updates_per_step: int = Field(default=1, ge=1, description="optimizer updates in a train step")
    prompts: int | None = Field(default=None, ge=1, description="prompts there are; None: endless")
    prompt_s: float = Field(default=0.01, ge=0, description="time to read prompts")
    judge_s: float = Field(default=0.01, ge=0, description="time to judge a group")
    filter_rate: float = Field(
        default=0.0, ge=0, lt=1, description="share of groups without signal, filtered"
    )
    reward_workers: int | None = Field(
        default=None, ge=1, description="rewards computed at once; None: no limit"
    )
    report_period_s: float = Field(
        default=10.0, gt=0, description="between two reports of an instance: its heartbeat"
    )
    save_period_s: float = Field(
        default=inf, gt=0, description="between two saves of prefixes; inf: never"
    )
    restart_s: float = Field(default=60.0, ge=0, description="a dead instance is back after this")
    carry_reprefill: bool = Field(
        default=True, description="new weights make running work compute its KV again"
    )
    kv_migration: bool = Field(
        default=True, description="a migration moves KV; else the target computes it again"
    )
    migration_lease_s: float = Field(
        default=900.0,
        gt=0,
        description="a reservation or a kept copy is freed if no message names it for this long",
    )
    faults: FaultParams = FaultParams()

    @property
    def devices(self) -> int:
        """All devices, of rollout and of the trainer."""
        return self.instances * self.devices_per_instance + self.train_devices

    @property
    def colocated(self) -> bool:
        """Training takes the devices of the instances, and generation waits meanwhile."""
        return self.train_devices == 0

    def costs(self) -> Costs:
        """What everything takes on these devices."""
        return Costs(
            self.model,
            self.device,
            self.efficiency,
            devices_per_instance=self.devices_per_instance,
            version_slots=self.version_slots,
        )
