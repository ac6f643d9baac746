"""Queries and keys of self-attention as they are and as an encoding rotates them, each padded once.

M queries and N items of the batch, packed, D item dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from ctr_pe.pe.base import PositionEncoding
from ctr_pe.sequence.positions import Where

T = TypeVar("T")
Both = tuple[T, T]
"""Of vectors as they are, if anything reads them, and of the same rotated."""


def rotated(
    pe: PositionEncoding, query: Tensor, key: Tensor, at: Callable[[], tuple[Where, Where]]
) -> tuple[Both[Tensor], Both[Tensor]]:
    """Of packed queries (M, D), and of packed keys (N, D); ``at`` as in :meth:`PositionEncoding.rotate_packed`."""
    rotated_query, rotated_key = pe.rotate_packed(query, key, at)
    if pe.only_rotates:
        query, key = rotated_query, rotated_key
    return (query, rotated_query), (key, rotated_key)


def each(apply: Callable[[Tensor], T], both: Both[Tensor]) -> Both[T]:
    """``apply`` to both, once where they are the same."""
    plain, turned = both
    found = apply(plain)
    return found, found if turned is plain else apply(turned)
