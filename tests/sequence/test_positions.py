from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ctr_pe import Positions
from ctr_pe.sequence.positions import Items, Pairs
from tests.support.hooks import item_pairs, no_items, target_pairs


def mask(*rows: str) -> Tensor:
    return torch.tensor([[c == "x" for c in row] for row in rows])


def test_distance_counts_from_the_newest_real_item_whatever_the_padding() -> None:
    positions = Positions.from_mask(mask("xxx...", "...xxx", ".x.x.x", "......", ".x....", "xxxxxx"))
    want = [[3, 2, 1, 0, 0, 0], [0, 0, 0, 3, 2, 1], [0, 3, 0, 2, 0, 1], [0] * 6, [0, 1, 0, 0, 0, 0], [6, 5, 4, 3, 2, 1]]
    assert positions.distance.tolist() == want
    assert positions.distance.dtype == torch.int64
    assert positions.lengths.tolist() == [3, 3, 3, 0, 1, 6]


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
    for block in [*positions.blocks, *positions.whole]:
        padded, width = block.pad(packed), block.mask.shape[1]
        assert width == max(counts[row] for row in block.rows)
        for row, values, mask in zip(block.rows.tolist(), padded.tolist(), block.mask.tolist(), strict=True):
            first = sum(counts[:row])
            assert mask == [False] * (width - counts[row]) + [True] * counts[row]
            assert values == [0.0] * (width - counts[row]) + list(range(first, first + counts[row]))
        assert block.pack(padded).tolist() == packed[block.items].tolist()
        assert torch.equal(block.pad(positions.pack(positions.distance)), block.slot_distance * block.mask)
        padded.sum().backward()
        if block is not positions.whole[0]:
            seen[block.items] += 1
    assert seen.tolist() == [1.0] * len(packed)
    assert packed.grad is not None
    assert packed.grad.tolist() == [2.0] * len(packed)
    items = no_items(positions)
    every = [target_pairs(positions), *positions.item_pairs(True, items), *positions.item_pairs(False, items)]
    every += [*positions.newest_pairs(True, items), item_pairs(positions, True)]
    for pairs in every:
        assert torch.equal(pairs.key.distance[0, 0], pairs.block.slot_distance)
        assert pairs.key.age is not None
        assert torch.equal(pairs.key.age[:, 0], pairs.block.pad(positions.pack(age)))


def test_blocks_have_a_largest_size() -> None:
    positions = Positions.from_mask(torch.ones(80, 50, dtype=torch.bool))
    assert [len(block.rows) for block in positions.blocks] == [72, 8]
    assert [len(block.rows) for block in positions.newest_blocks] == [80]  # which have a query each
    longer = Positions.from_mask(torch.ones(2, 500, dtype=torch.bool))
    assert [len(block.rows) for block in longer.blocks] == [1, 1]


def test_no_block_without_items() -> None:
    assert Positions.from_mask(mask("...", "...")).blocks == []
    assert Positions.from_mask(torch.zeros(0, 3, dtype=torch.bool)).blocks == []
    assert Positions.from_mask(torch.zeros(2, 0, dtype=torch.bool)).whole[0].mask.shape == (2, 0)


def test_pairs_of_a_target() -> None:
    pairs = target_pairs(Positions.from_mask(mask("x.x.", "....", "..x.")))
    assert pairs.allowed.tolist() == [[[[True, True]]], [[[False] * 2]], [[[False, True]]]]
    assert pairs.offset.tolist() == [[[[2, 1]]]]
    assert pairs.causal
    assert not pairs.self_attention
    assert pairs.block is pairs.positions.whole[0]


def test_pairs_of_items() -> None:
    positions = Positions.from_mask(mask(".x.xx", "x...."))
    both, causal = (item_pairs(positions, causal) for causal in (False, True))
    assert both.self_attention
    assert (both.causal, causal.causal) == (False, True)
    assert both.allowed[1, 0].tolist() == [[False] * 3, [False] * 3, [False, False, True]]
    assert causal.allowed[0, 0].tolist() == [[True, False, False], [True, True, False], [True] * 3]
    assert both.offset.tolist() == [[[[0, -1, -2], [1, 0, -1], [2, 1, 0]]]]  # places that the key lies before the query


def test_pairs_of_the_newest_item_are_the_last_of_all_items() -> None:
    counts = [3, 0, 20, 9, 1, 40, 17, 0, 8]
    rows = torch.arange(50) < torch.tensor(counts).unsqueeze(1)
    positions = Positions.from_mask(rows, torch.arange(rows.numel(), 0, -1).view_as(rows))
    for causal in (False, True):
        whole = item_pairs(positions, causal)
        for alone in positions.newest_pairs(causal, no_items(positions)):
            width, of = alone.block.mask.shape[1], alone.block.rows
            assert (alone.causal, alone.self_attention) == (causal, True)
            assert torch.equal(alone.allowed, whole.allowed[of, :, -1:, -width:])
            assert torch.equal(alone.offset, whole.offset[..., -1:, -width:])
            assert alone.query.age is not None
            assert whole.query.age is not None
            assert torch.equal(alone.query.age, whole.query.age[of, :, -1:])


def test_the_pairs_of_other_items_are_their_own() -> None:
    """What has been read of one batch of items is not taken for another's, though positions and blocks are the same."""
    positions = Positions.from_mask(mask("xxx", "x.."))
    positions.plan()
    one, other = Items(torch.randn(4, 2)), Items(torch.randn(4, 2))
    for items in (one, other):
        for pairs in (item_pairs(positions, True, items), target_pairs(positions, items)):
            assert torch.equal(pairs.embedding(slice(0, 2)), pairs.block.pad(items.embedding))


def test_an_embedding_of_pairs_is_that_of_their_keys_padded() -> None:
    counts = [3, 0, 20, 9, 1, 40, 17, 0, 8]
    rows = torch.zeros(len(counts), 50, dtype=torch.bool)
    for row, (filled, count) in enumerate(zip(rows, counts, strict=True)):
        filled[torch.randperm(50, generator=torch.Generator().manual_seed(row))[:count]] = True
    embedding = torch.randn(sum(counts), 5)
    positions, items = Positions.from_mask(rows), Items(embedding)
    assert len(positions.blocks) > 2
    every = [target_pairs(positions, items), *positions.item_pairs(False, items), *positions.item_pairs(True, items)]
    for pairs in [*every, *positions.newest_pairs(True, items), *positions.newest_pairs(False, items)]:
        for columns in (slice(1, 4), slice(0, 5), slice(1, 3)):
            got = pairs.embedding(columns)
            assert torch.equal(got, pairs.block.pad(embedding)[..., columns])
            assert not got[~pairs.block.mask].any()
            assert pairs.embedding(columns) is got  # fetched once for all layers


def test_products_are_of_what_each_query_and_key_is() -> None:
    """In target attention with one target or several, among items, and at candidates."""
    counts = [3, 0, 6, 1]
    rows = torch.arange(6) < torch.tensor(counts).unsqueeze(1)
    history, target = torch.randn(4, 6, 2).double(), torch.randn(4, 3, 2).double()
    ids = torch.randint(1, 9, (4, 6)), torch.randint(1, 9, (4, 3))
    at = Positions.from_mask(rows)
    items, several = Items(at.pack(history), (at.pack(ids[0]),)), Items(target, (ids[1],))

    def check(
        pairs: Pairs, asking: Callable[[int], Tensor], asked: Callable[[int], Tensor], keys: list[Tensor]
    ) -> None:
        """``asking``, ``asked``: vectors and ids of the queries of a row."""
        found = pairs.products("doubled", lambda embedding: 2 * embedding)
        known = pairs.of_queries("id", lambda items: items.ids[0])
        for row, own in enumerate(keys):
            width = len(own)
            if width:
                queries = asking(row)
                assert torch.allclose(found[row, 0, -len(queries) :, -width:], 4 * queries @ own.T)
                assert torch.equal(known[row, -len(queries) :], asked(row))

    old = [history[row, :count] for row, count in enumerate(counts)]
    check(at.target_pairs(items, several), lambda row: target[row], lambda row: ids[1][row], old)
    first = Items(target[:, 0], (ids[1][:, 0],))
    check(at.target_pairs(items, first), lambda row: target[row, :1], lambda row: ids[1][row, :1], old)
    check(item_pairs(at, True, items), lambda row: old[row], lambda row: ids[0][row, : counts[row]], old)
    each = [torch.cat([old[row], target[row, k : k + 1]]) for row in range(4) for k in range(3)]
    check(
        at.candidate_pairs(True, items, several),
        lambda row: each[row][-1:],
        lambda row: ids[1].flatten()[row : row + 1],
        each,
    )


def test_positions_from_lengths_equal_those_of_a_left_padded_mask() -> None:
    lengths, age = torch.tensor([3, 0, 1]), torch.tensor([30, 20, 10, 7])
    found = Positions.from_lengths(lengths, age)
    want = Positions.from_mask(mask("xxx", "...", "..x"), torch.tensor([[30, 20, 10], [0, 0, 0], [0, 0, 7]]))
    assert torch.equal(found.mask, want.mask)
    assert torch.equal(found.distance, want.distance)
    assert found.age is not None
    assert want.age is not None
    assert torch.equal(found.age, want.age)
    assert torch.equal(found.lengths, lengths)
    assert Positions.from_lengths(torch.zeros(0, dtype=torch.int64)).mask.shape == (0, 0)


@pytest.mark.parametrize(
    ("lengths", "age"),
    [
        (torch.tensor([[1]]), None),
        (torch.tensor([1.0]), None),
        (torch.tensor([2, -1]), None),
        (torch.tensor([2, 1]), torch.tensor([1, 2])),
        (torch.tensor([2]), torch.tensor([1.0, 2.0])),
    ],
)
def test_bad_lengths(lengths: Tensor, age: Tensor | None) -> None:
    with pytest.raises(ValueError, match="must be"):
        Positions.from_lengths(lengths, age)
