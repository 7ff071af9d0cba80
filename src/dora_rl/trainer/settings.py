"""What a user may set of training. Nothing here needs torch."""

from enum import StrEnum
from typing import Literal

from pydantic import Field, model_validator

from dora_rl.config import ConfigModel


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
    minibatches: int = Field(default=1, ge=1, description="optimizer updates in a step, at most")
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
    behaviour: Behaviour = Field(
        default=Behaviour.ENGINE, description="where old log-probabilities come from"
    )
    processes: int = Field(default=1, ge=1, le=1024, description="data parallel, this machine's")
    threads: int | None = Field(
        default=None, ge=1, le=4096, description="of torch in each process; else a fair share"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "TrainSettings":
        if not all(0 <= beta < 1 for beta in self.betas):
            shown = ", ".join(map(str, self.betas))
            raise ValueError(f"betas must be in [0, 1): `{shown}`. AdamW's own are 0.9, 0.999.")
        return self
