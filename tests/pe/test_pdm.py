"""PDM: attention between positions beside that between items, and the contrast of augmented views."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ctr_pe import Positions, build_pe
from ctr_pe.pe.pdm import AUGMENTATIONS, CONTRASTED, PDM, contrast
from ctr_pe.units import SelfAttention, TargetAttention
from ctr_pe.utils.errors import UserError
from ctr_pe.utils.random_generators import RandomGenerators
from tests.support import hooks

D, L, HEADS = 8, 6, 2
COUNTS = (3, 6, 0, 5, 1)


def lengths(*counts: int) -> Positions:
    return Positions.from_mask(torch.arange(max(counts)) < torch.tensor(counts).unsqueeze(1))


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomised(module: Any, seed: int = 5) -> Any:
    draw = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5, generator=draw)
    return module.double()


class TestPositions:
    @pytest.mark.parametrize("causal", [True, False])
    def test_weights_of_both_branches_sum_to_one_each(self, causal: bool) -> None:
        pe = randomised(PDM(D, L, HEADS))
        pairs = hooks.item_pairs(lengths(*COUNTS), causal)
        given = hooks.item_vectors(vectors(len(COUNTS), HEADS, L, D // HEADS))
        attention = pairs.softmax(vectors(len(COUNTS), HEADS, L, L)) * pairs.float_mask
        real = pairs.allowed.any(-1).expand(-1, HEADS, -1).double()
        for weights, want in ((pe.position_weights(pairs), 1.0), (pe.mix(attention, given, pairs)[0], 2.0)):
            assert torch.allclose(weights.sum(-1), want * real)
            assert (weights[~pairs.allowed.expand_as(weights)] == 0).all()

    def test_weights_depend_on_places_alone(self) -> None:
        pe = randomised(PDM(D, L))
        pairs = hooks.target_pairs(lengths(*COUNTS, 5))
        given = [hooks.target_vectors(vectors(6, D, seed=k), pairs, vectors(20, D, seed=k)) for k in range(2)]
        weights = [pe.mix(pairs.softmax(s), v, pairs)[0] - pairs.softmax(s)
                   for s, v in zip((vectors(6, 1, 1, L), vectors(6, 1, 1, L, seed=1)), given, strict=True)]  # fmt: skip
        assert torch.allclose(weights[0], weights[1], atol=1e-15)
        assert torch.allclose(weights[0][3], weights[0][5], atol=1e-15)  # both of 5 items
        assert (weights[0][0] - weights[0][1]).abs().max() > 1e-3

    def test_zero_projections_are_uniform_over_what_is_allowed(self) -> None:
        pe = randomised(PDM(D, L, HEADS))
        nn.init.zeros_(pe.query.weight)
        for causal in (True, False):
            pairs = hooks.item_pairs(lengths(*COUNTS), causal)
            allowed = pairs.allowed.double()
            want = allowed / allowed.sum(-1, keepdim=True).clamp(min=1)
            assert torch.allclose(pe.position_weights(pairs), want.expand(-1, HEADS, -1, -1))

    def test_weights_of_the_softmax_are_returned_as_they_are(self) -> None:
        """Interest = (a + a^p) h, and the weights that a unit returns are a."""
        pe = randomised(PDM(D, L))
        unit, plain = TargetAttention(D, pe=pe).double(), TargetAttention(D).double()
        batch = vectors(2, D), vectors(2, L, D, seed=1), lengths(L, 4)
        (interest, weights), (without, want) = unit(*batch), plain(*batch)
        assert torch.equal(weights, want)
        pairs = hooks.target_pairs(lengths(L, 4))
        extra = pairs.positions.unpack(pairs.block.pack(pe.position_weights(pairs)[:, 0, 0]))
        assert torch.allclose(interest, without + (extra.unsqueeze(-1) * batch[1]).sum(1))

    def test_layers_share_the_table_and_have_their_own_projections(self) -> None:
        first = PDM(D, L, HEADS)
        above = first.next_layer(lambda: PDM(D, L, HEADS))
        of_unit = first.next_layer(lambda: PDM(D, L, 1))
        longer = first.next_layer(lambda: PDM(D, L + 1, HEADS))
        assert isinstance(above, PDM)
        assert above.table is first.table
        assert above.query.weight is not first.query.weight
        assert of_unit.table is first.table
        assert longer.table is not first.table

    def test_parameters(self) -> None:
        torch.manual_seed(0)
        pe = build_pe("pdm", 64, 100, 2)
        shapes = {key: tuple(value.shape) for key, value in pe.state_dict().items()}
        assert shapes == {"table": (101, 64), "query.weight": (64, 64), "key.weight": (64, 64)}
        assert pe.table.std().item() == pytest.approx(0.02, rel=0.05)  # type: ignore[union-attr]


def loss_of(losses: dict[str, Tensor], augment: str = "reorder") -> Tensor:
    return losses[f"PDM {augment} contrast"]


class TestContrast:
    def test_equal_views_of_zeros_cannot_be_told_apart(self) -> None:
        for groups in ([(4, 3)], [(2, 3), (3, 5), (1, 20)]):
            rows = sum(count for count, _ in groups)
            losses = contrast([(torch.zeros(count, w, D), torch.zeros(count, w, D)) for count, w in groups])
            assert torch.allclose(losses, torch.full((2 * rows,), math.log(2 * rows - 1)))

    @pytest.mark.parametrize("temperature", [1.0, 0.3])
    def test_equals_the_equation(self, temperature: float) -> None:
        """Groups of any width and order: what they lack are zeros before the oldest."""
        sizes = [(2, 3), (3, 9), (1, 4), (2, 1)]
        groups = [(vectors(m, w, D, seed=k) / 3, vectors(m, w, D, seed=k + 9) / 3) for k, (m, w) in enumerate(sizes)]
        whole = [[torch.cat([torch.zeros(9 - z.shape[1], D).double(), one]).flatten() for z in side for one in z]
                 for side in zip(*groups, strict=True)]  # fmt: skip
        views, want = whole[0] + whole[1], []
        for i, z in enumerate(views):
            share = {j: torch.exp(z @ other / temperature) for j, other in enumerate(views) if j != i}
            want.append(-torch.log(share[(i + 8) % 16] / sum(share.values())))
        got = contrast(groups, temperature)
        assert torch.allclose(got.sort().values, torch.stack(want).sort().values)

    def test_the_order_of_rows_changes_nothing(self) -> None:
        one, other = vectors(5, 4, D) / 3, vectors(5, 4, D, seed=1) / 3
        order = torch.tensor([3, 0, 4, 1, 2])
        want = contrast([(one, other)])
        assert torch.allclose(contrast([(one[order], other[order])]), want.view(2, 5)[:, order].flatten())
        split = contrast([(one[order[:2]], other[order[:2]]), (one[order[2:]], other[order[2:]])])
        assert torch.allclose(split.sum(), want.sum())

    def test_large_products_stay_finite(self) -> None:
        views = (1e3 * vectors(4, L, D)).float().requires_grad_()
        loss = contrast([(views, views.detach())]).mean()
        loss.backward()
        assert loss.isfinite()
        assert views.grad is not None
        assert views.grad.isfinite().all()

    def test_a_row_alone_has_no_negatives(self) -> None:
        assert contrast([(vectors(1, L, D), vectors(1, L, D, seed=1))]).abs().max() < 1e-12


class TestAugmentation:
    @staticmethod
    def views(augment: str, ratio: float, counts: tuple[int, ...], times: int = 50) -> list[tuple[Tensor, Tensor]]:
        torch.manual_seed(3)
        pe = PDM(D, 20, pdm_contrast=0.1, pdm_augment=augment, pdm_ratio=ratio)
        return [pe._augmented(lengths(*counts).whole[0].mask) for _ in range(times)]

    def test_reordering_keeps_all_but_one_piece(self) -> None:
        counts, starts = (20, 5, 4, 10), [set[int]() for _ in range(4)]
        for order, there in self.views("reorder", 0.2, counts, 300):
            assert torch.equal(there, lengths(*counts).whole[0].mask)
            for b, count in enumerate(counts):
                items = order[b].tolist()
                assert sorted(items) == list(range(20))  # the same items
                moved = [place for place, item in enumerate(items) if place != item]
                assert all(place >= 20 - count for place in moved)  # padding stays in front
                if moved:
                    assert moved[-1] - moved[0] < int(0.2 * count)
                    starts[b] |= set(moved)
        # Wherever a piece fits; pieces of one item leave all as it is: fewer than 1 / 0.2 items, or of 5 to 9.
        assert starts == [set(range(20)), set(), set(), set(range(10, 20))]

    def test_masking_leaves_places_empty(self) -> None:
        counts, lost = (20, 7, 1), torch.zeros(3, 20)
        for order, there in self.views("mask", 0.5, counts):
            mask = lengths(*counts).whole[0].mask
            assert torch.equal(order, torch.arange(20).expand(3, -1))
            assert torch.equal((mask & ~there).sum(1), torch.tensor([10, 3, 0]))
            assert not (there & ~mask).any()
            lost += mask & ~there
        assert torch.equal(lost > 0, lengths(20, 7, 0).whole[0].mask)  # any item may be lost

    def test_cropping_drops_a_piece_and_closes_the_gap(self) -> None:
        counts, lost = (20, 7, 1), torch.zeros(3, 20)
        for order, there in self.views("crop", 0.5, counts):
            mask = lengths(*counts).whole[0].mask
            for b, count in enumerate(counts):
                gone = (mask & ~there)[b].nonzero().flatten().tolist()
                assert gone == list(range(gone[0], gone[0] + count // 2)) if count > 1 else not gone
                kept = there[b].nonzero().flatten().tolist()
                assert order[b].tolist()[20 - len(kept) :] == kept  # in their order, up to the newest place
            lost += mask & ~there
        assert torch.equal(lost > 0, lengths(20, 7, 0).whole[0].mask)

    @pytest.mark.parametrize("augment", AUGMENTATIONS)
    @pytest.mark.parametrize("ratio", [0.2, 0.29])
    def test_rows_too_short_for_the_ratio_stay_as_they_are(self, augment: str, ratio: float) -> None:
        short = math.ceil(1 / ratio) - 1
        for order, there in self.views(augment, ratio, (short, 1, 2)):
            assert torch.equal(there, lengths(short, 1, 2).whole[0].mask)
            assert torch.equal(order, torch.arange(short).expand(3, -1))

    def test_shares_are_rounded_down_and_not_below(self) -> None:
        for _, there in self.views("mask", 0.29, (100, 99), 2):
            assert there.sum(1).tolist() == [100 - 29, 99 - 28]

    @pytest.mark.parametrize("augment", AUGMENTATIONS)
    def test_nothing_may_be_left(self, augment: str) -> None:
        pe = PDM(D, L, pdm_contrast=0.1, pdm_augment=augment, pdm_ratio=1, pdm_contrast_on="norm")
        unit, history = TargetAttention(D, pe=pe), torch.randn(5, L, D, requires_grad=True)
        positions = lengths(*COUNTS)
        loss = loss_of(unit.attend(torch.randn(5, D), history, positions)[-1], augment)
        loss.backward()
        assert loss.isfinite()
        assert history.grad is not None
        assert history.grad.isfinite().all()

    def test_views_differ_and_follow_the_seed(self) -> None:
        first, again = (self.views("reorder", 0.5, (20,), 3) for _ in range(2))
        assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
        assert not torch.equal(first[0][0], first[1][0])


View = Callable[[list[int]], Sequence[int | None]]
VIEWS: dict[str, tuple[View, View]] = {  # the items in their new order; None where one is missing
    "reorder": (lambda items: items[::-1], lambda items: items[1:] + items[:1]),
    "mask": (
        lambda items: [None if j % 2 else item for j, item in enumerate(items)],
        lambda items: [item if j % 3 else None for j, item in enumerate(items)],
    ),
    "crop": (lambda items: items[: len(items) // 2], lambda items: items[1:]),
}


def scripted(pe: PDM, views: tuple[View, View]) -> None:
    """Let the encoding augment as ``views`` say."""
    calls = 0

    def augmented(mask: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal calls
        width, view = mask.shape[1], views[calls % 2]
        calls += 1
        orders, there = [], mask.clone()
        for b, count in enumerate(mask.sum(1).tolist()):
            kept = view(list(range(width - count, width)))
            lost = sorted(set(range(width)) - {item for item in kept if item is not None})
            there[b, lost] = False
            if None in kept:
                orders.append(list(range(width)))
            else:
                orders.append(lost + [item for item in kept if item is not None])
        return torch.tensor(orders), there

    pe._augmented = augmented  # type: ignore[method-assign]


def expected(
    hidden: Callable[[int, list[int]], Tensor], values: Callable[[int, int], Tensor], kind: str, on: str
) -> Tensor:
    """Loss of a batch, row by row: ``hidden`` gives places of items (by row and list of items) in their order."""
    zs: list[list[Tensor]] = []
    for view in VIEWS[kind]:
        rows = []
        for b, count in enumerate(COUNTS):
            if not count:
                continue
            kept = view(list(range(count)))
            seen = [item for item in kept if item is not None]
            found = iter(hidden(b, seen)) if seen else iter(())
            places = [torch.zeros(D).double() if item is None else next(found) for item in kept]
            if on == "norm":
                places = [x if item is None else nn.functional.layer_norm(x + values(b, item), (D,))
                           for x, item in zip(places, kept, strict=True)]  # fmt: skip
            places = [torch.zeros(D).double()] * (L - len(places)) + places
            rows.append(places[-1] if on == "last" else torch.cat(places))
        zs.append(rows)
    views, twins = zs[0] + zs[1], len(zs[0])
    losses = []
    for i, z in enumerate(views):
        others = torch.stack([z @ other / 0.7 for j, other in enumerate(views) if j != i])
        losses.append(others.logsumexp(0) - z @ views[(i + twins) % (2 * twins)] / 0.7)
    return 0.3 * torch.stack(losses).mean()


@pytest.mark.parametrize("on", CONTRASTED)
@pytest.mark.parametrize("kind", AUGMENTATIONS)
class TestLoss:
    """Against augmented sequences that go through attention without positions, one row after the other."""

    @staticmethod
    def encoding(kind: str, on: str, heads: int) -> PDM:
        pe = PDM(D, L, heads, pdm_contrast=0.3, pdm_augment=kind, pdm_contrast_on=on, pdm_temperature=0.7)
        scripted(pe, VIEWS[kind])
        return pe

    @pytest.mark.parametrize("causal", [True, False])
    def test_self_attention(self, kind: str, on: str, causal: bool) -> None:
        pe = self.encoding(kind, on, HEADS)
        layer = randomised(SelfAttention(D, HEADS, pe, causal))
        plain = SelfAttention(D, HEADS, causal=causal).double()
        plain.load_state_dict({key: value for key, value in layer.state_dict().items() if not key.startswith("pe.")})
        items, positions = vectors(len(COUNTS), L, D), lengths(*COUNTS)
        _, losses = layer.attend(positions.pack(items), positions)

        def hidden(b: int, order: list[int]) -> Tensor:
            return plain.heads(items[b, order], lengths(len(order)))[0].flatten(1)

        want = expected(hidden, lambda b, item: plain.value(items[b, item]), kind, on)
        assert torch.allclose(loss_of(losses, kind), want)

    def test_target_attention(self, kind: str, on: str) -> None:
        pe = self.encoding(kind, on, 1)
        unit, plain = TargetAttention(D, pe=randomised(pe)).double(), TargetAttention(D).double()
        target, items, positions = vectors(len(COUNTS), D, seed=1), vectors(len(COUNTS), L, D), lengths(*COUNTS)
        losses = unit.attend(target, items, positions)[-1]

        def hidden(b: int, order: list[int]) -> Tensor:
            _, weights = plain(target[[b]], items[b, order], lengths(len(order)))
            return weights[0].unsqueeze(1) * items[b, order]

        want = expected(hidden, lambda b, item: items[b, item], kind, on)
        assert torch.allclose(loss_of(losses, kind), want)


@pytest.mark.parametrize("unit", ["target", "self"])
class TestTraining:
    @staticmethod
    def module(unit: str, **options: Any) -> Any:
        torch.manual_seed(0)
        pe = PDM(D, L, 1 if unit == "target" else HEADS, **options)
        return TargetAttention(D, pe=pe) if unit == "target" else SelfAttention(D, HEADS, pe, True)

    @staticmethod
    def run(module: Any, items: Tensor, positions: Positions | None = None) -> dict[str, Tensor]:
        positions = positions or lengths(*COUNTS)
        batch = positions.pack(items), positions
        losses: dict[str, Tensor]
        *_, losses = module.attend(*((items[:, 0], *batch) if isinstance(module, TargetAttention) else batch))
        return losses

    def test_off_costs_nothing(self, unit: str) -> None:
        module = self.module(unit)
        module.pe._augmented = None
        assert not self.run(module, torch.randn(5, L, D))
        assert module.pe.loss_names == ()

    def test_evaluation_has_none(self, unit: str) -> None:
        module = self.module(unit, pdm_contrast=0.1)
        assert module.pe.loss_names == ("PDM reorder contrast",)
        assert loss_of(self.run(module, torch.randn(5, L, D))) > 0
        assert not self.run(module.eval(), torch.randn(5, L, D))

    def test_the_random_stream_stays_where_it_is(self, unit: str) -> None:
        after = []
        for options in ({}, {"pdm_contrast": 0.1}):
            module = self.module(unit, **options)
            torch.manual_seed(1)
            self.run(module, torch.randn(5, L, D))
            after.append(torch.rand(3))
        assert torch.equal(*after)

    def test_runs_of_a_seed_are_equal(self, unit: str) -> None:
        losses = []
        for _ in range(2):
            module = self.module(unit, pdm_contrast=0.1, pdm_ratio=0.7)
            items = torch.ones(5, L, D).cumsum(1)
            losses += [loss_of(self.run(module, items)).item() for _ in range(2)]
        assert losses[:2] == losses[2:]
        assert losses[0] != losses[1]  # each batch has views of its own

    def test_positions_do_not_learn_from_it(self, unit: str) -> None:
        module, items = self.module(unit, pdm_contrast=0.1), torch.randn(5, L, D, requires_grad=True)
        loss_of(self.run(module, items)).backward()
        assert all(parameter.grad is None for parameter in module.pe.parameters())
        assert items.grad is not None
        assert items.grad.abs().max() > 0

    def test_no_items_at_all(self, unit: str) -> None:
        module = self.module(unit, pdm_contrast=0.1, pdm_contrast_on="last")
        empty = Positions.from_mask(torch.zeros(2, 3, dtype=torch.bool))
        assert sum(self.run(module, torch.randn(2, 3, D), empty).values()) == 0

    def test_mixed_precision(self, unit: str) -> None:
        module, items = self.module(unit, pdm_contrast=0.1, pdm_contrast_on="norm"), torch.randn(5, L, D)
        losses = []
        for enabled in (False, True):
            module.pe.generators = RandomGenerators(0)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                losses.append(loss_of(self.run(module, items)))
        assert losses[1].dtype == torch.float32
        assert torch.allclose(losses[0], losses[1], rtol=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pdm_augment": "shuffle"}, "pdm_augment must be one of reorder, mask, crop, got 'shuffle'"),
        ({"pdm_contrast_on": "first"}, "pdm_contrast_on must be one of hidden, last, norm, got 'first'"),
        ({"pdm_contrast": -0.1}, "pdm_contrast must be a weight of 0 or more, got -0.1"),
        ({"pdm_ratio": 0}, "pdm_ratio must be above 0 and at most 1, got 0"),
        ({"pdm_temperature": 0.0}, "pdm_temperature must be a positive number, got 0.0"),
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_pe("pdm", D, L, **options)
