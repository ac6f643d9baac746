"""One history for K targets: the units give each target what it gets alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ctr_pe.pe.base import PositionEncoding
from ctr_pe.sequence.positions import Items, Positions
from ctr_pe.units import TargetAttention
from ctr_pe.units.gru import GATES, AttentionGRU, last_state
from ctr_pe.units.scores import DINScore, DotScore
from ctr_pe.units.transformer import Transformer
from tests.support.encoding_cases import CASES, factory, known

B, K, D, L = 5, 4, 8, 9
COUNTS = torch.tensor([6, 0, 1, 3, 9])  # empty, one item, and longer than the tables of 6
MAX_LEN = 6


@pytest.fixture
def mask() -> Tensor:
    """Padding on the left, on the right, and on both sides, row by row."""
    slot, first = torch.arange(L), (L - COUNTS) * torch.tensor([1, 0, 2, 2, 0]) // 2
    return (slot >= first.unsqueeze(1)) & (slot < (first + COUNTS).unsqueeze(1))


def positions(mask: Tensor) -> Positions:
    age = torch.arange(L, 0, -1).mul(86_399).add(7).expand(B, L)
    return Positions.from_mask(mask, age)


def randomised(unit: nn.Module) -> nn.Module:
    """In evaluation, with parameters that make every part count."""
    for parameter in unit.parameters():
        nn.init.normal_(parameter, std=0.3)
    return unit.eval()


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(B, K, D), torch.randn(B, L, D)


@pytest.mark.parametrize(("score", "softmax"), [("dot", True), ("bilinear", False), ("din", True)])
@pytest.mark.parametrize("case", CASES)
def test_target_attention(case: str, score: str, softmax: bool, mask: Tensor) -> None:
    torch.manual_seed(0)
    pe = factory(case)(D, MAX_LEN, 1)
    unit = randomised(TargetAttention(pe.out_dim, score, pe, softmax))
    target, history = inputs()
    with torch.inference_mode():
        at = positions(mask)
        items = known(at.pack(history))

        def run(target: Tensor) -> tuple[Tensor, Tensor]:
            moved, packed = pe.embed(target, at.pack(history), at)
            return unit(moved, packed, at, at.target_pairs(items, known(target)))  # type: ignore[no-any-return]

        together = run(target)
        for k in range(K):
            alone = run(target[:, k])
            for of_all, of_one in zip(together, alone, strict=True):
                torch.testing.assert_close(of_all[:, k], of_one, rtol=1e-5, atol=1e-5)


def test_a_score_of_ones_own_needs_no_method_for_it() -> None:
    class Distance(nn.Module):
        def forward(self, target: Tensor, items: Tensor, rows: Tensor) -> Tensor:
            return -(target[rows] - items).square().sum(-1)

    target, history = inputs()
    unit, mask = TargetAttention(D, Distance()), torch.arange(L) < COUNTS.unsqueeze(1)
    together, _ = unit(target, history, Positions.from_mask(mask))
    for k in range(K):
        torch.testing.assert_close(together[:, k], unit(target[:, k], history, Positions.from_mask(mask))[0])


@pytest.mark.parametrize(("targets", "slots"), [(1, 1), (130, 3), (3, 130), (65, 129)])
def test_the_din_score_in_pieces(targets: int, slots: int) -> None:
    """As many pairs as fill one piece, and a few more."""
    torch.manual_seed(0)
    score = randomised(DINScore(D, (64, 5), dropout=0.5))
    target, items = torch.randn(2, targets, D), torch.randn(2, slots, D)
    found = score.candidates(target, items)
    rows = torch.arange(2 * targets).repeat_interleave(slots)
    expected = score(target.flatten(0, 1), items.unsqueeze(1).expand(-1, targets, -1, -1).flatten(0, 2), rows)
    torch.testing.assert_close(found.flatten(), expected, rtol=1e-5, atol=1e-5)
    none = DotScore(D).candidates(target, items[:, :0])
    assert none.shape == (2, targets, 0)


@pytest.mark.parametrize(("heads", "norm"), [(1, "pre"), (2, "post")])
@pytest.mark.parametrize("case", CASES)
def test_causal_transformer(case: str, heads: int, norm: str, mask: Tensor) -> None:
    torch.manual_seed(0)

    def fresh() -> PositionEncoding:
        return factory(case)(D, MAX_LEN + 1, heads)

    lowest = fresh()
    unit = Transformer([lowest, lowest.next_layer(fresh)], causal=True, norm=norm)
    randomised(unit)
    target, history = inputs()
    with torch.inference_mode():
        at = positions(mask)
        items = known(at.pack(history))
        queries, packed = lowest.embed(target, at.pack(history), at)
        pairs = at.candidate_pairs(True, items, known(target))
        together = unit.candidates(queries, unit.encode(packed, at, items), pairs)
        for k in range(K):
            query, _ = lowest.embed(target[:, k], at.pack(history), at)
            alone, _ = unit.of_target(query, packed, at, (items, known(target[:, k])))
            torch.testing.assert_close(together[:, k], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gate", GATES)
def test_gru_with_an_attention_per_target(gate: str, mask: Tensor) -> None:
    torch.manual_seed(0)
    unit, at = randomised(AttentionGRU(D, D, gate)), Positions.from_mask(mask)
    items, weights = torch.randn(int(mask.sum()), D), torch.rand(int(mask.sum()), K)
    together = last_state(unit(items, weights, at), at)
    for k in range(K):
        torch.testing.assert_close(together[:, k], last_state(unit(items, weights[:, k], at), at))


def test_no_item_at_all() -> None:
    """A batch whose histories are all empty."""
    target, none = torch.randn(2, K, D), torch.zeros(2, 0, dtype=torch.bool)
    built: list[Callable[[], nn.Module]] = [lambda: TargetAttention(D, "din"), lambda: TargetAttention(D)]
    for build in built:
        interest, weights = build().eval()(target, torch.zeros(2, 0, D), Positions.from_mask(none))
        assert torch.equal(interest, torch.zeros(2, K, D))
        assert weights.shape == (2, K, 0)
    unit, at = Transformer([PositionEncoding(D, 1)], causal=True), Positions.from_mask(none)
    pairs = at.candidate_pairs(True, Items(torch.zeros(0, D)), Items(target))
    states = unit.candidates(target, unit.encode(torch.zeros(0, D), at), pairs)
    torch.testing.assert_close(states[:, 1], unit.of_target(target[:, 1], torch.zeros(0, D), at)[0])
