"""The next token of every row of a batch, from its logits and one uniform number a row.

Pure: no randomness and no state of its own. A row's draw is bit for bit the same whatever
other rows are in the batch: only element-wise operations, and sums whose order is set by the
width of the vocabulary alone. It knows sampling parameters, not trajectories or versions.

The draw inverts the cumulative distribution, so one number a row is enough; noise over a
vocabulary of 49k would cost more than the model's last layer. Weights are float32, their
cumulative sums and all log-probabilities float64.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dora_rl.engines.base import Sampling

_BLOCK = 128  # columns that are summed before the search; divides the common vocabularies
_DIRECT = 512  # up to this width one cumulative sum is cheaper than blocks
_CHUNK = 1 << 21  # weights at a time: larger buffers are mapped and cleared anew at each step
_TEMPERATURES = (1e-30, 1e30)  # what float32 can divide by; the limits are greedy and uniform
# Below this exponent `exp` leaves the normal numbers and is a hundred times slower. What is
# lost (1e-38 of the largest probability) no uniform number of 53 bits can reach.
_FLOOR = -87.0
_FLOOR_WEIGHT = 2e-38  # a little above exp(_FLOOR)
_BELOW_ONE = 1.0 - 2.0**-53
_PREFIXES = (256, 4096)  # the most probable tokens that filters look at, before all of them
_STRIDE = 16
_KNOWN_PLANS = 64
_RADIX = 1 << 15  # from this size on, torch sorts a list of integers five times as fast as floats


@dataclass(frozen=True, slots=True)
class Draw:
    """One token a row. Where `finite` is false the logits were no distribution: do not use it."""

    tokens: list[int]
    logprobs: list[float]  # of the distribution drawn from: after temperature and filters
    raw_logprobs: list[float | None]  # at temperature 1, unfiltered; None where not asked for
    finite: list[bool]


class _Group:
    """Rows that are drawn in the same way."""

    def __init__(self, rows: list[int], samplings: Sequence[Sampling]) -> None:
        self.rows = rows
        if not rows:
            return  # no chunks, so nobody asks for more
        self._whole = len(rows) == len(samplings)
        self._index = torch.tensor(rows, dtype=torch.int64)
        wishes = [samplings[row] for row in rows]
        self.inverses = [_inverse_temperature(wish.temperature) for wish in wishes]
        self.inverse = _column(self.inverses)
        self.tempered = any(inverse != 1.0 for inverse in self.inverses)
        self.filters = (
            torch.tensor([wish.top_k for wish in wishes], dtype=torch.int64).unsqueeze(1),
            _column([wish.top_p for wish in wishes]),
            _column([math.log(wish.min_p) if wish.min_p else -math.inf for wish in wishes]),
        )
        # With few top_k tokens, the prefix of the sorted row knows their mass itself.
        self.needs_mass = any(
            wish.top_p < 1 and not 0 < wish.top_k <= _PREFIXES[0] for wish in wishes
        )

    def chunks(self, logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Members of this group and their logits in float32, a few rows at a time."""
        step = max(1, _CHUNK // logits.shape[1])
        for start in range(0, len(self.rows), step):
            part = slice(start, start + step)
            rows = logits[part] if self._whole else logits.index_select(0, self._index[part])
            yield part, rows.float()


class SamplingPlan:
    """What the rows of a batch ask for, as tensors. Build a new one when the batch changes."""

    def __init__(self, samplings: Sequence[Sampling]) -> None:
        self.size = len(samplings)
        kinds: dict[str, list[int]] = {"greedy": [], "filtered": [], "plain": []}
        again: list[int] = []
        self.raw_is_own: list[int] = []  # the raw log-probability is the one of the draw
        for row, wish in enumerate(samplings):
            kind = _kind(wish)
            kinds[kind].append(row)
            if wish.raw_logprobs:
                own = kind == "plain" and wish.temperature == 1
                (self.raw_is_own if own else again).append(row)
        self.greedy = _Group(kinds["greedy"], samplings)
        self.filtered = _Group(kinds["filtered"], samplings)
        self.plain = _Group(kinds["plain"], samplings)
        self.raw = _Group(again, samplings)


class SamplingPlans:
    """Plans for batches of rows that all ask for the same, which most do, by their number."""

    def __init__(self) -> None:
        self._known: dict[tuple[Sampling, int], SamplingPlan] = {}
        self._last: tuple[list[Sampling], SamplingPlan] | None = None

    def plan(self, samplings: list[Sampling]) -> SamplingPlan:
        if self._last is None or self._last[0] != samplings:
            self._last = samplings, self._find(samplings)
        return self._last[1]

    def _find(self, samplings: list[Sampling]) -> SamplingPlan:
        if samplings.count(samplings[0]) < len(samplings):
            return SamplingPlan(samplings)
        key = samplings[0], len(samplings)
        if key not in self._known:
            if len(self._known) == _KNOWN_PLANS:
                self._known.clear()
            self._known[key] = SamplingPlan(samplings)
        return self._known[key]


def sample(logits: Tensor, plan: SamplingPlan, uniforms: Sequence[float]) -> Draw:
    """Draw a token for each row of `logits` [rows, vocabulary]; `uniforms` are in (0, 1).

    The distribution is inverted in the order of the token ids, in rows with filters in that of
    the probabilities.
    """
    assert logits.ndim == 2 and len(logits) == len(uniforms) == plan.size, logits.shape
    logits = logits.detach()
    draw = Draw([0] * plan.size, [math.nan] * plan.size, [None] * plan.size, [False] * plan.size)
    _draw_greedy(logits, plan.greedy, draw)
    _draw_plain(logits, plan.plain, uniforms, draw)
    _draw_filtered(logits, plan.filtered, uniforms, draw)
    _add_raw(logits, plan.raw, draw)
    for row in plan.raw_is_own:
        draw.raw_logprobs[row] = draw.logprobs[row]
    return draw


def _kind(wish: Sampling) -> str:
    if wish.temperature == 0:
        return "greedy"
    return "filtered" if wish.top_k or wish.top_p < 1 or wish.min_p else "plain"


def _inverse_temperature(temperature: float) -> float:
    low, high = _TEMPERATURES
    return 1.0 / min(max(temperature, low), high)


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


def _draw_greedy(logits: Tensor, group: _Group, draw: Draw) -> None:
    for part, logits_RV in group.chunks(logits):
        tops, tokens = logits_RV.max(dim=1)  # the first of equals; NaN before all numbers
        for row, top, token in zip(group.rows[part], tops.tolist(), tokens.tolist(), strict=True):
            if math.isfinite(top):
                draw.tokens[row], draw.logprobs[row], draw.finite[row] = token, 0.0, True


def _draw_plain(logits: Tensor, group: _Group, uniforms: Sequence[float], draw: Draw) -> None:
    for part, logits_RV in group.chunks(logits):
        top = logits_RV.amax(dim=1, keepdim=True)
        weights = _weights(logits_RV, top, group.inverse[part] if group.tempered else None)
        numbers = _column([uniforms[row] for row in group.rows[part]])
        tokens, total = _invert(weights, numbers)
        if weights.shape != logits_RV.shape:  # only a row of NaN leads beyond the vocabulary
            tokens.clamp_(max=logits_RV.shape[1] - 1)
        chosen = logits_RV.gather(1, tokens)
        _record(draw, group, part, tokens, torch.cat((top, chosen, total), dim=1))


def _draw_filtered(logits: Tensor, group: _Group, uniforms: Sequence[float], draw: Draw) -> None:
    for part, logits_RV in group.chunks(logits):
        vocabulary = logits_RV.shape[1]
        inverse = group.inverse[part]
        top = logits_RV.amax(dim=1, keepdim=True)
        mass = torch.ones_like(inverse)
        if group.needs_mass and vocabulary > _PREFIXES[0]:
            mass = _total(_weights(logits_RV, top, inverse if group.tempered else None))
        numbers = _column([uniforms[row] for row in group.rows[part]])
        rows = _Rows(logits_RV, top, inverse, mass, numbers, *(f[part] for f in group.filters))
        tokens = torch.zeros(len(top), 1, dtype=torch.int64)
        facts = torch.cat((top, top, mass), dim=1)  # float64, by promotion
        pending = torch.arange(len(top))
        for width in (*(prefix for prefix in _PREFIXES if prefix < vocabulary), vocabulary):
            prefix = _prefix(rows, width)
            kept = _kept(rows, prefix)
            done = (kept <= width).squeeze(1)
            where = pending[done]
            tokens[where], facts[where, 1:] = _draw_prefix(rows, prefix, kept, done)
            if len(where) == len(pending):
                break
            pending, rows = pending[~done], rows.take(~done)
        _record(draw, group, part, tokens, facts)


def _add_raw(logits: Tensor, group: _Group, draw: Draw) -> None:
    for part, logits_RV in group.chunks(logits):
        top = logits_RV.amax(dim=1, keepdim=True)
        total = _total(_weights(logits_RV, top, None))
        rows = group.rows[part]
        tokens = torch.tensor([draw.tokens[row] for row in rows], dtype=torch.int64).unsqueeze(1)
        facts = torch.cat((top, logits_RV.gather(1, tokens), total), dim=1)
        for row, (peak, logit, sum_) in zip(rows, facts.tolist(), strict=True):
            draw.raw_logprobs[row] = logit - peak - math.log(sum_) if draw.finite[row] else math.nan


def _record(draw: Draw, group: _Group, part: slice, tokens: Tensor, facts: Tensor) -> None:
    """`facts` of each row: its largest logit, the chosen logit, the sum of the weights."""
    members = zip(group.rows[part], group.inverses[part], strict=True)
    drawn = zip(tokens.squeeze(1).tolist(), facts.tolist(), strict=True)
    for (row, inverse), (token, (top, chosen, total)) in zip(members, drawn, strict=True):
        if math.isfinite(top):
            draw.tokens[row] = token
            draw.logprobs[row] = (chosen - top) * inverse - math.log(total)
            draw.finite[row] = True


def _weights(logits_RV: Tensor, top: Tensor, inverse: Tensor | None) -> Tensor:
    """exp((logit - top) / temperature), with columns of zero up to a whole number of blocks."""
    num_rows, vocabulary = logits_RV.shape
    width = -(-vocabulary // _BLOCK) * _BLOCK
    if vocabulary <= _DIRECT or width == vocabulary:
        weights = body = logits_RV - top  # before the division: it is exact near the top
    else:
        weights = logits_RV.new_zeros(num_rows, width)
        body = weights[:, :vocabulary]
        torch.sub(logits_RV, top, out=body)
    if inverse is not None:
        body.mul_(inverse.float())
    # Not `exp2`, which is quicker on small numbers: its last bit depends on the position.
    body.clamp_(min=_FLOOR).exp_()
    torch.threshold_(body, _FLOOR_WEIGHT, 0.0)
    return weights


def _block_sums(weights: Tensor) -> Tensor:
    """[rows, blocks] sums, or the weights themselves where they are few."""
    if weights.shape[1] <= _DIRECT:
        return weights
    return weights.view(len(weights), -1, _BLOCK).sum(dim=2)


def _total(weights: Tensor) -> Tensor:
    return _block_sums(weights).cumsum(1, dtype=torch.float64)[:, -1:]


def _invert(weights: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The first token whose cumulative weight is above the share `numbers`, and the total."""
    sums = _block_sums(weights)
    cumulative = sums.cumsum(1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = numbers * total
    found = _first_above(cumulative, target, total)
    if sums is weights:
        return found, total
    num_rows, num_blocks = sums.shape
    places = torch.arange(num_rows) * num_blocks + found.squeeze(1)
    inner = weights.view(-1, _BLOCK).index_select(0, places).cumsum(1, dtype=torch.float64)
    rest = target - (cumulative.gather(1, found) - sums.gather(1, found))
    return found * _BLOCK + _first_above(inner, rest.clamp_(min=0), inner[:, -1:]), total


def _first_above(cumulative: Tensor, target: Tensor, end: Tensor) -> Tensor:
    """The first index whose cumulative sum is above `target` and where it grows.

    Rounding may put the target a little beyond `end`; it is moved back, since a token of weight
    zero must never be drawn. The clamp of the index is for rows of NaN.
    """
    target = torch.minimum(target, end * _BELOW_ONE)
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows with filters; all but the logits are [rows, 1].

    `mass` is the sum of all weights, where top_p applies to all tokens.
    """

    logits_RV: Tensor
    top: Tensor
    inverse: Tensor
    mass: Tensor
    numbers: Tensor
    top_k: Tensor  # 0: no limit
    top_p: Tensor
    log_min_p: Tensor

    def take(self, mask: Tensor) -> "_Rows":
        return _Rows(*(getattr(self, field.name)[mask] for field in fields(self)))


@dataclass(frozen=True, slots=True)
class _Prefix:
    """The most probable tokens of each row, largest first; exponents are relative to the top.

    `values` are exact. `tokens` are too where the value is unique; equal values stand in any
    order, and some of the last may have been left out for others.
    """

    values: Tensor
    tokens: Tensor
    exponents: Tensor
    cumulative: Tensor


def _prefix(rows: _Rows, width: int) -> _Prefix:
    if width == rows.logits_RV.shape[1]:
        values, tokens = _sorted(rows.logits_RV)
    else:
        values, tokens = _largest(rows.logits_RV, width)
    exponents = (values.double() - rows.top) * rows.inverse
    return _Prefix(values, tokens, exponents, exponents.exp().cumsum(1))


def _sorted(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Largest first, equal ones by token id."""
    if logits_RV.shape[1] < _RADIX:
        values, tokens = torch.sort(logits_RV, dim=1, descending=True, stable=True)
        return values, tokens
    bits = (logits_RV + 0.0).view(torch.int32)  # the sum makes one zero of two
    keys = torch.where(bits < 0, bits & 0x7FFFFFFF, ~bits)
    tokens = torch.stack([row.sort(stable=True).indices for row in keys])
    return logits_RV.gather(1, tokens), tokens


def _largest(logits_RV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """`topk`, in two rounds where the vocabulary is large: its cost is that of the first pass.

    The columns are dealt into groups of `_STRIDE`. A value outside of the `width` groups with
    the largest maxima is no larger than any of these maxima, so it adds nothing to the list.
    """
    num_rows, vocabulary = logits_RV.shape
    num_groups = vocabulary // _STRIDE
    if num_groups < 2 * width:
        values, tokens = logits_RV.topk(width, dim=1)
        return values, tokens
    dealt = _STRIDE * num_groups
    maxima = logits_RV[:, :dealt].view(num_rows, _STRIDE, num_groups).amax(dim=1)
    picks = maxima.topk(width, dim=1, sorted=False).indices.unsqueeze(1)
    columns = (picks + torch.arange(0, dealt, num_groups).unsqueeze(1)).flatten(1)
    if dealt < vocabulary:
        rest = torch.arange(dealt, vocabulary).expand(num_rows, -1)
        columns = torch.cat((columns, rest), dim=1)
    values, places = logits_RV.gather(1, columns).topk(width, dim=1)
    return values, columns.gather(1, places)


def _kept(rows: _Rows, prefix: _Prefix) -> Tensor:
    """How many tokens pass the filters [rows, 1]; more than the prefix has: look further."""
    width, vocabulary = prefix.values.shape[1], rows.logits_RV.shape[1]
    limited = (rows.top_k > 0) & (rows.top_k < vocabulary)
    top_k = torch.where(limited, rows.top_k, vocabulary)
    mass = prefix.cumulative.gather(1, top_k.clamp(max=width) - 1)
    if width < vocabulary:
        mass = torch.where(limited, mass, rows.mass)
    reach = torch.searchsorted(prefix.cumulative, rows.top_p * mass) + 1
    reach = torch.where(rows.top_p < 1, reach, vocabulary)
    above = (prefix.exponents >= rows.log_min_p).sum(dim=1, keepdim=True)
    above = torch.where(above < width, above, vocabulary)
    kept = torch.minimum(torch.minimum(top_k, reach), above)
    # The mass of the top_k tokens is not known before the prefix has them all.
    return torch.where(limited & (top_k > width), vocabulary, kept).clamp_(min=1)


def _draw_prefix(rows: _Rows, prefix: _Prefix, kept: Tensor, done: Tensor) -> tuple[Tensor, Tensor]:
    """Of the rows that are done: the token [rows, 1]; its logit and the sum of the weights kept.

    Equal logits count as sorted by token id, here and at the edge of what is kept.
    """
    width = prefix.values.shape[1]
    total = prefix.cumulative.gather(1, kept.clamp(max=width) - 1)
    place = _first_above(prefix.cumulative, rows.numbers * total, total)
    tokens = prefix.tokens.gather(1, place)
    chosen = prefix.values.gather(1, place)
    if width < rows.logits_RV.shape[1]:  # else sorted in full, and stable
        equals = prefix.values == chosen
        unsure = ((equals.sum(dim=1) > 1) | equals[:, -1]) & rows.top.isfinite().squeeze(1)
        rank = place - (prefix.values > chosen).sum(dim=1, keepdim=True)
        for row in (unsure & done).nonzero().squeeze(1).tolist():
            tokens[row] = (rows.logits_RV[row] == chosen[row]).nonzero()[rank[row]].squeeze(1)
    return tokens[done], torch.cat((chosen, total), dim=1)[done]
