"""The ids of an embedding table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Vocabulary:
    """0 is padding, 1 … n are the ids of ``originals`` (n numbers or texts) in this order, n + 1 that of all others."""

    originals: Sequence[Any] | Array

    @classmethod
    def by_frequency(cls, counts: Array, more: Iterable[int] = ()) -> Vocabulary:
        """Of numbers 0, 1, …: those with a count, the largest first (ties by number), then the others in ``more``."""
        order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
        return cls(np.concatenate([order, np.setdiff1d(np.asarray(more, order.dtype), order)]))

    def __len__(self) -> int:
        return len(self.originals)

    @property
    def unseen(self) -> int:
        """The id of everything that is not known."""
        return len(self) + 1

    def table(self, size: int) -> Array:
        """(size,) id of each number below ``size``, in the smallest type that holds them."""
        ids = np.full(size, self.unseen, np.min_scalar_type(self.unseen))
        ids[np.asarray(self.originals)] = np.arange(1, self.unseen)
        return ids

    @cached_property
    def _enum(self) -> pl.DataType:
        return pl.Enum(self.originals)

    def stored(self) -> dict[str, int]:
        """Original -> id as in feature_vocab.json, with FuxiCTR's two reserved entries."""
        known = {str(original): number for number, original in enumerate(self.originals, 1)}
        return {"__PAD__": 0, **known, "__OOV__": self.unseen}

    def ids(self, texts: pl.Expr) -> pl.Expr:
        """Text -> id."""
        return texts.cast(self._enum, strict=False).to_physical().cast(pl.Int64).fill_null(len(self)) + 1
