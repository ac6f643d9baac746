"""FoX, FIRE and DAPE: what their papers promise. (Values: test_against_reference; padding, gradients: the battery.)"""

from __future__ import annotations

import math

import pytest
import torch

from ctr_pe.pe import build_pe
from ctr_pe.pe.fire import FIRE
from ctr_pe.pe.fox import FoX
from ctr_pe.sequence.positions import Positions
from ctr_pe.units import SelfAttention, TargetAttention
from ctr_pe.utils.errors import UserError

D, L = 8, 6


def full(rows: int, items: int) -> Positions:
    return Positions.from_mask(torch.ones(rows, items, dtype=torch.bool))


def weights_of(pe: torch.nn.Module, history: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    weights: torch.Tensor = TargetAttention(D, "dot", pe).double()(target, history, full(*history.shape[:2]))[1]  # type: ignore[arg-type]
    return weights


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("fox", {"forget.weight": (2, 4), "forget.bias": (2,)}),
        ("fire", {"rate": (), "threshold": (), "mlp.0.weight": (32, 1), "mlp.0.bias": (32,),
                  "mlp.2.weight": (2, 32), "mlp.2.bias": (2,)}),
    ],
)  # fmt: skip
def test_parameters(name: str, shapes: dict[str, tuple[int, ...]]) -> None:
    assert {key: tuple(value.shape) for key, value in build_pe(name, D, L, 2).named_parameters()} == shapes


class TestFoX:
    def test_starts_as_alibi_of_the_gates_bias(self) -> None:
        history, target = torch.randn(3, L, D).double(), torch.randn(3, D).double()
        alibi = build_pe("alibi", D, L, alibi_slope=math.log1p(math.exp(-4)))
        assert torch.allclose(weights_of(build_pe("fox", D, L), history, target), weights_of(alibi, history, target))

    def test_a_closed_gate_forgets_all_older_items_and_no_newer_one(self) -> None:
        pe, history, target = FoX(D, L).double(), torch.zeros(1, L, D).double(), torch.zeros(1, D).double()
        with torch.no_grad():
            pe.forget["weight"][0, 0] = -1.0
        history[0, 3, 0] = 50.0  # w · k + b = -46
        weights = weights_of(pe, history, target)[0]
        assert weights[:3].max() < 1e-15
        assert weights[3:].min() > 0.3

    def test_the_target_has_no_gate(self) -> None:
        pe, history = FoX(D, L).double(), torch.randn(1, L, D).double()
        torch.nn.init.normal_(pe.forget["weight"])
        zero = torch.zeros(1, D).double()  # with a dot score nothing else depends on the target
        assert torch.equal(weights_of(pe, history, zero), weights_of(pe, history, zero * 2))
        unit = TargetAttention(D, "dot", pe, softmax=False).double()
        _, logits = unit(zero, history, full(1, L))
        assert logits[0, -1] == 0  # the newest item: nothing between it and the target

    def test_gates_are_those_of_each_head(self) -> None:
        pe = FoX(D, L, 2)
        layer, items = SelfAttention(D, 2, pe, causal=True), torch.randn(1, L, D)
        before, _ = layer.heads(items[0], full(1, L))
        with torch.no_grad():
            pe.forget["bias"][1] = -2.0
        after, _ = layer.heads(items[0], full(1, L))
        assert torch.equal(before[:, 0], after[:, 0])
        assert not torch.allclose(before[1:, 1], after[1:, 1])


class TestFIRE:
    def test_a_longer_history_meets_no_value_that_a_full_one_has_not(self) -> None:
        """The input of the MLP stays in [0, 1], however long the row."""
        pe = FIRE(D, L)
        inputs: list[torch.Tensor] = []
        pe.mlp.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
        TargetAttention(D, "dot", pe)(torch.randn(1, D), torch.randn(1, 500, D), full(1, 500))
        (shares,) = inputs
        assert 0 < shares.min() < shares.max() < 1

    def test_depends_on_the_length_beyond_the_threshold_only(self) -> None:
        pe = FIRE(D, 40)
        with torch.no_grad():
            pe.threshold.fill_(20.0)  # T = softplus(20) ≈ 20

        def newest(items: int) -> torch.Tensor:
            return pe.curve(torch.tensor([items + 1]), torch.arange(items) + 1, causal=True)[0, -5:, 0]

        assert torch.allclose(newest(6), newest(19), rtol=1e-5, atol=1e-7)
        assert not torch.allclose(newest(19), newest(30))

    def test_is_computed_once_for_each_two_indices_in_self_attention(self) -> None:
        pe, computed, positions = FIRE(D, L), list[int](), Positions.from_lengths(torch.tensor([40, 2, 90, 90]))
        pe.mlp.register_forward_pre_hook(lambda _, given: computed.append(given[0].numel()))
        assert len(positions.blocks) > 1
        SelfAttention(D, 1, pe)(torch.randn(222, D), positions)
        assert computed == [90 * 90]

    def test_rows_of_different_lengths_share_a_batch(self) -> None:
        pe, counts = FIRE(D, L), [5, 1, 5, 3]
        mask = torch.arange(5) < torch.tensor(counts).unsqueeze(1)
        positions = Positions.from_mask(mask)
        unit = TargetAttention(D, "dot", pe)
        target, history = torch.randn(4, D), torch.randn(4, 5, D)
        _, together = unit(target, history, positions)
        for row, count in enumerate(counts):
            _, alone = unit(target[[row]], history[[row], :count], full(1, count))
            assert torch.allclose(together[[row], :count], alone, atol=1e-6)


class TestDAPE:
    @pytest.mark.parametrize("base", ["fire", "kerple_log", "alibi"])
    def test_starts_as_its_base(self, base: str) -> None:
        history, target = torch.randn(3, L, D).double(), torch.randn(3, D).double()
        torch.manual_seed(0)
        alone = build_pe(base, D, L)
        torch.manual_seed(0)
        pe = build_pe("dape", D, L, dape_base=base)
        assert torch.equal(weights_of(pe, history, target), weights_of(alone, history, target))

    def test_heads_see_each_other(self) -> None:
        pe, items = build_pe("dape", D, L, 2), torch.randn(1, L, D)
        torch.nn.init.normal_(pe.mlp[2].weight)  # type: ignore[index]
        layer = SelfAttention(D, 2, pe, causal=True)
        before, _ = layer.heads(items[0], full(1, L))
        with torch.no_grad():
            layer.query.weight[D // 2 :] += 1.0  # of the second head
        assert not torch.allclose(before[1:, 0], layer.heads(items[0], full(1, L))[0][1:, 0])

    def test_layers_share_what_the_base_shares(self) -> None:
        for base, shared in (("kerple_log", True), ("fire", False)):
            first = build_pe("dape", D, L, dape_base=base)
            above = first.next_layer(lambda base=base: build_pe("dape", D, L, dape_base=base))  # type: ignore[misc]
            assert (above.base is first.base) is shared
            assert above.mlp is not first.mlp

    def test_an_unknown_base_is_refused(self) -> None:
        with pytest.raises(UserError, match="dape_base must be one of fire, kerple_log, alibi, got 'rope'"):
            build_pe("dape", D, L, dape_base="rope")
