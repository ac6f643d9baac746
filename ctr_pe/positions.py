"""Where each item lies, counted from the target. The only place that looks at padding.

B batch, L history slots, N real items of the batch, Q queries, R rows of a block, W its slots, n its real items.

Histories come as (B, L, D) with padding anywhere, or packed as (N, D): the real items alone, row by row. Most slots of
a batch are padding, so models look up, score and pool packed items. Attention lays them out again in blocks: rows of
like length, the newest item in the last slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

NARROWEST, LARGEST = 4, 180_000
"""Rows with up to so many items share a block; a block has at most so many pairs per head. Fewer pairs take longer for
their calls, more for the caches that they leave."""
SLOT = 24
"""Pairs that a slot counts for where each row has one query."""


@dataclass(frozen=True)
class Places:
    """Distances (and ages) of queries or keys; the axes broadcast against the leading axes of their vectors.

    ``distance`` int64: 0 = the target, 1 = the most recent item, n = the oldest.
    ``age`` int64: seconds from the event to the request, or None when the data have no times.
    """

    distance: Tensor
    age: Tensor | None = None


@dataclass(frozen=True)
class Pairs:
    """The (query, key) pairs of one attention over a block: who stands where and who may look at whom.

    The newest item is in the last slot and there are no gaps, so distances are the same in every row.

    ``query`` places: distance (1, 1, Q), age (B, 1, Q). ``key`` places: distance (1, 1, L), age (B, 1, L).
    ``allowed`` (B, 1, Q, L) bool: True where a real query may attend to a real key. An axis of one is for the heads.
    ``block``: the rows and what is known of their items.
    ``causal``: queries look at earlier items and themselves only; so does the target, which is the newest.
    ``among_items``: self-attention, where queries are items themselves: all of a row, or its newest (Q = 1).
    ``scale``: factor of the unit's products, logit = scale · query · key; 1 for scores of another kind.
    ``project``: for a bilinear score, gives W t for targets t (..., D), so that the logit is W t · key.
    ``packed``: in target attention, the keys (N, D) as before ``rotate``; laid out only for ``needs_vectors``.
    ``rescore``: in target attention, gives the logits (B, 1, 1, L) again with vectors (N, D) added to the packed keys.
    ``side``: in self-attention, what encodings wanted to know of the items, (B, L, any) each.
    """

    query: Places
    key: Places
    allowed: Tensor
    block: Block
    causal: bool
    among_items: bool = False
    scale: float = 1.0
    project: Callable[[Tensor], Tensor] | None = None
    packed: Tensor | None = None
    rescore: Callable[[Tensor], Tensor] | None = None
    side: Mapping[Any, Tensor] = field(default_factory=dict)

    @cached_property
    def offset(self) -> Tensor:
        """(1, 1, Q, L) int64: how many places the key lies before the query; negative for later keys."""
        return self.key.distance.unsqueeze(-2) - self.query.distance.unsqueeze(-1)

    # Numbers, because torch takes many times as long where a bool meets a float.

    @cached_property
    def admitted(self) -> Tensor:
        """(B, 1, Q, L) float32: 1 where allowed, 0 elsewhere."""
        return self.allowed.view(torch.int8).to(torch.float32)

    @cached_property
    def barrier(self) -> Tensor:
        """(B, 1, Q, L) float32: 0 where allowed, elsewhere the lowest finite number. Not -inf: a row of nothing else
        would give NaN, in the gradient too."""
        return (self.admitted - 1) * torch.finfo(torch.float32).max

    def softmax(self, logits: Tensor) -> Tensor:
        """Over the keys that are allowed: (B, H, Q, L), in float32 at least. Where none is, at queries that are padding
        or have no history, all share equally: their values are zero, and nobody reads what is pooled."""
        return (logits + self.barrier).softmax(-1)


@dataclass(frozen=True)
class Items:
    """What items are, for encodings that ask for more than vectors of the attention.

    ``embedding`` (N, D): as looked up, its fields side by side, before any layer.
    ``ids``: per field the ids (N,) int64, 0 = padding; empty when not known.
    ``chosen`` (N,) bool: False for an item that was shown and not clicked; None when not known, as in evaluation.
    """

    embedding: Tensor
    ids: tuple[Tensor, ...] = ()
    chosen: Tensor | None = None


@dataclass(frozen=True)
class Block:
    """Rows of a batch, laid out with the newest item of each in the last of W slots and no gaps.

    ``of``: the positions of the batch. ``rows`` (R,) int64: which of its rows.
    ``items`` (n,) int64: places of the block's items among the packed items of the batch.
    ``mask`` (R, W) bool: True = real item.
    """

    of: Positions
    rows: Tensor
    items: Tensor
    mask: Tensor

    @cached_property
    def _slots(self) -> Tensor:
        return self.mask.flatten().nonzero().squeeze(1)

    def lay(self, packed: Tensor) -> Tensor:
        """Packed items of the batch (N, ...) -> (R, W, ...), zero at padding."""
        return self.place(packed.index_select(0, self.items))

    def place(self, own: Tensor) -> Tensor:
        """(n, ...), the block's items in the order of ``items`` -> (R, W, ...), zero at padding."""
        if len(own) == self.mask.numel():
            return own.view(*self.mask.shape, *own.shape[1:])
        empty = own.new_zeros(self.mask.numel(), *own.shape[1:])
        return empty.index_copy(0, self._slots, own).view(*self.mask.shape, *own.shape[1:])

    def take(self, laid: Tensor) -> Tensor:
        """(R, W, ...) -> (n, ...), in the order of ``items``."""
        flat = laid.flatten(0, 1)
        return flat if len(self.items) == len(flat) else flat.index_select(0, self._slots)

    @cached_property
    def distance(self) -> Tensor:
        """(W,) int64: W, ..., 2, 1."""
        return torch.arange(self.mask.shape[1], 0, -1, device=self.mask.device)

    def from_target(self) -> Pairs:
        """One query, the target at distance 0, over the whole history."""
        zero, age = self.distance.new_zeros(1, 1, 1), self.of.age
        at_target = Places(zero, None if age is None else zero)
        return Pairs(at_target, self._keys, self.mask[:, None, None, :], self, causal=True)

    def from_items(self, causal: bool, scale: float = 1.0) -> Pairs:
        """Every item is a query over all items, or with ``causal`` over itself and the items before it. Stacked layers
        of one kind share the pairs."""
        if (causal, scale) not in self._among:
            allowed = self.mask[:, None, :, None] & self.mask[:, None, None, :]
            if causal:
                allowed = allowed & (self.distance <= self.distance.unsqueeze(-1)).mT
            self._among[causal, scale] = Pairs(self._keys, self._keys, allowed, self, causal, True, scale)
        return self._among[causal, scale]

    def from_newest(self, causal: bool, scale: float = 1.0) -> Pairs:
        """The newest item of each row is its one query: the last of those of ``from_items``."""
        age = self._keys.age
        newest = Places(self.distance[None, None, -1:], None if age is None else age[..., -1:])
        return Pairs(newest, self._keys, self.mask[:, None, None, :], self, causal, True, scale)

    @cached_property
    def _among(self) -> dict[tuple[bool, float], Pairs]:
        return {}

    @cached_property
    def _keys(self) -> Places:
        age = self.of.age
        return Places(self.distance[None, None], None if age is None else self.lay(self.of.pack(age)).unsqueeze(1))


class Blocks(list[Block]):
    """Blocks that together have every row with items, once."""

    def split(self, packed: Tensor) -> list[Tensor]:
        """Packed items of the batch (N, ...) -> the items (n, ...) of each block."""
        return list(torch.split(packed.index_select(0, self._items), [len(block.items) for block in self]))

    def join(self, parts: list[Tensor]) -> Tensor:
        """(n, ...) of each block -> packed (N, ...)."""
        whole = torch.cat(parts)
        return torch.empty_like(whole).index_copy(0, self._items, whole)

    def split_rows(self, per_row: Tensor) -> list[Tensor]:
        """(B, ...) -> (R, ...) of each block."""
        return list(torch.split(per_row.index_select(0, self._rows), [len(block.rows) for block in self]))

    def join_rows(self, parts: list[Tensor]) -> Tensor:
        """(R, ...) of each block -> (B, ...); every row has items."""
        whole = torch.cat(parts)
        return torch.empty_like(whole).index_copy(0, self._rows, whole)

    @cached_property
    def _items(self) -> Tensor:
        return torch.cat([block.items for block in self])

    @cached_property
    def _rows(self) -> Tensor:
        return torch.cat([block.rows for block in self])


@dataclass(frozen=True)
class Positions:
    """Positions of a batch of histories, independent of the amount and the side of their padding.

    ``distance`` (B, L) int64: 1 = most recent real item, n = oldest of n, 0 = padding.
    ``mask`` (B, L) bool: True = real item. Real items are in time order, oldest first; padding may lie anywhere.
    ``age`` (B, L) int64 or None: seconds from the event to the request, 0 at padding.
    ``items``, ``target``: what the packed items and the targets are, or None, see :meth:`carrying`.
    """

    distance: Tensor
    mask: Tensor
    age: Tensor | None = None
    items: Items | None = None
    target: Items | None = None

    @classmethod
    def from_mask(cls, mask: Tensor, age: Tensor | None = None) -> Positions:
        """Count positions from a mask.

        Args:
            mask: (B, L) bool, True = real item, any padding side.
            age: (B, L) integers, seconds from each event to the request.

        Raises:
            ValueError: mask is not a (B, L) bool tensor, or age is not an integer tensor of its shape.
        """
        if mask.dim() != 2 or mask.dtype != torch.bool:
            raise ValueError(f"mask must be a (B, L) bool tensor, got {tuple(mask.shape)} {mask.dtype}")
        if age is not None:
            if age.shape != mask.shape or age.is_floating_point() or age.is_complex() or age.dtype == torch.bool:
                raise ValueError(
                    f"age must be integers (seconds) of shape {tuple(mask.shape)}, got {tuple(age.shape)} {age.dtype}"
                )
            age = age.long().masked_fill(~mask, 0)
        newer = mask.sum(1, keepdim=True) - mask.cumsum(1)
        return cls(distance=(newer + 1).masked_fill(~mask, 0), mask=mask, age=age)

    def carrying(self, items: Items, target: Items | None = None) -> Positions:
        """These positions and what their packed items (N) and targets (B) are.

        Models call it once per batch. Without it, encodings take what the unit is given for the items' embeddings.
        """
        return replace(self, items=items, target=target)

    def with_target(self) -> Positions:
        """Positions of the sequence [history; target], one slot more: the target is its newest item, of age 0."""
        age = None if self.age is None else torch.nn.functional.pad(self.age, (0, 1))
        whole = Positions.from_mask(torch.nn.functional.pad(self.mask, (0, 1), value=True), age)
        if self.items is None or self.target is None:
            return whole
        old, new = self.items, self.target
        chosen = None
        if old.chosen is not None and new.chosen is not None:
            chosen = self.append(old.chosen, new.chosen)
        ids = tuple(self.append(*pair) for pair in zip(old.ids, new.ids, strict=True))
        return whole.carrying(Items(self.append(old.embedding, new.embedding), ids, chosen))

    def append(self, packed: Tensor, last: Tensor) -> Tensor:
        """(N, ...) of the items and (B, ...) of the targets -> packed (N + B, ...): each row's items, then its target.

        The layout of :meth:`with_target`.
        """
        return torch.cat([packed, last]).index_select(0, self._with_last)

    @cached_property
    def _with_last(self) -> Tensor:
        rows, _ = self.real
        return torch.cat([rows, torch.arange(len(self.mask), device=rows.device)]).argsort(stable=True)

    @cached_property
    def real(self) -> tuple[Tensor, Tensor]:
        """Row and slot (N,), (N,) int64 of every real item, row by row."""
        rows, slots = self.mask.nonzero(as_tuple=True)
        return rows, slots

    @cached_property
    def _slots(self) -> Tensor:
        return self.mask.flatten().nonzero().squeeze(1)

    def pack(self, x: Tensor) -> Tensor:
        """(B, L, ...) -> (N, ...): the real items."""
        return x.flatten(0, 1).index_select(0, self._slots)

    def spread(self, packed: Tensor) -> Tensor:
        """(N, ...) -> (B, L, ...): real items in their slots, zero at padding."""
        empty = packed.new_zeros(self.mask.numel(), *packed.shape[1:])
        return empty.index_copy(0, self._slots, packed).view(*self.mask.shape, *packed.shape[1:])

    def of(self, history: Tensor, per_slot: Tensor) -> Tensor:
        """Values per slot (B, L) in the layout of ``history``: as they are for (B, L, D), packed for (N, D)."""
        return per_slot if history.dim() == 3 else self.pack(per_slot)

    @cached_property
    def count(self) -> Tensor:
        """(B,) int64: real items per row."""
        return self.mask.sum(1)

    @property
    def rank(self) -> Tensor:
        """(B, L) int64: 1 = oldest real item, n = most recent, 0 = padding."""
        return (self.count.unsqueeze(1) + 1 - self.distance).masked_fill(~self.mask, 0)

    @cached_property
    def whole(self) -> Block:
        """All rows in one block, in their order, as wide as the longest history."""
        rows = torch.arange(len(self.mask), device=self.mask.device)
        items = torch.arange(len(self.real[0]), device=self.mask.device)
        return self._block(rows, items, int(self.count.max()) if len(rows) else 0)

    @cached_property
    def blocks(self) -> Blocks:
        """Every row that has items, in blocks of like length: attention costs the square of the longest in a block.

        A block's longest history is at most half longer than its shortest, or ``NARROWEST`` items long.
        """
        return self._blocks(lambda width: width**2)

    @cached_property
    def newest_blocks(self) -> Blocks:
        """The same for one query per row, whose blocks have more rows."""
        return self._blocks(lambda width: width * SLOT)

    @cached_property
    def newest(self) -> Tensor:
        """(B,) int64: where each row's newest item is among the packed ones. A row needs to have one."""
        return self.count.cumsum(0) - 1

    def _blocks(self, cost: Callable[[int], int]) -> Blocks:
        order = self.count.argsort(stable=True)
        counts = self.count[order].tolist()
        place = self.count.cumsum(0)[order] - self.count[order]  # of each row's first item among the packed
        blocks, first, last = Blocks(), sum(count == 0 for count in counts), len(counts)
        while first < last:
            widest, stop = max(NARROWEST, counts[first] + counts[first] // 2), first + 1
            while stop < last and counts[stop] <= widest and (stop + 1 - first) * cost(counts[stop]) <= LARGEST:
                stop += 1
            rows, sizes = order[first:stop], self.count[order[first:stop]]
            ends = sizes.cumsum(0)
            n = sum(counts[first:stop])
            items = torch.arange(n, device=order.device) + (place[first:stop] - ends + sizes).repeat_interleave(
                sizes, output_size=n
            )
            blocks.append(self._block(rows, items, counts[stop - 1]))
            first = stop
        return blocks

    def _block(self, rows: Tensor, items: Tensor, width: int) -> Block:
        distance = torch.arange(width, 0, -1, device=rows.device)
        return Block(self, rows, items, distance <= self.count[rows].unsqueeze(1))
