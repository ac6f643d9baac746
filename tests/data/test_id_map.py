"""Ids of a table: by frequency, 0 for padding, one more than the known for everything else."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from ctr_pe.data.id_map import PAD, UNSEEN, IdMap, Index


def by_count(counts: list[int], more: tuple[int, ...] = ()) -> IdMap:
    return IdMap.by_frequency(pl.Series(range(len(counts))), np.array(counts), more)


def test_numbers_go_by_falling_count_and_ties_by_number() -> None:
    ids = by_count([2, 0, 5, 2, 0, 1])
    assert ids.stored == {PAD: 0, "2": 1, "0": 2, "3": 3, "5": 4, UNSEEN: 5}
    assert (ids.size, ids.unseen) == (6, 5)
    assert ids.table(6).tolist() == [2, 5, 1, 3, 5, 4]


def test_counts_of_equal_values_are_added() -> None:
    ids = IdMap.by_frequency(pl.Series(["b", "a", "b", None]), np.array([1, 2, 2, 9]))
    assert list(ids.known) == ["b", "a"]


def test_what_else_is_known_comes_last() -> None:
    assert list(by_count([0, 3], more=(1, 2, 4)).known) == ["1", "2", "4"]
    assert by_count([0, 0]).table(2).tolist() == [1, 1]


def test_the_type_of_ids_is_the_smallest_that_holds_them() -> None:
    for known, dtype in ((254, np.uint8), (255, np.uint16)):
        ids = by_count([1] * known)
        assert ids.table(known).dtype == ids.ids(pl.Series([3])).dtype == dtype


RAW = [
    pl.Series([1, -5, 3, None, 2**40, 3]),
    pl.Series(["a", "", "é", None, "a", " a", "NaN"]),
    pl.Series(["x", "y", "x"], dtype=pl.Categorical),
    pl.Series([7, 0, 7], dtype=pl.UInt8),
    pl.Series([True, False, None]),
    pl.Series([0, 1]).cast(pl.Date),
    pl.Series([PAD, UNSEEN, "a"]),  # raw values that look like reserved entries are out of vocabulary
]


@pytest.mark.parametrize("raw", RAW, ids=lambda raw: str(raw.dtype))
@pytest.mark.parametrize("more", [0, 3000], ids=["join", "search"])
def test_a_value_has_one_id_however_it_is_looked_up(raw: pl.Series, more: int) -> None:
    """Eager by join or search, in a lazy table, after saving, and after growth."""
    ids = IdMap.of([*raw[:-1].drop_nulls().unique(maintain_order=True), *(f"other {i}" for i in range(more))])
    expected = [ids.known.get(str(text), ids.unseen) for text in raw.cast(pl.String)]
    assert ids.ids(raw).tolist() == expected
    assert pl.DataFrame({"x": raw.cast(pl.String)}).select(ids.ids_of_texts(pl.col("x")))["x"].to_list() == expected
    assert IdMap(ids.stored, ids.unseen).ids(raw).tolist() == expected
    grown = ids.grow(["later", *ids.known])
    assert grown.ids(raw).tolist() == [
        grown.known["later"] if text == "later" else number for text, number in zip(raw, expected, strict=True)
    ]
    assert grown.ids(pl.Series(["later"])).tolist() == [ids.size]


@pytest.mark.parametrize("sign", ["x", "ü", "名", "\U0001f600"])
@pytest.mark.parametrize("length", [1, 7, 15, 16, 36, 300])
def test_texts_of_any_length_are_found(length: int, sign: str) -> None:
    """By a search for a few as by a join for many; UUIDs have 36 characters."""
    texts = [f"{sign * max(0, length - 3)}{number:03}" for number in range(200)]
    known, order = pl.Series(texts), np.random.default_rng(0).permutation(200)
    index = Index(known.gather(order))
    wanted = pl.Series([None, *texts[::7], f"{texts[3]} ", "", "~"])
    expected = [-1, *np.argsort(order)[::7].tolist(), -1, -1, -1]
    for many in (1, 200):
        assert index.find(pl.concat([wanted] * many)).tolist() == expected * many
    assert index.find(pl.Series([texts[5]])).tolist() == [int(np.argsort(order)[5])]
