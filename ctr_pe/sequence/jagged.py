"""Histories of different lengths as tensors: packed, padded, or in blocks of rows of like length.

B batch, L history slots, N real items of the batch, R rows of a block, W its slots, n its real items.

Padded histories are (B, L, ...) with padding anywhere, packed ones (N, ...): the real items alone, row by row. Most
slots of a batch are padding, so models look up, score and pool packed items. Attention pads them again in blocks: rows
of like length, the newest item in the last slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor

from ctr_pe.sequence.transfer import to_device
from ctr_pe.utils.autograd import apply
from ctr_pe.utils.lazy_property import lazy_property

NARROWEST = 4
"""Shorter rows are of like length: smaller blocks lose more to the overhead of calls."""
SLOT = 24
"""Pairs that a slot counts for where each row has one query."""


class _Gather(torch.autograd.Function):
    """By hand, because the gradient of ``index_select`` is added up, as if an index could be there twice."""

    @staticmethod
    def forward(x: Tensor, index: Tensor) -> Tensor:
        return x.index_select(0, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.size = inputs[0].shape[0]
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return scatter_rows(grad, index, ctx.size), None

    @staticmethod
    def vmap(info: Any, axes: tuple[int, None], x: Tensor, index: Tensor) -> tuple[Tensor, int]:
        return gather_rows(x.movedim(axes[0], 1), index), 1


class _Scatter(torch.autograd.Function):
    """By hand, because ``index_copy`` copies the zeros first, and ``index_copy_`` is a loop in ``torch.func.vmap``."""

    @staticmethod
    def forward(x: Tensor, index: Tensor, size: int) -> Tensor:
        new = x.new_empty if x.shape[0] == size else x.new_zeros
        return new(size, *x.shape[1:]).index_copy_(0, index, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return gather_rows(grad, index), None, None

    @staticmethod
    def vmap(info: Any, axes: tuple[int, None, None], x: Tensor, index: Tensor, size: int) -> tuple[Tensor, int]:
        return scatter_rows(x.movedim(axes[0], 1), index, size), 1


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """(any, ...) -> (n, ...): the entries at ``index`` (n,), of which no two are the same."""
    found: Tensor = apply(_Gather, x, index)
    return found


def scatter_rows(x: Tensor, index: Tensor, size: int) -> Tensor:
    """(n, ...) -> (size, ...): the entries at ``index`` (n,), of which no two are the same, and zeros elsewhere."""
    found: Tensor = apply(_Scatter, x, index, size)
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
class Jagged:
    """A batch of histories, or a block of its rows.

    ``mask`` (B, L) bool: True = real item, where histories are padded. Real items are in time order, oldest first;
    padding may lie anywhere; in a block the newest item is in the last slot and there are no gaps.
    ``lengths`` (B,) int64: real items per row.
    ``host``: mask and lengths on the CPU, where they are on another device and known here too.
    ``layout``: of the batch's blocks, None for that of the device that the mask is on.
    ``batch_rows`` (R,), ``batch_items`` (n,) int64: of a block, which rows of the batch, and which of its packed items;
    None for all, in their order. ``pack`` and ``unpack`` have the block's items alone.
    """

    mask: Tensor
    lengths: Tensor
    host: tuple[Tensor, Tensor] | None = field(default=None, kw_only=True)
    layout: Layout | None = field(default=None, kw_only=True)
    batch_rows: Tensor | None = field(default=None, kw_only=True)
    batch_items: Tensor | None = field(default=None, kw_only=True)
    dense: ClassVar[bool] = False
    """Whether padding counts as items, see :mod:`ctr_pe.sequence.dense`."""
    real: ClassVar[Any] = None
    """(N,) bool: the items that do not only fill up, see :mod:`ctr_pe.sequence.filled`; None for all."""
    stays_on_cpu: ClassVar[tuple[str, ...]] = ("host", "mask_cpu", "lengths_cpu", "_slots_cpu")
    """Fields that a :class:`~ctr_pe.sequence.transfer.PinnedTransfer` leaves where they are."""

    # Sizes and indices are computed on the CPU: to ask an accelerator for them would make it run empty.

    @lazy_property
    def mask_cpu(self) -> Tensor:
        return self.mask.cpu() if self.host is None else self.host[0]

    @lazy_property
    def lengths_cpu(self) -> Tensor:
        return self.lengths.cpu() if self.host is None else self.host[1]

    def to_device(self, x: Tensor) -> Tensor:
        """From the CPU to where the mask is."""
        return to_device(x, self.mask.device)

    def plan(self) -> None:
        """Compute all that attention asks for, so that it can be sent where the batch goes
        (:mod:`ctr_pe.sequence.transfer`)."""
        for blocks in (self.whole, self.blocks, self.newest_blocks):
            for block in blocks:
                _ = block.mask_cpu, block.lengths_cpu, block._slots, block.slot_distance
        _ = self.mask_cpu, self.lengths_cpu, self._slots, self.item_rows, self.newest, self._with_last

    # Packed and padded.

    def pack(self, padded: Tensor) -> Tensor:
        """(B, L, ...) -> the real items (N, ...), row by row."""
        flat = padded.flatten(0, 1)
        return flat if len(flat) == len(self._slots) else gather_rows(flat, self._slots)

    def unpack(self, packed: Tensor) -> Tensor:
        """(N, ...) -> (B, L, ...): real items in their slots, zero at padding."""
        if len(packed) < self.mask.numel():
            packed = scatter_rows(packed, self._slots, self.mask.numel())
        return packed.view(*self.mask.shape, *packed.shape[1:])

    def pad(self, packed: Tensor) -> Tensor:
        """Packed items of the batch (N, ...) -> those of the block (R, W, ...), zero at padding."""
        return self.unpack(packed if self.batch_items is None else gather_rows(packed, self.batch_items))

    def like(self, history: Tensor, per_slot: Tensor) -> Tensor:
        """Values per slot (B, L) in the layout of ``history``: unchanged for (B, L, D), packed for (N, D)."""
        return per_slot if history.dim() == 3 else self.pack(per_slot)

    @lazy_property
    def rows(self) -> Tensor:
        """(R,) int64: index of each row in the batch. An exported graph keeps a shape as it is, and no ``len``."""
        return torch.arange(self.mask.shape[0], device=self.mask.device) if self.batch_rows is None else self.batch_rows

    @lazy_property
    def items(self) -> Tensor:
        """(n,) int64: index of each item among the packed items of the batch."""
        return torch.arange(len(self._slots), device=self.mask.device) if self.batch_items is None else self.batch_items

    @lazy_property
    def slot_distance(self) -> Tensor:
        """(W,) int64: W, ..., 2, 1, in a block the distance of each slot's item from the target."""
        return torch.arange(self.mask.shape[1], 0, -1, device=self.mask.device)

    @lazy_property
    def item_rows(self) -> Tensor:
        """(N,) int64: the row of each packed item."""
        rows = torch.arange(len(self.mask))
        return self.to_device(rows.repeat_interleave(self.lengths_cpu, output_size=len(self._slots_cpu)))

    def real_pairs(self, queries: int = 1) -> tuple[Tensor, ...]:
        """Row, query and slot, int64 tensors, of the pairs of each of so many queries of a row and its real items."""
        real = self.mask_cpu.unsqueeze(1).expand(-1, queries, -1)
        return tuple(map(self.to_device, real.nonzero(as_tuple=True)))

    def distinct_lengths(self) -> tuple[Tensor, Tensor]:
        """The different lengths of histories (U,), and which of them each row has (B,)."""
        lengths, row = torch.unique(self.lengths_cpu, return_inverse=True)
        return self.to_device(lengths), self.to_device(row)

    # Rows and their newest items.

    @lazy_property
    def newest(self) -> Tensor:
        """(B,) int64: index of each row's newest item among the packed ones. A row needs to have one."""
        return self.lengths.cumsum(0) - 1

    @property
    def no_row_is_empty(self) -> bool:
        """Whether every row has an item; False where that is not known before it is computed."""
        return bool((self.lengths_cpu > 0).all())

    def append(self, packed: Tensor, last: Tensor) -> Tensor:
        """(N, ...) of items and (B, ...) of targets -> packed (N + B, ...): each row's items, then its target."""
        return gather_rows(torch.cat([packed, last]), self._with_last)

    def drop_last(self, packed: Tensor) -> Tensor:
        """What :meth:`append` made of items and targets: packed (N, ...) -> (N - B, ...) without each row's newest."""
        older = torch.ones(len(packed), dtype=torch.bool, device=packed.device).index_fill(0, self.newest, False)
        return gather_rows(packed, older.nonzero().squeeze(1))

    def newest_of(self, packed: Tensor) -> Tensor:
        """(N, ...) -> those of each row's newest item (B, ...), zero for an empty history."""
        rows = self.lengths_cpu.nonzero().squeeze(1)
        newest = gather_rows(packed, self.to_device((self.lengths_cpu.cumsum(0) - 1)[rows]))
        return scatter_rows(newest, self.to_device(rows), self.mask.shape[0])

    def total(self, packed: Tensor) -> Tensor:
        """(N, ...) -> their sum per row (B, ...)."""
        return packed.new_zeros(self.mask.shape[0], *packed.shape[1:]).index_add(0, self.item_rows, packed)

    def in_last(self, packed: Tensor, slots: int) -> Tensor:
        """(N, ...) -> (B, slots, ...): the newest items of each row in the last slots, zeros where it is short."""
        rows = torch.arange(len(self.mask)).repeat_interleave(self.lengths_cpu)
        slot = slots + torch.arange(len(rows)) - self.lengths_cpu.cumsum(0)[rows]
        kept = (slot >= 0).nonzero().squeeze(1)
        padded = packed.new_zeros(self.mask.shape[0], slots, *packed.shape[1:])
        where = (self.to_device(rows[kept]), self.to_device(slot[kept]))
        return padded.index_put(where, packed.index_select(0, self.to_device(kept)))

    # Blocks.

    @lazy_property
    def whole(self) -> Blocks:
        """All rows in one block, in their order, as wide as the longest history."""
        return Blocks([self._block(None, None, self._longest)])

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
        order = self.lengths_cpu.argsort(stable=True)
        lengths = self.lengths_cpu[order]
        counts = lengths.tolist()
        start = self.lengths_cpu.cumsum(0)[order] - lengths  # of each row's first item among the packed
        blocks, first, last = Blocks(), sum(count == 0 for count in counts), len(counts)
        while first < last:
            widest = max(NARROWEST, counts[first] + counts[first] // 2) if layout.like else counts[-1]
            stop = first + 1
            while stop < last and counts[stop] <= widest and (stop + 1 - first) * cost(counts[stop]) <= layout.largest:
                stop += 1
            sizes = lengths[first:stop]
            shift = start[first:stop] - sizes.cumsum(0) + sizes
            n = sum(counts[first:stop])
            items = torch.arange(n) + shift.repeat_interleave(sizes, output_size=n)
            blocks.append(self._block(order[first:stop], items, counts[stop - 1]))
            first = stop
        return blocks

    def _block(self, rows: Tensor | None, items: Tensor | None, width: int) -> Jagged:
        lengths = self.lengths_cpu if rows is None else self.lengths_cpu[rows]
        mask = torch.arange(width, 0, -1) <= lengths.unsqueeze(1)
        rows, items = (None if index is None else self.to_device(index) for index in (rows, items))
        there = self.to_device(mask), self.to_device(lengths)
        return Jagged(*there, host=(mask, lengths), batch_rows=rows, batch_items=items)

    @lazy_property
    def _longest(self) -> int:
        return int(self.lengths_cpu.max()) if len(self.mask) else 0

    @lazy_property
    def _slots(self) -> Tensor:
        return self.to_device(self._slots_cpu)

    @lazy_property
    def _slots_cpu(self) -> Tensor:
        """(N,) int64: of each packed item, its index among the B L slots."""
        return self.mask_cpu.flatten().nonzero().squeeze(1)

    @lazy_property
    def _with_last(self) -> Tensor:
        rows = self.item_rows
        index = torch.arange(len(rows) + len(self.mask), device=rows.device)
        ends = self.lengths.cumsum(0) + index[: len(self.mask)]
        return scatter_rows(index, torch.cat([index[: len(rows)] + rows, ends]), len(index))


class Blocks(list[Jagged]):
    """Blocks that together have every row with items, once; a row without is in none, or in one of all rows."""

    @property
    def whole(self) -> bool:
        """Whether there is one block, which has all rows in their order."""
        return len(self) == 1 and self[0].batch_items is None

    def pad(self, packed: Tensor) -> list[Tensor]:
        """Packed items of the batch (N, ...) -> (R, W, ...) of each block, zero at padding."""
        if self.whole:
            return [self[0].unpack(packed)]
        parts = torch.split(scatter_rows(packed, self._item_slots, sum(self._sizes)), self._sizes)
        return [part.view(*block.mask.shape, *part.shape[1:]) for block, part in zip(self, parts, strict=True)]

    def pack(self, padded: list[Tensor]) -> Tensor:
        """(R, W, ...) of each block -> packed items of the batch (N, ...)."""
        if self.whole:
            return self[0].pack(padded[0])
        return gather_rows(torch.cat([part.flatten(0, 1) for part in padded]), self._item_slots)

    def split_rows(self, per_row: Tensor) -> list[Tensor]:
        """(B, ...) -> (R, ...) of each block."""
        if self.whole:
            return [per_row]
        return list(torch.split(gather_rows(per_row, self._rows), [len(block.mask) for block in self]))

    def join_rows(self, parts: list[Tensor]) -> Tensor:
        """(R, ...) of each block -> (B, ...); every row is in one."""
        return parts[0] if self.whole else scatter_rows(torch.cat(parts), self._rows, len(self._rows))

    @lazy_property
    def _sizes(self) -> list[int]:
        return [block.mask.numel() for block in self]

    @lazy_property
    def _item_slots(self) -> Tensor:
        """(N,) int64: of each packed item, its slot in the slots of all blocks, one block after the other."""
        starts = accumulate(self._sizes[:-1], initial=0)
        slots = torch.cat([block._slots + start for block, start in zip(self, starts, strict=True)])
        return scatter_rows(slots, torch.cat([block.items for block in self]), len(slots))

    @lazy_property
    def _rows(self) -> Tensor:
        return torch.cat([block.rows for block in self])


def as_numbers(mask: Tensor) -> Tensor:
    """A bool as 1 and 0 in float32; by way of int8, which is many times as fast in torch."""
    return (mask if torch.compiler.is_compiling() else mask.view(torch.int8)).to(torch.float32)


def repeated(per_row: Tensor, times: int) -> Tensor:
    """Values per row (B, ...) -> (B times, ...), each so many times in turn."""
    return per_row.unsqueeze(1).expand(-1, times, *per_row.shape[1:]).flatten(0, 1)


def per_target(per_row: Tensor, target: Tensor) -> Tensor:
    """Values per row (B,), as they broadcast against the leading axes of targets (B, D) or (B, K, D)."""
    return per_row.view(-1, *[1] * (target.dim() - 2))
