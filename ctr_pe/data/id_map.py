"""The ids of an embedding table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from ctr_pe.utils.errors import UserError, counted, nearest, option

Array = npt.NDArray[Any]
PAD, UNSEEN = "__PAD__", "__OOV__"  # FuxiCTR's reserved entries


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
        return {PAD: 0, **known, UNSEEN: self.unseen}

    def ids(self, texts: pl.Expr) -> pl.Expr:
        """Text -> id."""
        return texts.cast(self._enum, strict=False).to_physical().cast(pl.Int64).fill_null(len(self)) + 1


def grown(stored: Mapping[str, int], more: Iterable[str]) -> dict[str, int]:
    """A stored vocabulary, and after its last id those of ``more`` that it lacks, in their order.

    No id changes, that of unseen values neither: it is the last one of a new vocabulary, and of a grown one the last
    one of its beginning.
    """
    new = [text for text in dict.fromkeys(more) if text not in stored]
    return {**stored, **{text: number for number, text in enumerate(new, max(stored.values()) + 1)}}


def ids_of(values: pl.Series, stored: Mapping[str, int]) -> Array:
    """(n,) ids of original values by a stored vocabulary, in the smallest type that holds all of its ids."""
    known = {text: number for text, number in stored.items() if text not in (PAD, UNSEEN)}
    found = values.cast(pl.String).replace_strict(known, default=stored[UNSEEN], return_dtype=pl.Int64)
    return found.to_numpy().astype(np.min_scalar_type(max(stored.values())))


def check_growth(
    before: Mapping[str, Mapping[str, int]], now: Mapping[str, Mapping[str, int]], whose: str, which: str
) -> None:
    """Raises UserError unless every id of the vocabularies ``before``, of ``whose``, is the same in ``now``, of
    ``which``."""
    for feature, stored in before.items():
        if feature not in now:
            raise UserError(f"{which}: no feature '{feature}', which {whose} has: {nearest(feature, now)}")
        there = now[feature]
        if moved := [text for text, number in stored.items() if there.get(text) != number]:
            at = f"id {there[moved[0]]}" if moved[0] in there else "no id"
            raise UserError(
                f"{which}: no growth of the vocabulary of {whose}: {counted(len(moved), 'value')} of '{feature}' moved "
                f"or gone, '{moved[0]}' has {at} instead of {stored[moved[0]]}: build it with {option('append_to')}"
            )
