"""What a scenario file says, and the world that it means for each paradigm.

The sections are plain data with ranges; `Scenario.setup` puts them together and refuses what
contradicts itself, in the words of the file. Lengths belong to the scenario alone, so that
every paradigm meets the same ones.
"""

from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

from pydantic import Field, field_serializer, model_validator

from dora_rl.config import ConfigModel, validate
from dora_rl.core.protocol.errors import UserError
from dora_rl.core.protocol.paradigms import PARADIGMS
from dora_rl.core.protocol.settings import Elastic, ParadigmName, Settings
from dora_rl.simulator.cost_parameters import Efficiency, Model, NamedDevice
from dora_rl.simulator.faults import FaultParams
from dora_rl.simulator.params import WorldParams
from dora_rl.simulator.workload import Sampler, Workload


class About(ConfigModel):
    """`[scenario]`: what is run, and which part of it is measured."""

    title: str = Field(min_length=1)
    description: str = ""
    paradigms: tuple[ParadigmName, ...] = Field(
        default=tuple(ParadigmName), min_length=1, description="which are compared, in this order"
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="measured is from the publication of this version on"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "About":
        if len(set(self.paradigms)) < len(self.paradigms):
            raise ValueError(
                f"paradigms must differ: `{', '.join(self.paradigms)}`. Name each one once."
            )
        return self


class Run(ConfigModel):
    """`[run]`: how long, and from which seed."""

    steps: int = Field(
        ge=1, le=1_000_000, description="the run ends when this version is published"
    )
    seed: int = 0


class Rollout(ConfigModel):
    """`[rollout]`: an instance of the engine."""

    slots: int = Field(
        default=64, ge=1, le=1_000_000, description="trajectories in one instance's batch"
    )
    version_slots: int = Field(
        default=1,
        ge=1,
        description="versions one instance can hold; with model.lora_rank, K + 1 if left out",
    )


class Task(ConfigModel):
    """`[task]`: how rewards are computed."""

    reward_workers: int | None = Field(
        default=None, ge=1, description="rewards computed at once; else no limit"
    )


class Runtime(ConfigModel):
    """`[runtime]`: how the parts of a run keep in touch."""

    report_period_s: float = Field(default=10.0, ge=0.01, description="heartbeat of an instance")


class Cluster(ConfigModel):
    """`[cluster]`: devices, how they are shared out, and how the services around them behave."""

    devices: int = Field(ge=1, le=10_000_000, description="all devices, of rollout and of training")
    device: NamedDevice = Field(description="a name, such as H800, or a table of figures")
    devices_per_instance: int = Field(default=1, ge=1, description="of one rollout replica")
    train_devices: int = Field(
        ge=1, description="devices of the trainer where it does not share those of rollout"
    )
    updates_per_step: int = Field(
        default=1,
        ge=1,
        description="optimizer updates in a train step",
        json_schema_extra={"elsewhere": "train.minibatches"},
    )
    prompts: int | None = Field(default=None, ge=1, description="prompts there are; else endless")
    prompt_s: float = Field(default=0.01, ge=0, le=1e6, description="time to read prompts")
    judge_s: float = Field(default=0.01, ge=0, le=1e6, description="time to judge a group")
    filter_rate: float = Field(default=0.0, ge=0, lt=1, description="share of groups filtered")
    save_period_s: float | None = Field(
        default=None,
        gt=0,
        description="between two saves of prefixes; else never",
        json_schema_extra={"elsewhere": "run.save_every_s"},
    )
    restart_s: float = Field(default=60.0, ge=0, description="a dead instance is back after this")
    carry_reprefill: bool = Field(
        default=True, description="new weights make running work compute its KV again"
    )
    kv_migration: bool = Field(
        default=True, description="a migration moves KV; else the target computes it again"
    )
    migration_lease_s: float = Field(
        default=900.0, gt=0, description="what a migration reserved is freed after this silence"
    )


class Overrides(ConfigModel):
    """`[paradigm.NAME]`: what differs for one paradigm, by section."""

    orchestration: dict[str, Any] = Field(default_factory=dict)
    rollout: dict[str, Any] = Field(default_factory=dict)
    task: dict[str, Any] = Field(default_factory=dict)
    runtime: dict[str, Any] = Field(default_factory=dict)
    cluster: dict[str, Any] = Field(default_factory=dict)
    efficiency: dict[str, Any] = Field(default_factory=dict)

    def sections(self) -> dict[str, dict[str, Any]]:
        """The sections that say something."""
        return {name: values for name, values in self if values}


@dataclass(frozen=True, slots=True)
class Setup:
    """One paradigm of a scenario, ready to run."""

    name: ParadigmName
    settings: Settings
    params: WorldParams
    workload: Workload
    seed: int
    steps: int
    warmup_steps: int

    def sampler(self) -> Sampler:
        """The lengths: the same for every paradigm."""
        return Sampler(self.workload, self.seed)


class Scenario(ConfigModel):
    """One scenario file. A key that a run has as well is in the same section there."""

    scenario: About
    run: Run
    orchestration: Settings = Settings()
    rollout: Rollout = Rollout()
    task: Task = Task()
    runtime: Runtime = Runtime()
    cluster: Cluster
    model: Model
    efficiency: Efficiency = Efficiency()
    workload: Workload = Workload()
    faults: FaultParams = FaultParams()
    paradigm: dict[ParadigmName, Overrides] = Field(default_factory=dict)

    @field_serializer("orchestration")
    def _without_paradigm(self, settings: Settings) -> dict[str, Any]:
        plain = asdict(settings)
        del plain["paradigm"]  # each run has its own
        del plain["version_slots"]  # rollout's
        return plain

    @model_validator(mode="after")
    def _consistent(self) -> "Scenario":
        if self.scenario.warmup_steps >= self.run.steps:
            raise ValueError(
                f"scenario.warmup_steps must be < run.steps ({self.run.steps}): "
                f"`{self.scenario.warmup_steps}`. At least one step has to be measured."
            )
        if self.orchestration.version_slots != 1:
            raise ValueError(
                "orchestration.version_slots is rollout.version_slots in a scenario: "
                f"`{self.orchestration.version_slots}`. Set it there."
            )
        return self._with_room_for_adapters()

    def _with_room_for_adapters(self) -> "Scenario":
        """Adapters are small: an instance holds every live version, unless the file says less."""
        if self.model.lora_rank is None or "version_slots" in self.rollout.model_fields_set:
            return self
        slots = {"version_slots": self.orchestration.max_staleness + 1}
        return self.model_copy(update={"rollout": self.rollout.model_copy(update=slots)})

    def setup(self, paradigm: ParadigmName) -> Setup:
        """What this scenario means for one paradigm; UserError where it means nothing."""
        overrides = self.paradigm.get(paradigm, Overrides()).sections()
        try:
            return self._with(overrides)._setup(paradigm)
        except UserError as error:
            place = f"in [paradigm.{paradigm}]: " if overrides else ""
            raise UserError(f"{place}{error}") from None

    def _with(self, overrides: dict[str, dict[str, Any]]) -> "Scenario":
        if not overrides:
            return self
        plain = self.model_dump(mode="json", exclude_none=True, exclude={"paradigm"})
        for section, values in overrides.items():
            plain[section] |= values
        return validate(Scenario, plain, self.scenario.title)

    def _setup(self, paradigm: ParadigmName) -> Setup:
        settings = replace(
            self.orchestration, paradigm=paradigm, version_slots=self.rollout.version_slots
        )
        cluster = self.cluster
        params = WorldParams(
            instances=self._instances(paradigm),
            slots=self.rollout.slots,
            version_slots=settings.version_slots,
            reward_workers=self.task.reward_workers,
            report_period_s=self.runtime.report_period_s,
            train_devices=0 if PARADIGMS[paradigm].colocated else cluster.train_devices,
            elastic_instances=self._elastic_instances(paradigm),
            save_period_s=inf if cluster.save_period_s is None else cluster.save_period_s,
            model=self.model,
            efficiency=self.efficiency,
            faults=self.faults,
            **{
                name: value
                for name, value in cluster
                if name not in ("devices", "train_devices", "save_period_s")
            },
        )
        self._check_memory(params)
        return Setup(
            paradigm,
            settings,
            params,
            self.workload,
            self.run.seed,
            self.run.steps,
            self.scenario.warmup_steps,
        )

    def _instances(self, paradigm: ParadigmName) -> int:
        """Colocated rollout has every device; else what the trainer leaves."""
        cluster = self.cluster
        each = cluster.devices_per_instance
        if PARADIGMS[paradigm].colocated:
            left, of_what = cluster.devices, "cluster.devices"
        else:
            left, of_what = cluster.devices - cluster.train_devices, "devices left for rollout"
            if left <= 0:
                raise UserError(
                    f"cluster.train_devices must be < cluster.devices ({cluster.devices}): "
                    f"`{cluster.train_devices}`. `{paradigm}` needs devices for rollout as well."
                )
        if left < each:
            raise UserError(
                f"{of_what} must be >= cluster.devices_per_instance ({each}): `{left}`. "
                f"`{paradigm}` would have no instance."
            )
        if left % each:
            raise UserError(
                f"{of_what} must be a multiple of cluster.devices_per_instance ({each}): "
                f"`{left}`. Change cluster.devices or cluster.train_devices."
            )
        return left // each

    def _elastic_instances(self, paradigm: ParadigmName) -> int:
        """As many as fit on the trainer's devices, where these are lent."""
        if self.orchestration.elastic is Elastic.OFF or not PARADIGMS[paradigm].lends:
            return 0
        return self.cluster.train_devices // self.cluster.devices_per_instance

    def _check_memory(self, params: WorldParams) -> None:
        try:
            capacity = params.costs().kv_capacity_tokens
        except ValueError as error:
            raise UserError(f"cluster: {error}") from None
        longest = self.workload.longest_tokens
        if longest >= capacity:
            raise UserError(
                f"the longest trajectory must fit into one instance's KV memory ({capacity} "
                f"tokens): `{longest}` tokens. Raise cluster.devices_per_instance, or shorten "
                "the workload."
            )
