"""What a checkpoint holds, in memory of its own, so that training continues while it is written."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
import torch
from torch import Tensor

from dora_rl.trainer import checkpoint
from dora_rl.trainer.errors import CheckpointError
from dora_rl.trainer.model import Source
from dora_rl.trainer.report import StepReport

MASTER = "master."  # of float32 weights, where those that are published say less
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class Facts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is not a tensor."""

    step: _Count
    updates: _Count
    model: str  # the digest of the initial policy
    settings: dict[str, Any]
    report: StepReport | None


@dataclass(frozen=True)
class Snapshot:
    """A trainer at one moment. Nothing here changes any more; any thread may write it."""

    source: Source
    weights: dict[str, Tensor]  # float32, by the names of the checkpoint
    dtypes: dict[str, torch.dtype]  # that each is published in
    state: dict[str, Tensor]  # of the optimizer; the value head
    facts: Callable[[], Facts]

    def write(self, directory: Path) -> None:
        """Write it as a checkpoint; see `checkpoint.write`."""
        weights = {name: tensor.to(self.dtypes[name]) for name, tensor in self.weights.items()}
        masters = {
            f"{MASTER}{name}": tensor
            for name, tensor in self.weights.items()
            if self.dtypes[name] != torch.float32
        }
        facts = msgspec.to_builtins(self.facts())
        checkpoint.write(
            directory,
            self.source.directory,
            weights,
            self.state | masters,
            facts,
            adapter=self.source.adapter,
        )


def facts_of(found: checkpoint.Checkpoint) -> Facts:
    """What a checkpoint says, if it has the form of what was written."""
    try:
        return msgspec.convert(found.facts, Facts)
    except msgspec.ValidationError as error:
        raise CheckpointError(
            f"the checkpoint `{found.directory}` is damaged: {error} in its state.json. "
            "Restore an earlier checkpoint."
        ) from error
