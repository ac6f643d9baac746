"""Who stands where: distances and ages of items, counted from the target, and which query may attend to which key.

B batch, L history slots, N real items of the batch, Q queries, R rows of a block, W its slots.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ctr_pe.sequence.jagged import Blocks, Jagged, Layout, as_numbers, gather_rows, repeated
from ctr_pe.utils.lazy_property import lazy_property

T = TypeVar("T")


@dataclass(frozen=True)
class Where:
    """Distances (and ages) of queries or keys; the axes broadcast against the leading axes of their vectors.

    ``distance`` int64: 0 = the target, 1 = the most recent item, n = the oldest.
    ``age`` int64: seconds from the event to the request, or None when the data have no times.
    """

    distance: Tensor
    age: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> Where:
        """``change`` of both."""
        return Where(change(self.distance), None if self.age is None else change(self.age))

    @lazy_property
    def per_vector(self) -> Where:
        """Of packed items (N,) -> (N, 1, 1), which broadcasts against vectors (N, H, 1, d)."""
        return self.map(lambda x: x[:, None, None])

    def once(self, name: Hashable, compute: Callable[[], T]) -> T:
        """What ``compute`` gives, computed once per ``name`` for all layers."""
        if name not in self._found:
            self._found[name] = compute()
        found: T = self._found[name]
        return found

    @lazy_property
    def _found(self) -> dict[Hashable, Any]:
        return {}


@dataclass(frozen=True, eq=False)
class Items:
    """Items as looked up, for encodings that ask for more than the vectors of the attention.

    ``embedding`` (N, D): the fields of an item side by side, before any layer; of targets (B, D), or (B, K, D) where
    each history has K targets.
    ``ids``: per field the ids (N,) int64, 0 = no value; empty when not given.
    ``chosen`` (N,) bool: False for an item that was shown and not clicked; None when not given, as in evaluation.
    ``all_ids``: of a history in training, by field the ids (N,) with those of items that were not chosen; on the CPU,
    of a filled batch where its lengths are.
    """

    embedding: Tensor
    ids: tuple[Tensor, ...] = ()
    chosen: Tensor | None = None
    all_ids: Mapping[str, Tensor] = field(default_factory=dict)
    _read: dict[Hashable, Tensor] = field(default_factory=dict, init=False)

    @property
    def several(self) -> bool:
        """Whether they are K targets of each history, (B, K, D) and ids (B, K)."""
        return self.embedding.dim() == 3

    def read_once(self, name: Hashable, read: Callable[[Items], Tensor]) -> Tensor:
        """``read(self)``, computed at the first call with a name."""
        if name not in self._read:
            self._read[name] = read(self)
        return self._read[name]


@dataclass(frozen=True, eq=False)
class Pairs:
    """The (query, key) pairs of one attention over a block. Stacked layers share them.

    Keys are the items of the block: the newest in the last slot and no gaps, so distances are the same in every row.

    ``positions``: of the batch. ``blocks``, ``index``: the block is ``blocks[index]``.
    ``items``: of the batch, packed; in self-attention they are the queries too. ``target``: the queries of target
    attention, or the candidates. ``histories``: positions of the histories that end with several candidates each
    (:meth:`Positions.candidate_pairs`), whose ``items`` then leave the candidates out; else None.
    ``query``: distance (1, 1, Q), age (B, 1, Q). ``key``: distance (1, 1, L), age (B, 1, L); axes of one are for heads.
    ``allowed`` (B, 1, Q, L) bool: True where a real query may attend to a real key.
    ``causal``: queries see earlier items and themselves only; so does the target, which is the newest.
    ``self_attention``: queries are items themselves, all of a row or its newest (Q = 1); else the one target.
    """

    positions: Positions
    blocks: Blocks
    index: int
    items: Items
    target: Items | None
    query: Where
    key: Where
    allowed: Tensor
    causal: bool
    self_attention: bool
    histories: Positions | None = None
    shared: dict[Hashable, Any] = field(default_factory=dict)
    """What :meth:`once_for_blocks` has computed, of all pairs of one attention."""

    @property
    def block(self) -> Jagged:
        """The rows, and which of the batch's items are their keys."""
        return self.blocks[self.index]

    @property
    def of_all_blocks(self) -> int:
        """How many pairs there are in the blocks together, padding among them."""
        one_query = self.query.distance.shape[-1] == 1
        return sum(block.mask.numel() * (1 if one_query else block.mask.shape[1]) for block in self.blocks)

    @property
    def longest(self) -> int:
        """Slots of the largest of the blocks."""
        return max(block.mask.shape[1] for block in self.blocks)

    @lazy_property
    def offset(self) -> Tensor:
        """(1, 1, Q, L) int64: how many items the key lies before the query; negative for later keys."""
        return self.key.distance.unsqueeze(-2) - self.query.distance.unsqueeze(-1)

    def embedding(self, columns: slice) -> Tensor:
        """(B, L, any): columns of the keys' item embeddings, zero at padding. Fetched once for all layers."""
        return self.of_keys((columns.start, columns.stop), lambda items: items.embedding[..., columns])

    def of_keys(self, name: Hashable, read: Callable[[Items], Tensor]) -> Tensor:
        """(B, L, ...): what ``read`` takes from the items that are keys, zero at padding. Called once per ``name`` for
        all layers."""
        blocks = self.blocks if self.histories is None else self.histories.whole
        padded = self.once_for_blocks(name, lambda: blocks.pad(self.items.read_once(name, read)))[self.index]
        if self.histories is None:
            return padded
        assert self.target is not None
        candidates = read(self.target)
        shared = padded.unsqueeze(1).expand(*candidates.shape[:2], *padded.shape[1:])
        return torch.cat([shared, candidates.unsqueeze(2)], 2).flatten(0, 1)

    def of_queries(self, name: Hashable, read: Callable[[Items], Tensor]) -> Tensor:
        """(B, Q, ...): the same of the queries."""
        if self.self_attention:
            return self.of_keys(name, read)[:, -self.query.distance.shape[-1] :]
        assert self.target is not None
        return read(self.target) if self.target.several else read(self.target).unsqueeze(1)

    def products(self, name: Hashable, read: Callable[[Tensor], Tensor]) -> Tensor:
        """(B, 1, Q, L): product of the vectors that ``read`` makes of the embeddings of query and key."""
        if self.self_attention or self.target is None or self.target.several:
            query, keys = (of(name, lambda one: read(one.embedding)) for of in (self.of_queries, self.of_keys))
            return (query @ keys.mT).unsqueeze(1)
        both = self.target.embedding, self.items.embedding
        of_target, of_items = torch.split(read(torch.cat(both)), [len(one) for one in both])
        rows = self.positions.item_rows  # one target: numbers are padded and no vectors
        return self.block.pad((of_target.index_select(0, rows) * of_items).sum(-1))[:, None, None]

    def once(self, name: Hashable, compute: Callable[[Pairs], Tensor]) -> Tensor:
        """What ``compute`` gives for these pairs, computed once per ``name`` for all layers."""
        if name not in self._found:
            self._found[name] = compute(self)
        return self._found[name]

    def once_for_blocks(self, name: Hashable, compute: Callable[[], T]) -> T:
        """What ``compute`` gives for the pairs of all blocks, computed once per ``name`` for blocks and layers."""
        if name not in self.shared:
            self.shared[name] = compute()
        found: T = self.shared[name]
        return found

    @lazy_property
    def _found(self) -> dict[Hashable, Tensor]:
        return {}

    # Floats, because torch takes many times as long where it combines a bool with a float.

    @lazy_property
    def float_mask(self) -> Tensor:
        """(B, 1, Q, L) float32: ``allowed`` as 1 and 0."""
        return as_numbers(self.allowed)

    @lazy_property
    def additive_mask(self) -> Tensor:
        """(B, 1, Q, L) float32: 0 where allowed, elsewhere the lowest finite number. Not -inf: a row of nothing else
        would give NaN, in the gradient too."""
        return as_numbers(self.allowed).sub_(1).mul_(torch.finfo(torch.float32).max)

    def softmax(self, logits: Tensor) -> Tensor:
        """Attention weights (B, H, Q, L) over the keys that are allowed, in float32 at least. Where none is, at queries
        that are padding or have no history, the weights are uniform, and the result is not used.
        """
        return (logits + self.additive_mask).softmax(-1)


@dataclass(frozen=True, eq=False)
class Positions(Jagged):
    """Positions of a batch of histories, independent of the amount and the side of their padding.

    ``mask`` (B, L) bool: True = real item. Real items are in time order, oldest first; padding may lie anywhere.
    ``distance`` (B, L) int64: 1 = most recent real item, n = oldest of n, 0 = padding.
    ``age`` (B, L) int64 or None: seconds from the event to the request, 0 at padding.
    """

    distance: Tensor
    age: Tensor | None = None

    @classmethod
    def from_mask(cls, mask: Tensor, age: Tensor | None = None, layout: Layout | None = None) -> Positions:
        """Count positions from a mask.

        Args:
            mask: (B, L) bool, True = real item, any padding side.
            age: (B, L) integers, seconds from each event to the request.
            layout: of blocks, for a batch that will be sent to another device. An accelerator that has the only mask
                has to be waited for.

        Raises:
            ValueError: mask is not a (B, L) bool tensor, or age is not an integer tensor of its shape.
        """
        if mask.dim() != 2 or mask.dtype != torch.bool:
            raise ValueError(f"mask must be a (B, L) bool tensor, got {tuple(mask.shape)} {mask.dtype}")
        if age is not None:
            _check_age(age, mask.shape)
            age = age.long().masked_fill(~mask, 0)
        lengths = mask.sum(1)
        distance = lengths.unsqueeze(1) - mask.cumsum(1) + 1
        return cls(mask, lengths, distance.masked_fill(~mask, 0), age, layout=layout)

    @classmethod
    def from_lengths(cls, lengths: Tensor, age: Tensor | None = None, layout: Layout | None = None) -> Positions:
        """Positions of packed histories: values of N items row by row, each row's oldest item first.

        Padded, they have the newest item in the last slot, and as many slots as the longest has items.

        Args:
            lengths: (B,) int64, items per row.
            age: (N,) integers, seconds from each event to the request.
            layout: of blocks, for a batch that will be sent to another device.

        Raises:
            ValueError: lengths are not (B,) integers of 0 or more, or age is not an integer tensor (N,).
        """
        if lengths.dim() != 1 or lengths.dtype != torch.int64 or (lengths < 0).any():
            raise ValueError(f"lengths must be (B,) int64 of 0 or more, got {tuple(lengths.shape)} {lengths.dtype}")
        distance = torch.arange(int(lengths.max()) if len(lengths) else 0, 0, -1, device=lengths.device)
        mask = distance <= lengths.unsqueeze(1)
        positions = cls(mask, lengths, distance * mask, layout=layout)
        if age is None:
            return positions
        _check_age(age, torch.Size([int(lengths.sum())]))
        return replace(positions, age=positions.unpack(age.long()))

    @property
    def rank(self) -> Tensor:
        """(B, L) int64: 1 = oldest real item, n = most recent, 0 = padding."""
        return (self.lengths.unsqueeze(1) + 1 - self.distance).masked_fill(~self.mask, 0)

    def plan(self, with_target: bool = False) -> None:
        """Compute all that attention asks for, of these positions or :meth:`with_target`."""
        super().plan()
        _ = self.at_items, self.at_sequence, self.at_target
        if with_target:
            self._and_target.plan()

    def with_target(self) -> Positions:
        """Positions of the sequence [history; target], one slot more: the target is its newest item, of age 0."""
        return self._and_target

    @lazy_property
    def at_items(self) -> Where:
        """Of the packed items, (N,)."""
        return Where(self.pack(self.distance), None if self.age is None else self.pack(self.age))

    @lazy_property
    def at_sequence(self) -> Where:
        """Of the packed items in self-attention, (N,): ages count from the newest of their row, because only times
        between items matter."""
        at = self.at_items
        if at.age is None:
            return at
        return replace(at, age=at.age - gather_rows(at.age, gather_rows(self.newest, self.item_rows)))

    @property
    def at_newest(self) -> Where:
        """:attr:`at_sequence` of each row's newest item, (B,). A row needs to have one."""
        return self.at_sequence.map(lambda x: gather_rows(x, self.newest))

    @lazy_property
    def at_target(self) -> Where:
        """Of the target, (1,)."""
        zero = self.distance.new_zeros(1)
        return Where(zero, None if self.age is None else zero)

    def at_candidates(self, count: int) -> tuple[Where, Where]:
        """Where targets are that end the sequences [history; target], ``count`` of each history: they, (1,); and the
        packed items of the histories, then they, (N + B count,)."""
        own = Where(self.at_target.distance + 1, self.at_target.age)
        of_items, ends = Where(self.at_items.distance + 1, self.at_items.age), self.mask.shape[0] * count
        age = None if own.age is None or of_items.age is None else torch.cat([of_items.age, own.age.expand(ends)])
        return own, Where(torch.cat([of_items.distance, own.distance.expand(ends)]), age)

    def target_pairs(self, items: Items, target: Items) -> Pairs:
        """Target attention over all rows in one block: one query, the target at distance 0, or K of them."""
        zero = self.at_target.distance.view(1, 1, 1)
        at_target = Where(zero, None if self.age is None else zero)
        (pairs,) = self._pairs(self.whole, items, True, lambda _: at_target, target)
        return pairs

    def item_pairs(self, causal: bool, items: Items, blocks: Blocks | None = None) -> list[Pairs]:
        """Self-attention in each block, by default of :attr:`blocks`: every item is a query over all items, or with
        ``causal`` over itself and the items before it. The layers of a stack share these pairs."""
        return self._pairs(self.blocks if blocks is None else blocks, items, causal)

    def newest_pairs(self, causal: bool, items: Items) -> list[Pairs]:
        """Self-attention in each block where only the newest item of each row is a query: the last of item_pairs."""
        return self._pairs(self.newest_blocks, items, causal, _newest)

    def candidate_pairs(self, causal: bool, items: Items, targets: Items) -> Pairs:
        """Self-attention over [history; target] for each of K targets (B, K, D) of a history, in one block: B K rows,
        of which only the target is a query."""
        count = targets.embedding.shape[1]

        def repeated_with_target(x: Tensor) -> Tensor:
            return repeated(nn.functional.pad(x, (0, 1)), count)

        mask = repeated(nn.functional.pad(self.mask, (0, 1), value=True), count)
        whole = self.from_mask(mask, None if self.age is None else repeated_with_target(self.age))
        key = whole._keys(whole.whole[0])
        allowed = whole.whole[0].mask[:, None, None, :]
        return Pairs(whole, whole.whole, 0, items, targets, _newest(key), key, allowed, causal, True, self)

    def _pairs(
        self,
        blocks: Blocks,
        items: Items,
        causal: bool,
        queries: Callable[[Where], Where] | None = None,
        target: Items | None = None,
    ) -> list[Pairs]:
        """``queries``: where they are, one for all rows or one per row, given the keys; None for every item."""
        found: list[Pairs] = []
        shared: dict[Hashable, Any] = {}
        for index, block in enumerate(blocks):
            key, allowed = self._keys(block), block.mask[:, None, None, :]
            if queries is None:
                allowed = block.mask[:, None, :, None] & allowed
                if causal:
                    allowed = allowed & (block.slot_distance <= block.slot_distance.unsqueeze(-1)).mT
            query = key if queries is None else queries(key)
            pairs = Pairs(self, blocks, index, items, target, query, key, allowed, causal, target is None, None, shared)
            found.append(pairs)
        return found

    def _keys(self, block: Jagged) -> Where:
        age = None if self.age is None else block.pad(self.pack(self.age)).unsqueeze(1)
        return Where(block.slot_distance[None, None], age)

    @lazy_property
    def _and_target(self) -> Positions:
        age = None if self.age is None else nn.functional.pad(self.age, (0, 1))
        whole = self.from_mask(nn.functional.pad(self.mask, (0, 1), value=True), age, self.layout)
        if self.mask.is_cpu or self.dense:
            return whole
        return replace(whole, host=(nn.functional.pad(self.mask_cpu, (0, 1), value=True), self.lengths_cpu + 1))


def _newest(key: Where) -> Where:
    """The newest of the keys, in the last slot."""
    return key.map(lambda x: x[..., -1:])


def _check_age(age: Tensor, shape: torch.Size) -> None:
    if age.shape != shape or age.is_floating_point() or age.is_complex() or age.dtype == torch.bool:
        raise ValueError(f"age must be integers (seconds) of shape {tuple(shape)}, got {tuple(age.shape)} {age.dtype}")
