"""The forms of a matrix product agree; tiles do not see each other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.models.linear import TILE_ROWS, Layout, make_linear, narrow_rows_of_this_machine


def weights(dtype: torch.dtype, *outputs: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(sum(outputs))
    return (
        [torch.randn(n, 24, generator=generator).to(dtype) for n in outputs],
        [torch.randn(n, generator=generator).to(dtype) for n in outputs],
    )


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_every_form_is_the_same_product(
    layout: Layout, dtype: torch.dtype, biased: bool, rows: int
) -> None:
    matrices, biases = weights(dtype, 8, 3)
    linear = make_linear(layout, matrices, biases if biased else None, narrow_rows=8)
    x = torch.randn(rows, 24, generator=torch.Generator().manual_seed(rows))
    expected = torch.nn.functional.linear(
        x, torch.cat(matrices).float(), torch.cat(biases).float() if biased else None
    )
    rounded = dtype == torch.bfloat16 and layout is not Layout.TILED
    tolerance = 0.15 if rounded else 1e-4
    out = linear(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=0.01)


@given(st.integers(1, 3 * TILE_ROWS), st.integers(0, 99), st.data())
def test_a_row_of_tiles_depends_on_nothing_else(rows: int, seed: int, data: st.DataObject) -> None:
    matrices, biases = weights(torch.float32, 30)
    linear = make_linear(Layout.TILED, matrices, biases)
    x = torch.randn(rows, 24, generator=torch.Generator().manual_seed(seed))
    row = data.draw(st.integers(0, rows - 1))
    assert torch.equal(linear(x)[row], linear(x[[row]])[0])


def test_the_machine_answers() -> None:
    assert 0 <= narrow_rows_of_this_machine(64, 128) <= 64
