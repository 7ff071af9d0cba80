"""Samples as tensors: the whole batch in the flat layout of `algorithms`, and micro-batches of it.

Flat means one entry a response token (`_T`), sequences one after another. A micro-batch is
padded on the right: under causal attention no real token sees what stands after it, so no mask
is needed. Packed instead, its sequences stand in one row, and their lengths keep them apart. With
shared prompts they stand in one row, too, and a prompt that several have in common stands there
once. The last token of a sequence is only predicted, never read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from dora_rl.core.protocol.types import TrajectoryId, Version
from dora_rl.samples import Sample, Trajectory
from dora_rl.trainer.errors import StepRejected
from dora_rl.trainer.native.operations import Packing

_ROUNDING = 1e-3  # how far above 0 an engine's log-probability may come


@dataclass(frozen=True)
class Batch:
    """The samples of a step, in order of trajectory."""

    samples: tuple[Sample, ...]
    tokens: tuple[Tensor, ...]  # of each sequence: prompt and response
    prompts: tuple[int, ...]  # lengths
    responses: tuple[int, ...]
    starts: tuple[int, ...]  # of each sequence in the flat layout
    mask_T: Tensor  # whether the policy sampled it
    rollout_logprobs_T: Tensor
    version_T: Tensor  # that sampled it; -1 where nobody did

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """What each sequence costs: the tokens that the model reads."""
        return tuple(p + r - 1 for p, r in zip(self.prompts, self.responses, strict=True))

    @property
    def num_tokens(self) -> int:
        return sum(self.prompts) + sum(self.responses)

    @cached_property
    def versions(self) -> tuple[Version, ...]:
        """Those that sampled anything, in order."""
        return tuple(v for v in torch.unique(self.version_T).tolist() if v >= 0)

    @cached_property
    def groups(self) -> tuple[int, ...]:
        return tuple(sample.trajectory.group for sample in self.samples)

    def ids(self, rows: Sequence[int]) -> tuple[TrajectoryId, ...]:
        return tuple(self.samples[row].trajectory.id for row in rows)

    def flat(self, rows: Sequence[int]) -> Tensor:
        """Where the tokens of these rows are in the flat layout."""
        spans = (range(self.starts[r], self.starts[r] + self.responses[r]) for r in rows)
        return torch.tensor([*chain.from_iterable(spans)], dtype=torch.int64)

    def sequence(self, rows: Sequence[int]) -> Tensor:
        """For each of their tokens the place of its sequence among these rows."""
        lengths = torch.tensor([self.responses[row] for row in rows], dtype=torch.int64)
        return torch.repeat_interleave(torch.arange(len(rows)), lengths)


@dataclass(frozen=True)
class MicroBatch:
    """Some rows as the model reads them. Without rows: one token, and nothing to predict."""

    rows: tuple[int, ...]
    input_BT: Tensor
    positions_T: Tensor  # in the flattened input: the position that predicts each token
    targets_T: Tensor
    flat_T: Tensor  # the same tokens in the flat layout of the batch
    sampled_T: Tensor | None  # which of them were sampled; None: all
    padding: int
    lengths: tuple[int, ...] | None = None  # of the sequences of a packed row; None: not packed
    packing: Packing | None = None  # of a row with shared prompts; None: each has its own


def collate(batch: Batch, rows: tuple[int, ...], *, packed: bool = False) -> MicroBatch:
    """The micro-batch of these rows, padded to the longest or packed into one."""
    if not rows:
        none = torch.empty(0, dtype=torch.int64)
        return MicroBatch((), torch.zeros(1, 1, dtype=torch.int64), none, none, none, None, 1)
    lengths = tuple(batch.lengths[row] for row in rows)
    width = max(lengths)
    begins = (
        list(accumulate(lengths[:-1], initial=0)) if packed else range(0, len(rows) * width, width)
    )
    flat_input = torch.zeros(sum(lengths) if packed else len(rows) * width, dtype=torch.int64)
    positions, targets = [], []
    for begin, row in zip(begins, rows, strict=True):
        tokens, prompt = batch.tokens[row], batch.prompts[row]
        flat_input[begin : begin + len(tokens) - 1] = tokens[:-1]
        start = begin + prompt - 1
        positions.append(torch.arange(start, start + batch.responses[row]))
        targets.append(tokens[prompt:])
    flat_T = batch.flat(rows)
    mask_T = batch.mask_T[flat_T]
    return MicroBatch(
        rows=rows,
        input_BT=flat_input.view(1 if packed else len(rows), -1),
        positions_T=torch.cat(positions),
        targets_T=torch.cat(targets),
        flat_T=flat_T,
        sampled_T=None if bool(mask_T.all()) else mask_T.nonzero().squeeze(1),
        padding=flat_input.numel() - sum(lengths),
        lengths=lengths if packed else None,
    )


def collate_shared(batch: Batch, rows: tuple[int, ...]) -> MicroBatch:
    """The micro-batch of these rows in one, where every prompt stands once, before its responses.

    Its `rows` are in another order: those of a prompt stand together.
    """
    if not rows:
        return replace(collate(batch, ()), packing=Packing.of([(0, [1])]))
    begin = 0
    inputs: list[int] = []
    positions: list[int] = []
    targets: list[int] = []
    ordered: list[int] = []
    groups = []
    for prompt, members in by_prompt(batch, rows).items():
        inputs += prompt
        lengths, at = [len(prompt)], begin + len(prompt)
        for row in members:
            tokens = batch.samples[row].trajectory.tokens
            inputs += tokens[:-1]
            # The first token of a response is predicted by the prompt's last, whoever's it is.
            positions.append(begin + len(prompt) - 1)
            positions += range(at, at + len(tokens) - 1)
            targets += tokens
            lengths += [len(tokens) - 1] if len(tokens) > 1 else []
            at += len(tokens) - 1
        groups.append((len(prompt), lengths))
        ordered += members
        begin = at
    flat_T = batch.flat(ordered)
    mask_T = batch.mask_T[flat_T]
    return MicroBatch(
        rows=tuple(ordered),
        input_BT=torch.tensor([inputs]),
        positions_T=torch.tensor(positions),
        targets_T=torch.tensor(targets),
        flat_T=flat_T,
        sampled_T=None if bool(mask_T.all()) else mask_T.nonzero().squeeze(1),
        padding=0,
        packing=Packing.of(groups),
    )


def by_prompt(batch: Batch, rows: Sequence[int]) -> dict[tuple[int, ...], list[int]]:
    """Rows by the prompt that they have in common."""
    found: dict[tuple[int, ...], list[int]] = {}
    for row in rows:
        found.setdefault(batch.samples[row].trajectory.prompt, []).append(row)
    return found


def make_batch(samples: Sequence[Sample], *, vocab_size: int) -> Batch:
    """The batch of a step; a sample that makes no sense rejects the step and is named."""
    if not samples:
        raise StepRejected("the batch is empty. A step needs at least one sample.", ())
    ordered = tuple(sorted(samples, key=lambda sample: sample.trajectory.id))
    for sample in ordered:
        _check(sample, vocab_size)
    ids = [sample.trajectory.id for sample in ordered]
    for left, right in pairwise(ids):
        if left == right:
            raise StepRejected(f"trajectory `{left}` is twice in the batch.", [left])
    return lay_out(ordered)


def lay_out(samples: tuple[Sample, ...]) -> Batch:
    """Samples that were checked and are in order, as tensors; there may be none."""
    trajectories = [sample.trajectory for sample in samples]
    responses = tuple(len(t.tokens) for t in trajectories)
    starts = tuple(accumulate(responses[:-1], initial=0))[: len(responses)]
    logprobs = chain.from_iterable(t.logprobs for t in trajectories)
    versions = torch.tensor([t.version for t in trajectories], dtype=torch.int64)
    mask_T = torch.ones(sum(responses), dtype=torch.bool)
    version_T = torch.repeat_interleave(versions, torch.tensor(responses, dtype=torch.int64))
    for start, trajectory in zip(starts, trajectories, strict=True):
        if trajectory.observed or len(trajectory.segments) > 1:
            part = slice(start, start + len(trajectory.tokens))
            mask_T[part], version_T[part] = _mask(trajectory), _versions(trajectory)
    return Batch(
        samples=samples,
        tokens=tuple(torch.tensor(t.prompt + t.tokens) for t in trajectories),
        prompts=tuple(len(t.prompt) for t in trajectories),
        responses=responses,
        starts=starts,
        mask_T=mask_T,
        rollout_logprobs_T=torch.tensor([*logprobs], dtype=torch.float32),
        version_T=version_T,
    )


def _mask(trajectory: Trajectory) -> Tensor:
    mask = torch.ones(len(trajectory.tokens), dtype=torch.bool)
    for start, end in trajectory.observed:
        mask[start:end] = False
    return mask


def _versions(trajectory: Trajectory) -> Tensor:
    """The version that sampled each token, -1 where it was observed.

    Paradigms that mix versions within a trajectory show it in its segments.
    """
    mask = _mask(trajectory)
    segments = trajectory.segments
    versions = torch.full((len(mask),), trajectory.version)
    if len(segments) > 1:
        by_token = torch.repeat_interleave(
            torch.tensor([segment.version for segment in segments]),
            torch.tensor([segment.tokens for segment in segments]),
        )
        # They count what was sampled, or all of the response.
        if len(by_token) == len(mask):
            versions = by_token
        else:
            versions[mask] = by_token
    return versions.masked_fill_(~mask, -1)


def _check(sample: Sample, vocab_size: int) -> None:
    trajectory = sample.trajectory
    problem = _problem(sample, vocab_size)
    if problem:
        name = trajectory.id
        raise StepRejected(f"trajectory `{name}` cannot be trained: {problem}.", [name])


def _problem(sample: Sample, vocab_size: int) -> str | None:
    trajectory = sample.trajectory
    if not trajectory.prompt or not trajectory.tokens:
        return "its prompt or its response is empty"
    if len(trajectory.logprobs) != len(trajectory.tokens):
        return f"it has {len(trajectory.tokens)} tokens and {len(trajectory.logprobs)} logprobs"
    if not math.isfinite(sample.reward):
        return f"its reward is `{sample.reward}`"
    tokens = (*trajectory.prompt, *trajectory.tokens)
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        foreign = next(t for t in tokens if not 0 <= t < vocab_size)
        return f"the token `{foreign}` is not in the vocabulary of {vocab_size}"
    logprobs = trajectory.logprobs
    if not all(map(math.isfinite, logprobs)) or max(logprobs) > _ROUNDING:
        return "a log-probability is not finite, or above 0"
    end = 0
    for span in trajectory.observed:
        if not end <= span.start <= span.end <= len(trajectory.tokens):
            return f"its observed span `{span.start}` to `{span.end}` is not within the response"
        end = span.end
    segments = sum(segment.tokens for segment in trajectory.segments)
    if len(trajectory.segments) > 1 and segments not in (
        len(trajectory.tokens),
        trajectory.num_sampled,
    ):
        return f"its segments have {segments} tokens, it sampled {trajectory.num_sampled}"
    return None
