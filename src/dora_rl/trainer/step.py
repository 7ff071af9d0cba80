"""One train step: what is known of the batch beforehand, then a few optimizer updates.

Every process of the group runs this with its share of the batch; the leader has the whole of it
too, for what needs every sibling. Sums over the processes make all of them decide alike.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dora_rl.algorithms.algorithm import Algorithm, Responses, Targets, Tokens, summarise
from dora_rl.core.protocol.types import Version
from dora_rl.trainer import buckets
from dora_rl.trainer.batches import Batch, MicroBatch, by_prompt, collate, collate_shared
from dora_rl.trainer.errors import StepRejected
from dora_rl.trainer.lora import dropping
from dora_rl.trainer.model import Policy, Source, other_weights
from dora_rl.trainer.optimizer import Optimizer, learning_rate
from dora_rl.trainer.report import StepReport
from dora_rl.trainer.settings import Behaviour, TrainSettings
from dora_rl.trainer.shares import Aims, Deal, Scores, Share, aims, padded
from dora_rl.trainer.world import World
from dora_rl.transports.weights.shared_directory import LoadedWeights, WeightStore

_WIDTH = 64  # numbers that processes add up for a report; an algorithm has a dozen


@dataclass
class Tally:
    """What the passes of a step add up to, in this process."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    slots: int = 0
    padding: int = 0
    gap_sum: float = 0.0
    gap_count: int = 0
    gap_max: float = 0.0

    def add(self, sums: Mapping[str, Tensor], micro: MicroBatch) -> None:
        self.slots += micro.input_BT.numel()
        self.padding += micro.padding
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def add_gap(self, gap: Tensor) -> None:
        if gap.numel():
            self.gap_sum += float(gap.sum())
            self.gap_count += gap.numel()
            self.gap_max = max(self.gap_max, float(gap.max()))


class Stepper:
    """A policy, its optimizer and the algorithm that trains it."""

    def __init__(
        self,
        policy: Policy,
        source: Source,
        optimizer: Optimizer,
        algorithm: Algorithm,
        train: TrainSettings,
        store: WeightStore,
        world: World,
        total_steps: int,
        seed: int,
        progress: Callable[[], None],
    ) -> None:
        self.policy = policy
        self.source = source
        self.optimizer = optimizer
        self._algorithm = algorithm
        self._train = train
        self._store = store
        self._world = world
        self._total_steps = total_steps
        self._seed = seed  # of an adapter's dropout
        self._progress = progress
        self._versions: dict[Version, LoadedWeights] = {}

    def take(self, step: int, share: Share, dealt: Deal | None) -> StepReport | None:
        """Train on the batch; whatever goes wrong, weights and optimizer are as before.

        Each process gives its share; the leader also the whole batch, and gets the report.
        """
        begun = time.perf_counter()
        tally = Tally()
        mine = dealt.batch if dealt is not None and self._world.size == 1 else share.batch()
        scores = self._score_batch(mine, share.versions, tally)
        aim = aims(self._world, share, dealt, scores, self._aims)
        # One update alone is refused before it is applied: there is nothing to go back to.
        undo = self.optimizer.snapshot() if share.num_minibatches > 1 else None
        losses, norms = [], []
        try:
            for number in range(share.num_minibatches):
                first = step if number == 0 else None
                rows = share.rows(number)
                loss, norm = self._minibatch(mine, rows, scores, aim, tally, first)
                _check_finite(loss, norm, dealt, number)
                losses.append(loss)
                norms.append(norm)
                self._progress()
                self.optimizer.update(step, norm)
                self._progress()
        except BaseException:
            self.optimizer.clear()
            if undo is not None:
                undo()
            raise
        tallied = self._tallied(tally, share.num_minibatches)
        if dealt is None:
            return None
        metrics = {
            **aim.targets.metrics,
            **tallied,
            **_about(dealt.batch, step),
            "loss": sum(losses) / len(losses),
            "grad_norm": sum(norms) / len(norms),
            "learning_rate": learning_rate(self._train, step, self._total_steps),
        }
        return StepReport(
            step=step,
            seconds=time.perf_counter() - begun,
            tokens=dealt.batch.num_tokens,
            sampled_tokens=int(dealt.batch.mask_T.sum()),
            updates=share.num_minibatches,
            metrics={name: float(value) for name, value in metrics.items()},
        )

    def forget(self) -> None:
        """Let go of other versions' weights: they may be published anew."""
        self._versions = {}

    # Before the first update

    def _score_batch(self, batch: Batch, versions: Sequence[Version], tally: Tally) -> Scores:
        old_T, values_T, reference_T = batch.rollout_logprobs_T, None, None
        if self._train.behaviour is Behaviour.RECOMPUTE:
            old_T = self._recompute(batch, versions)
            tally.add_gap((old_T - batch.rollout_logprobs_T)[batch.mask_T].abs())
        if self._algorithm.needs_values:
            _, values_T = self._pass(batch)
        if self._algorithm.needs_reference:
            with other_weights(self.policy, self.source.names, self.source.tensors):
                reference_T, _ = self._pass(batch)
        return Scores(old_T, reference_T, values_T)

    def _recompute(self, batch: Batch, versions: Sequence[Version]) -> Tensor:
        """Exact log-probabilities of each token by the version that sampled it.

        `versions` are those of all processes, which go through the model together.
        """
        kept = {v: self._versions[v] for v in versions if v in self._versions}
        self._versions = kept  # those that no sample needs any more are let go
        old_T = torch.zeros_like(batch.rollout_logprobs_T)
        for version in versions:
            if version not in kept:
                kept[version] = self._store.load(version)
                self._progress()
            with other_weights(self.policy, self.source.names, kept[version].tensors):
                sampled_T = batch.version_T == version
                rows = [
                    row
                    for row, (start, length) in enumerate(
                        zip(batch.starts, batch.responses, strict=True)
                    )
                    if bool(sampled_T[start : start + length].any())
                ]
                logprobs_T, _ = self._pass(batch, rows)
            old_T = torch.where(sampled_T, logprobs_T, old_T)
        return old_T

    @torch.no_grad()
    def _pass(
        self, batch: Batch, rows: Iterable[int] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and values of some rows, in every process; 0 elsewhere."""
        rows = range(len(batch.samples)) if rows is None else rows
        logprobs_T = torch.zeros_like(batch.rollout_logprobs_T)
        values_T = torch.zeros_like(logprobs_T)
        for micro in self._mine(batch, tuple(rows)):
            logprobs, _, values = self._forward(micro)
            logprobs_T[micro.flat_T] = logprobs
            if values is not None:
                values_T[micro.flat_T] = values
            self._progress()
        return logprobs_T, None if self.policy.value_head is None else values_T

    def _aims(self, dealt: Deal, scores: Scores) -> Aims:
        """What the whole batch is trained towards; a mini-batch has its own weights."""
        batch = dealt.batch
        targets = self._targets(batch, scores)
        weights_T = torch.zeros_like(scores.old_logprobs_T)
        for rows in dealt.minibatches:
            flat_T, mask_T = batch.flat(rows), targets.mask_T
            weights_T[flat_T] = self._algorithm.weights(mask_T[flat_T], batch.sequence(rows))
        return Aims(targets, weights_T)

    def _targets(self, batch: Batch, scores: Scores) -> Targets:
        rows = range(len(batch.samples))
        return self._algorithm.targets(
            Responses(
                rewards_N=torch.tensor([s.reward for s in batch.samples], dtype=torch.float32),
                group_N=torch.tensor(batch.groups),
                truncated_N=torch.tensor([s.trajectory.truncated for s in batch.samples]),
                sequence_T=batch.sequence(rows),
                mask_T=batch.mask_T,
                values_T=scores.values_T,
                old_logprobs_T=scores.old_logprobs_T,
                reference_logprobs_T=scores.reference_logprobs_T,
            )
        )

    # Updates

    def _minibatch(
        self,
        batch: Batch,
        rows: buckets.Rows,
        scores: Scores,
        aim: Aims,
        tally: Tally,
        first: int | None,
    ) -> tuple[float, float]:
        """Gradients of one mini-batch, of which this process has these rows: its loss and their
        norm. `first` is the step, before any update of it: then the weights still are those of
        that version."""
        micros = list(self._mine(batch, rows))
        loss = torch.zeros(())
        for number, micro in enumerate(micros):
            self._world.sync_gradients(self.policy, number == len(micros) - 1)
            place = (self._seed, self.optimizer.count, number, self._world.rank)
            with dropping(self.policy.dropouts, self.policy.device, *place):
                part = self._microbatch(batch, micro, scores, aim, tally, first)
                part.backward()  # type: ignore[no-untyped-call]
            loss += part.detach()
            self._progress()
        return float(self._world.total(loss)), self.optimizer.grad_norm()

    def _microbatch(
        self,
        batch: Batch,
        micro: MicroBatch,
        scores: Scores,
        aim: Aims,
        tally: Tally,
        first: int | None,
    ) -> Tensor:
        """This part of the loss, with its graph."""
        logprobs_T, entropy_T, values_T = self._forward(micro)
        if not micro.rows:
            return logprobs_T.sum() + (0.0 if values_T is None else values_T.sum())
        part, sums = self._algorithm.loss(
            Tokens(
                logprobs_T=logprobs_T,
                entropy_T=entropy_T,
                values_T=values_T,
                weights_T=aim.weights_T[micro.flat_T],
                **_known(batch, micro, scores, aim.targets),
            )
        )
        tally.add(sums, micro)
        if first is not None and self._train.behaviour is Behaviour.ENGINE:
            fresh_T = batch.version_T[micro.flat_T] == first
            gap_T = logprobs_T.detach() - batch.rollout_logprobs_T[micro.flat_T]
            tally.add_gap(gap_T[fresh_T].abs())
        return part

    def _mine(self, batch: Batch, rows: buckets.Rows) -> Iterator[MicroBatch]:
        """These rows in micro-batches; every process has equally many, some of them empty."""
        packed, shared = self.policy.packs, self.policy.native
        budget = self._train.token_budget
        if shared:
            families = [(len(p), members) for p, members in by_prompt(batch, rows).items()]
            calls = buckets.shared_packs(families, batch.lengths, budget)
        else:
            together = buckets.packs if packed else buckets.microbatches
            calls = together(rows, batch.lengths, budget)
        count = int(self._world.largest(torch.tensor(len(calls))))
        form = collate_shared if shared else partial(collate, packed=packed)
        return (form(batch, part) for part in padded(calls, count))

    def _forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        device = self.policy.device
        sampled_T = None if micro.sampled_T is None else micro.sampled_T.to(device)
        logprobs_T, entropy_T, values_T = self.policy(
            micro.input_BT.to(device),
            micro.positions_T.to(device),
            micro.targets_T.to(device),
            sampled_T,
            micro.lengths,
            micro.packing,
        )
        # The loss is a few numbers a token: the CPU has them all.
        return logprobs_T.cpu(), entropy_T.cpu(), None if values_T is None else values_T.cpu()

    def _tallied(self, tally: Tally, updates: int) -> dict[str, float]:
        """The tally of all processes, as metrics."""
        names = sorted(tally.sums)
        counts = [tally.slots, tally.padding, tally.gap_count, tally.gap_sum]
        # Of one width in every process: one that had no row does not know the names. The leader
        # always has some, for the longest row is dealt to it.
        added = torch.zeros(_WIDTH, dtype=torch.float64)
        values = [*counts, *(tally.sums[name] for name in names)]
        added[: len(values)] = torch.tensor(values, dtype=torch.float64)
        slots, padding, gap_count, gap_sum, *sums = self._world.total(added).tolist()
        gap_max = float(self._world.largest(torch.tensor(tally.gap_max)))
        if not names:
            return {}
        metrics = {
            # What is no sum or count over tokens is a part of the loss: its mean over updates.
            name: value if name.endswith(("_mean", "_share")) else value / updates
            for name, value in summarise(dict(zip(names, sums, strict=False))).items()
            if name != "tokens"
        }
        metrics["padding_share"] = padding / slots
        if gap_count:
            metrics["logprob_gap_mean"] = gap_sum / gap_count
            metrics["logprob_gap_max"] = gap_max
        return metrics


def _known(batch: Batch, micro: MicroBatch, scores: Scores, targets: Targets) -> dict[str, Any]:
    """What a micro-batch needs of the flat layout; all but what the model just computed."""
    flat_T = micro.flat_T

    def part(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[flat_T]

    return {
        "old_logprobs_T": scores.old_logprobs_T[flat_T],
        "rollout_logprobs_T": batch.rollout_logprobs_T[flat_T],
        "advantages_T": targets.advantages_T[flat_T],
        "mask_T": targets.mask_T[flat_T],
        "sequence_T": batch.sequence(micro.rows),
        "reference_logprobs_T": part(scores.reference_logprobs_T),
        "old_values_T": part(scores.values_T),
        "returns_T": part(targets.returns_T),
    }


def _check_finite(loss: float, norm: float, dealt: Deal | None, minibatch: int) -> None:
    """Reject a mini-batch whose gradients would spoil the weights. All processes decide alike."""
    for name, value in (("loss", loss), ("gradient norm", norm)):
        if not math.isfinite(value):
            raise StepRejected(
                f"the {name} of a mini-batch is not finite: `{value}`. Nothing was changed; "
                "train without these trajectories, or with a smaller learning rate.",
                () if dealt is None else dealt.batch.ids(dealt.minibatches[minibatch]),
            )


def _about(batch: Batch, step: int) -> dict[str, float]:
    """Staleness, and the parts of the rewards."""
    ages = [step - sample.trajectory.version for sample in batch.samples]
    metrics = {"staleness_mean": sum(ages) / len(ages), "staleness_max": float(max(ages))}
    for name in sorted({name for sample in batch.samples for name in sample.parts}):
        parts = [sample.parts[name] for sample in batch.samples if name in sample.parts]
        metrics[f"reward/{name}"] = sum(parts) / len(parts)
    return metrics
