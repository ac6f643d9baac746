from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ctr_pe import Positions
from ctr_pe.pe import build_pe
from ctr_pe.pe.xlnet import XLNet, by_key
from ctr_pe.units import DotScore, SelfAttention, TargetAttention

D, L = 8, 6


def full(rows: int = 2, slots: int = L) -> Positions:
    return Positions.from_mask(torch.ones(rows, slots, dtype=torch.bool))


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(heads: int = 1, max_len: int = L) -> XLNet:
    pe = XLNet(D, max_len, heads).double()
    torch.manual_seed(1)
    for parameter in pe.parameters():
        nn.init.normal_(parameter)
    return pe


@pytest.mark.parametrize("unit", ["dot", "bilinear", "din", "self", "causal"])
def test_without_biases_and_projection_it_is_none(unit: str) -> None:
    def outputs(name: str) -> Tensor:
        torch.manual_seed(0)
        with torch.random.fork_rng():
            pe = build_pe(name, D, L, 2 if unit in ("self", "causal") else 1)
        for parameter in pe.parameters():
            nn.init.zeros_(parameter)
        if unit in ("self", "causal"):
            return SelfAttention(D, 2, pe, unit == "causal").double()(vectors(2, L, D), full())
        return TargetAttention(D, unit, pe).double()(vectors(2, D), vectors(2, L, D, seed=1), full())[1]

    assert torch.equal(outputs("xlnet"), outputs("none"))


def test_content_bias_is_blind_to_order_and_position_bias_to_content() -> None:
    pe = drawn()
    nn.init.zeros_(pe.projection.weight)
    target, history, order = vectors(2, D), vectors(2, L, D, seed=1), torch.tensor([3, 0, 5, 1, 4, 2])
    unit = TargetAttention(D, pe=pe).double()
    _, weights = unit(target, history, full())
    assert torch.allclose(unit(target, history[:, order], full())[1], weights[:, order])
    assert not torch.allclose(weights, TargetAttention(D).double()(target, history, full())[1])
    # with no query and no content bias, v · W R(D_j) alone decides
    pe = drawn()
    nn.init.zeros_(pe.content_bias)
    _, weights = TargetAttention(D, pe=pe).double()(torch.zeros(2, D).double(), history, full())
    assert torch.allclose(weights[0], weights[1])
    assert not torch.allclose(weights[0, :1], weights[0])


@pytest.mark.parametrize("causal", [True, False])
def test_only_offsets_count(causal: bool) -> None:
    """Items in front of a causal query's view shift all ranks, those after it all distances."""
    layer = SelfAttention(D, 2, drawn(2), causal).double()
    items = vectors(1, L, D)
    whole, part = layer(items, full(1)), layer(items[:, :4], full(1, 4))
    assert torch.allclose(whole[:, :4], part) == causal


def test_later_and_earlier_keys_differ() -> None:
    """The offset is signed: reading a sequence backwards is another sequence."""
    layer, items = SelfAttention(D, 2, drawn(2)).double(), vectors(1, L, D)
    assert not torch.allclose(layer(items.flip(1), full(1)).flip(1), layer(items, full(1)))
    with torch.no_grad():
        layer.pe.projection.weight[:, : D // 2] = 0  # without sines |offset| is all that counts
    assert torch.allclose(layer(items.flip(1), full(1)).flip(1), layer(items, full(1)))


def test_histories_have_no_longest() -> None:
    short, long = (TargetAttention(D, pe=drawn(max_len=size)).double() for size in (2, 500))
    batch = vectors(1, D), vectors(1, 50, D, seed=1), full(1, 50)
    assert torch.equal(short(*batch)[1], long(*batch)[1])


@pytest.mark.parametrize(("scaled", "factor"), [(True, D**-0.5), (False, 1.0)])
def test_terms_are_scaled_as_the_products_of_the_score(scaled: bool, factor: float) -> None:
    """(t + u) · h_j + (t + v) · W R(D_j): position and content weigh as much as they do beside each other."""
    pe = drawn()
    unit = TargetAttention(D, DotScore(D, scaled), pe, softmax=False).double()
    target, history = vectors(1, D), vectors(1, L, D, seed=1)
    distance = torch.arange(L, 0, -1).double().unsqueeze(1)
    angle = distance * 10000.0 ** (-torch.arange(D // 2).double() * 2 / D)
    waves = torch.cat([angle.sin(), angle.cos()], 1)
    content = history[0] @ (target[0] + pe.content_bias[0])
    position = waves @ pe.projection.weight.T @ (target[0] + pe.position_bias[0])
    assert torch.allclose(unit(target, history, full(1))[1][0], (content + position) * factor)


@pytest.mark.parametrize(("queries", "keys", "later"), [(1, 5, 1), (5, 5, 1), (5, 5, 5), (1, 1, 1), (1, 0, 1)])
def test_scores_per_offset_become_scores_per_key(queries: int, keys: int, later: int) -> None:
    scores = vectors(2, 3, queries, keys + later)
    got = by_key(scores, keys)
    assert got.shape == (2, 3, queries, keys)
    for i in range(queries):
        for j in range(keys):
            column = queries - 1 - i + j  # offset of the last query's oldest key first, then ever later keys
            if column < keys + later - 1:
                assert torch.equal(got[..., i, j], scores[..., i, column])


def test_layers_share_biases_and_have_projections_of_their_own() -> None:
    pe = XLNet(D, L, 2)
    above = pe.next_layer(lambda: XLNet(D, L, 2))
    assert isinstance(above, XLNet)
    assert above.content_bias is pe.content_bias
    assert above.position_bias is pe.position_bias
    assert not torch.equal(above.projection.weight, pe.projection.weight)
    names = dict(nn.ModuleList([pe, above]).named_parameters())
    assert sorted(names) == ["0.content_bias", "0.position_bias", "0.projection.weight", "1.projection.weight"]
    unit = pe.next_layer(lambda: XLNet(D, L, 1))
    assert isinstance(unit, XLNet)
    assert unit.content_bias.shape == (1, D)
