"""Encodings by event times: what they are, and that only differences of times count, in whole seconds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ctr_pe import Chain, Positions, build_pe
from ctr_pe.pe.base import PositionEncoding
from ctr_pe.pe.cape import CAPE
from ctr_pe.pe.cape_time import TimeCAPE
from ctr_pe.pe.rope import RoPE
from ctr_pe.pe.time_bias import TimeBias
from ctr_pe.pe.time_rope import TimeRoPE
from ctr_pe.sequence.positions import Where
from ctr_pe.units import SelfAttention, TargetAttention
from tests.support import hooks

D, L = 8, 6
MINUTE, HOUR, DAY = 60, 3600, 86_400
NAMES = ["time_bias", "time_rope", "cape_time"]
# (encoding, options) of everything that reads ages in its own way
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in NAMES),
    ("time_rope", {"rope_time": "sum"}),
    ("cape_time", {"position_span": "between"}),
    ("time_bias+cape", {}),
]


def vectors(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def random_ages(rows: int = 2, slots: int = L, seed: int = 0) -> Tensor:
    """Gaps from seconds to weeks, oldest first."""
    draw = torch.Generator().manual_seed(seed)
    gaps = torch.exp(torch.rand(rows, slots, generator=draw, dtype=torch.float64) * math.log(20 * DAY)).long()
    return gaps.flip(1).cumsum(1).flip(1)


def at(ages: Tensor) -> Positions:
    return Positions.from_mask(torch.ones(ages.shape, dtype=torch.bool), ages)


def learned(name: str, heads: int = 1, **options: Any) -> PositionEncoding:
    """An encoding whose parameters have left their start."""
    pe = build_pe(name, D, L, heads, **options)
    draw = torch.Generator().manual_seed(1)
    for parameter in pe.parameters():
        nn.init.normal_(parameter, std=0.5, generator=draw)
    return pe


def self_attention(pe: PositionEncoding, causal: bool, dtype: torch.dtype = torch.float64) -> SelfAttention:
    torch.manual_seed(0)
    return SelfAttention(D, pe.num_heads, pe, causal).to(dtype)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_between_items_only_whole_seconds_of_difference_count(name: str, options: dict[str, Any], causal: bool) -> None:
    """A history that is 10⁹ seconds older has the same states and gradients, bit for bit, in float32 too: it cannot
    tell 10⁹ from 10⁹ + 60."""
    results = []
    for shift in (0, 10**9):
        layer = self_attention(learned(name, 2, **options), causal, torch.float32)
        items = vectors(2, L, D, dtype=torch.float32).requires_grad_()
        states = layer(items, at(random_ages() + shift))
        states.square().sum().backward()
        results.append([states, items.grad, *(p.grad for p in layer.parameters())])
    for ours, shifted in zip(*results, strict=True):
        assert ours is None if shifted is None else torch.equal(ours, shifted)


@pytest.mark.parametrize("score", ["dot", "bilinear", "din"])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_clocks_may_start_anywhere(name: str, options: dict[str, Any], score: str) -> None:
    """10⁹ seconds more on every event and on the request: the same interest, bit for bit."""
    torch.manual_seed(0)
    unit, request = TargetAttention(D, score, learned(name, **options)), 1_700_000_000
    events = request - random_ages()
    batch = vectors(2, D, dtype=torch.float32), vectors(2, L, D, seed=1, dtype=torch.float32)
    results = [unit(*batch, at((request + shift) - (events + shift))) for shift in (0, 10**9)]
    for ours, shifted in zip(*results, strict=True):
        assert torch.equal(ours, shifted)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_times_matter(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    unit, batch = TargetAttention(D, pe=learned(name, **options)).double(), (vectors(2, D), vectors(2, L, D, seed=1))
    one, other = (unit(*batch, at(random_ages(seed=seed)))[1] for seed in (0, 1))
    assert (one - other).abs().max() > 1e-3


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_events_of_one_second_and_clocks_that_disagree(name: str, options: dict[str, Any], causal: bool) -> None:
    ages = torch.tensor([[5, 5, 5, 5, 5, 5], [0, 0, 0, 0, 0, 0], [10**10, 40, 90, -3, 20, -(10**10)]])
    layer = self_attention(learned(name, 2, **options), causal)
    unit = TargetAttention(D, pe=learned(name, **options)).double()
    history = vectors(3, L, D).requires_grad_()
    states, (interest, weights) = layer(history, at(ages)), unit(vectors(3, D), history, at(ages))
    (states.square().sum() + interest.square().sum()).backward()
    assert history.grad is not None
    for tensor in (states, weights, history.grad, *(p.grad for p in [*layer.parameters(), *unit.parameters()])):
        assert tensor is None or tensor.isfinite().all()


@pytest.mark.parametrize(("name", "options"), CASES)
def test_causal_attention_does_not_know_when_the_future_happens(name: str, options: dict[str, Any]) -> None:
    """A prefix of the history gives the first states, though the item after it and its time are gone."""
    layer, items, ages = self_attention(learned(name, 2, **options), True), vectors(2, L, D), random_ages()
    states = layer(items, at(ages))
    for n in range(1, L):
        assert torch.allclose(layer(items[:, :n], at(ages[:, :n])), states[:, :n], rtol=0, atol=1e-12)
    changed = torch.cat([ages[:, :4], ages[:, 4:] // 3], 1)
    assert torch.allclose(layer(items, at(changed))[:, :4], states[:, :4], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["time_bias", "cape_time", "time_bias+cape", "time_bias+cape_time"])
@pytest.mark.parametrize("score", ["dot", "din"])
def test_training_starts_as_none(name: str, score: str) -> None:
    """Exactly, but for the last digits of a softmax that cape does itself."""
    torch.manual_seed(0)
    plain, positions = TargetAttention(D, score), at(random_ages())
    unit = TargetAttention(D, plain.score, build_pe(name, D, L))
    batch = vectors(2, D, dtype=torch.float32), vectors(2, L, D, seed=1, dtype=torch.float32)
    for ours, none in zip(unit(*batch, positions), plain(*batch, positions), strict=True):
        torch.testing.assert_close(ours, none, rtol=0, atol=1e-6 if "cape" in name else 0)
    layers = [self_attention(build_pe(each, D, L, 2), False, torch.float32) for each in (name, "none")]
    ours, none = (layer(batch[1], positions) for layer in layers)
    torch.testing.assert_close(ours, none, rtol=0, atol=1e-6 if "cape" in name else 0)


@pytest.mark.parametrize("name", [*NAMES, "time_bias+cape", "cape+time_rope"])
def test_without_ages_one_line_says_so(name: str) -> None:
    positions = Positions.from_mask(torch.ones(2, L, dtype=torch.bool))
    assert build_pe(name, D, L).about.needs_age
    for unit in (TargetAttention(D, pe=build_pe(name, D, L)), SelfAttention(D, 2, build_pe(name, D, L, 2))):
        batch = (torch.zeros(2, D), torch.zeros(2, L, D))[-1 if isinstance(unit, SelfAttention) else 0 :]
        with pytest.raises(ValueError, match=r"time_?\w* needs the ages of the items") as caught:
            unit(*batch, positions)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("time_bias", {"time_unit": 0}, "time_unit must be a positive number, got 0"),
        ("time_bias", {"time_unit": "1h"}, "got '1h'"),
        ("time_bias", {"time_unit": True}, "got True"),
        ("time_rope", {"rope_time": "both"}, "rope_time must be one of split, sum, got 'both'"),
        ("time_rope", {"rope_layout": "other"}, "rope_layout"),
        ("time_rope", {"shortest_period": -1.0}, "shortest_period must be a positive"),
        ("time_rope", {"longest_period": math.inf}, "longest_period must be a positive"),
        ("time_rope", {"longest_period": 10.0}, "shortest_period=60.0 exceeds longest_period=10.0"),
        ("cape_time", {"session_gap": math.nan}, "session_gap must be a positive"),
        ("cape_time", {"position_dim": 0}, "position_dim"),
        ("cape_time", {"position_span": "start"}, "position_span"),
    ],
)
def test_bad_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        build_pe(name, D, L, **options)
    assert "\n" not in str(caught.value)


class TestTimeBias:
    @staticmethod
    def of_ages(pe: TimeBias, ages: Tensor) -> Tensor:
        """What it adds to the logits of target attention, (B, L)."""
        pairs = hooks.target_pairs(at(ages))
        logits = torch.zeros(len(ages), 1, 1, ages.shape[1], dtype=pe.table.dtype)
        return pe.bias(logits, hooks.vectors_for(pairs, D), pairs)[:, 0, 0]

    def test_each_bucket_is_twice_as_long_as_the_one_before(self) -> None:
        """Float32 would take 2²⁶ - 1 for 2²⁶, and a rounded logarithm 8 for less than 2³."""
        pe = TimeBias(D, L)
        with torch.no_grad():
            pe.table.copy_(torch.arange(32.0).unsqueeze(1))
        starts = [2**k for k in range(31)]
        assert self.of_ages(pe, torch.tensor([[0, *starts]])).tolist() == [list(range(32))]
        last = [start - 1 for start in starts[1:]]
        assert self.of_ages(pe, torch.tensor([last])).tolist() == [list(range(1, 31))]
        assert self.of_ages(pe, torch.tensor([[2**30, 2**31, 10**12]])).tolist() == [[31] * 3]

    def test_the_power_law(self) -> None:
        pe = TimeBias(D, L, time_unit=DAY).double()
        with torch.no_grad():
            pe.amount.fill_(2.0)
        ages = torch.tensor([[9 * DAY, 3 * DAY, DAY, 0]])
        assert torch.allclose(self.of_ages(pe, ages), torch.tensor([[0.2, 0.5, 1.0, 2.0]]).double())  # b is 1 at first
        with torch.no_grad():
            pe.decay.fill_(math.log(math.expm1(0.5)))
        assert torch.allclose(self.of_ages(pe, ages)[0, 1], torch.tensor(1.0).double())

    def test_order_does_not_matter_if_ages_are_the_same(self) -> None:
        torch.manual_seed(0)
        unit, history, ages = TargetAttention(D, pe=learned("time_bias")).double(), vectors(2, L, D), random_ages()
        order = torch.tensor([3, 0, 5, 1, 4, 2])
        one, weights = unit(vectors(2, D), history, at(ages))
        other, permuted = unit(vectors(2, D), history[:, order], at(ages[:, order]))
        assert torch.allclose(one, other)
        assert torch.allclose(weights[:, order], permuted)

    def test_layers_of_the_same_heads_share_it(self) -> None:
        below = build_pe("time_bias", D, L, 2)
        assert below.next_layer(lambda: build_pe("time_bias", D, L, 2)) is below
        assert below.next_layer(lambda: build_pe("time_bias", D, L, 1)) is not below
        chain = build_pe("time_bias+cape", D, L, 2)
        above = chain.next_layer(lambda: build_pe("time_bias+cape", D, L, 2))
        assert isinstance(chain, Chain)
        assert isinstance(above, Chain)
        assert above.encodings[0] is chain.encodings[0]
        assert above.encodings[1] is not chain.encodings[1]


class TestTimeRoPE:
    @staticmethod
    def turned(x: Tensor, distance: int, age: int, **options: Any) -> Tensor:
        pe = TimeRoPE(x.shape[-1], L, **options)
        zero = torch.tensor(0)
        return pe.rotate(x, x, Where(zero, zero), Where(torch.tensor(distance), torch.tensor(age)))[1]

    @pytest.mark.parametrize("layout", ["half", "interleaved"])
    @pytest.mark.parametrize("how", ["split", "sum"])
    @pytest.mark.parametrize("dim", [1, 2, 3, 6, 8])
    def test_keeps_norms_and_the_target(self, dim: int, how: str, layout: str) -> None:
        x, options = vectors(dim), {"rope_time": how, "rope_layout": layout}
        turned = self.turned(x, 5, 3 * DAY + 7, **options)
        assert torch.allclose(turned.norm(), x.norm())
        assert torch.equal(self.turned(x, 0, 0, **options), x)
        assert dim == 1 or (turned - x).abs().max() > 1e-3

    @pytest.mark.parametrize("how", ["split", "sum"])
    def test_dot_products_depend_on_the_offset_and_the_time_between(self, how: str) -> None:
        q, k = vectors(8), vectors(8, seed=1)

        def product(distance: int, age: int, offset: int, between: int) -> Tensor:
            query = self.turned(q, distance, age, rope_time=how)
            return query @ self.turned(k, distance + offset, age + between, rope_time=how)

        products = [product(i, age, 3, HOUR) for i, age in ((0, 0), (1, 10**9), (7, 55), (50, 400 * DAY))]
        assert torch.allclose(torch.stack(products), products[0])
        assert (product(0, 0, 4, HOUR) - products[0]).abs() > 1e-3
        assert (product(0, 0, 3, 2 * HOUR) - products[0]).abs() > 1e-3

    def test_split_turns_half_of_the_planes_by_order_and_half_by_time(self) -> None:
        x = vectors(8)
        moved, later = self.turned(x, 3, 0), self.turned(x, 0, HOUR)
        assert torch.equal(moved[[2, 3, 6, 7]], x[[2, 3, 6, 7]])
        assert torch.equal(later[[0, 1, 4, 5]], x[[0, 1, 4, 5]])
        places = Where(torch.tensor(0)), Where(torch.tensor(3))
        half = RoPE(4, L).rotate(x[[0, 1, 4, 5]], x[[0, 1, 4, 5]], *places)[1]
        assert torch.allclose(moved[[0, 1, 4, 5]], half)

    @pytest.mark.parametrize("layout", ["half", "interleaved"])
    def test_sum_without_time_is_rope(self, layout: str) -> None:
        x, places = vectors(7), (Where(torch.tensor(0)), Where(torch.tensor(4)))
        rope = RoPE(7, L, rope_layout=layout).rotate(x, x, *places)[1]
        assert torch.equal(self.turned(x, 4, 0, rope_time="sum", rope_layout=layout), rope)

    def test_periods_span_the_range(self) -> None:
        """Four periods between a minute and 60⁹ s are 60² · 60^(2c): each plane is back where it was after its own."""
        options = {"rope_time": "sum", "shortest_period": 60.0, "longest_period": 60.0**9}
        x = torch.ones(8, dtype=torch.float64)
        for plane in range(4):
            back = self.turned(x, 0, 60 ** (2 * plane + 2), **options)
            same = (back - x).abs() < 1e-12
            assert same[plane]
            assert same[plane + 4]
            assert not same[plane + 1 : 4].any()  # slower ones are on their way

    def test_long_ago_keeps_its_angle(self) -> None:
        """Thirty years in seconds, in float32 and in bfloat16, within what these can say of the result."""
        age = 30 * 365 * DAY + 12_345
        exact = self.turned(torch.ones(8, dtype=torch.float64), 0, age)
        assert (self.turned(torch.ones(8), 0, age) - exact).abs().max() < 1e-6
        assert (self.turned(torch.ones(8).bfloat16(), 0, age) - exact).abs().max() < 1e-2

    def test_values_are_not_turned(self) -> None:
        unit, history = TargetAttention(D, pe=TimeRoPE(D, L)).double(), vectors(2, L, D)
        interest, weights = unit(vectors(2, D, seed=1), history, at(random_ages()))
        assert torch.allclose(interest, (weights.unsqueeze(-1) * history).sum(1))


class TestTimeCAPE:
    @staticmethod
    def places(ages: list[int], stretch: float = 0.0) -> list[float]:
        """Positions in target attention where all gates of CAPE are 1/2, in whole gates."""
        pe, slots = TimeCAPE(1, 20, position_dim=1).double(), len(ages)
        with torch.no_grad():
            pe.gate.weight.fill_(1.0)
            pe.table.copy_(torch.arange(21.0).unsqueeze(1) / nn.functional.silu(torch.ones(1).double()))
            pe.stretch.fill_(stretch)
        logits, pairs = torch.zeros(1, 1, 1, slots).double(), hooks.target_pairs(at(torch.tensor([ages])))
        bias: Tensor = pe.bias(logits, hooks.target_vectors(torch.ones(1, 1).double(), pairs), pairs)
        return (2 * bias.flatten()).tolist()

    def test_a_session_is_one_place(self) -> None:
        ages = [9 * DAY + 90, 9 * DAY + 60, 9 * DAY, 4 * DAY + 5, 4 * DAY, 40, 20, 10]
        assert self.places(ages) == pytest.approx([2, 2, 2, 1, 1, 0, 0, 0], abs=0.06)
        assert self.places([20, 10, 5]) == pytest.approx([0, 0, 0], abs=0.01)
        assert self.places([2 * DAY, DAY]) == pytest.approx([2, 1], abs=1e-6)

    def test_long_pauses_count_more_and_never_more_than_one(self) -> None:
        steps = [self.places([pause])[0] for pause in (0, 1, MINUTE, 10 * MINUTE, HOUR, DAY, 10**9)]
        assert steps[0] == 0
        assert steps == sorted(steps)
        assert steps[2] < 0.02
        assert steps[3] < 0.2
        assert steps[4] == pytest.approx(1 - math.exp(-1))
        assert steps[5] == pytest.approx(1)
        assert steps[6] == 1
        assert self.places([HOUR], math.log(24))[0] == pytest.approx(1 - math.exp(-1 / 24))  # stretched to a day

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("span", ["end", "between"])
    def test_with_long_pauses_it_is_cape_exactly(self, span: str, dtype: torch.dtype) -> None:
        cape, timed = CAPE(D, L, 2, position_span=span), TimeCAPE(D, L, 2, position_span=span)
        nn.init.normal_(cape.table)
        assert timed.load_state_dict(cape.state_dict(), strict=False).missing_keys == ["stretch"]
        positions = at(torch.arange(L, 0, -1).expand(2, L) * 50 * DAY)
        items = vectors(2, L, D, dtype=dtype)
        for causal in (True, False):
            ours, theirs = (self_attention(pe, causal, dtype)(items, positions) for pe in (timed, cape))
            assert torch.equal(ours, theirs)
        cape, timed = CAPE(D, L), TimeCAPE(D, L)
        nn.init.normal_(cape.table)
        timed.load_state_dict(cape.state_dict(), strict=False)
        for ours, theirs in zip(
            *(TargetAttention(D, pe=pe.to(dtype))(items[:, 0], items, positions) for pe in (timed, cape)), strict=True
        ):
            assert torch.equal(ours, theirs)

    def test_the_scale_of_time_is_learned(self) -> None:
        unit = TargetAttention(D, pe=learned("cape_time")).double()
        unit(vectors(2, D), vectors(2, L, D, seed=1), at(random_ages()))[0].square().sum().backward()
        assert isinstance(unit.pe, TimeCAPE)
        assert unit.pe.stretch.grad is not None
        assert unit.pe.stretch.grad.abs().max() > 1e-6
