"""A batch dealt to the processes that train it: each gets its own rows, and what they need.

    leader    whole batch -> `deal` -> one `Share` a rank, which goes to it as a message
    rank      its share -> scores of its rows (passes through the model)
    leader    `collect_scores`: all scores -> targets and weights, which need every sibling
    rank      `deal_targets`: those of its own rows -> loss and gradients

A row stays with its rank for the whole step. Numbers a token go over the process group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from dora_rl.algorithms.algorithm import Targets
from dora_rl.core.protocol.types import Version
from dora_rl.samples import Sample
from dora_rl.trainer import buckets
from dora_rl.trainer.batches import Batch, lay_out
from dora_rl.trainer.errors import StepRejected
from dora_rl.trainer.world import World


@dataclass
class Scores:
    """What is known of some rows before the first update, in their flat layout."""

    old_logprobs_T: Tensor
    reference_logprobs_T: Tensor | None
    values_T: Tensor | None


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank gets of a batch. `samples` and `minibatches` are its own; it may have none."""

    samples: tuple[Sample, ...]  # in order of trajectory
    minibatches: tuple[int, ...]  # for each of them, which mini-batch it belongs to
    num_minibatches: int
    versions: tuple[Version, ...]  # that sampled anything in the batch: all ranks load each
    width: int  # response tokens of the rank that has most

    def batch(self) -> Batch:
        return lay_out(self.samples)

    def rows(self, minibatch: int) -> buckets.Rows:
        """This rank's rows of a mini-batch."""
        return tuple(row for row, found in enumerate(self.minibatches) if found == minibatch)


@dataclass(frozen=True)
class Deal:
    """A whole batch and who has what of it: the leader's."""

    batch: Batch
    minibatches: list[buckets.Rows]
    rows: list[buckets.Rows]  # of each rank
    shares: list[Share]


def deal(batch: Batch, minibatches: int, ranks: int) -> Deal:
    """Mini-batches of a batch, and each dealt to the ranks, nearly equal in tokens."""
    found = buckets.minibatches(batch.groups, batch.lengths, minibatches)
    rank_of = buckets.assign(found, batch.lengths, ranks)
    minibatch_of = {row: number for number, rows in enumerate(found) for row in rows}
    dealt = [tuple(r for r in range(len(rank_of)) if rank_of[r] == rank) for rank in range(ranks)]
    width = max(sum(batch.responses[row] for row in rows) for rows in dealt)
    shares = [
        Share(
            samples=tuple(batch.samples[row] for row in rows),
            minibatches=tuple(minibatch_of[row] for row in rows),
            num_minibatches=len(found),
            versions=batch.versions,
            width=width,
        )
        for rows in dealt
    ]
    return Deal(batch, found, dealt, shares)


@dataclass(frozen=True)
class Aims:
    """What a rank's rows are trained towards, and what each of their tokens weighs."""

    targets: Targets
    weights_T: Tensor


def aims(
    world: World,
    share: Share,
    dealt: Deal | None,
    scores: Scores,
    compute: Callable[[Deal, Scores], Aims],
) -> Aims:
    """What `compute` finds for the whole batch, each rank its own rows of it.

    Only the leader has `dealt`, and calls `compute`. If that raises, every rank raises.
    """
    if world.size == 1:
        assert dealt is not None
        return compute(dealt, scores)
    whole = _collect_scores(world, share, dealt, scores)
    if dealt is None:
        if not world.leader_says():
            raise StepRejected("the leader found no targets for the batch.", ())
        return _unstacked(world.scatter(None, share.width), len(scores.old_logprobs_T))
    assert whole is not None
    try:
        found = compute(dealt, whole)
    except BaseException:
        world.leader_says(False)
        raise
    world.leader_says(True)
    stacked = _stacked(found)
    flats = [dealt.batch.flat(rows) for rows in dealt.rows]
    mine = world.scatter([stacked[:, flat_T] for flat_T in flats], share.width)
    aim = _unstacked(mine, len(scores.old_logprobs_T))
    return Aims(
        Targets(
            advantages_T=aim.targets.advantages_T,
            mask_T=aim.targets.mask_T,
            returns_T=aim.targets.returns_T,
            metrics=found.targets.metrics,
        ),
        aim.weights_T,
    )


def _collect_scores(
    world: World, share: Share, dealt: Deal | None, scores: Scores
) -> Scores | None:
    """Those of the whole batch, for the leader."""
    known = (scores.old_logprobs_T, scores.reference_logprobs_T, scores.values_T)
    parts = world.gather(torch.stack([s for s in known if s is not None]), share.width)
    if parts is None or dealt is None:
        return None
    whole = torch.zeros(len(parts[0]), len(dealt.batch.mask_T))
    for rows, part in zip(dealt.rows, parts, strict=True):
        flat_T = dealt.batch.flat(rows)
        whole[:, flat_T] = part[:, : len(flat_T)]
    lines = iter(whole)
    old, reference, values = (None if s is None else next(lines) for s in known)
    assert old is not None
    return Scores(old, reference, values)


def _stacked(aim: Aims) -> Tensor:
    targets = aim.targets
    lines = [targets.advantages_T, targets.mask_T.float(), aim.weights_T]
    if targets.returns_T is not None:
        lines.append(targets.returns_T)
    return torch.stack(lines)


def _unstacked(lines_KT: Tensor, length: int) -> Aims:
    advantages_T, mask_T, weights_T, *returns = lines_KT[:, :length]
    targets = Targets(
        advantages_T=advantages_T,
        mask_T=mask_T != 0,
        returns_T=returns[0] if returns else None,
        metrics={},
    )
    return Aims(targets, weights_T)


def padded(calls: Sequence[buckets.Rows], count: int) -> list[buckets.Rows]:
    """Every rank makes equally many calls; the missing ones are empty."""
    return [*calls, *[()] * (count - len(calls))]
