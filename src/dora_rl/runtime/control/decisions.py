"""What a supervisor is told of workers and of the run, and what it decides: values alone."""

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from dora_rl.core.protocol.types import InstanceId


class Role(Enum):
    TRAINER = "the trainer"
    ROLLOUT = "rollout instance"
    EVALUATOR = "the evaluator"


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker of the run, whichever process it is now. Its text is its name in messages."""

    role: Role
    instance: InstanceId | None = None

    def __str__(self) -> str:
        return self.role.value if self.instance is None else f"{self.role.value} {self.instance}"


TRAINER = Worker(Role.TRAINER)
EVALUATOR = Worker(Role.EVALUATOR)


def rollout(instance: InstanceId) -> Worker:
    return Worker(Role.ROLLOUT, instance)


ELASTIC_INSTANCES = 10_000
"""The number of the first instance on the trainer's devices: above all that can be scaled to."""
EVALUATOR_INSTANCE = 2**20
"""Beyond the numbers of all of them."""


def is_elastic(instance: InstanceId) -> bool:
    return ELASTIC_INSTANCES <= instance < EVALUATOR_INSTANCE


# Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the configuration allows, and what messages have to name."""

    start_timeout_s: float
    train_silence_s: float
    stop_timeout_s: float
    max_train_attempts: int
    replaces_workers: bool = True  # else a worker that is given up ends the run
    watches_memory: bool = True
    redoes_steps: bool = True  # a new trainer can get to where the last one was
    memory_remedy: str = ""
    trainer_log: str = ""


@dataclass(frozen=True, slots=True)
class Death:
    """How a worker ended: in one line that names it, and whether by an error of its own."""

    why: str
    own_error: bool = False  # an exception, or a fault of the processor


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """How far the run is."""

    begun: bool = True  # the core has been asked for work; before, there is nothing to save
    steps: int = 0  # that were trained
    training: bool = False  # the trainer was sent a batch that it has not answered
    halted: bool = False  # by the core
    stopping: bool = False  # it was asked to stop, or writes its last checkpoint, or has
    saved: bool = False  # the last checkpoint is complete
    evaluation_overdue: bool = False


# Decisions


@dataclass(frozen=True, slots=True)
class Kill:
    """End the worker's process at once; its death is reported like any other."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class Drain:
    """The worker's process has to go: hand its work over, or save it, and have it end."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class Restart:
    """The worker is lost: tell what counted on it, and start it as this incarnation."""

    worker: Worker
    incarnation: int
    why: str
    told_to_go: bool = False  # where its work was handed over in time, nobody has lost anything


@dataclass(frozen=True, slots=True)
class Retire:
    """The worker is gone and is not wanted any more: tell what may still count on it."""

    worker: Worker
    incarnation: int
    why: str


@dataclass(frozen=True, slots=True)
class Abandon:
    """The worker is lost, and nobody waits for it; it is started when it is needed again."""

    worker: Worker
    why: str


@dataclass(frozen=True, slots=True)
class RejectBatch:
    """Whoever trains this batch dies: reject it, and report `batch_rejected`."""

    why: str


@dataclass(frozen=True, slots=True)
class AnnounceStop:
    """The run must end though nobody asked for it: tell the user why."""

    because: str


@dataclass(frozen=True, slots=True)
class StopRun:
    """Finish the step that is under way, save, and end; `because` is None if the user asked."""

    because: str | None


@dataclass(frozen=True, slots=True)
class FailRun:
    """The run cannot continue; the message names the culprit."""

    message: str


Decision: TypeAlias = (
    Kill | Drain | Restart | Retire | Abandon | RejectBatch | AnnounceStop | StopRun | FailRun
)
