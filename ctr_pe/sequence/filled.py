"""Packed histories filled up to sizes that many batches share, so that a CUDA graph of one batch fits the next.

After the rows of the batch come rows that only fill up: they have the items that are missing, and nothing that is
computed of them is used. No size and no index depends on what the tensors hold, and all indices are computed where the
lengths are: by an accelerator itself, which a plan made on the CPU would have to wait for.

B rows with those that fill up, N items likewise, W slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from ctr_pe.sequence.jagged import Blocks, Jagged, gather_rows, scatter_rows
from ctr_pe.sequence.positions import Positions, Where
from ctr_pe.utils.lazy_property import lazy_property

SHARE = 16
"""A size is rounded up to a multiple of at least this part of it, so that at most so much is computed in vain."""


def rounded(size: int) -> int:
    """``size`` or the next of the sizes that are shared, of which there are ``SHARE`` from one power of two to the
    next."""
    step = max(1, (1 << size.bit_length() - 1) // SHARE) if size > 0 else 1
    return -(-size // step) * step


def rows_to_fill(items: int, slots: int) -> int:
    """How many rows of at most ``slots`` items fill any number of items up that is rounded to ``items``."""
    step = max(1, (1 << items.bit_length() - 1) // SHARE) if items > 0 else 1
    return -(-step // max(1, slots))


def filling(missing: int, rows: int, slots: int) -> Tensor:
    """(rows,) int64: lengths of rows that have so many items together, at most ``slots`` each."""
    return (missing - slots * torch.arange(rows)).clamp(0, slots)


Parts = tuple[tuple[int, int], ...]


def like_length(lengths: Tensor, slots: int, before: list[Parts]) -> Parts:
    """Rows and slots of the blocks of self-attention: half of all rows, which are the shortest, a quarter, and so on.
    Nothing where one block of all rows takes less than ``SAVED`` times the pairs.

    Args:
        lengths: (B,) int64, on the CPU.
        slots: of the longest.
        before: what was found for batches of this kind, of which the first is taken that fits and has at most ``VAIN``
            times the pairs; what is new is added.
    """
    if len(lengths) < 2:
        return ()
    rows: list[int] = []
    ordered = np.sort(lengths.numpy())
    for _ in range(HALVINGS):
        rows.append((len(ordered) - sum(rows)) // 2)
    rows = [*filter(None, rows), len(ordered) - sum(rows)]
    longest = [max(1, int(ordered[stop - 1])) for stop in accumulate(rows)]
    wanted = tuple(zip(rows, longest, strict=True))
    new = tuple((count, min(_coarse(size), slots)) for count, size in wanted)
    if SAVED * _pairs(new) > len(ordered) * slots**2:
        return ()
    for parts in before:
        fits = all(has >= size for (_, has), size in zip(parts, longest, strict=True))
        if fits and _pairs(parts) <= VAIN * _pairs(wanted):
            return parts
    before.append(new)
    return new


HALVINGS, SAVED, VAIN = 5, 2, 2


def _coarse(size: int) -> int:
    """One of two sizes from one power of two to the next."""
    power = 1 << size.bit_length() - 1
    return next(one for one in (power, power * 3 // 2, power * 2) if one >= size)


def _pairs(parts: Parts) -> int:
    return sum(rows * slots**2 for rows, slots in parts)


class _OnDevice(Jagged):
    """Masks and lengths are there alone."""

    @lazy_property
    def mask_cpu(self) -> NoReturn:
        raise TypeError("masks of a filled batch are on its device alone: a CUDA graph would keep those of one batch")

    @lazy_property
    def lengths_cpu(self) -> NoReturn:
        raise TypeError("lengths of a filled batch are on its device alone: a CUDA graph would keep those of one batch")

    def distinct_lengths(self) -> tuple[Tensor, Tensor]:
        return self.lengths, torch.arange(len(self.lengths), device=self.lengths.device)


class BlocksOfLikeLength(Blocks):
    """Those of a filled batch that its ``parts`` tell, rows in order of length."""

    def __init__(self, positions: Filled) -> None:
        lengths = positions.lengths
        self.positions, self.order, ends, start = positions, lengths.argsort(stable=True), [], 0
        counts = [count for count, _ in positions.parts]
        for rows, (count, slots) in zip(torch.split(self.order, counts), positions.parts, strict=True):
            within = lengths.index_select(0, rows)
            mask = torch.arange(slots, 0, -1, device=lengths.device) <= within.unsqueeze(1)
            self.append(_OnDevice(mask, within, batch_rows=rows))
            ends.append(torch.arange(1, count + 1, device=lengths.device) * slots + start)
            start += count * slots
        self._ends = torch.cat(ends)  # of each row, among the slots of all blocks

    @lazy_property
    def _item_slots(self) -> Tensor:
        at = self.positions
        last = scatter_rows(self._ends, self.order, len(self.order)) - at.lengths.cumsum(0)
        return last.index_select(0, at.item_rows) + at.items

    @lazy_property
    def _rows(self) -> Tensor:
        return self.order


@dataclass(frozen=True, eq=False)
class Filled(_OnDevice, Positions):
    """Positions of a filled batch; made by :meth:`of`.

    ``count``: N. ``real_rows``: how many rows are of the batch itself, the first ones; None with targets. ``parts``: of
    the blocks of self-attention, see :func:`like_length`; () for one block of all rows.
    """

    count: int = field(default=0, kw_only=True)
    real_rows: int | None = field(default=None, kw_only=True)
    parts: Parts = field(default=(), kw_only=True)

    @classmethod
    def of(
        cls,
        lengths: Tensor,
        items: int,
        slots: int,
        age: Tensor | None = None,
        real_rows: int | None = None,
        parts: Parts = (),
    ) -> Filled:
        """Positions of packed histories.

        Args:
            lengths: (B,) int64, items per row, at most ``slots``; ``items`` together.
            age: (N,) int64, seconds from each event to the request.
            real_rows: rows of the batch itself, the first.
            parts: rows and slots of the blocks of self-attention, at least as many as the rows in order of length need.
        """
        distance = torch.arange(slots, 0, -1, device=lengths.device)
        mask = distance <= lengths.unsqueeze(1)
        found = cls(mask, lengths, distance * mask, count=items, real_rows=real_rows, parts=parts)
        return found if age is None else replace(found, age=found.unpack(age.long()))

    @lazy_property
    def real(self) -> Tensor | None:
        return None if self.real_rows is None else self.item_rows < self.real_rows

    @lazy_property
    def items(self) -> Tensor:
        return torch.arange(self.count, device=self.lengths.device)

    @lazy_property
    def item_rows(self) -> Tensor:
        return self.rows.repeat_interleave(self.lengths, output_size=self.count)

    @lazy_property
    def _slots(self) -> Tensor:
        """(N,) int64: of each packed item, its index among the B W slots; the newest is in the last."""
        slots = self.mask.shape[1]
        before = (self.rows + 1) * slots - self.lengths.cumsum(0)
        return self.items + before.index_select(0, self.item_rows)

    def real_pairs(self, queries: int = 1) -> tuple[Tensor, ...]:
        if queries != 1:
            raise NotImplementedError("a filled batch has one target per row")
        return self.item_rows, torch.zeros_like(self.items), self._slots % self.mask.shape[1]

    @property
    def no_row_is_empty(self) -> bool:
        return False

    def newest_of(self, packed: Tensor) -> Tensor:
        newest = packed.index_select(0, self.newest.clamp(min=0))  # of rows without items that of another
        return newest.where(self.lengths.view(-1, *[1] * (packed.dim() - 1)) > 0, 0)

    def drop_last(self, packed: Tensor) -> Tensor:
        """Of positions :meth:`with_target`, whose rows all have an item."""
        older = self.count - len(self.lengths)
        rows = self.rows.repeat_interleave(self.lengths - 1, output_size=older)
        return gather_rows(packed, self.items[:older] + rows)

    def in_last(self, packed: Tensor, slots: int) -> Tensor:
        padded = self.unpack(packed)
        return torch.cat([padded.new_zeros(padded.shape[0], slots, *padded.shape[2:]), padded], 1)[:, -slots:]

    def by_step(self, packed: Tensor) -> Tensor:
        """(N, ...) -> (W B, ...): the oldest item of every row, then the second oldest, zeros where there is none."""
        return scatter_rows(packed, self._step_places, self.mask.numel())

    def from_steps(self, by_step: Tensor) -> Tensor:
        """What :meth:`by_step` gave, or as many states of another width -> packed (N, ...)."""
        return gather_rows(by_step, self._step_places)

    @lazy_property
    def _step_places(self) -> Tensor:
        starts = self.lengths.cumsum(0) - self.lengths
        older = self.items - starts.index_select(0, self.item_rows)
        return older * len(self.lengths) + self.item_rows

    @lazy_property
    def whole(self) -> Blocks:
        return Blocks([self])

    @lazy_property
    def blocks(self) -> Blocks:
        return BlocksOfLikeLength(self) if self.parts else self.whole

    @property
    def newest_blocks(self) -> Blocks:
        return self.blocks

    def _keys(self, block: Jagged) -> Where:
        if self.age is None or block is self:
            return super()._keys(block)
        age = self.age.index_select(0, block.rows)[:, -block.mask.shape[1] :].unsqueeze(1)
        return Where(block.slot_distance[None, None], age)

    @lazy_property
    def _and_target(self) -> Filled:
        rows, slots = self.mask.shape
        age = None
        if self.age is not None:
            age = self.append(self.pack(self.age), self.age.new_zeros(rows))
        parts = tuple((count, size + 1) for count, size in self.parts)
        return Filled.of(self.lengths + 1, self.count + rows, slots + 1, age, parts=parts)


__all__ = ["Filled", "Parts", "filling", "like_length", "rounded", "rows_to_fill"]
