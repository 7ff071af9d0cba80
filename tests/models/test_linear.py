"""The forms of a matrix product agree; tiles do not see each other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.machine.fast_paths import PORTABLE, Trial
from dora_rl.models import linear as products
from dora_rl.models.linear import TILE_ROWS, Layout, make_linear, onednn_order


def weights(dtype: torch.dtype, *outputs: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(sum(outputs))
    return (
        [torch.randn(n, 24, generator=generator).to(dtype) for n in outputs],
        [torch.randn(n, generator=generator).to(dtype) for n in outputs],
    )


def narrow_rows() -> int:
    """8 where this machine's oneDNN orders bf16 weights at all, however fast it is."""
    try:
        products._onednn_order(torch.ones(16, 16, dtype=torch.bfloat16))
    except RuntimeError:
        return 0
    return 8


@pytest.mark.parametrize("layout", [Layout.MAPPED, Layout.PACKED, Layout.TILED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_every_form_is_the_same_product(
    layout: Layout, dtype: torch.dtype, biased: bool, rows: int
) -> None:
    matrices, biases = weights(dtype, 8, 3)
    linear = make_linear(layout, matrices, biases if biased else None, narrow_rows=narrow_rows())
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


@pytest.mark.parametrize("rows_as_they_are", [0, 5, 1 << 31])
@pytest.mark.parametrize("biased", [True, False])
def test_mapped_weights_are_the_same_product_converted_or_not(
    rows_as_they_are: int, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_SLICE_NUMBERS", 3 * 24)  # slices of three outputs, and of two
    matrices, biases = weights(torch.bfloat16, 8, 3)
    linear = make_linear(
        Layout.MAPPED, matrices, biases if biased else None, narrow_rows=rows_as_they_are
    )
    for rows in (1, 5, 6, 40):
        x = torch.randn(rows, 24, generator=torch.Generator().manual_seed(rows))
        bias = torch.cat(biases).float() if biased else None
        expected = torch.nn.functional.linear(x, torch.cat(matrices).float(), bias)
        # Converted, they are fp32 in every bit but the order of the sum.
        tolerance = 0.15 if rows <= rows_as_they_are else 1e-4
        torch.testing.assert_close(linear(x), expected, atol=tolerance, rtol=0.01)


def test_the_machine_answers() -> None:
    assert 0 <= onednn_order(64, 128).value <= 64
    assert products.bf16_products().value >= 0


def test_a_product_that_raises_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PORTABLE, raising=False)

    def raises(weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("this processor cannot")

    monkeypatch.setattr(products, "_onednn_order", raises)
    assert onednn_order(31, 17) == Trial(False, "RuntimeError: this processor cannot")


def test_a_product_that_is_slower_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PORTABLE, raising=False)
    monkeypatch.setattr(products, "_onednn_order", lambda weight: weight)
    times = iter([2.0, 1.0] * 5)
    monkeypatch.setattr(products, "best_time", lambda calls: next(times))
    found = onednn_order(31, 18)
    assert not found.in_force and found.value == 0 and "slower than fp32: 0.5 x" in found.finding


@pytest.mark.parametrize("wins", [64, 16, 1])
def test_bf16_serves_up_to_as_many_rows_as_it_wins(
    wins: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PORTABLE, raising=False)
    monkeypatch.setattr(products, "_onednn_order", lambda weight: weight)
    lost = [64, 32, 16, 8, 1].index(wins)
    times = iter([2.0, 1.0] * lost + [1.0, 2.0])
    monkeypatch.setattr(products, "best_time", lambda calls: next(times))
    assert onednn_order(31, 100 + wins).value == wins
