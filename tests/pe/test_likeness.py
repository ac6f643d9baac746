"""A match with the target, wherever the item lies. (Values: test_against_reference.)"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ctr_pe.pe import build_pe, options_of
from ctr_pe.pe.cape_cosine import CosineCAPE
from ctr_pe.pe.likeness import Likeness
from ctr_pe.sequence.positions import Items, Positions
from ctr_pe.units import SelfAttention, TargetAttention
from tests.support import hooks

D, L = 8, 6


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(name: str) -> TargetAttention:
    """Of like weights for each encoding: tables of as many rows, of which the first two are likeness's."""
    torch.manual_seed(0)
    pe = build_pe(name, D, L, field_dims=[5, 3]).double()
    nn.init.normal_(pe.get_parameter("table"), generator=torch.Generator().manual_seed(0))
    return TargetAttention(D, "dot", pe).double()


def interest(unit: TargetAttention, items: Tensor, target: Tensor) -> Tensor:
    found: Tensor = unit(target, items, Positions.from_mask(torch.ones(1, len(items), dtype=torch.bool)))[0]
    return found


def test_the_order_of_items_says_nothing_but_in_cape_cosine() -> None:
    items, target = vectors(L, D), vectors(1, D, seed=1)
    ours, cosine, plain = drawn("likeness"), drawn("cape_cosine"), TargetAttention(D, "dot").double()
    assert torch.allclose(interest(ours, items, target), interest(ours, items.flip(0), target), atol=1e-12)
    assert not torch.allclose(interest(ours, items, target), interest(plain, items, target), atol=1e-3)
    ends = [interest(cosine, some, target) for some in (items, items.flip(0))]
    assert not torch.allclose(ends[0], ends[1], atol=1e-3)


@pytest.mark.parametrize("causal", [True, False])
def test_nor_does_it_between_items(causal: bool) -> None:
    """What is added to a pair of items does not depend on those between them."""
    pe = build_pe("likeness", D, L, 2).double()
    nn.init.normal_(pe.get_parameter("table"))
    layer, items = SelfAttention(D, 2, pe, causal).double(), vectors(L, D)
    order = torch.tensor([3, 0, 4, 1, 2, 5])  # the newest stays the newest
    at = Positions.from_mask(torch.ones(1, L, dtype=torch.bool))
    assert torch.allclose(layer(items, at)[-1], layer(items[order], at)[-1], atol=1e-12)


def test_an_item_is_where_cape_cosine_puts_it_if_it_is_alone() -> None:
    """At its own gate: the logits are those of one row of a table with the two rows."""
    ours, cosine = drawn("likeness").pe, drawn("cape_cosine").pe
    assert isinstance(ours, Likeness)
    assert isinstance(cosine, CosineCAPE)
    with torch.no_grad():
        cosine.table[:2] = ours.table
    at = Positions.from_mask(torch.ones(L, 1, dtype=torch.bool))
    pairs = at.target_pairs(*(Items(vectors(L, D, seed=seed)) for seed in (0, 1)))
    given = vectors(L, 1, 1, 1), hooks.target_vectors(vectors(L, D, seed=1), pairs), pairs
    assert torch.allclose(ours.bias(*given), cosine.bias(*given), atol=1e-12)
    assert not torch.allclose(ours.bias(*given), given[0], atol=1e-3)


@pytest.mark.parametrize("score", ["dot", "din"])
def test_it_starts_exactly_as_none(score: str) -> None:
    items, target = vectors(L, D), vectors(1, D, seed=1)
    plain = TargetAttention(D, score).double()
    unit = TargetAttention(D, plain.score, build_pe("likeness", D, L)).double()
    assert torch.equal(interest(unit, items, target), interest(plain, items, target))


def test_it_learns_from_the_start() -> None:
    """Through the table, which is zero then; all else has a gradient once the table has not."""
    items, target = vectors(L, D), vectors(1, D, seed=1)
    unit = TargetAttention(D, "dot", build_pe("likeness", D, L, field_dims=[5, 3])).double()
    interest(unit, items, target).square().sum().backward()
    table = unit.pe.get_parameter("table")
    assert table.grad is not None
    assert table.grad.abs().max() > 0
    assert torch.allclose(table.grad[0], -table.grad[1])  # what both rows have, the softmax does not see
    nn.init.normal_(table)
    interest(unit, items, target).square().sum().backward()
    for name, parameter in unit.pe.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("options", [{}, {"field_dims": [5, 3]}])
def test_layers_share_their_gates_and_nothing_else(options: dict[str, object]) -> None:
    first = build_pe("likeness", D, L, 2, **options)
    above = first.next_layer(lambda: build_pe("likeness", D, L, 2, **options))
    shared = {name for name, own in above.named_parameters() if own is dict(first.named_parameters())[name]}
    names = {"projection", "steepness", "middle", *(["field_weights"] if options else [])}
    assert shared == names
    assert set(dict(above.named_parameters())) == names | {"table", "gate.weight", "gate.bias"}


def test_its_options_are_those_that_it_reads() -> None:
    of_cosine, of_likeness = set(options_of(CosineCAPE)), set(options_of(Likeness))
    assert of_cosine - of_likeness == {"position_span"}
    assert of_likeness <= of_cosine
