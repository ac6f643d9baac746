"""CAPE with gates that are constant, by category, or by a cosine of their own. (Values: test_against_reference.)"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ctr_pe.pe import build_pe, cape_cosine
from ctr_pe.pe.cape_cosine import CosineCAPE
from ctr_pe.pe.contextual import ContextualEncoding
from ctr_pe.sequence.positions import Items, Pairs, Positions
from ctr_pe.units import SelfAttention, TargetAttention
from ctr_pe.units.transformer import Transformer
from ctr_pe.utils.errors import UserError
from tests.support import hooks

D, L = 8, 6
NAMES = ["cape_constant", "cape_oracle", "cape_cosine"]


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def encoding(name: str, heads: int = 1, **options: object) -> ContextualEncoding:
    torch.manual_seed(0)
    pe = build_pe(name, D, L, heads, **options).double()
    assert isinstance(pe, ContextualEncoding)
    return pe


def of_target(items: Tensor, target: Tensor, ids: list[int] | None = None) -> Pairs:
    """Target attention of one target over one history (n, D). ``ids``: the categories of the items, then of the target;
    no two of them are the same item."""
    carried = Items(items), Items(target[None])
    if ids is not None:
        own, category = torch.arange(len(ids)) + 1, torch.tensor(ids)
        carried = Items(items, (own[:-1], category[:-1])), Items(target[None], (own[-1:], category[-1:]))
    return Positions.from_mask(torch.ones(1, len(items), dtype=torch.bool)).target_pairs(*carried)


def places(pe: ContextualEncoding, pairs: Pairs) -> Tensor:
    """Positions (n,) of the keys, whatever the logits."""
    logits = vectors(*pairs.allowed.shape, seed=9)
    found = pe.fractional_positions(logits, pairs)
    assert torch.equal(found, pe.fractional_positions(-3 * logits, pairs))
    return found[0, 0, 0]


def batch() -> tuple[Tensor, Tensor, Positions, Pairs]:
    target, items = vectors(2, D), vectors(2 * L, D, seed=1)
    at = Positions.from_mask(torch.ones(2, L, dtype=torch.bool))
    known = Items(items, (torch.arange(2 * L) % 3,)), Items(target, (torch.zeros(2, dtype=torch.int64),))
    return target, items, at, at.target_pairs(*known)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("score", ["dot", "din"])
def test_they_start_exactly_as_none(name: str, score: str) -> None:
    given = batch()
    plain = TargetAttention(D, score).double()
    unit = TargetAttention(D, plain.score, encoding(name)).double()
    for got, want in zip(unit(*given), plain(*given), strict=True):
        assert torch.equal(got, want)


class TestConstant:
    def test_a_position_is_half_a_distance(self) -> None:
        got = places(encoding("cape_constant"), of_target(vectors(L, D), vectors(D)))
        assert got.tolist() == [3.0, 2.5, 2.0, 1.5, 1.0, 0.5]

    @pytest.mark.parametrize("causal", [True, False])
    def test_it_is_cape_of_a_unit_whose_logits_are_zero(self, causal: bool) -> None:
        constant, cape, items = encoding("cape_constant", 2), encoding("cape", 2), vectors(L, D)
        nn.init.normal_(cape.table)
        constant.load_state_dict(cape.state_dict())
        states = []
        for pe in (constant, cape):
            layer = SelfAttention(D, 2, pe, causal).double()
            nn.init.zeros_(layer.key.weight)
            nn.init.zeros_(layer.key.bias)
            nn.init.eye_(layer.query.weight)
            nn.init.eye_(layer.value.weight)
            nn.init.eye_(layer.output.weight)
            for linear in (layer.query, layer.value, layer.output):
                nn.init.zeros_(linear.bias)
            states.append(layer(items, Positions.from_mask(torch.ones(1, L, dtype=torch.bool))))
        assert torch.allclose(states[0], states[1], atol=1e-12)

    def test_no_gradient_goes_through_the_gates(self) -> None:
        pe, pairs = encoding("cape_constant"), of_target(vectors(L, D), vectors(D))
        nn.init.normal_(pe.table)
        logits = vectors(1, 1, 1, L).requires_grad_()
        pe.bias(logits, hooks.target_vectors(vectors(1, D), pairs), pairs)[..., 2].sum().backward()
        assert logits.grad is not None
        assert logits.grad.flatten().tolist() == [0, 0, 1, 0, 0, 0]


class TestOracle:
    def test_a_position_counts_the_items_of_other_categories(self) -> None:
        got = places(encoding("cape_oracle"), of_target(vectors(L, D), vectors(D), [1, 2, 1, 3, 3, 1, 1]))
        assert got.tolist() == pytest.approx([3, 3, 2, 2, 1, 0], abs=1e-12)

    def test_among_items_the_query_s_category_decides(self) -> None:
        ids = torch.tensor([1, 2, 2, 1])
        at, items = Positions.from_mask(torch.ones(1, 4, dtype=torch.bool)), Items(vectors(4, D), (ids,))
        found = encoding("cape_oracle").fractional_positions(vectors(1, 1, 4, 4), hooks.item_pairs(at, True, items))
        assert found[0, 0, 3].tolist() == pytest.approx([2, 2, 1, 0], abs=1e-12)
        assert found[0, 0, 2, :3].tolist() == pytest.approx([1, 0, 0], abs=1e-12)

    def test_without_ids_it_says_what_is_missing(self) -> None:
        pe, at = build_pe("cape_oracle", D, L), Positions.from_mask(torch.ones(1, 3, dtype=torch.bool))
        with pytest.raises(ValueError, match="cape_oracle needs ids: give the unit positions"):
            TargetAttention(D, pe=pe)(torch.randn(1, D), torch.randn(3, D), at)
        with pytest.raises(ValueError, match="cape_oracle needs ids: give the unit positions"):
            SelfAttention(D, 1, pe)(torch.randn(3, D), at)

    def test_a_field_of_vectors_is_no_category(self) -> None:
        build_pe("cape_oracle", D, L, field_sizes=[0, 9])
        with pytest.raises(UserError, match=r"last field of an item must have ids, got field_sizes=\[9, 0\]"):
            build_pe("cape_oracle", D, L, field_sizes=[9, 0])


class TestCosine:
    def test_like_items_leave_the_others_where_they_are(self) -> None:
        """The target itself, its opposite, and the zero vector, which is like nothing."""
        x, pe = vectors(D), encoding("cape_cosine")
        got = places(pe, of_target(torch.stack([-x, 3 * x, 0 * x]), x))
        like, unlike, neither = (torch.sigmoid(torch.tensor(-10 * (c - 0.5))).item() for c in (1, -1, 0))
        assert got.tolist() == pytest.approx([unlike + like + neither, like + neither, neither], rel=1e-6)
        assert like < 0.01 < 0.99 < neither < unlike

    @pytest.mark.parametrize("likeness_of", ["item", "fields"])
    def test_the_scale_of_embeddings_does_not_matter(self, likeness_of: str) -> None:
        """FuxiCTR's start at 1e-4 times a normal number."""
        pe = encoding("cape_cosine", likeness_of=likeness_of, field_dims=[5, 3])
        items, target = vectors(L, D), vectors(D, seed=1)
        small, large = (places(pe, of_target(size * items, size * target)) for size in (1e-4, 1e2))
        assert torch.allclose(small, large, atol=0.02)
        assert large[0] - large[-1] > 2

    def test_gradients_of_zero_and_of_tiny_vectors_are_finite(self) -> None:
        pe, target = encoding("cape_cosine"), (1e-4 * vectors(1, D, seed=1)).requires_grad_()
        nn.init.normal_(pe.table)
        items = (1e-4 * vectors(L, D) * torch.tensor([1, 0, 1e-30, 1, 0, 1]).unsqueeze(1)).requires_grad_()
        unit, at = TargetAttention(D, pe=pe).double(), Positions.from_mask(torch.ones(1, L, dtype=torch.bool))
        interest, _ = unit(target, items, at)
        interest.sum().backward()
        for leaf in (items, target, *pe.parameters()):
            assert leaf.grad is not None
            assert leaf.grad.isfinite().all()
            assert leaf.grad.abs().max() < 1e5

    def test_the_whole_item_counts_or_each_field(self) -> None:
        """One field like the target's and one unlike: the longer field decides, or the weights of the fields do."""
        target = torch.cat([torch.ones(4), torch.ones(4)]).double()
        item = torch.cat([10 * torch.ones(4), -torch.ones(4)]).double().unsqueeze(0)
        whole = encoding("cape_cosine", likeness_dim=D)
        fields = encoding("cape_cosine", likeness_dim=D, field_dims=[4, 4])
        assert isinstance(whole, CosineCAPE)
        assert isinstance(fields, CosineCAPE)
        for pe in (whole, fields):
            nn.init.eye_(pe.projection)
        assert (whole.middle.item(), fields.middle.item()) == (0.5, 0.25)
        cosine = 36 / (8**0.5 * 404**0.5)
        assert places(whole, of_target(item, target)).item() == pytest.approx(gate(cosine), rel=1e-4)
        assert places(fields, of_target(item, target)).item() == pytest.approx(gate(0, 0.25), rel=1e-4)
        assert fields.field_weights is not None
        with torch.no_grad():
            fields.field_weights.copy_(torch.tensor([3.0, 0.0]))
        share = torch.tensor(3.0).sigmoid().item()
        assert places(fields, of_target(item, target)).item() == pytest.approx(gate(2 * share - 1, 0.25), rel=1e-4)

    @pytest.mark.parametrize("options", [{}, {"field_dims": [5, 3]}])
    def test_layers_share_their_gate_logits_and_nothing_else(self, options: dict[str, object]) -> None:
        first = encoding("cape_cosine", 2, **options)
        above = first.next_layer(lambda: encoding("cape_cosine", 2, **options))
        shared = {name for name, own in above.named_parameters() if own is dict(first.named_parameters())[name]}
        names = {"projection", "steepness", "middle", *(["field_weights"] if options else [])}
        assert shared == names
        assert set(dict(above.named_parameters())) == names | {"table", "gate.weight", "gate.bias"}

    def test_layers_project_the_items_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = []
        direction = cape_cosine.direction
        monkeypatch.setattr(cape_cosine, "direction", lambda x: calls.append(x) or direction(x))
        lowest = encoding("cape_cosine", 2)
        unit = Transformer([lowest, lowest.next_layer(lambda: encoding("cape_cosine", 2))], causal=True).double()
        target, items, at, _ = batch()
        unit(target, items, at)
        assert len(calls) == 1

    def test_what_items_are_decides_and_not_what_a_layer_makes_of_them(self) -> None:
        pe, (_, items, at, _) = encoding("cape_cosine", 2), batch()
        nn.init.normal_(pe.table)
        logits, given = vectors(2, 2, L, L), hooks.item_vectors(vectors(2, 2, L, D // 2))
        known, other = (hooks.item_pairs(at, True, Items(x)) for x in (items, items.flip(0)))
        assert not torch.allclose(pe.bias(logits, given, known), pe.bias(logits, given, other))
        found = pe.fractional_positions(logits, known)
        assert torch.equal(found, pe.fractional_positions(-logits, known))
        assert found.shape == (2, 1, L, L)  # one for all heads


def gate(cosine: float, middle: float = 0.5) -> float:
    return torch.sigmoid(torch.tensor(-10 * (cosine - middle)).double()).item()
