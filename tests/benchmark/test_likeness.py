"""benchmark/likeness.py: a match with the target, wherever the item lies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmark.likeness import OwnGate
from ctr_pe.pe.cape_cosine import CosineCAPE
from ctr_pe.sequence.positions import Positions
from ctr_pe.units import TargetAttention

D, L = 8, 6


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(cls: type[CosineCAPE]) -> TargetAttention:
    torch.manual_seed(0)
    pe = cls(D, L, field_dims=[5, 3])
    nn.init.normal_(pe.table)
    return TargetAttention(D, "dot", pe).double()


def interest(unit: TargetAttention, items: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = unit(target, items, Positions.from_mask(torch.ones(1, len(items), dtype=torch.bool)))
    return found


def test_the_order_of_items_says_nothing_but_in_cape_cosine() -> None:
    items, target = vectors(L, D), vectors(1, D, seed=1)
    ours, cosine = drawn(OwnGate), drawn(CosineCAPE)
    assert torch.allclose(interest(ours, items, target)[0], interest(ours, items.flip(0), target)[0], atol=1e-12)
    ends = [interest(cosine, some, target)[0] for some in (items, items.flip(0))]
    assert not torch.allclose(ends[0], ends[1], atol=1e-3)


@pytest.mark.parametrize("items", [1, L])
def test_an_item_is_at_its_own_gate(items: int) -> None:
    """With a single item that is where ``cape_cosine`` puts it too."""
    history, target, unit = vectors(items, D), vectors(1, D, seed=1), drawn(OwnGate)
    pe = unit.pe
    assert isinstance(pe, OwnGate)
    assert pe.gate is not None
    logits = history @ target[0] / D**0.5
    query = nn.functional.silu(pe.gate(target[0]))
    for j in range(items):
        cosines = [
            torch.cosine_similarity(projection @ target[0, part], projection @ history[j, part], dim=0)
            for part, projection in ((slice(0, 5), pe.projection[:, :5]), (slice(5, 8), pe.projection[:, 5:]))
        ]
        gate = torch.sigmoid(-10 * (sum(cosines) / 2 - 0.25))
        logits[j] += query @ (pe.table[0] + gate * (pe.table[1] - pe.table[0]))
    found, weights = interest(unit, history, target)
    assert torch.allclose(weights.flatten(), logits.softmax(0), atol=1e-6)
    assert torch.allclose(found[0], logits.softmax(0) @ history, atol=1e-5)
    alone, _ = interest(drawn(CosineCAPE), history[:1], target)
    assert torch.allclose(alone, interest(unit, history[:1], target)[0], atol=1e-12)
