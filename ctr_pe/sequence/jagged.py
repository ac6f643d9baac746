"""Histories of different lengths as tensors: padded, packed, or in blocks of rows of like length.

B batch, L history slots, N real items of the batch, R rows of a block, W its slots, n its real items.

Padded histories are (B, L, ...) with padding anywhere, packed ones (N, ...): the real items alone, row by row. Most
slots of a batch are padding, so models look up, score and pool packed items. Attention pads them again in blocks: rows
of like length, the newest item in the last slot.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor

from ctr_pe.sequence.transfer import to_device
from ctr_pe.utils.lazy_property import lazy_property

NARROWEST = 4
"""Shorter rows are of like length: smaller blocks lose more to the overhead of calls."""
SLOT = 24
"""Pairs that a slot counts for where each row has one query."""


class _Gather(torch.autograd.Function):
    """By hand, because the gradient of ``index_select`` is added up, as if a place could be taken twice."""

    @staticmethod
    def forward(x: Tensor, places: Tensor) -> Tensor:
        return x.index_select(0, places)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.size = inputs[0].shape[0]
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return scatter_rows(grad, places, ctx.size), None

    @staticmethod
    def vmap(info: Any, axes: tuple[int, None], x: Tensor, places: Tensor) -> tuple[Tensor, int]:
        return gather_rows(x.movedim(axes[0], 1), places), 1


class _Scatter(torch.autograd.Function):
    """By hand, because ``index_copy`` copies the zeros first, and ``index_copy_`` is a loop in ``torch.func.vmap``."""

    @staticmethod
    def forward(x: Tensor, places: Tensor, size: int) -> Tensor:
        new = x.new_empty if x.shape[0] == size else x.new_zeros
        return new(size, *x.shape[1:]).index_copy_(0, places, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gather_rows(grad, places), None, None

    @staticmethod
    def vmap(info: Any, axes: tuple[int, None, None], x: Tensor, places: Tensor, size: int) -> tuple[Tensor, int]:
        return scatter_rows(x.movedim(axes[0], 1), places, size), 1


def gather_rows(x: Tensor, places: Tensor) -> Tensor:
    """(any, ...) -> (n, ...): the entries at ``places`` (n,), of which no two are the same."""
    found: Tensor = _Gather.apply(x, places)  # type: ignore[no-untyped-call]
    return found


def scatter_rows(x: Tensor, places: Tensor, size: int) -> Tensor:
    """(n, ...) -> (size, ...): the entries at ``places`` (n,), of which no two are the same, and zeros elsewhere."""
    found: Tensor = _Scatter.apply(x, places, size)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True)
class Layout:
    """Which rows share a block: those of ``like`` length, the longest at most half longer than the shortest or
    ``NARROWEST`` items long, or any; ``largest``: (query, key) pairs of a block per head."""

    like: bool
    largest: int

    @classmethod
    def on(cls, device: torch.device) -> Layout:
        """On a CPU larger blocks do not fit the cache. Elsewhere a block costs its launches, whatever its size, until
        the pairs of a head take 64 MB."""
        return cls(True, 180_000) if device.type == "cpu" else cls(False, 2**24)


@dataclass(frozen=True, eq=False)
class Padded:
    """Histories of different lengths in slots.

    ``mask`` (B, L) bool: True = real item. ``known``: the same on the CPU, if it is known there already.
    """

    mask: Tensor
    known: Tensor | None = field(default=None, kw_only=True)
    every_slot: ClassVar[bool] = False
    """Whether padding counts as items, see :mod:`ctr_pe.sequence.dense`."""

    # Sizes and indices are computed on the CPU: to ask an accelerator for them would make it run empty.

    @lazy_property
    def mask_here(self) -> Tensor:
        """The mask on the CPU."""
        return self.mask.cpu() if self.known is None else self.known

    @lazy_property
    def count_here(self) -> Tensor:
        """:attr:`count` on the CPU."""
        return self.count if self.mask.is_cpu else self.mask_here.sum(1)

    def to_device(self, x: Tensor) -> Tensor:
        """From the CPU to where the mask is."""
        return to_device(x, self.mask.device)

    @lazy_property
    def count(self) -> Tensor:
        """(B,) int64: real items per row."""
        return self.mask.sum(1)

    def pack(self, padded: Tensor) -> Tensor:
        """(B, L, ...) -> the real items (N, ...), row by row."""
        flat = padded.flatten(0, 1)
        return flat if len(flat) == len(self._slots) else gather_rows(flat, self._slots)

    def unpack(self, packed: Tensor) -> Tensor:
        """(N, ...) -> (B, L, ...): real items in their slots, zero at padding."""
        if len(packed) < self.mask.numel():
            packed = scatter_rows(packed, self._slots, self.mask.numel())
        return packed.view(*self.mask.shape, *packed.shape[1:])

    def places(self, queries: int = 1) -> tuple[Tensor, ...]:
        """Row, query and slot, int64 tensors, of the pairs of each of so many queries of a row and its real items."""
        real = self.mask_here.unsqueeze(1).expand(-1, queries, -1)
        return tuple(map(self.to_device, real.nonzero(as_tuple=True)))

    def lengths(self) -> tuple[Tensor, Tensor]:
        """The different lengths of histories (U,), and which of them each row has (B,)."""
        lengths, row = torch.unique(self.count_here, return_inverse=True)
        return self.to_device(lengths), self.to_device(row)

    @lazy_property
    def _slots(self) -> Tensor:
        return self.to_device(self._slots_here)

    @lazy_property
    def _slots_here(self) -> Tensor:
        return self.mask_here.flatten().nonzero().squeeze(1)


@dataclass(frozen=True, eq=False)
class Block(Padded):
    """Rows of a batch, ``mask`` (R, W), padded so that the newest item of each is in the last of W slots, without gaps.

    ``rows`` (R,) int64: which rows of the batch. ``items`` (n,) int64: indices of the block's items among the packed
    items of the batch. ``pack`` and ``unpack`` have the block's items alone, in the order of ``items``.
    """

    rows: Tensor
    items: Tensor

    @lazy_property
    def distance(self) -> Tensor:
        """(W,) int64: W, ..., 2, 1, the distance of each slot's item from the target."""
        return torch.arange(self.mask.shape[1], 0, -1, device=self.mask.device)

    def pad(self, packed: Tensor) -> Tensor:
        """Packed items of the batch (N, ...) -> (R, W, ...), zero at padding."""
        return self.unpack(gather_rows(packed, self.items))


class Whole(Block):
    """All rows of a batch, in their order."""

    def pad(self, packed: Tensor) -> Tensor:
        return self.unpack(packed)


class Blocks(list[Block]):
    """Blocks that together have every row with items, once; a row without is in none, or in one of all rows."""

    def pad(self, packed: Tensor) -> list[Tensor]:
        """Packed items of the batch (N, ...) -> (R, W, ...) of each block, zero at padding."""
        parts = torch.split(scatter_rows(packed, self._places, sum(self._sizes)), self._sizes)
        return [part.view(*block.mask.shape, *part.shape[1:]) for block, part in zip(self, parts, strict=True)]

    def pack(self, padded: list[Tensor]) -> Tensor:
        """(R, W, ...) of each block -> packed items of the batch (N, ...)."""
        return gather_rows(torch.cat([part.flatten(0, 1) for part in padded]), self._places)

    def split_rows(self, per_row: Tensor) -> list[Tensor]:
        """(B, ...) -> (R, ...) of each block."""
        return list(torch.split(gather_rows(per_row, self._rows), [len(block.rows) for block in self]))

    def join_rows(self, parts: list[Tensor]) -> Tensor:
        """(R, ...) of each block -> (B, ...); every row is in one."""
        return scatter_rows(torch.cat(parts), self._rows, len(self._rows))

    def pad_once(self, key: Hashable, packed: Callable[[], Tensor]) -> list[Tensor]:
        """:meth:`pad`, computed at the first call with a key."""
        if key not in self._padded:
            self._padded[key] = self.pad(packed())
        return self._padded[key]

    @lazy_property
    def _padded(self) -> dict[Hashable, list[Tensor]]:
        return {}

    @lazy_property
    def _sizes(self) -> list[int]:
        return [block.mask.numel() for block in self]

    @lazy_property
    def _places(self) -> Tensor:
        """(N,) int64: of each packed item, its slot in the slots of all blocks, one block after the other."""
        starts = accumulate(self._sizes[:-1], initial=0)
        slots = torch.cat([block._slots + start for block, start in zip(self, starts, strict=True)])
        return scatter_rows(slots, torch.cat([block.items for block in self]), len(slots))

    @lazy_property
    def _rows(self) -> Tensor:
        return torch.cat([block.rows for block in self])


class OneBlock(Blocks):
    """A list of one block, which has all rows in their order."""

    def pad(self, packed: Tensor) -> list[Tensor]:
        return [self[0].unpack(packed)]

    def pack(self, padded: list[Tensor]) -> Tensor:
        return self[0].pack(padded[0])

    def split_rows(self, per_row: Tensor) -> list[Tensor]:
        return [per_row]

    def join_rows(self, parts: list[Tensor]) -> Tensor:
        return parts[0]


@dataclass(frozen=True, eq=False)
class Ragged(Padded):
    """A batch of histories of different lengths.

    ``mask`` (B, L) bool: True = real item. Real items are in time order, oldest first; padding may lie anywhere.
    ``layout``: of its blocks, None for that of the device that the mask is on.
    """

    layout: Layout | None = field(default=None, kw_only=True)

    def plan(self) -> None:
        """Compute all that attention asks for, so that it can be sent where the batch goes
        (:mod:`ctr_pe.sequence.transfer`)."""
        for blocks in (self.whole, self.blocks, self.newest_blocks):
            for block in blocks:
                _ = block.mask_here, block._slots, block.distance
        _ = self.mask_here, self.count_here, self._slots, self.real, self.newest, self._with_last

    @lazy_property
    def real(self) -> tuple[Tensor, Tensor]:
        """Row and slot (N,), (N,) int64 of every real item, row by row."""
        rows, slots = self.mask_here.nonzero(as_tuple=True)
        return self.to_device(rows), self.to_device(slots)

    @lazy_property
    def newest(self) -> Tensor:
        """(B,) int64: index of each row's newest item among the packed ones. A row needs to have one."""
        return self.count.cumsum(0) - 1

    def like(self, history: Tensor, per_slot: Tensor) -> Tensor:
        """Values per slot (B, L) in the layout of ``history``: unchanged for (B, L, D), packed for (N, D)."""
        return per_slot if history.dim() == 3 else self.pack(per_slot)

    def append(self, packed: Tensor, last: Tensor) -> Tensor:
        """(N, ...) of items and (B, ...) of targets -> packed (N + B, ...): each row's items, then its target."""
        return gather_rows(torch.cat([packed, last]), self._with_last)

    def drop_last(self, packed: Tensor) -> Tensor:
        """What :meth:`append` made of items and targets: packed (N, ...) -> (N - B, ...) without each row's newest."""
        return gather_rows(packed, (self.pack(self._newer) > 0).nonzero().squeeze(1))

    def newest_of(self, packed: Tensor) -> Tensor:
        """(N, ...) -> those of each row's newest item (B, ...), zero for an empty history."""
        rows = self.count_here.nonzero().squeeze(1)
        newest = gather_rows(packed, self.to_device((self.count_here.cumsum(0) - 1)[rows]))
        return scatter_rows(newest, self.to_device(rows), self.mask.shape[0])

    def total(self, packed: Tensor) -> Tensor:
        """(N, ...) -> their sum per row (B, ...)."""
        rows, _ = self.real
        return packed.new_zeros(self.mask.shape[0], *packed.shape[1:]).index_add(0, rows, packed)

    def in_last(self, packed: Tensor, slots: int) -> Tensor:
        """(N, ...) -> (B, slots, ...): the newest items of each row in the last slots, zeros where it is short."""
        newer = self.count_here.unsqueeze(1) - self.mask_here.cumsum(1)
        rows, column = self.mask_here.nonzero(as_tuple=True)
        slot = slots - 1 - newer[rows, column]
        kept = (slot >= 0).nonzero().squeeze(1)
        placed = packed.new_zeros(self.mask.shape[0], slots, *packed.shape[1:])
        where = (self.to_device(rows[kept]), self.to_device(slot[kept]))
        return placed.index_put(where, packed.index_select(0, self.to_device(kept)))

    @lazy_property
    def whole(self) -> Blocks:
        """All rows in one block, in their order, as wide as the longest history."""
        rows, items = torch.arange(len(self.mask)), torch.arange(len(self._slots_here))
        return OneBlock([self._block(Whole, rows, items, self._longest)])

    @lazy_property
    def blocks(self) -> Blocks:
        """Every row that has items, in blocks of like length: attention costs the square of the longest in a block."""
        return self._blocks(lambda width: width**2)

    @lazy_property
    def newest_blocks(self) -> Blocks:
        """The same for one query per row, whose blocks have more rows."""
        return self._blocks(lambda width: width * SLOT)

    def _blocks(self, cost: Callable[[int], int]) -> Blocks:
        layout = self.layout or Layout.on(self.mask.device)
        if not layout.like and 0 < len(self.mask) * cost(self._longest) <= layout.largest:
            return self.whole
        order = self.count_here.argsort(stable=True)
        counts = self.count_here[order].tolist()
        start = self.count_here.cumsum(0)[order] - self.count_here[order]  # of each row's first item among the packed
        blocks, first, last = Blocks(), sum(count == 0 for count in counts), len(counts)
        while first < last:
            widest = max(NARROWEST, counts[first] + counts[first] // 2) if layout.like else counts[-1]
            stop = first + 1
            while stop < last and counts[stop] <= widest and (stop + 1 - first) * cost(counts[stop]) <= layout.largest:
                stop += 1
            rows, sizes = order[first:stop], self.count_here[order[first:stop]]
            shift = start[first:stop] - sizes.cumsum(0) + sizes
            n = sum(counts[first:stop])
            items = torch.arange(n) + shift.repeat_interleave(sizes, output_size=n)
            blocks.append(self._block(Block, rows, items, counts[stop - 1]))
            first = stop
        return blocks

    def _block(self, kind: type[Block], rows: Tensor, items: Tensor, width: int) -> Block:
        distance = torch.arange(width, 0, -1)
        mask = distance <= self.count_here[rows].unsqueeze(1)
        return kind(self.to_device(mask), self.to_device(rows), self.to_device(items), known=mask)

    @lazy_property
    def _longest(self) -> int:
        return int(self.count_here.max()) if len(self.mask) else 0

    @lazy_property
    def _newer(self) -> Tensor:
        """(B, L) int64: how many items of the row are newer."""
        return self.count.unsqueeze(1) - self.mask.cumsum(1)

    @lazy_property
    def _with_last(self) -> Tensor:
        rows, _ = self.real
        index = torch.arange(len(rows) + len(self.mask), device=rows.device)
        ends = self.count.cumsum(0) + index[: len(self.mask)]
        return scatter_rows(index, torch.cat([index[: len(rows)] + rows, ends]), len(index))


def as_numbers(mask: Tensor) -> Tensor:
    """A bool as 1 and 0 in float32; by way of int8, which is many times as fast in torch."""
    return (mask if torch.compiler.is_compiling() else mask.view(torch.int8)).to(torch.float32)


def repeated(per_row: Tensor, times: int) -> Tensor:
    """Values per row (B, ...) -> (B times, ...), each so many times in turn."""
    return per_row.unsqueeze(1).expand(-1, times, *per_row.shape[1:]).flatten(0, 1)


def per_target(per_row: Tensor, target: Tensor) -> Tensor:
    """Values per row (B,), as they broadcast against the leading axes of targets (B, D) or (B, K, D)."""
    return per_row.view(-1, *[1] * (target.dim() - 2))
