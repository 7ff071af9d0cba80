"""What a user may set of training. Nothing here needs torch."""

import re
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from dora_rl.config import ConfigModel
from dora_rl.trainer.rendezvous import Address
from dora_rl.weights.adapter import MAX_RANK


class Schedule(StrEnum):
    CONSTANT = "constant"
    LINEAR = "linear"  # down to 0 at the last step
    COSINE = "cosine"  # down to 0 at the last step


class Dtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Behaviour(StrEnum):
    """Where the log-probabilities of the old policy come from."""

    ENGINE = "engine"  # as the engine reported them with its tokens
    RECOMPUTE = "recompute"  # from the weights of the version that sampled, by the trainer


AUTO, CPU = "auto", "cpu"
_DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9][0-9]{0,3}))?")


def _device(name: str) -> str:
    if not _DEVICE.fullmatch(name):
        raise ValueError(
            f"device must be `auto`, `cpu`, `cuda` or `cuda:N`: `{name}`. "
            "Use `auto` for a GPU where there is one."
        )
    return name


def _rendezvous(text: str) -> str:
    try:
        Address.parse(text)
    except ValueError:
        raise ValueError(
            f"rendezvous must be HOST:PORT: `{text}`. Use 127.0.0.1:0 for a free port of this "
            "machine."
        ) from None
    return text


DeviceName = Annotated[str, AfterValidator(_device)]
"""`auto` (a GPU where torch has one, else the CPU), `cpu`, `cuda` or `cuda:N`."""


def refusal(device: str, processes: int, gpus: int) -> str | None:
    """Why `train.device` cannot be had by so many processes of a machine with so many GPUs.

    None if it can: on the CPU always, by `auto` also without any GPU.
    """
    if device == CPU or (device == AUTO and gpus == 0):
        return None
    there = f"torch has {gpus or 'no'} GPU{'s' * (gpus != 1)} here"
    _, _, number = device.partition(":")
    if gpus == 0 or (number and int(number) >= gpus):
        lower = f", or `cuda:0` to `cuda:{gpus - 1}`" if gpus else ""
        return f"train.device is not there: `{device}`; {there}. Use `auto` or `cpu`{lower}."
    if processes > gpus:
        return (
            f"train.processes is more than there are GPUs: `{processes}`; {there}, and each "
            f'process needs its own. Lower it, or set train.device = "cpu".'
        )
    return None


_TARGETS = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


class LoraSettings(ConfigModel):
    """`[model.lora]`: train an adapter of the model instead of its weights."""

    rank: int = Field(default=16, ge=1, le=MAX_RANK, description="of the product that is added")
    alpha: float = Field(default=32.0, gt=0, le=1e6, description="it is scaled by alpha / rank")
    target_modules: tuple[str, ...] = Field(
        default=_TARGETS, min_length=1, description="the last names of the modules that have one"
    )
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="of what enters the adapter, where gradients are taken: another policy than "
        "the one that sampled",
    )

    @field_validator("target_modules")
    @classmethod
    def _names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(
                    f"target_modules must be the last names of modules: `{name}`. Use "
                    "`q_proj`, say."
                )
        return tuple(sorted(set(names)))


class TrainSettings(ConfigModel):
    """`[train]`: the optimizer, and how a batch goes through the model."""

    learning_rate: float = Field(
        default=1e-6,
        ge=0,
        le=1e3,
        description="of AdamW, after the warm-up",
        json_schema_extra={"fix": "Use 0 to train nothing."},
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps of a linear rise to it")
    schedule: Schedule = Field(default=Schedule.CONSTANT, description="after the warm-up")
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="of AdamW")
    eps: float = Field(default=1e-8, gt=0, description="of AdamW")
    weight_decay: float = Field(
        default=0.0, ge=0, description="of matrices; norms and biases never decay"
    )
    max_grad_norm: float = Field(default=1.0, gt=0, description="global norm, clipped above")
    minibatches: int = Field(
        default=1,
        ge=1,
        description="optimizer updates in a step, at most",
        json_schema_extra={"elsewhere": "cluster.updates_per_step"},
    )
    token_budget: int = Field(
        default=2048, ge=1, description="tokens of one forward pass, padding included"
    )
    dtype: Dtype | Literal["auto"] = Field(
        default=Dtype.FLOAT32,
        description="of compute; weights and optimizer stay float32; `auto`: what is faster where "
        "the run starts",
    )
    publish_dtype: Dtype | None = Field(
        default=None, description="of published weights; else the model's own"
    )
    activation_checkpointing: bool = Field(
        default=False, description="less memory, a third more time"
    )
    logprob_chunk: int = Field(
        default=512, ge=1, description="tokens whose logits are in memory at once"
    )
    native_kernels: bool | None = Field(
        default=None,
        description="norms, attention and gates by kernels compiled on this machine, and prompts "
        "that responses share computed once; else on the CPU where there is a C compiler",
    )
    behaviour: Behaviour = Field(
        default=Behaviour.ENGINE, description="where old log-probabilities come from"
    )
    device: DeviceName = Field(
        default=AUTO, description="`auto`: a GPU where torch has one, else the CPU"
    )
    processes: int = Field(default=1, ge=1, le=1024, description="data parallel")
    rendezvous: Annotated[str, AfterValidator(_rendezvous)] | None = Field(
        default=None,
        description="HOST:PORT at which they meet; else loopback and a free port. Only those on "
        "loopback are started by the trainer",
    )
    threads: int | None = Field(
        default=None, ge=1, le=4096, description="of torch in each process; else a fair share"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "TrainSettings":
        if not all(0 <= beta < 1 for beta in self.betas):
            shown = ", ".join(map(str, self.betas))
            raise ValueError(f"betas must be in [0, 1): `{shown}`. AdamW's own are 0.9, 0.999.")
        if self.processes > 1 and ":" in self.device:
            raise ValueError(
                f"device is one GPU for {self.processes} processes: `{self.device}`. "
                "Use `cuda`, which gives each its own, or processes = 1."
            )
        return self
