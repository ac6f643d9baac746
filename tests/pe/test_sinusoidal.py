from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ctr_pe import PositionEncoding, Positions
from ctr_pe.pe.naive import Naive
from ctr_pe.pe.sinusoidal import Sinusoidal

D, L = 8, 6


def full(slots: int = L) -> Positions:
    return Positions.from_mask(torch.ones(1, slots, dtype=torch.bool))


def table(rows: int, dim: int = D) -> Tensor:
    """Rows 0, 1, ... as zero items show them."""
    target, history = Sinusoidal(dim, L).embed(
        torch.zeros(1, dim).double(), torch.zeros(1, rows - 1, dim).double(), full(rows - 1)
    )
    assert target is not None
    return torch.cat([target, history[0].flip(0)])


@pytest.mark.parametrize("dim", [1, 2, 7, 8])
def test_waves(dim: int) -> None:
    for p, row in enumerate(table(12, dim)):
        for column, value in enumerate(row):
            angle = p / 10000 ** (2 * (column // 2) / dim)
            assert value.item() == pytest.approx([math.sin, math.cos][column % 2](angle), abs=1e-12)


def test_products_of_rows_depend_on_their_offset_only() -> None:
    rows = table(30)
    products = rows @ rows.T
    for offset in range(30):
        assert torch.allclose(products.diagonal(offset), products[0, offset], atol=1e-12)
    assert products[0, 0] - products[0, 1:].max() > 0.1


@pytest.mark.parametrize("position_index", ["distance", "rank"])
@pytest.mark.parametrize("on_target", [True, False])
def test_options_mean_what_they_mean_for_learned_positions(position_index: str, on_target: bool) -> None:
    options = {"position_index": position_index, "on_target": on_target}
    learned, fixed = Naive(D, L, **options).double(), Sinusoidal(D, L, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        learned.table.copy_(table(L + 1))
    positions = Positions.from_mask(torch.tensor([[1, 0, 1, 1, 0, 1], [0] * 6, [1] * 6]).bool())
    batch = torch.randn(3, D).double(), torch.randn(3, L, D).double(), positions
    for ours, theirs in zip(fixed.embed(*batch), learned.embed(*batch), strict=True):
        assert torch.equal(ours, theirs)  # type: ignore[arg-type]


def test_old_items_have_places_of_their_own() -> None:
    _, history = Sinusoidal(D, 3).embed(None, torch.zeros(1, 40, D), full(40))
    assert len(history[0].unique(dim=0)) == 40


def test_nothing_is_learned_or_stored_and_nothing_is_added_above_the_input() -> None:
    pe = Sinusoidal(D, L, 2)
    assert not pe.state_dict()
    above = pe.next_layer(lambda: Sinusoidal(D, L, 4))
    assert (type(above), above.num_heads) == (PositionEncoding, 4)


def test_half_precision_keeps_its_angles() -> None:
    _, half = Sinusoidal(D, L).embed(None, torch.zeros(1, 1000, D).half(), full(1000))
    assert half.dtype == torch.float16
    assert (half[0].double() - table(1001)[1:].flip(0)).abs().max() < 1e-3


@pytest.mark.parametrize("scale", [0.02, 3])
def test_scale(scale: float) -> None:
    target, history = Sinusoidal(D, L, sinusoidal_scale=scale).embed(torch.zeros(1, D), torch.zeros(1, L, D), full())
    plain_target, plain_history = Sinusoidal(D, L).embed(torch.zeros(1, D), torch.zeros(1, L, D), full())
    assert target is not None
    assert plain_target is not None
    assert torch.allclose(target, scale * plain_target)
    assert torch.allclose(history, scale * plain_history)


@pytest.mark.parametrize("scale", [0, -1.0, float("nan"), float("inf"), "1"])
def test_bad_scale(scale: float) -> None:
    with pytest.raises(ValueError, match="sinusoidal_scale must be a positive number"):
        Sinusoidal(D, L, sinusoidal_scale=scale)
