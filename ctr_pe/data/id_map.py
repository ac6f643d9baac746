"""Raw values -> ids, those of embedding tables and the numbers of users and items."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from ctr_pe.data.dataset import ID
from ctr_pe.utils.errors import UserError, counted, nearest, option

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
TEXTS = (pl.String, pl.Categorical, pl.Enum)
NO_VALUE = frozenset(
    ["", "NULL", "Null", "null", "NaN", "NAN", "nan", "NA", "N/A", "n/a", "#N/A", "None", "<NA>", "\\N", "undefined"]
)
"""Texts that programs write where there is no value."""
EXACT = 2**53  # from here on a float64 stands for several whole numbers
PAD, UNSEEN = "__PAD__", "__OOV__"  # FuxiCTR's reserved entries


FEW = 4096
"""Keys that are searched for, however few are known."""


def _searched(keys: pl.Series) -> Array:
    """Integers or texts as numpy compares them, which is polars' order: texts by UTF-8. Nulls are any.

    Texts are objects: ``numpy.searchsorted`` reads those of ``StringDType`` that are longer than 15 bytes from wrong
    memory (https://github.com/numpy/numpy/issues/31533).
    """
    filled = keys.fill_null("" if keys.dtype == pl.String else 0) if keys.null_count() else keys
    return np.array(filled.to_list(), object) if keys.dtype == pl.String else filled.to_numpy()


class Index:
    """Finds keys among N distinct ones: by search for a few, by a join for many."""

    def __init__(self, known: pl.Series) -> None:
        order = known.arg_sort()
        self.sorted = known.gather(order).alias("key")
        self.at = order.to_numpy().astype(np.int64)

    @property
    def dtype(self) -> pl.DataType:
        """Of the keys: int64 or string."""
        return self.sorted.dtype

    def find(self, wanted: pl.Series) -> Ints:
        """(n,) place of each key among the known ones, -1 for all others; of the same type as they are."""
        if not len(self.sorted) or not len(wanted):
            return np.full(len(wanted), -1, np.int64)
        if len(wanted) > FEW and len(wanted) * 20 > len(self.sorted):
            known = pl.DataFrame([self.sorted, pl.Series("at", self.at)])
            table = wanted.alias("key").to_frame()
            return table.join(known, on="key", how="left", maintain_order="left")["at"].fill_null(-1).to_numpy()
        keys = _searched(wanted)
        place = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        found = np.where(self._keys[place] == keys, self.at[place], -1)
        return np.where(wanted.is_null().to_numpy(), -1, found) if wanted.null_count() else found

    @cached_property
    def _keys(self) -> Array:
        """``sorted`` for numpy, whose search takes microseconds: a query of polars wakes its threads each time."""
        return _searched(self.sorted)

    def of(self, values: Sequence[Any]) -> pl.Series:
        """Python values as keys of this index's type; what is none becomes null, which is never found."""
        if self.dtype == pl.Int64 and any(isinstance(value, (float, np.floating)) for value in values):
            values = [_whole(value) if isinstance(value, (float, np.floating)) else value for value in values]
        return pl.Series("key", values, dtype=self.dtype, strict=False)


@dataclass(frozen=True, eq=False)
class IdMap:
    """The ids of one embedding table: 0 is "no value", ``unseen`` that of null and of values out of vocabulary.

    ``stored``: raw value as text -> id with FuxiCTR's two reserved entries, as in feature_vocab.json. The ids of a new
    map are 1 … n in the order of its values and n + 1 for unseen ones; a grown map has later ids after that.
    """

    stored: Mapping[str, int]
    unseen: int

    @classmethod
    def of(cls, values: Iterable[Any]) -> IdMap:
        """A new map of distinct values: numbers or texts."""
        texts = [text for text in map(str, values) if text not in (PAD, UNSEEN)]
        unseen = len(texts) + 1
        return cls({PAD: 0, **dict(zip(texts, range(1, unseen), strict=True)), UNSEEN: unseen}, unseen)

    @classmethod
    def by_frequency(cls, values: pl.Series, counts: Array, more: Iterable[Any] = ()) -> IdMap:
        """Of ``values`` (n,) that occur ``counts`` (n,) times: the most frequent first, ties by value, none that never
        occurs; then those in ``more``."""
        table = pl.DataFrame({"value": values, "count": counts}).drop_nulls("value")
        total = table.group_by("value").agg(pl.col("count").sum()).filter(pl.col("count") > 0)
        ordered = total.sort("count", "value", descending=[True, False])["value"]
        return cls.of(dict.fromkeys([*ordered, *more]))

    @cached_property
    def size(self) -> int:
        """Rows of the embedding table: one more than the largest id."""
        return max(self.stored.values()) + 1

    @cached_property
    def known(self) -> dict[str, int]:
        """Without the reserved entries."""
        return {text: number for text, number in self.stored.items() if text not in (PAD, UNSEEN)}

    def grow(self, more: Iterable[str]) -> IdMap:
        """This map, and after its last id those of ``more`` that it lacks, in their order; no id changes."""
        new = [text for text in dict.fromkeys(more) if text not in self.stored]
        return IdMap({**self.stored, **{text: number for number, text in enumerate(new, self.size)}}, self.unseen)

    def ids(self, values: pl.Series) -> Array:
        """(n,) ids of raw values of any type, in the smallest type that holds all ids of the map."""
        index, ids = self._lookup
        return ids[index.find(texts(values))]

    def ids_of_texts(self, texts: pl.Expr) -> pl.Expr:
        """The same for texts in a lazy table, int64; of a new map."""
        return texts.cast(self._enum, strict=False).to_physical().cast(pl.Int64).fill_null(self.unseen - 1) + 1

    def table(self, size: int) -> Array:
        """(size,) the same for the numbers below ``size``; a map of whole numbers."""
        ids = np.full(size, self.unseen, self._dtype)
        ids[np.fromiter(map(int, self.known), np.int64, len(self.known))] = list(self.known.values())
        return ids

    @cached_property
    def _lookup(self) -> tuple[Index, Array]:
        ids = np.fromiter((*self.known.values(), self.unseen), self._dtype, len(self.known) + 1)
        return Index(pl.Series(list(self.known), dtype=pl.String)), ids

    @property
    def _dtype(self) -> np.dtype[Any]:
        return np.min_scalar_type(self.size - 1)

    @cached_property
    def _enum(self) -> pl.DataType:
        return pl.Enum(list(self.known))


def places(ids: Array, size: int) -> Ints:
    """(size,) the place in ``ids`` (n,) of each number below ``size``, -1 for those that are not there."""
    found = np.full(size, -1, np.int64)
    kept = ids < size
    found[ids[kept]] = np.flatnonzero(kept)
    return found


def _whole(value: Any) -> int | None:
    """The whole number that a float stands for."""
    return int(value) if abs(value) < EXACT and value % 1 == 0 else None


def categories(values: pl.Series) -> pl.Series:
    """As :func:`texts`; one that stands for no value is null."""
    found = texts(values)
    return found.set(found.is_in(list(NO_VALUE)).fill_null(False), None)


def texts(values: pl.Series) -> pl.Series:
    """Raw values as text, as a request in JSON has them: whole floats and decimals as the integers they are."""
    if values.dtype.is_decimal():
        return values.cast(pl.String).str.replace(r"(\.\d*?)0+$", "${1}").str.strip_suffix(".")
    if values.dtype.is_float():
        whole = values.cast(pl.Int64, strict=False)
        exact = (values == whole).fill_null(False)
        fraction = values.set(values.is_nan().fill_null(False), None).cast(pl.String)
        return whole.cast(pl.String).zip_with(exact, fraction)
    return values.cast(pl.String)


def missing(unseen: int, count: int, like: Array) -> Array:
    """(count, …) ids of missing values, of the type and the further axes of ``like`` (n, …)."""
    one = np.zeros((1, *like.shape[1:]), like.dtype)
    one.flat[0] = unseen
    return np.repeat(one, count, axis=0)


def with_ids(items: pl.DataFrame, maps: Mapping[str, Any]) -> pl.DataFrame:
    """The catalogue with the ids of these columns, each in the column of its name and ``:id``."""
    return items.with_columns(pl.Series(name + ID, ids.ids(items[name])) for name, ids in maps.items())


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
