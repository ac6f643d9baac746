from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ctr_pe import Positions
from ctr_pe.positions import Items


def mask(*rows: str) -> Tensor:
    return torch.tensor([[c == "x" for c in row] for row in rows])


def test_distance_counts_from_the_newest_real_item_whatever_the_padding() -> None:
    positions = Positions.from_mask(mask("xxx...", "...xxx", ".x.x.x", "......", ".x....", "xxxxxx"))
    want = [[3, 2, 1, 0, 0, 0], [0, 0, 0, 3, 2, 1], [0, 3, 0, 2, 0, 1], [0] * 6, [0, 1, 0, 0, 0, 0], [6, 5, 4, 3, 2, 1]]
    assert positions.distance.tolist() == want
    assert positions.distance.dtype == torch.int64
    assert positions.count.tolist() == [3, 3, 3, 0, 1, 6]


def test_rank_counts_from_the_oldest() -> None:
    positions = Positions.from_mask(mask("xxx.", ".x.x", "...."))
    assert positions.rank.tolist() == [[1, 2, 3, 0], [0, 1, 0, 2], [0] * 4]


def test_no_slots_and_no_rows() -> None:
    assert Positions.from_mask(torch.zeros(2, 0, dtype=torch.bool)).distance.shape == (2, 0)
    assert Positions.from_mask(torch.zeros(0, 3, dtype=torch.bool)).distance.shape == (0, 3)


def test_age_stays_an_exact_integer_and_padding_has_none() -> None:
    age = torch.tensor([[2**53 + 1, 7, 123]])
    positions = Positions.from_mask(mask("xx."), age)
    assert positions.age is not None
    assert positions.age.tolist() == [[2**53 + 1, 7, 0]]


@pytest.mark.parametrize(
    ("bad_mask", "age"),
    [
        (torch.ones(2, 3), None),
        (torch.ones(3, dtype=torch.bool), None),
        (torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 3)),
        (torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 2, dtype=torch.int64)),
        (torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 3, dtype=torch.bool)),
    ],
)
def test_bad_input(bad_mask: Tensor, age: Tensor | None) -> None:
    with pytest.raises(ValueError, match="must be"):
        Positions.from_mask(bad_mask, age)


def test_blocks_hold_rows_of_like_length_with_the_newest_item_last() -> None:
    counts = [3, 0, 20, 9, 1, 40, 17, 0, 8]
    rows = torch.zeros(len(counts), 50, dtype=torch.bool)
    for row, (filled, count) in enumerate(zip(rows, counts, strict=True)):
        filled[torch.randperm(50, generator=torch.Generator().manual_seed(row))[:count]] = True
    age = torch.arange(rows.numel(), 0, -1).view_as(rows)
    positions = Positions.from_mask(rows, age)
    assert [[counts[row] for row in block.rows] for block in positions.blocks] == [[1, 3], [8, 9], [17, 20], [40]]
    packed = torch.arange(float(sum(counts)), requires_grad=True)
    seen = torch.zeros(len(packed))
    for block in [*positions.blocks, positions.whole]:
        laid, width = block.lay(packed), block.mask.shape[1]
        assert width == max(counts[row] for row in block.rows)
        for row, values, mask in zip(block.rows.tolist(), laid.tolist(), block.mask.tolist(), strict=True):
            first = sum(counts[:row])
            assert mask == [False] * (width - counts[row]) + [True] * counts[row]
            assert values == [0.0] * (width - counts[row]) + list(range(first, first + counts[row]))
        assert block.take(laid).tolist() == packed[block.items].tolist()
        assert torch.equal(block.lay(positions.pack(positions.distance)), block.distance * block.mask)
        keys = block.from_target().key
        assert keys.age is not None
        assert torch.equal(keys.age[:, 0], block.lay(positions.pack(age)))
        laid.sum().backward()
        if block is not positions.whole:
            seen[block.items] += 1
    assert seen.tolist() == [1.0] * len(packed)
    assert packed.grad is not None
    assert packed.grad.tolist() == [2.0] * len(packed)


def test_blocks_have_a_largest_size() -> None:
    positions = Positions.from_mask(torch.ones(80, 50, dtype=torch.bool))
    assert [len(block.rows) for block in positions.blocks] == [72, 8]
    assert [len(block.rows) for block in positions.newest_blocks] == [80]  # which have a query each
    longer = Positions.from_mask(torch.ones(2, 500, dtype=torch.bool))
    assert [len(block.rows) for block in longer.blocks] == [1, 1]


def test_no_block_without_items() -> None:
    assert Positions.from_mask(mask("...", "...")).blocks == []
    assert Positions.from_mask(torch.zeros(0, 3, dtype=torch.bool)).blocks == []
    assert Positions.from_mask(torch.zeros(2, 0, dtype=torch.bool)).whole.mask.shape == (2, 0)


def test_pairs_of_a_target() -> None:
    pairs = Positions.from_mask(mask("x.x.", "....", "..x.")).whole.from_target()
    assert pairs.allowed.tolist() == [[[[True, True]]], [[[False] * 2]], [[[False, True]]]]
    assert pairs.offset.tolist() == [[[[2, 1]]]]
    assert pairs.causal


def test_pairs_of_items() -> None:
    block = Positions.from_mask(mask(".x.xx", "x....")).whole
    both, causal = block.from_items(False), block.from_items(True)
    assert (both.causal, causal.causal) == (False, True)
    assert both.allowed[1, 0].tolist() == [[False] * 3, [False] * 3, [False, False, True]]
    assert causal.allowed[0, 0].tolist() == [[True, False, False], [True, True, False], [True] * 3]
    assert both.offset.tolist() == [[[[0, -1, -2], [1, 0, -1], [2, 1, 0]]]]  # places that the key lies before the query


def test_what_items_are_is_carried_along() -> None:
    def items(values: list[float], ids: list[int], chosen: list[bool]) -> Items:
        return Items(torch.tensor(values).unsqueeze(1), (torch.tensor(ids),), torch.tensor(chosen))

    positions = Positions.from_mask(mask("xx.", "...", "..x"))
    history, target = items([1, 2, 5], [11, 12, 15], [True] * 3), items([3, 4, 6], [13, 14, 16], [True, False, False])
    whole = positions.carrying(history, target).with_target()
    assert whole.items is not None
    assert whole.items.chosen is not None
    assert whole.items.embedding.flatten().tolist() == [1, 2, 3, 4, 5, 6]
    assert whole.items.ids[0].tolist() == [11, 12, 13, 14, 15, 16]
    assert whole.items.chosen.tolist() == [True, True, True, False, True, False]
    assert positions.with_target().items is None
    evaluated = positions.carrying(Items(history.embedding), Items(target.embedding)).with_target()
    assert evaluated.items is not None
    assert evaluated.items.chosen is None
