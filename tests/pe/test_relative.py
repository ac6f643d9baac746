"""T5, ALiBi, KERPLE: a number per head and offset."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ctr_pe import PositionEncoding, Positions
from ctr_pe.pe import build_pe
from ctr_pe.pe.alibi import ALiBi, slope_per_head
from ctr_pe.pe.kerple import KerpleLog, KerplePower
from ctr_pe.pe.relative import RelativeBias
from ctr_pe.pe.t5 import T5
from ctr_pe.units import SelfAttention, TargetAttention
from tests.support import hooks, models

D, L = 8, 6
NAMES = ["t5", "alibi", "kerple_log", "kerple_power"]


def full(rows: int = 2, slots: int = L) -> Positions:
    return Positions.from_mask(torch.ones(rows, slots, dtype=torch.bool))


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(name: str, heads: int = 1, max_len: int = L) -> RelativeBias:
    pe = build_pe(name, D, max_len, heads, alibi_slope=0.25).double()
    assert isinstance(pe, RelativeBias)
    torch.manual_seed(1)
    for parameter in pe.parameters():
        nn.init.normal_(parameter)
    return pe


@pytest.mark.parametrize("name", NAMES)
class TestAll:
    def test_sees_order_but_not_content(self, name: str) -> None:
        pe, logits = drawn(name), vectors(2, 1, 1, L)
        pairs = hooks.target_pairs(full())
        one, another = (hooks.target_vectors(vectors(2, D, seed=k), pairs, vectors(2 * L, D, seed=k)) for k in (1, 2))
        added = pe.bias(logits, one, pairs) - logits
        other = pe.bias(-3 * logits, another, pairs) + 3 * logits
        assert torch.allclose(added, other, atol=1e-12)
        assert torch.allclose(added[0], added[1], atol=1e-12)
        assert (added[0, 0, 0].diff().abs() > 1e-4).all()

    @pytest.mark.parametrize("score", ["dot", "bilinear", "din"])
    def test_target_attention_adds_the_curve_at_distances(self, name: str, score: str) -> None:
        pe, logits = drawn(name), vectors(2, L)
        at = pe.curve(torch.tensor([6, 5, 4, 3, 2, 1]), True)
        unit = TargetAttention(D, score, pe).double()
        plain = TargetAttention(D, unit.score, softmax=False).double()
        batch = vectors(2, D), vectors(2, L, D, seed=1), full()
        _, logits = plain(*batch)
        assert torch.allclose(unit(*batch)[1], (logits + at).softmax(-1))

    @pytest.mark.parametrize("causal", [True, False])
    def test_states_of_a_prefix_stay(self, name: str, causal: bool) -> None:
        """Only offsets count, not distances to the end. Without a mask: only offsets, so the newest item has none."""
        layer = SelfAttention(D, 2, drawn(name, 2), causal).double()
        items = vectors(2, L, D)
        whole, part = layer(items, full()), layer(items[:, :4], full(slots=4))
        assert torch.allclose(whole[:, :4], part) == causal

    def test_histories_have_no_longest(self, name: str) -> None:
        short, long = drawn(name, max_len=2), drawn(name, max_len=500)
        offsets = torch.arange(300)
        assert torch.equal(short.curve(offsets, True), long.curve(offsets, True))

    def test_heads_differ(self, name: str) -> None:
        curve = drawn(name, 4).curve(torch.arange(10), True)
        assert curve.shape == (4, 10)
        assert len(curve.unique(dim=0)) == 4

    def test_layers_share_it_where_heads_match(self, name: str) -> None:
        pe = drawn(name, 2)
        assert pe.next_layer(lambda: build_pe(name, D, L, 2)) is pe
        above = pe.next_layer(lambda: build_pe(name, D, L, 1))
        assert (type(above), above.num_heads) == (type(pe), 1)

    def test_all_layers_of_a_model_have_one(self, name: str, tmp_path: Path) -> None:
        model = models.build("SASRec", tmp_path, position_encoding=name)  # three blocks
        assert sum(isinstance(module, PositionEncoding) for module in model.modules()) == 1
        model = models.build("DMIN", tmp_path, position_encoding=name)  # two self-attentions of two heads, two units
        assert sum(isinstance(module, PositionEncoding) for module in model.modules()) == 3

    def test_position_stays_in_float32_under_autocast(self, name: str) -> None:
        pe = drawn(name).float()
        offsets = torch.arange(400, 0, -1)
        pairs = hooks.target_pairs(full(1, 400))
        ones = hooks.target_vectors(torch.ones(1, D), pairs)
        got = pe.bias(torch.zeros(1, 1, 1, 400).bfloat16(), ones, pairs)
        assert got.dtype == torch.float32
        assert torch.allclose(got[0, 0].double(), drawn(name).curve(offsets, True), rtol=1e-5)

    def test_half_precision_keeps_far_places_apart(self, name: str) -> None:
        pe, offsets = drawn(name), torch.arange(2000, 2400)
        half = pe.half().curve(offsets, True)
        assert half.dtype == torch.float32
        assert torch.allclose(half, pe.double().curve(offsets, True).float(), rtol=1e-5)


class TestT5:
    @staticmethod
    def slow_bucket(distance: int, buckets: int) -> int:
        """The paper's, with the comparison of logarithms raised to powers, which are exact."""
        half = buckets // 2
        if distance < half:
            return distance
        share = Fraction(distance, half) ** half
        return max(half + k for k in range(half) if share >= Fraction(128, half) ** k)

    def test_buckets_of_the_past(self) -> None:
        bucket = T5(D, L).bucket(torch.arange(400), True).tolist()
        assert bucket == [self.slow_bucket(n, 32) for n in range(400)]
        assert bucket[:17] == [*range(17)]
        assert set(bucket[128:]) == {31}
        assert set(bucket) == set(range(32))
        assert bucket[127] == 31  # the capped bucket 31 begins before 128, at 16 · 8^(15/16) = 112.4
        assert bucket[112:114] == [30, 31]

    def test_buckets_of_both_sides(self) -> None:
        offsets = torch.arange(-400, 401)
        bucket = T5(D, L).bucket(offsets, False)
        want = [self.slow_bucket(abs(n), 16) + 16 * (n < 0) for n in offsets.tolist()]
        assert bucket.tolist() == want
        # 8 · 16^(k/8) is a whole number at every second k: a rounded logarithm must not put it one bucket lower.
        assert T5(D, L).bucket(torch.tensor([8, 16, 32, 64, -64]), False).tolist() == [8, 10, 12, 14, 30]

    def test_buckets_follow_the_mask_not_what_rows_hold(self) -> None:
        """The last item has no later key in either layer, yet its buckets differ: two-sided ones are wider."""
        pe, items = drawn("t5"), vectors(1, 20, D)
        two_sided, causal = (SelfAttention(D, 1, pe, causal).double() for causal in (False, True))
        two_sided.load_state_dict(causal.state_dict())
        assert not torch.allclose(two_sided(items, full(1, 20))[:, -1], causal(items, full(1, 20))[:, -1])
        # up to offset 8 the buckets are the same
        assert torch.allclose(two_sided(items[:, :9], full(1, 9))[:, -1], causal(items[:, :9], full(1, 9))[:, -1])

    @pytest.mark.parametrize("unit", ["dot", "bilinear", "din", "self", "causal"])
    def test_starts_exactly_as_none(self, unit: str) -> None:
        def outputs(name: str) -> Tensor:
            torch.manual_seed(0)
            pe = build_pe(name, D, L, 2 if unit in ("self", "causal") else 1)
            if unit in ("self", "causal"):
                return SelfAttention(D, 2, pe, unit == "causal").double()(vectors(2, L, D), full())
            return TargetAttention(D, unit, pe).double()(vectors(2, D), vectors(2, L, D, seed=1), full())[1]

        assert torch.equal(outputs("t5"), outputs("none"))


class TestALiBi:
    def test_published_slopes(self) -> None:
        assert slope_per_head(8) == [2.0**-h for h in range(1, 9)]
        assert slope_per_head(1) == [2.0**-8]
        assert slope_per_head(2) == [2.0**-4, 2.0**-8]
        assert slope_per_head(6) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
        assert slope_per_head(12)[8:] == [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]
        assert [len(set(slope_per_head(heads))) for heads in range(1, 40)] == [*range(1, 40)]

    def test_a_slope_of_its_own(self) -> None:
        assert ALiBi(D, L, alibi_slope=0.5).slopes.tolist() == [0.5]
        assert ALiBi(D, L, 4, alibi_slope=0.0625).slopes.tolist() == [0.5, 0.25, 0.125, 0.0625]

    @pytest.mark.parametrize("slope", [0, -1.0, math.inf, math.nan, "steep", True, None])
    def test_bad_slopes(self, slope: object) -> None:
        with pytest.raises(ValueError, match="alibi_slope must be a positive number"):
            ALiBi(D, L, alibi_slope=slope)  # type: ignore[arg-type]

    def test_falls_by_the_slope_per_place_on_either_side(self) -> None:
        curve = ALiBi(D, L, alibi_slope=0.5).curve(torch.tensor([2, 1, 0, -1, -2]), False)
        assert curve.tolist() == [[-1.0, -0.5, 0.0, -0.5, -1.0]]

    def test_of_equal_items_the_newest_weighs_most(self) -> None:
        _, weights = TargetAttention(D, pe=ALiBi(D, L)).double()(
            vectors(2, D), vectors(2, 1, D).expand(2, L, D), full()
        )
        assert (weights.diff() > 0).all()

    def test_slopes_are_stored_and_not_learned(self) -> None:
        pe = ALiBi(D, L, alibi_slope=0.5)
        assert not list(pe.parameters())
        other = ALiBi(D, L)
        other.load_state_dict(pe.state_dict())
        assert torch.equal(other.curve(torch.arange(5), True), pe.curve(torch.arange(5), True))


class TestKerple:
    @pytest.mark.parametrize("cls", [KerpleLog, KerplePower])
    def test_falls_strictly_from_zero(self, cls: type[RelativeBias]) -> None:
        pe = cls(D, L, 2).double()
        for parameter in pe.parameters():
            nn.init.normal_(parameter)
        curve = pe.curve(torch.arange(200), True)
        assert (curve[:, 0] == 0).all()
        assert (curve.diff() < 0).all()
        assert torch.equal(pe.curve(-torch.arange(200), False), curve)

    @pytest.mark.parametrize("cls", [KerpleLog, KerplePower])
    @pytest.mark.parametrize("extreme", [-800.0, 0.0, 800.0])
    def test_values_and_gradients_are_finite_at_offset_zero_and_at_extremes(
        self, cls: type[RelativeBias], extreme: float
    ) -> None:
        pe = cls(D, L).double()
        nn.init.constant_(pe.r2, extreme)  # type: ignore[arg-type]
        curve = pe.curve(torch.arange(3), True)
        assert curve[0, 0] == 0
        curve.sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in pe.parameters())

    def test_power_one_is_alibi(self) -> None:
        power, alibi = KerplePower(D, L).double(), ALiBi(D, L, alibi_slope=0.25).double()
        nn.init.zeros_(power.r2)
        nn.init.constant_(power.r1, math.log(math.expm1(0.25)))
        offsets = torch.arange(-50, 51)
        assert torch.allclose(power.curve(offsets, False), alibi.curve(offsets, False))

    @pytest.mark.parametrize("cls", [KerpleLog, KerplePower])
    def test_without_weight_it_is_none(self, cls: type[RelativeBias]) -> None:
        pe = cls(D, L).double()
        nn.init.constant_(pe.r1, -800.0)  # type: ignore[arg-type]
        assert (pe.curve(torch.arange(50), True) == 0).all()

    def test_log_needs_an_exponential_number_of_places_for_a_linear_fall(self) -> None:
        pe = KerpleLog(D, L).double()
        nn.init.constant_(pe.r1, math.log(math.expm1(2.0)))
        nn.init.constant_(pe.r2, math.log(math.expm1(1.0)))
        assert torch.allclose(
            pe.curve(torch.tensor([0, 1, 3, 7, 15]), True)[0], -2 * math.log(2) * torch.arange(5).double()
        )

    @pytest.mark.parametrize("cls", [KerpleLog, KerplePower])
    @pytest.mark.parametrize("lot", [torch.zeros, torch.ones])
    def test_the_ends_of_what_is_drawn_are_finite(
        self, cls: type[RelativeBias], lot: Callable[[int], Tensor], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch, "rand", lot)
        assert all(p.isfinite().all() for p in cls(D, L, 2).parameters())

    def test_first_values_are_in_the_authors_ranges_and_can_learn(self) -> None:
        torch.manual_seed(0)
        log, power = KerpleLog(400, L, 400), KerplePower(400, L, 400)
        softplus = nn.functional.softplus
        drawn = {"log a": softplus(log.r1), "log b": softplus(log.r2)}
        drawn |= {"power a": softplus(power.r1), "power b": 2 * torch.sigmoid(power.r2)}
        for name, values in drawn.items():
            top = 2.0 if name in ("log a", "power b") else 1.0
            assert values.isfinite().all()
            assert 0 < values.min() < 0.05 * top
            assert 0.95 * top < values.max() < top
            assert abs(values.mean() - top / 2) < 0.06 * top
        for pe in (log, power):
            pe.curve(torch.arange(1, 20), True).sum().backward()
            for parameter in pe.parameters():
                assert parameter.grad is not None
                assert (parameter.grad != 0).all()
