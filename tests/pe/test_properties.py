"""What each encoding is: the properties that its paper states or that its equations imply."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ctr_pe import Positions
from ctr_pe.ops.contextual.reference import contextual_positions, interpolate
from ctr_pe.pe import build_pe
from ctr_pe.pe.cape import CAPE
from ctr_pe.pe.cope import CoPE
from ctr_pe.pe.naive import Naive
from ctr_pe.pe.rope import RoPE
from ctr_pe.sequence.positions import Pairs, Where
from ctr_pe.units import SelfAttention, TargetAttention
from tests.support import hooks

D, L = 8, 6


def full(rows: int = 2, slots: int = L) -> Positions:
    return Positions.from_mask(torch.ones(rows, slots, dtype=torch.bool))


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scored_bias(pe: nn.Module, logits: Tensor, query: Tensor, pairs: Pairs) -> Tensor:
    """What a contextual encoding adds to the logits (B, L) of a target (B, D)."""
    wide = logits[:, None, None, :]
    added: Tensor = pe.bias(wide, hooks.target_vectors(query, pairs), pairs) - wide  # type: ignore[operator]
    return added[:, 0, 0]


def test_none_is_blind_to_order() -> None:
    unit, target, history = TargetAttention(D).double(), vectors(2, D), vectors(2, L, D, seed=1)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    interest, weights = unit(target, history, full())
    shuffled, shuffled_weights = unit(target, history[:, order], full())
    assert torch.allclose(shuffled, interest, atol=1e-12)
    assert torch.allclose(shuffled_weights, weights[:, order], atol=1e-12)


@pytest.mark.parametrize("name", ["naive", "rope", "cope", "cape"])
def test_the_others_see_order(name: str) -> None:
    pe = build_pe(name, D, L).double()
    for parameter in pe.parameters():
        nn.init.normal_(parameter)
    unit, positions = TargetAttention(D, pe=pe).double(), full()
    target, history = vectors(2, D), vectors(2, L, D, seed=1)
    interest, _ = unit(*pe.embed(target, history, positions), positions)
    shuffled, _ = unit(*pe.embed(target, history.flip(1), positions), positions)
    assert (interest - shuffled).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["cope", "cape", "cape_additive"])
@pytest.mark.parametrize("score", ["dot", "bilinear", "din"])
def test_zero_tables_start_exactly_as_none(name: str, score: str) -> None:
    torch.manual_seed(0)
    plain = TargetAttention(D, score).double()
    unit = TargetAttention(D, plain.score, build_pe(name, D, L)).double()
    batch = vectors(2, D), vectors(2, L, D, seed=1), full()
    for a, b in zip(unit(*batch), plain(*batch), strict=True):
        assert torch.equal(a, b)


class TestNaive:
    def test_adds_rows_by_distance_and_row_zero_to_the_target(self) -> None:
        pe = Naive(D, L)
        target, history = pe.embed(torch.zeros(2, D), torch.zeros(2, L, D), full())
        assert torch.equal(history[0], pe.table[[6, 5, 4, 3, 2, 1]])
        assert target is not None
        assert torch.equal(target[1], pe.table[0])

    def test_by_rank(self) -> None:
        pe = Naive(D, L, position_index="rank")
        positions = Positions.from_mask(torch.tensor([[False, True, True, True]]))
        target, history = pe.embed(torch.zeros(1, D), torch.zeros(1, 4, D), positions)
        assert torch.equal(history[0, 1:], pe.table[[0, 1, 2]])
        assert target is not None
        assert torch.equal(target[0], pe.table[3])

    def test_padding_stays_zero_and_no_target_is_fine(self) -> None:
        positions = Positions.from_mask(torch.tensor([[True, False]]))
        target, history = Naive(D, L).embed(None, torch.zeros(1, 2, D), positions)
        assert target is None
        assert history[0, 1].abs().max() == 0

    def test_target_can_be_left_alone(self) -> None:
        target, _ = Naive(D, L, on_target=False).embed(torch.zeros(2, D), torch.zeros(2, L, D), full())
        assert target is not None
        assert target.abs().max() == 0

    def test_old_items_share_the_last_row(self) -> None:
        pe = Naive(D, 3)
        _, history = pe.embed(None, torch.zeros(2, L, D), full())
        assert torch.equal(history[0, :4], pe.table[[3, 3, 3, 3]])

    def test_zero_table_is_none(self) -> None:
        pe = Naive(D, L)
        nn.init.zeros_(pe.table)
        history = vectors(2, L, D)
        assert torch.equal(pe.embed(None, history, full())[1], history)


class TestRoPE:
    @staticmethod
    def turned(x: Tensor, distance: int, **options: object) -> Tensor:
        pe = RoPE(x.shape[-1], L, **options)  # type: ignore[arg-type]
        at = Where(torch.tensor(distance))
        return pe.rotate(x, x, Where(torch.tensor(0)), at)[1]

    @pytest.mark.parametrize("layout", ["half", "interleaved"])
    @pytest.mark.parametrize("dim", [1, 2, 7, 8])
    def test_keeps_norms_and_the_target(self, dim: int, layout: str) -> None:
        x = vectors(dim)
        assert torch.allclose(self.turned(x, 5, rope_layout=layout).norm(), x.norm())
        assert torch.equal(self.turned(x, 0, rope_layout=layout), x)

    def test_dot_products_depend_on_the_offset_only(self) -> None:
        q, k = vectors(8), vectors(8, seed=1)
        products = [self.turned(q, i) @ self.turned(k, i + 3) for i in (0, 1, 7, 50)]
        assert torch.allclose(torch.stack(products), products[0])
        assert (self.turned(q, 0) @ self.turned(k, 4) - products[0]).abs() > 1e-3

    def test_layouts_are_a_permutation_of_each_other(self) -> None:
        x = vectors(8)
        order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # interleaved coordinate c is half's coordinate order[c]
        assert torch.allclose(self.turned(x[order], 3, rope_layout="interleaved"), self.turned(x, 3)[order])

    def test_odd_dim_leaves_the_last_coordinate(self) -> None:
        x = vectors(7)
        assert self.turned(x, 4)[-1] == x[-1]

    def test_values_are_not_rotated(self) -> None:
        unit = TargetAttention(D, pe=RoPE(D, L)).double()
        history, positions = vectors(2, L, D), full()
        interest, weights = unit(vectors(2, D, seed=1), history, positions)
        assert torch.allclose(interest, (weights.unsqueeze(-1) * history).sum(1))

    def test_half_precision_keeps_its_angles(self) -> None:
        x = torch.ones(1, 8)
        far, exact = Where(torch.tensor([997])), self.turned(torch.ones(8, dtype=torch.float64), 997)
        half = RoPE(8, L).half().rotate(x.half(), x.half(), far, far)[1][0].double()
        assert (half - exact).abs().max() < 5e-3


class TestContextual:
    """CoPE and CAPE."""

    @pytest.mark.parametrize(("pe", "all_open"), [(CoPE(D, L), 40.0), (CAPE(D, L, position_dim=3), -40.0)])
    def test_open_gates_give_relative_positions_closed_gates_none(self, pe: CoPE | CAPE, all_open: float) -> None:
        pe.double()
        for parameter in pe.parameters():
            nn.init.normal_(parameter)
        query, positions = vectors(2, D), full()
        gated = query
        if pe.gate is not None:
            gated = nn.functional.silu(pe.gate(query))
        table = pe.table
        opened = scored_bias(pe, torch.full((2, L), all_open).double(), query, hooks.target_pairs(positions))
        assert torch.allclose(opened, gated @ table[[6, 5, 4, 3, 2, 1]].T, atol=1e-9)  # type: ignore[index]
        closed = scored_bias(pe, torch.full((2, L), -all_open).double(), query, hooks.target_pairs(positions))
        assert torch.allclose(closed, (gated @ table[0]).unsqueeze(1).expand(2, L), atol=1e-9)  # type: ignore[index]

    def test_gates_of_the_two_add_up_to_one(self) -> None:
        pairs, table = hooks.target_pairs(full()), torch.arange(L + 1.0, dtype=torch.float64)
        logits = vectors(2, L)
        cope, cape = CoPE(1, L).double(), CAPE(1, L, position_dim=1).double()
        one = torch.ones(2, 1, dtype=torch.float64)
        with torch.no_grad():  # tables and gates for which the bias is the position itself
            cope.table.copy_(table.unsqueeze(1))
            cape.table.copy_(table.unsqueeze(1) / nn.functional.silu(one[:1]))
            cape.gate.weight.fill_(1.0)
        p_cope, p_cape = scored_bias(cope, logits, one, pairs), scored_bias(cape, logits, one, pairs)
        distance = full().distance
        assert torch.allclose(p_cope + p_cape, distance.double())
        steps = p_cape[:, :-1] - p_cape[:, 1:]
        assert torch.allclose(steps, torch.sigmoid(-logits[:, :-1]))  # p_j - p_{j+1} = g_j, so p falls with j

    def test_swapping_neighbours_moves_only_the_newer_of_the_two(self) -> None:
        gates = torch.rand(1, 1, 1, L, dtype=torch.float64)
        p = contextual_positions(gates)[0, 0, 0]
        order = [0, 1, 3, 2, 4, 5]
        swapped = contextual_positions(gates[..., order])[0, 0, 0]
        assert torch.allclose(swapped[[0, 1, 2, 4, 5]], p[[0, 1, 2, 4, 5]])
        assert (swapped[3] - p[3]).abs() > 1e-3

    @pytest.mark.parametrize("pe", [CoPE(D, L), CAPE(D, L)])
    def test_swapping_equal_items_changes_nothing(self, pe: nn.Module) -> None:
        nn.init.normal_(pe.table)  # type: ignore[arg-type]
        unit = TargetAttention(D, pe=pe).double()  # type: ignore[arg-type]
        history = vectors(2, L, D)
        history[:, 2] = history[:, 4]
        order = torch.tensor([0, 1, 4, 3, 2, 5])
        for a, b in zip(
            unit(vectors(2, D), history, full()), unit(vectors(2, D), history[:, order], full()), strict=True
        ):
            assert torch.equal(a, b)

    def test_scoring_once_equals_scoring_interpolated_rows(self) -> None:
        """t' · e[p] with a vector per item, as the paper writes it, equals interpolating scores."""
        table, query = vectors(L + 1, 3), vectors(2, 3, seed=1)
        p = torch.rand(2, 1, 1, L, dtype=torch.float64) * L
        low = p.floor().long()
        share = (p - low).unsqueeze(-1)
        literal = (1 - share) * table[low] + share * table[(low + 1).clamp(max=L)]
        want = (literal * query[:, None, None, None]).sum(-1)
        assert torch.allclose(interpolate((query @ table.T)[:, None, None], p), want)

    def test_gradient_flows_at_integer_positions(self) -> None:
        position = torch.tensor([[[[2.0, 1.0]]]], dtype=torch.float64, requires_grad=True)
        table = torch.tensor([[[[0.0, 1.0, 4.0, 9.0]]]], dtype=torch.float64)
        interpolate(table, position).sum().backward()
        assert position.grad is not None
        assert position.grad.flatten().tolist() == [5.0, 3.0]

    def test_saturated_gates_have_finite_gradients(self) -> None:
        pe, query = CAPE(D, L).double(), vectors(2, D)
        nn.init.normal_(pe.table)
        logits = torch.tensor([[-800.0, 800.0, -50.0, 50.0, 0.0, 1e4]] * 2, dtype=torch.float64, requires_grad=True)
        scored_bias(pe, logits, query, hooks.target_pairs(full())).sum().backward()
        assert logits.grad is not None
        assert logits.grad.isfinite().all()

    def test_gates_of_forbidden_keys_are_zero_not_a_half(self) -> None:
        pe = CAPE(1, 20, position_dim=1).double()
        with torch.no_grad():
            pe.table.copy_(torch.arange(21.0).unsqueeze(1))
            pe.gate.weight.fill_(1.0)
        pairs = hooks.target_pairs(full(1, 12))
        pairs = replace(pairs, allowed=torch.arange(12) < 2)
        bias = scored_bias(pe, torch.zeros(1, 12).double(), torch.ones(1, 1).double(), pairs)
        position = bias / nn.functional.silu(torch.ones(()).double())
        assert torch.allclose(position[0, :2], torch.tensor([1.0, 0.5]).double())

    def test_causal_last_row_equals_target_attention_with_the_query_s_own_gate(self) -> None:
        pe = CAPE(D, L, position_dim=4).double()
        nn.init.normal_(pe.table)
        layer = SelfAttention(D, 1, pe, causal=True).double()
        items = vectors(2, L, D)
        last = layer(items, full())[:, -1]
        query, keys, values = layer.query(items[:, -1]), layer.key(items), layer.value(items)
        logits = (query.unsqueeze(1) * keys).sum(-1) / D**0.5
        weights = (logits + scored_bias(pe, logits, query, hooks.target_pairs(full()))).softmax(-1)
        assert torch.allclose(last, layer.output((weights.unsqueeze(-1) * values).sum(1)))

    def test_between_sums_towards_the_query_on_both_sides(self) -> None:
        gates = torch.rand(1, 1, 4, 4, dtype=torch.float64)
        p = contextual_positions(gates, between=True)[0, 0]
        g = gates[0, 0]
        for i in range(4):
            for j in range(4):
                want = g[i, min(i, j) : max(i, j) + 1].sum()
                assert torch.allclose(p[i, j], want)

    def test_positions_stay_in_float32_under_autocast(self) -> None:
        """100 gates of 0.51 are 51 places; bfloat16 would lose tenths of a place on the way."""
        slots = 100
        pe = CAPE(1, slots, position_dim=1)
        with torch.no_grad():
            pe.gate.weight.fill_(1.0)
            pe.table.copy_(torch.arange(slots + 1.0).unsqueeze(1) / 0.7310586)  # the bias is the position
        logits = torch.linspace(-2, 2, slots)[None, None, None].bfloat16()
        exact = torch.sigmoid(-logits.double()).flip(-1).cumsum(-1).flip(-1)
        pairs = hooks.target_pairs(full(1, slots))
        got = pe.bias(logits, hooks.target_vectors(torch.ones(1, 1), pairs), pairs) - logits.float()
        assert got.dtype == torch.float32
        assert (got - exact).abs().max() < 1e-3

    def test_at_first_only_the_table_learns_then_the_gate_too(self) -> None:
        torch.manual_seed(0)
        pe = CAPE(D, L)
        unit = TargetAttention(D, pe=pe)
        optimiser = torch.optim.SGD(unit.parameters(), 0.5)
        target, history = torch.randn(2, D), torch.randn(2, L, D)
        for step in range(2):
            optimiser.zero_grad()
            unit(target, history, full())[0].square().sum().backward()
            grads = {name: float(p.grad.abs().max()) for name, p in pe.named_parameters() if p.grad is not None}
            assert grads["table"] > 0
            assert (grads["gate.weight"] > 0) == (grads["gate.bias"] > 0) == (step > 0)
            optimiser.step()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rope", {"rope_base": 100.0}),
        ("time_rope", {"rope_base": 100.0}),
        ("time_rope", {"rope_time": "sum"}),
        ("time_rope", {"shortest_period": 7.0}),
        ("time_rope", {"longest_period": 1e9}),
    ],
)
def test_angles_are_shared_by_encodings_with_the_same_options_alone(name: str, options: dict[str, Any]) -> None:
    """What one has computed for a place, another reads there."""
    x, distance, age = torch.ones(3, 8), torch.tensor([1, 2, 30]), torch.tensor([5, 400, 90_000])
    shared = Where(distance, age)
    for pe in (build_pe(name, 8, L), build_pe("rope", 8, L), build_pe(name, 8, L, **options), build_pe(name, 8, L)):
        alone = Where(distance, age)
        assert torch.equal(pe.rotate(x, x, shared, shared)[1], pe.rotate(x, x, alone, alone)[1])
