"""What the hooks of an encoding are given, made of tensors: for tests that call them without a unit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ctr_pe.pe.vectors import ItemVectors, TargetVectors
from ctr_pe.sequence.positions import Items, Pairs, Positions


def item_pairs(positions: Positions, causal: bool, items: Items | None = None) -> Pairs:
    """Every item looks at every other: all rows of the batch in one block, in their order."""
    (pairs,) = positions.item_pairs(causal, items or no_items(positions), positions.whole)
    return pairs


def target_pairs(positions: Positions, items: Items | None = None, target: Items | None = None) -> Pairs:
    """The target of each row looks at its items."""
    return positions.target_pairs(items or no_items(positions), target or Items(torch.zeros(len(positions.mask), 1)))


def no_items(positions: Positions) -> Items:
    """For encodings that do not read them."""
    return Items(torch.zeros(int(positions.mask.sum()), 1))


def target_vectors(
    query: Tensor,
    pairs: Pairs,
    items: Tensor | None = None,
    scale: float = 1.0,
    rescore: Callable[[Tensor], Tensor] | None = None,
) -> TargetVectors:
    """Of target attention: targets (B, D) and packed items (N, D), zeros by default."""
    packed = query.new_zeros(len(pairs.block.items), query.shape[-1]) if items is None else items
    return TargetVectors(query[:, None, None, :], scale, packed, pairs.block, rescore or _not_asked_for)


def item_vectors(query: Tensor, key: Tensor | None = None, value: Tensor | None = None) -> ItemVectors:
    """Of self-attention: queries, keys and values (B, H, L, d); by default all are the same."""
    key = query if key is None else key
    return ItemVectors(query, 1.0, key, key if value is None else value)


def vectors_for(pairs: Pairs, width: int, dtype: torch.dtype = torch.float64) -> TargetVectors | ItemVectors:
    """Zeros, ``width`` wide, for hooks that read none: of one head."""
    rows, _, queries, keys = pairs.allowed.shape
    if not pairs.self_attention:
        return target_vectors(torch.zeros(rows, width, dtype=dtype), pairs)
    query, key = (torch.zeros(rows, 1, n, width, dtype=dtype) for n in (queries, keys))
    return item_vectors(query, key)


def _not_asked_for(shift: Tensor) -> Tensor:
    raise AssertionError("no encoding under test scores the items again")
