"""One process's part of training: the leader has one, and so has every follower.

All of them are asked the same in the same order, for most of it needs the whole group.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from dora_rl.algorithms.algorithm import Algorithm
from dora_rl.algorithms.settings import AlgorithmSettings
from dora_rl.core.protocol.errors import UserError
from dora_rl.samples import Sample
from dora_rl.trainer import checkpoint
from dora_rl.trainer.batches import Batch, make_batch
from dora_rl.trainer.errors import CheckpointError
from dora_rl.trainer.model import VALUE_HEAD, load
from dora_rl.trainer.optimizer import Optimizer
from dora_rl.trainer.progress import Progress
from dora_rl.trainer.report import StepReport
from dora_rl.trainer.settings import LoraSettings, Schedule, TrainSettings
from dora_rl.trainer.sharding import gathered, local, shard_of
from dora_rl.trainer.shares import Deal, Share, deal
from dora_rl.trainer.snapshot import MASTER, Facts, Snapshot, facts_of
from dora_rl.trainer.step import Stepper
from dora_rl.trainer.world import World
from dora_rl.transports.weights.shared_directory import WeightStore
from dora_rl.weights.checks import shown
from dora_rl.weights.fingerprint import Fingerprint

# These change how a step is computed, not what: a checkpoint may continue with others.
_FREE = {
    "activation_checkpointing",
    "device",
    "logprob_chunk",
    "native_kernels",
    "processes",
    "rendezvous",
    "threads",
    "token_budget",
}
# But for the dropout of an adapter, whose noise is drawn for each pass of each process.
_NOISE = {"device", "processes", "token_budget"}
_REFUSED = -1  # instead of the step of a checkpoint


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that a process needs to know to open its replica."""

    model: str
    store: str
    train: dict[str, Any]
    algorithm: dict[str, Any]
    max_tokens: int
    temperature: float
    total_steps: int
    seed: int
    lora: dict[str, Any] | None = None

    def train_settings(self) -> TrainSettings:
        return TrainSettings.model_validate_json(msgspec.json.encode(self.train))

    def algorithm_settings(self) -> AlgorithmSettings:
        return AlgorithmSettings.model_validate_json(msgspec.json.encode(self.algorithm))

    def lora_settings(self) -> LoraSettings | None:
        if self.lora is None:
            return None
        return LoraSettings.model_validate_json(msgspec.json.encode(self.lora))

    def facts(self) -> dict[str, Any]:
        """What a checkpoint must have been trained with to be continued."""
        free = _FREE - _NOISE if (self.lora or {}).get("dropout") else _FREE
        facts = {f"train.{k}": v for k, v in self.train.items() if k not in free}
        facts |= {f"algorithm.{k}": v for k, v in self.algorithm.items()}
        facts |= {f"lora.{k}": v for k, v in (self.lora or {}).items()}
        facts |= {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}
        if self.train_settings().schedule is not Schedule.CONSTANT:
            facts["total_steps"] = self.total_steps
        return facts


@dataclass(frozen=True)
class _Restored:
    """What one process has read of a checkpoint, and checked; nothing is changed yet."""

    facts: Facts
    accept_moments: Callable[[], None]
    masters: dict[str, Tensor]


class Replica:
    """Policy, optimizer and step of one process."""

    def __init__(self, settings: ReplicaSettings, world: World) -> None:
        train = settings.train_settings()
        if train.threads is not None:
            torch.set_num_threads(train.threads)
        algorithm = Algorithm(settings.algorithm_settings(), max_tokens=settings.max_tokens)
        self.settings, self.train = settings, train
        self.policy, self.source = load(
            Path(settings.model),
            train,
            settings.temperature,
            world.device,
            seed=settings.seed,
            value_head=algorithm.needs_values,
            lora=settings.lora_settings(),
            shard=world.shard,
        )
        self.vocab_size = self.policy.vocab_size
        self._parameters = {n: p for n, p in self.policy.named_parameters() if p.requires_grad}
        self._optimizer = Optimizer(self._parameters, train, settings.total_steps, world.total)
        self.progress = Progress()
        self._stepper = Stepper(
            self.policy,
            self.source,
            self._optimizer,
            algorithm,
            train,
            WeightStore(Path(settings.store)),
            world,
            settings.total_steps,
            settings.seed,
            self.progress,
        )
        self.step = 0  # steps taken: also the version of these weights
        self.report: StepReport | None = None  # of the last step
        self._world = world

    def batch(self, samples: tuple[Sample, ...]) -> Batch:
        return make_batch(samples, vocab_size=self.vocab_size)

    def deal(self, batch: Batch) -> Deal:
        """The batch of a step, and the share of each process."""
        return deal(batch, self.train.minibatches, self._world.size)

    def take(self, dealt: Deal) -> StepReport:
        """The leader's part of a step."""
        report = self._take(dealt.shares[0], dealt)
        assert report is not None
        return report

    def follow(self, share: Share) -> None:
        """A follower's part of a step."""
        self._take(share, None)

    def _take(self, share: Share, dealt: Deal | None) -> StepReport | None:
        with self.progress.deferred():
            report = self._stepper.take(self.step, share, dealt)
            self.step += 1
            self.report = report
        return report

    def fingerprint(self) -> Fingerprint | None:
        """What the weights say of the probe: a pass, which all processes take part in."""
        with self.progress.deferred():
            fingerprint = self.policy.fingerprint()
            self.progress()
        return fingerprint

    def published(self) -> dict[str, Tensor]:
        """The weights by the names of the checkpoint, whole, in the dtype of publication.

        The leader's, on the CPU; the other processes give it their parts, and get nothing.
        """
        weights = {}
        with self.progress.deferred():
            for name, parameter in self._named():
                whole = gathered(parameter, self._dtype(name), copy=False)
                if whole is not None:
                    weights[name] = whole
                self.progress()
        return weights

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for name, saved in self.source.names.items():
            yield saved, self._parameters[name]

    def _dtype(self, name: str) -> torch.dtype:
        if self.train.publish_dtype is None:
            return self.source.tensors[name].dtype
        dtype: torch.dtype = getattr(torch, self.train.publish_dtype.value)
        return dtype

    # Checkpoints

    def snapshot(self) -> Snapshot | None:
        """A copy of all that a checkpoint holds: the leader's; the others lend it their parts."""
        heads = ((n, p) for n, p in self._parameters.items() if n.startswith(VALUE_HEAD))
        with self.progress.deferred():
            weights = self._copies(self._named())
            state = self._copies(self._optimizer.moments())
            state |= self._copies((f"{MASTER}{name}", head) for name, head in heads)
        if self._world.rank:
            return None
        step, updates, report = self.step, self._optimizer.count, self.report

        def facts() -> Facts:
            return Facts(
                step=step,
                updates=updates,
                model=self.source.digest,
                settings=self.settings.facts(),
                report=report,
            )

        dtypes = {name: self._dtype(name) for name in weights}
        return Snapshot(self.source, weights, dtypes, state, facts)

    def _copies(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        copies = {}
        for name, tensor in tensors:
            whole = gathered(tensor, copy=True)
            if whole is not None:
                copies[name] = whole
            self.progress()
        return copies

    def restore(self, directory: Path) -> None:
        """Continue from a checkpoint that every process has read and checked.

        A `UserError` is raised in all processes of the group or in none; then nothing is changed
        in any of them.
        """
        directory = Path(directory)
        restored, refused = None, None
        try:
            restored = self._read(directory)
        except UserError as error:
            refused = error
        agreed = self._world.agree(_REFUSED if restored is None else restored.facts.step)
        if refused is not None:
            raise refused
        assert restored is not None
        if not agreed:
            raise CheckpointError(
                f"another training process cannot restore `{directory}`, or finds another step "
                f"there than {restored.facts.step}; its reason is on stderr. Every process must "
                "see the same files under this path."
            )
        with self.progress.deferred(), torch.no_grad():
            restored.accept_moments()
            self.progress()
            for name, parameter in self._parameters.items():
                local(parameter).copy_(restored.masters[name])
                self.progress()
            self._stepper.forget()
            self.step = restored.facts.step
            self.report = restored.facts.report

    def _read(self, directory: Path) -> _Restored:
        found = checkpoint.read(directory, self.progress)
        facts = facts_of(found)
        self._refuse_others(directory, facts)
        state = found.state_tensors()
        self.progress()
        masters = self._masters(directory, found.weights(), state)
        with torch.no_grad():
            accept = self._optimizer.prepare(state, facts.updates)
        return _Restored(facts, accept, masters)

    def _masters(
        self, directory: Path, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The float32 weights of a checkpoint: this process's part of each parameter."""
        masters = {}
        for name, parameter in self._parameters.items():
            saved = self.source.names.get(name)
            if saved is not None and self._dtype(saved) == torch.float32:
                tensor = weights.get(saved)
            else:
                tensor = state.get(f"{MASTER}{saved or name}")
            if tensor is None or tensor.shape != parameter.shape or tensor.dtype != torch.float32:
                raise CheckpointError(
                    f"`{directory}` has no float32 weights `{saved or name}` of the shape "
                    f"`{list(parameter.shape)}`. Restore an earlier checkpoint."
                )
            masters[name] = shard_of(tensor, parameter)
        return masters

    def _refuse_others(self, directory: Path, facts: Facts) -> None:
        mine, theirs = self.settings.facts(), facts.settings
        # Through JSON, as the checkpoint's own: tuples have become lists.
        mine = msgspec.json.decode(msgspec.json.encode(mine))
        changed = [k for k in sorted(mine.keys() | theirs.keys()) if mine.get(k) != theirs.get(k)]
        if changed:
            diff = "; ".join(
                f"{key} was {shown(theirs.get(key))} and is {shown(mine.get(key))}"
                for key in changed
            )
            raise CheckpointError(
                f"`{directory}` was trained with other settings: {diff}. Set them as they were."
            )
        if facts.model != self.source.digest:
            raise CheckpointError(
                f"`{directory}` was trained from another model: its initial weights have the "
                f"digest `{facts.model}`, those of `{self.source.directory}` have "
                f"`{self.source.digest}`. Name the model that the run began with."
            )
