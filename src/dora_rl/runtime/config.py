"""The configuration of a run: all sections of the TOML file, checked against each other.

Each part declares its own section; here they meet. Free of torch, so that a mistake is told
before anything heavy is imported.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field, field_serializer, model_validator

from dora_rl.algorithms.settings import AlgorithmSettings, check
from dora_rl.config import ConfigModel
from dora_rl.core.protocol.paradigms import PARADIGMS
from dora_rl.core.protocol.settings import Elastic, Settings
from dora_rl.engines.registry import (
    EngineName,
    can_be_deterministic,
    can_speculate,
    device_refusal,
    has_own_environment,
    least_kv_tokens,
    most_versions,
    sampling_refusal,
)
from dora_rl.engines.speculation import Speculation
from dora_rl.engines.vllm.settings import VllmSettings
from dora_rl.machine import processor
from dora_rl.runtime.launchers.ray.settings import RaySettings
from dora_rl.runtime.prepare.not_yet import not_yet
from dora_rl.tasks.settings import TaskSettings
from dora_rl.trainer.settings import AUTO, Behaviour, DeviceName, LoraSettings, TrainSettings
from dora_rl.transports.kv.settings import KvTransportSettings
from dora_rl.transports.weights.settings import WeightTransportSettings

# In one engine, unless the user says so: a full set of weights costs memory, and splits batches.
_MOST_VERSIONS = 8
_MOST_ADAPTERS = 32


class ModelSettings(ConfigModel):
    """`[model]`: the initial policy."""

    path: str = Field(
        min_length=1,
        description="a Hugging Face model directory, a name on the hub, or a packaged model's",
    )
    lora: LoraSettings | None = Field(
        default=None, description="train a LoRA adapter; else all weights are trained"
    )


class RolloutSettings(ConfigModel):
    """`[rollout]`: an instance of the engine, and how it samples."""

    engine: EngineName = Field(
        default=EngineName.EMBEDDED,
        description="what generates: the CPU engine of this package, or vLLM",
    )
    device: DeviceName = Field(
        default=AUTO, description="of the engine: the embedded one runs on the CPU"
    )
    slots: int = Field(default=32, ge=1, le=65_536, description="trajectories that run at once")
    version_slots: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="versions that one engine serves at once; else as many as may be live",
    )
    spare_version_slot: bool = Field(
        default=True,
        description="memory for one version more, where the engine can: a new one is there before "
        "an old one goes",
    )
    kv_budget_tokens: int | None = Field(
        default=None, ge=1, description="KV memory; else what the slots can use"
    )
    kv_dtype: Literal["float32", "bfloat16"] = "float32"
    prefill_chunk: int = Field(default=512, ge=1, description="prompt tokens read in one step")
    deterministic: bool | None = Field(
        default=None, description="bit-exact whatever the batch; else in `inline` only"
    )
    native_kernels: bool | None = Field(
        default=None,
        description="passes of the embedded engine by kernels compiled on this machine; else where "
        "they are faster or, if it is deterministic, where there is a C compiler",
    )
    bf16_products: bool = Field(
        default=True,
        description="the embedded engine may round what enters a product of bf16 weights to bf16, "
        "where that is faster and it is not deterministic; else products are in float32",
    )
    speculation: Speculation = Field(
        default=Speculation.AUTO,
        description="whether the embedded engine proposes tokens to its last few trajectories: "
        "auto, on or off; the same tokens come out",
    )
    max_tokens: int = Field(default=256, ge=1, description="of a response, all turns together")
    temperature: float = Field(
        default=1.0, gt=0, description="of sampling; the trainer divides its logits by it too"
    )
    top_k: int = Field(default=0, ge=0, description="0: no limit")
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    stop: tuple[str, ...] = Field(default=(), description="strings that end a turn")
    vllm: VllmSettings = VllmSettings()

    @property
    def engine_options(self) -> dict[str, Any]:
        """What the engine's own section says."""
        return self.vllm.model_dump() if self.engine is EngineName.VLLM else {}


class LogicalTime(ConfigModel):
    """`[runtime.inline]`: how long things take on the logical clock."""

    step_s: float = Field(default=0.01, gt=0, description="one step of an engine")
    train_token_s: float = Field(default=2e-4, ge=0, description="training, for each token")
    score_s: float = Field(default=0.01, ge=0, description="one reward, one turn")
    publish_s: float = Field(default=0.02, ge=0)


class RuntimeSettings(ConfigModel):
    """`[runtime]`: where the parts of a run live."""

    kind: Literal["local", "inline", "ray"] = Field(
        default="local",
        description="processes of this machine, all in one on a logical clock, or a Ray cluster",
    )
    instances: int = Field(default=1, ge=1, le=1024, description="rollout processes")
    rollout_threads: int | None = Field(default=None, ge=1, description="of one; else by the cores")
    train_threads: int | None = Field(default=None, ge=1, description="else by the cores")
    elastic_instances: int | None = Field(
        default=None,
        ge=0,
        le=1024,
        description="on the trainer's cores, for orchestration.elastic; else one if that is on",
    )
    report_period_s: float = Field(default=0.5, ge=0.01, description="heartbeat of an instance")
    step_timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="an instance whose step takes longer sends no more heartbeats: it hangs",
    )
    start_timeout_s: float = Field(
        default=300.0, gt=0, description="a process that is not ready by then has failed"
    )
    train_silence_s: float = Field(
        default=300.0, gt=0, description="a trainer that shows no progress for so long is replaced"
    )
    stop_timeout_s: float = Field(
        default=600.0, gt=0, description="for the last step and its checkpoint after Ctrl-C"
    )
    min_free_memory_mb: int = Field(
        default=256,
        ge=0,
        description="with less left, a local run saves and ends; 0: not watched",
    )
    inline: LogicalTime = LogicalTime()
    ray: RaySettings = RaySettings()
    weights: WeightTransportSettings = WeightTransportSettings()
    kv: KvTransportSettings = KvTransportSettings()


class RunSettings(ConfigModel):
    """`[run]`: how long, from which seed, and what is kept."""

    steps: int = Field(default=100, ge=1, description="train steps")
    seed: int = Field(default=0, ge=0, lt=2**63)
    out: str | None = Field(default=None, description="the run directory; else runs/DATE-TIME")
    shared: bool = Field(
        default=False, description="let other users of this machine into the run directory"
    )
    checkpoint_every: int | None = Field(
        default=20,
        ge=1,
        description="steps between checkpoints: a resume takes those after the last one again",
    )
    keep_checkpoints: int = Field(default=2, ge=1, description="older ones are deleted")
    durable: bool = Field(
        default=True, description="keep a ledger, so that a run that is killed can be resumed"
    )
    commit_every_s: float = Field(
        default=0.2, ge=0, description="so much at most is lost if the run is killed"
    )
    snapshot_every: int = Field(
        default=10_000,
        ge=1,
        description="events between two snapshots, at least: a resume replays so many",
    )
    save_every_s: float = Field(
        default=5.0,
        gt=0,
        description="between two times that a running trajectory's tokens are saved",
        json_schema_extra={"elsewhere": "cluster.save_period_s"},
    )
    samples_per_step: int = Field(
        default=4, ge=0, le=10_000, description="trajectories of a step in samples.jsonl; 0: none"
    )
    show_sample_every: int = Field(
        default=10, ge=0, description="steps between samples on the terminal; 0: none"
    )


class Threads(NamedTuple):
    """How the cores are shared out."""

    rollout: int  # of each instance
    train: int

    @property
    def evaluation(self) -> int:
        """Beside all of the others, and never waited for but at the end: half of an instance."""
        return max(1, self.rollout // 2)


class RunConfig(ConfigModel):
    """A whole run."""

    not_yet: ClassVar[Callable[..., str | None]] = not_yet
    """For messages of `config`: what a word names that this version does not have."""

    model: ModelSettings
    task: TaskSettings = Field(default_factory=lambda: TaskSettings())
    algorithm: AlgorithmSettings = AlgorithmSettings()
    train: TrainSettings = TrainSettings()
    rollout: RolloutSettings = RolloutSettings()
    orchestration: Settings = Settings()
    runtime: RuntimeSettings = RuntimeSettings()
    run: RunSettings = RunSettings()

    @field_serializer("orchestration")
    def _without_steps(self, settings: Settings) -> dict[str, Any]:
        plain = asdict(settings)
        del plain["max_steps"], plain["version_slots"]  # other sections say them
        return plain

    @model_validator(mode="after")
    def _consistent(self) -> "RunConfig":
        if self.orchestration.max_steps not in (0, self.run.steps):
            raise ValueError(
                f"orchestration.max_steps is run.steps ({self.run.steps}) in a run: "
                f"`{self.orchestration.max_steps}`. Remove it."
            )
        if self.orchestration.version_slots != 1:
            raise ValueError(
                "orchestration.version_slots is rollout.version_slots in a run: "
                f"`{self.orchestration.version_slots}`. Set it there."
            )
        self._check_engine()
        self._check_transports()
        self._check_elastic()
        longest_s = self.orchestration.heartbeat_timeout_s / 2  # an eighth of it may go unheard
        if self.runtime.report_period_s > longest_s:
            raise ValueError(
                "runtime.report_period_s must be at most half of orchestration.heartbeat_timeout_s "
                f"({self.orchestration.heartbeat_timeout_s}): `{self.runtime.report_period_s}`. "
                f"Use {longest_s} or less, or a longer timeout."
            )
        self.warnings()
        return self

    def _check_engine(self) -> None:
        """Refuse what the engine that is named cannot do."""
        rollout, name = self.rollout, self.rollout.engine
        if why := device_refusal(name, rollout.device):
            raise ValueError(why)
        wanted = rollout.version_slots or 1
        most = self._most_versions(wanted)
        if wanted > most:
            raise ValueError(
                f"rollout.version_slots must be at most {most}, as the {name} engine holds no more "
                f"full sets of weights: `{wanted}`. Use more instances for more versions at once, "
                "or model.lora."
            )
        if self.runtime.kind == "inline" and has_own_environment(name):
            raise ValueError(
                f"runtime.kind must be `local` or `ray` with the {name} engine, which has an "
                f"environment and processes of its own: `{self.runtime.kind}`."
            )
        if self.deterministic and not can_be_deterministic(name):
            raise ValueError(
                f"rollout.deterministic must be false with the {name} engine, whose results depend "
                "on the batch: `true`."
            )
        if rollout.speculation is Speculation.ON and not can_speculate(name):
            raise ValueError(
                f"rollout.speculation must be `auto` or `off` with the {name} engine: `on`. The "
                "embedded engine has it."
            )
        if why := sampling_refusal(name, rollout.temperature, rollout.top_p, rollout.min_p):
            raise ValueError(f"rollout: {why}")
        self._check_engine_memory()

    def _check_transports(self) -> None:
        """Refuse an object store where there is none."""
        runtime = self.runtime
        for what, transport in (("weights", runtime.weights), ("kv", runtime.kv)):
            if transport.transport == "object_store" and runtime.kind != "ray":
                raise ValueError(
                    f"runtime.{what}.transport needs a Ray cluster: `object_store` with "
                    f"runtime.kind = `{runtime.kind}`. Use runtime.kind = `ray`, or `directory`."
                )

    def _check_elastic(self) -> None:
        elastic, count = self.orchestration.elastic, self.runtime.elastic_instances
        if elastic is Elastic.OFF:
            if count:
                raise ValueError(
                    f"runtime.elastic_instances needs orchestration.elastic: `{count}`. "
                    "Set that to `rollout` or `both`."
                )
        elif self._uses_gpus:
            raise ValueError(
                f"orchestration.elastic must be `off` with a GPU: `{elastic}`. Nothing moves the "
                "trainer's memory off a device yet; cores can be lent."
            )
        elif self.runtime.kind == "ray" and not self.runtime.ray.trainer.bundle:
            raise ValueError(
                "orchestration.elastic needs devices that the trainer can lend: "
                "`runtime.ray.trainer.cpus = 0`. Give it cpus, or set elastic to `off`."
            )

    @property
    def _uses_gpus(self) -> bool:
        devices = (self.rollout.device, self.train.device)
        on_nodes = self.runtime.ray.trainer.gpus if self.runtime.kind == "ray" else 0
        return bool(on_nodes) or any(device.startswith("cuda") for device in devices)

    @property
    def elastic_instances(self) -> int:
        """Rollout instances on the trainer's cores, where those are lent."""
        core = self.orchestration
        if core.elastic is Elastic.OFF or not PARADIGMS[core.paradigm].lends:
            return 0
        wanted = self.runtime.elastic_instances
        return 1 if wanted is None else wanted

    def _check_engine_memory(self) -> None:
        rollout, name = self.rollout, self.rollout.engine
        block = rollout.engine_options.get("block_size", 1)
        least = -(-least_kv_tokens(name) // block) * block  # whole blocks
        if rollout.kv_budget_tokens is not None and rollout.kv_budget_tokens < least:
            raise ValueError(
                f"rollout.kv_budget_tokens must be at least {least} with the {name} engine: "
                f"`{rollout.kv_budget_tokens}`."
            )
        sharing = 1 if self._own_gpus else self.runtime.instances
        share = sharing * rollout.vllm.gpu_memory_utilization
        if rollout.device.startswith("cuda") and share > 1:
            raise ValueError(
                f"rollout.vllm.gpu_memory_utilization of {self.runtime.instances} instances on "
                f"one GPU must add up to 1 at most: `{rollout.vllm.gpu_memory_utilization}` each. "
                "Lower it."
            )

    @property
    def _own_gpus(self) -> bool:
        """Whether each instance has a GPU of its own."""
        return self.runtime.kind == "ray" and self.runtime.ray.rollout.gpus >= 1

    def warnings(self) -> list[str]:
        """What is allowed, and may not be meant."""
        core = self.settings()
        found = check(
            self.algorithm,
            group_size=core.group_size,
            max_staleness=PARADIGMS[core.paradigm].max_staleness(core),
            multi_epoch=self.train.minibatches > 1,
        )
        if self.algorithm.importance != "none" and self.train.behaviour is Behaviour.ENGINE:
            found.append(
                f"importance `{self.algorithm.importance}` corrects nothing while the engine's own "
                "log-probabilities are the old policy's. Set train.behaviour to `recompute`."
            )
        rollout = self.rollout
        if rollout.top_p < 1 or rollout.top_k or rollout.min_p:
            found.append(
                "top_p, top_k and min_p sample from another distribution than the trainer's: "
                "ratios are biased. Use 1, 0 and 0."
            )
        return found

    def settings(self) -> Settings:
        """What the core is told."""
        core = self.orchestration
        paradigm = PARADIGMS[core.paradigm]
        live = paradigm.max_staleness(core) + 1 if paradigm.pins_version else 1
        return replace(
            core,
            max_steps=self.run.steps,
            version_slots=self.rollout.version_slots
            or self._most_versions(
                min(live, _MOST_VERSIONS if self.model.lora is None else _MOST_ADAPTERS)
            ),
        )

    @property
    def version_slots(self) -> int:
        """Of one engine: for the versions that it serves at once and, where it can, a spare."""
        wanted = self.settings().version_slots + self.rollout.spare_version_slot
        return self._most_versions(wanted)

    def _most_versions(self, wanted: int) -> int:
        lora = self.model.lora is not None
        return most_versions(self.rollout.engine, wanted, lora=lora)

    @property
    def colocated(self) -> bool:
        """Training and rollout take turns, so each may have every core."""
        return PARADIGMS[self.orchestration.paradigm].colocated

    @property
    def deterministic(self) -> bool:
        wish = self.rollout.deterministic
        return self.runtime.kind == "inline" if wish is None else wish

    def threads(self, cores: int | None = None) -> Threads:
        """Threads of each process, so that those that run at once do not fight for cores."""
        runtime = self.runtime
        if runtime.kind == "ray":
            return self._threads_on_nodes(runtime)
        cores = cores or processor.cores()
        train = runtime.train_threads or self.train.threads
        if train is None:
            train = cores if self.colocated else max(1, cores // 2)
        rollout = runtime.rollout_threads
        if rollout is None:
            left = cores if self.colocated else cores - train * self.train.processes
            rollout = max(1, left // runtime.instances)
        return Threads(rollout, train)

    def elastic_threads(self, cores: int | None = None) -> int:
        """Of each instance on the trainer's cores; on Ray, on those of one training process."""
        train, processes = self.threads(cores).train, self.train.processes
        if self.runtime.kind == "ray":
            return max(1, train // -(-max(1, self.elastic_instances) // processes))
        return max(1, train * processes // max(1, self.elastic_instances))

    def _threads_on_nodes(self, runtime: RuntimeSettings) -> Threads:
        """As many as a worker has CPUs of its node."""
        train = runtime.train_threads or self.train.threads
        share = int(runtime.ray.trainer.cpus)
        rollout = runtime.rollout_threads or int(runtime.ray.rollout.cpus)
        return Threads(max(1, rollout), train or max(1, share))
