"""Dropout with a quick mask."""

from __future__ import annotations

import pytest
import torch

from ctr_pe.units.dropout import Dropout


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_rate_and_mean_and_independence(rate: float) -> None:
    torch.manual_seed(0)
    x = torch.ones(1000, 999, requires_grad=True)
    y = Dropout(rate)(x)
    kept = y != 0
    deviation = (rate * (1 - rate) / x.numel()) ** 0.5
    assert abs((~kept).double().mean() - rate) < 5 * deviation + 2**-16
    assert abs(y.double().mean() - 1) < 5 * deviation / (1 - rate)
    assert torch.allclose(y[kept], y.max().expand(int(kept.sum())))
    assert abs(y.max().item() * (1 - rate) - 1) < 1e-3
    for lag in (1, 2, 3, 4, 999):  # numbers that share a draw, or lie below each other, do not go together
        flat = kept.flatten().double()
        both = (flat[lag:] * flat[:-lag]).mean()
        assert abs(both - (1 - rate) ** 2) < 6 * deviation
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (2, 1, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_shapes_and_types(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    y = Dropout(0.3)(torch.ones(shape, dtype=dtype))
    assert y.shape == shape
    assert y.dtype == dtype


def test_evaluation_and_extreme_rates() -> None:
    x = torch.randn(50)
    assert torch.equal(Dropout(0.5).eval()(x), x)
    assert torch.equal(Dropout(0.0)(x), x)
    assert torch.equal(Dropout(1.0)(x), torch.zeros(50))


def test_one_seed_gives_one_mask() -> None:
    masks = []
    for _ in range(2):
        torch.manual_seed(3)
        masks.append(Dropout(0.5)(torch.ones(101)))
    assert torch.equal(*masks)


def test_a_mask_is_on_the_device_that_is_asked_for() -> None:
    mask = Dropout(0.25).draw(torch.Size((3, 4)), torch.device("meta"))
    assert (mask.device.type, mask.shape, mask.dtype) == ("meta", (3, 4), torch.int16)
