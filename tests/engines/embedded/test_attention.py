"""Attention over blocks is plain attention over the tokens in them."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dora_rl.engines.embedded import attention
from dora_rl.engines.embedded.attention import BlockAttention, ExactAttention, Reading, causal
from dora_rl.machine.fast_paths import Trial

SCALE = 0.37


@dataclass
class Case:
    """Rows with the blocks that they read; a block may have several readers."""

    reads_R: list[list[Reading]]
    shared: set[int]
    q: Tensor
    keys: Tensor
    values: Tensor

    @property
    def block_tokens(self) -> int:
        return self.keys.shape[-1]

    def regions(self) -> list[list[Reading]]:
        reads = [read for reads in self.reads_R for read in reads]
        low = [read for read in reads if read.block not in self.shared]
        high = [read for read in reads if read.block in self.shared]
        return [region for region in (low, high) if region]

    def plain(self) -> Tensor:
        """One row and one head after another, in float64."""
        rows, heads, width = self.q.shape
        group = heads // self.keys.shape[1]
        out = torch.zeros(rows, heads, width, dtype=torch.float64)
        for row, reads in enumerate(self.reads_R):
            for head in range(heads):
                kv = head // group
                keys = torch.cat([self.keys[b, kv, :, :n].T for _, b, n in reads]).double()
                values = torch.cat([self.values[b, kv, :n] for _, b, n in reads]).double()
                weights = (keys @ self.q[row, head].double() * SCALE).softmax(0)
                out[row, head] = weights @ values
        return out.flatten(1)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows = draw(st.integers(1, 6))
    size = draw(st.sampled_from([1, 4, 8]))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    width = 2 * draw(st.integers(1, 4))
    num_blocks = 40
    order = draw(st.permutations(range(num_blocks)))
    free = iter(order)
    prompts = []
    for _ in range(draw(st.integers(1, 3))):
        blocks = [next(free) for _ in range(draw(st.integers(0, 3)))]
        last = draw(st.integers(1, size))
        prompts.append([(b, size if b != blocks[-1] else last) for b in blocks])
    reads_R = []
    for row in range(rows):
        own = [next(free) for _ in range(draw(st.integers(1, 4)))]
        last = draw(st.integers(1, size))
        blocks = draw(st.sampled_from(prompts)) + [(b, size) for b in own[:-1]] + [(own[-1], last)]
        reads_R.append([Reading(row, block, tokens) for block, tokens in blocks])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    loud = draw(st.sampled_from([1.0, 30.0]))  # scores far apart

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return Case(
        reads_R,
        {block for prompt in prompts for block, _ in prompt},
        loud * noise(rows, kv_heads * group, width),
        noise(num_blocks, kv_heads, width, size),
        noise(num_blocks, kv_heads, size, width),
    )


@pytest.mark.parametrize("room", [10_000, -10_000])  # rows side by side, or block by block
def test_over_blocks(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_ROOM", room)

    @given(cases())
    def check(case: Case) -> None:
        attend = BlockAttention(
            case.regions(), len(case.reads_R), case.block_tokens, case.keys.shape[1]
        )
        out = attend(case.q, case.keys, case.values, SCALE)
        torch.testing.assert_close(out.double(), case.plain(), rtol=1e-4, atol=1e-5)

    check()


@pytest.mark.parametrize("fast", [True, False])
def test_over_blocks_in_bf16(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are, weights and queries are rounded to bf16 as well; converted, nothing else is."""
    monkeypatch.setattr(attention, "bf16_kv", lambda: Trial(fast, "as the test says"))

    @given(cases())
    def check(case: Case) -> None:
        case.keys, case.values = case.keys.bfloat16(), case.values.bfloat16()
        case.q = case.q / case.q.abs().max()  # loud scores differ by what rounding does to them
        attend = BlockAttention(
            case.regions(), len(case.reads_R), case.block_tokens, case.keys.shape[1]
        )
        out = attend(case.q, case.keys, case.values, SCALE)
        tolerance = 0.05 if fast else 1e-4
        torch.testing.assert_close(out.double(), case.plain(), rtol=tolerance, atol=tolerance)

    check()


def test_a_long_row_does_not_widen_the_others() -> None:
    def reads(row: int, first: int, count: int) -> list[Reading]:
        return [Reading(row, first + i, 4) for i in range(count)]

    uneven = BlockAttention([reads(0, 0, 200) + reads(1, 200, 1) + reads(2, 201, 1)], 3, 4, 1)
    even = BlockAttention([reads(0, 0, 200) + reads(1, 200, 180)], 2, 4, 1)
    assert not uneven._side_by_side
    assert even._side_by_side


@given(cases())
def test_exactly(case: Case) -> None:
    out = ExactAttention(case.reads_R, case.block_tokens)(case.q, case.keys, case.values, SCALE)
    torch.testing.assert_close(out.double(), case.plain(), rtol=1e-4, atol=1e-5)


@given(cases(), st.data())
def test_exact_rows_depend_on_nothing_else(case: Case, data: st.DataObject) -> None:
    together = ExactAttention(case.reads_R, case.block_tokens)(
        case.q, case.keys, case.values, SCALE
    )
    row = data.draw(st.integers(0, len(case.reads_R) - 1))
    # Alone, in other blocks, and with NaN in all that it does not read.
    reads = case.reads_R[row]
    target = data.draw(st.permutations(range(case.keys.shape[0])))[: len(reads)]
    keys, values = (torch.full_like(x, torch.nan) for x in (case.keys, case.values))
    for old, new in zip(reads, target, strict=True):
        keys[new], values[new] = case.keys[old.block], case.values[old.block]
    moved = [Reading(0, new, old.tokens) for old, new in zip(reads, target, strict=True)]
    alone = ExactAttention([moved], case.block_tokens)(case.q[[row]], keys, values, SCALE)
    assert torch.equal(alone[0], together[row])


@given(st.integers(1, 5), st.integers(0, 6), st.integers(1, 2), st.integers(1, 3))
def test_causal(count: int, first: int, kv_heads: int, group: int) -> None:
    generator = torch.Generator().manual_seed(count * 100 + first)
    tokens, width = first + count, 4
    q = torch.randn(count, kv_heads * group, width, generator=generator)
    keys = torch.randn(kv_heads, width, tokens, generator=generator)
    values = torch.randn(kv_heads, tokens, width, generator=generator)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1),
        keys.transpose(1, 2).repeat_interleave(group, 0),
        values.repeat_interleave(group, 0),
        attn_mask=torch.arange(tokens) <= torch.arange(first, tokens).unsqueeze(1),
        scale=SCALE,
    )
    out = causal(q, keys, values, first, SCALE)
    torch.testing.assert_close(out, expected.transpose(0, 1).flatten(1))
