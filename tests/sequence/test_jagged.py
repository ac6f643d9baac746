"""Padded, packed and in blocks: the same items, wherever the padding lies."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from unittest import mock

import pytest
import torch
from torch import Tensor

from ctr_pe.sequence.jagged import NARROWEST, Blocks, Jagged, Layout, gather_rows, scatter_rows

COUNTS = [[3, 0, 20, 9, 1, 40, 17, 0, 8], [5], [4, 4, 4], [0, 2], [0], [0, 0, 0], []]


WIDE, SMALL = Layout(False, 2**24), Layout(False, 900)


def left(count: int, width: int, row: int) -> Tensor:
    return torch.arange(width) >= width - count


def right(count: int, width: int, row: int) -> Tensor:
    return torch.arange(width) < count


def anywhere(count: int, width: int, row: int) -> Tensor:
    return torch.zeros(width).index_fill(0, torch.randperm(width, generator=drawer(row))[:count], 1.0).bool()


def drawer(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


Side = Callable[[int, int, int], Tensor]
layouts = pytest.mark.parametrize("side", [left, right, anywhere])
batches = pytest.mark.parametrize("counts", COUNTS, ids=str)


def ragged(counts: list[int], side: Side, more: int = 3) -> Jagged:
    width = max(counts, default=0) + more
    rows = [side(count, width, row) for row, count in enumerate(counts)]
    return of_mask(torch.stack(rows) if rows else torch.zeros(0, width, dtype=torch.bool))


def of_mask(mask: Tensor) -> Jagged:
    return Jagged(mask, mask.sum(1))


def numbered(of: Jagged, *shape: int) -> Tensor:
    """Packed items, no two entries of which are equal, and none of which is zero."""
    n = int(of.mask.sum())
    size = n * int(torch.tensor(shape).prod()) if shape else n
    return torch.arange(1.0, size + 1).view(n, *shape)


def blocks_of(of: Jagged) -> dict[str, Blocks]:
    found = {"blocks": of.blocks, "newest": of.newest_blocks, "whole": of.whole}
    for layout in (WIDE, SMALL):
        with mock.patch.object(Layout, "on", return_value=layout):
            found[str(layout)] = of_mask(of.mask).blocks
    return found


@layouts
@batches
@pytest.mark.parametrize("shape", [(), (3, 2)])
class TestPacking:
    def test_packed_items_are_the_real_ones_row_by_row(
        self, counts: list[int], side: Side, shape: tuple[int, ...]
    ) -> None:
        of = ragged(counts, side)
        padded = torch.randn(*of.mask.shape, *shape)
        assert torch.equal(of.pack(padded), padded[of.mask])
        assert of.lengths.tolist() == counts
        rows, _, slots = of.real_pairs()
        assert torch.equal(padded[rows, slots], of.pack(padded))
        assert torch.equal(rows, of.item_rows)
        assert rows.tolist() == [row for row, count in enumerate(counts) for _ in range(count)]

    def test_unpacking_undoes_packing(self, counts: list[int], side: Side, shape: tuple[int, ...]) -> None:
        of = ragged(counts, side)
        packed = numbered(of, *shape)
        padded = of.unpack(packed)
        assert padded.shape == (*of.mask.shape, *shape)
        assert torch.equal(of.pack(padded), packed)
        assert not padded[~of.mask].any()
        junk = torch.full_like(padded, torch.nan).masked_fill(of.mask.view(*of.mask.shape, *[1] * len(shape)), 0.0)
        assert torch.equal(of.unpack(of.pack(padded + junk)), padded)  # whatever padding holds

    def test_blocks_of_any_kind(self, counts: list[int], side: Side, shape: tuple[int, ...]) -> None:
        """Padding and taking out again, in the order of the block's items; and all blocks together give the batch."""
        of = ragged(counts, side)
        packed = numbered(of, *shape)
        for name, blocks in blocks_of(of).items():
            for block, padded in zip(blocks, blocks.pad(packed) if blocks else [], strict=True):
                own = packed[block.items]
                assert torch.equal(padded, block.unpack(own))
                assert torch.equal(padded, block.pad(packed))
                assert padded.shape == (len(block.rows), block.mask.shape[1], *shape)
                assert not padded[~block.mask].any()
                assert torch.equal(block.pack(padded), own)
                junk = padded.clone()
                junk[~block.mask] = torch.nan
                assert torch.equal(block.unpack(block.pack(junk)), padded)
                assert torch.equal(block.pack(block.pad(packed)), packed[block.items])
            if blocks:
                junky = [
                    part.masked_fill(~block.mask.view(*block.mask.shape, *[1] * len(shape)), torch.nan)
                    for block, part in zip(blocks, blocks.pad(packed), strict=True)
                ]
                assert torch.equal(blocks.pack(junky), packed), name

    def test_rows_are_split_and_joined(self, counts: list[int], side: Side, shape: tuple[int, ...]) -> None:
        """Of blocks that have every row; rows without items are in no block."""
        of = ragged(counts, side)
        per_row = torch.randn(len(counts), *shape)
        for name, blocks in blocks_of(of).items():
            for block, own in zip(blocks, blocks.split_rows(per_row) if blocks else [], strict=True):
                assert torch.equal(own, per_row[block.rows])
            if blocks and (name == "whole" or 0 not in counts):
                assert torch.equal(blocks.join_rows(blocks.split_rows(per_row)), per_row)

    def test_values_per_slot_follow_the_history_s_layout(
        self, counts: list[int], side: Side, shape: tuple[int, ...]
    ) -> None:
        of = ragged(counts, side)
        per_slot = torch.randn(*of.mask.shape)
        assert of.like(torch.zeros(*of.mask.shape, 4), per_slot) is per_slot
        assert torch.equal(of.like(torch.zeros(int(of.mask.sum()), 4), per_slot), of.pack(per_slot))


@layouts
@batches
class TestBlocks:
    def test_every_row_with_items_is_in_one_block_and_every_item_too(self, counts: list[int], side: Side) -> None:
        of = ragged(counts, side)
        filled = [row for row, count in enumerate(counts) if count]
        for blocks in blocks_of(of).values():
            rows = torch.cat([block.rows for block in blocks]).tolist() if blocks else []
            items = torch.cat([block.items for block in blocks]).tolist() if blocks else []
            assert sorted(rows) == ([*range(len(counts))] if blocks.whole else filled)
            assert sorted(items) == [*range(sum(counts))]
            for block in blocks:
                assert block.mask.sum(1).tolist() == [counts[row] for row in block.rows.tolist()]

    def test_the_newest_item_is_in_the_last_slot_and_distances_count_from_it(
        self, counts: list[int], side: Side
    ) -> None:
        of = ragged(counts, side)
        rank = torch.cat([torch.arange(count, 0, -1) for count in counts]) if counts else torch.zeros(0).long()
        for blocks in blocks_of(of).values():
            for block in blocks:
                assert block.slot_distance.tolist() == [*range(block.mask.shape[1], 0, -1)]
                assert torch.equal(block.pad(rank), block.slot_distance * block.mask)
                assert block.mask.shape[1] == max((counts[row] for row in block.rows.tolist()), default=0)

    def test_gradients_reach_every_item_once(self, counts: list[int], side: Side) -> None:
        of = ragged(counts, side)
        packed = numbered(of, 2).requires_grad_()
        for blocks in blocks_of(of).values():
            weight = torch.randn(len(packed), 2)
            if not blocks:
                continue
            for joined in (blocks.pack(blocks.pad(packed)), blocks.pack([block.pad(packed) for block in blocks])):
                (grad,) = torch.autograd.grad((joined * weight).sum(), packed)
                assert torch.equal(grad, weight)
        (grad,) = torch.autograd.grad(of.unpack(packed).sum(), packed)
        assert torch.equal(grad, torch.ones_like(grad))

    def test_padding_side_changes_no_block(self, counts: list[int], side: Side) -> None:
        """Nor does the amount of padding: blocks are of the real items alone."""
        of = ragged(counts, side)
        for other in (ragged(counts, right, 0), ragged(counts, left, 9)):
            for ours, theirs in zip(blocks_of(of).values(), blocks_of(other).values(), strict=True):
                for block, its in zip(ours, theirs, strict=True):
                    for name in ("rows", "items", "mask"):
                        assert torch.equal(getattr(block, name), getattr(its, name))

    def test_rows_of_a_block_are_of_like_length_and_few_enough(self, counts: list[int], side: Side) -> None:
        of = ragged(counts, side)
        for blocks in (of.blocks, of.newest_blocks):
            for block in blocks:
                shortest, longest = int(block.mask.sum(1).min()), block.mask.shape[1]
                assert longest <= max(NARROWEST, 1.5 * shortest)
        largest = Layout.on(of.mask.device).largest
        for block in of.blocks:
            assert len(block.rows) * block.mask.shape[1] ** 2 <= max(largest, block.mask.shape[1] ** 2)

    def test_on_an_accelerator_blocks_are_as_few_as_their_size_allows(self, counts: list[int], side: Side) -> None:
        assert len(blocks_of(ragged(counts, side))[str(WIDE)]) == (sum(counts) > 0)
        with mock.patch.object(Layout, "on", return_value=SMALL):
            blocks = ragged(counts, side).blocks
        for block, wider in pairwise(blocks):
            assert (len(block.rows) + 1) * int(wider.mask.sum(1).min()) ** 2 > SMALL.largest


@layouts
@batches
def test_a_target_is_appended_to_each_row(counts: list[int], side: Side) -> None:
    of = ragged(counts, side)
    packed, last = numbered(of, 2), -torch.arange(1.0, 2 * len(counts) + 1).view(len(counts), 2)
    got = of.append(packed, last)
    parts = torch.split(packed, counts) if counts else ()
    want = [torch.cat([own, target[None]]) for own, target in zip(parts, last, strict=True)]
    assert torch.equal(got, torch.cat(want) if want else packed)


def test_the_newest_of_each_row() -> None:
    assert ragged([3, 1, 5], anywhere).newest.tolist() == [2, 3, 8]


def test_no_slots() -> None:
    of = of_mask(torch.zeros(2, 0, dtype=torch.bool))
    assert of.pack(torch.zeros(2, 0, 3)).shape == (0, 3)
    assert of.unpack(torch.zeros(0, 3)).shape == (2, 0, 3)
    (block,) = of.whole
    assert block.pad(torch.zeros(0, 3)).shape == (2, 0, 3)
    assert block.pack(torch.zeros(2, 0, 3)).shape == (0, 3)
    assert of.blocks == []


PLACES = {3: torch.tensor([2, 0, 1]), 5: torch.tensor([4, 0, 3])}


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("shape", [(), (2,)])
class TestPlaces:
    def test_values(self, size: int, shape: tuple[int, ...]) -> None:
        places = PLACES[size]
        x = torch.randn(3, *shape)
        whole = scatter_rows(x, places, size)
        want = torch.zeros(size, *shape)
        want[places] = x
        assert torch.equal(whole, want)
        assert torch.equal(gather_rows(whole, places), x)

    def test_gradients_of_first_and_second_order(self, size: int, shape: tuple[int, ...]) -> None:
        places = PLACES[size]
        x = torch.randn(3, *shape, dtype=torch.float64, requires_grad=True)
        whole = torch.randn(size, *shape, dtype=torch.float64, requires_grad=True)
        for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
            assert check(lambda x: scatter_rows(x, places, size) ** 2, x)
            assert check(lambda whole: gather_rows(whole, places) ** 2, whole)

    @pytest.mark.parametrize("axis", [0, -1])
    def test_one_call_for_several(self, size: int, shape: tuple[int, ...], axis: int) -> None:
        """As torch.func.vmap does, over any axis, with gradients."""
        places = PLACES[size]
        several = torch.randn(4, 3, *shape, requires_grad=True)

        def there_and_back(x: Tensor) -> Tensor:
            return gather_rows(scatter_rows(x, places, size) ** 2, places)

        got = torch.func.vmap(there_and_back, in_dims=axis)(several.movedim(0, axis))
        assert torch.equal(got, several**2)
        (grad,) = torch.autograd.grad(got.sum(), several)
        assert torch.equal(grad, 2 * several)
