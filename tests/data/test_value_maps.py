"""Raw values of declared columns -> ids: the same in training and after, missing ones in an id of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import polars as pl
import pytest

from ctr_pe.config.columns import DeclaredColumn, declared
from ctr_pe.data.id_map import PAD, UNSEEN
from ctr_pe.data.value_maps import Hashed, field_spec, readable_as, stored_map, value_map
from ctr_pe.serving.rank_request import RankRequest, parsed
from ctr_pe.utils.errors import UserError


def spec(words: str) -> DeclaredColumn:
    return declared({"x": words})["x"]


def ones(values: pl.Series) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.ones(len(values), np.int64)


def test_numbers_fall_into_buckets_of_as_many_values() -> None:
    values = pl.Series(np.random.default_rng(0).permutation(1000).astype(float))
    ids = value_map(spec("event,numeric,num_buckets=10"), values, ones(values)).ids(values)
    assert np.bincount(ids)[1:].tolist() == [100] * 10
    assert (np.diff(ids[np.argsort(values.to_numpy())].astype(int)) >= 0).all()


@pytest.mark.parametrize("missing", [None, float("nan"), float("inf"), float("-inf"), "", "NaN", "null", "x"])
def test_missing_and_infinite_numbers_have_an_id_of_their_own(missing: float | str | None) -> None:
    values = pl.Series([1.0, 2.0, 3.0, 4.0])
    buckets = value_map(spec("event,numeric,num_buckets=2"), values, ones(values))
    given = pl.Series([missing, "2"] if isinstance(missing, str) else [missing, 2.0])
    assert buckets.ids(given).tolist() == [buckets.unseen, 1]
    assert buckets.ids(pl.Series([-1e300, 1e300])).tolist() == [1, 2]


@pytest.mark.parametrize("values", [[], [None, None], [5.0], [5.0] * 9])
def test_few_numbers_make_few_buckets(values: list[float | None]) -> None:
    column = pl.Series(values, dtype=pl.Float64)
    buckets = value_map(spec("event,numeric"), column, ones(column))
    assert buckets.size == 3
    assert buckets.ids(pl.Series([4.0, None])).tolist() == [1, 2]


def test_hashed_categories_need_no_training_rows() -> None:
    ids = Hashed.of(50).ids(pl.Series(["a", None, "b", "a", "", "ü"]))
    assert ids.tolist() == [1 + 0xE8B7BE43 % 50, 51, 1 + 0x71BEEFF9 % 50, ids[0], 51, ids[5]]
    assert 1 <= ids[5] <= 50


def test_rare_categories_are_unknown() -> None:
    values = pl.Series(["a", "a", "b", "c", "c", None])
    found = value_map(spec("item,min_categr_count=2"), values, ones(values))
    assert found.stored.keys() == {PAD, "a", "c", UNSEEN}
    assert found.ids(pl.Series(["b", "a"]))[0] == found.unseen


@pytest.mark.parametrize("values", [["b|a", "b", "", None, "z|b|a|q"], [["b", "a"], ["b"], [], None, ["z", "b", "a"]]])
def test_several_categories_keep_their_order_and_their_limit(values: list[object]) -> None:
    several = value_map(spec("item,sequence,max_len=2"), pl.Series(["b|a", "b"]), np.ones(2, np.int64))
    b, a, none = several.stored["b"], several.stored["a"], several.unseen
    assert several.ids(pl.Series(values)).tolist() == [[b, a], [b, 0], [none, 0], [none, 0], [none, b]]


@pytest.mark.parametrize(
    "words", ["item", "event,numeric", "event,hash_buckets=9", "item,sequence", "item,sequence,hash_buckets=9"]
)
def test_the_stored_vocabulary_is_all_that_a_map_knows(words: str) -> None:
    values = pl.Series(["1", "2", "3", "4", None])
    made = value_map(spec(words), values, ones(values))
    again = stored_map(field_spec(spec(words)), dict(made.stored), made.unseen)
    for given in (values, pl.Series(["7", "3", ""])):
        assert (made.ids(given) == again.ids(given)).all()
    assert (made.grow([]).ids(values) == made.ids(values)).all()


def test_whole_floats_are_the_integers_they_are() -> None:
    values = pl.Series([1.0, 2.0, None])
    found = value_map(spec("item"), values, ones(values))
    assert (found.ids(values) == found.ids(pl.Series([1, 2, None]))).all()


@pytest.mark.parametrize("whole", [float, int])
@pytest.mark.parametrize(
    "values",
    [
        pl.Series([True, False, None]), pl.Series([3.0, 2.5, float("nan"), None]), pl.Series([1, -7, None]),
        pl.Series(["3.50", "3.00", "0.05", "-10.00", None]).cast(pl.Decimal(9, 2)),
        pl.Series([100, 7]).cast(pl.Decimal(9, 0)),
        pl.Series([[1.0, 2.5], [3.0, None], [], None]), pl.Series([[True, None], [False]]),
        pl.Series([[1, None, 2], [3]]),
        pl.Series([[1.0, 2.0]], dtype=pl.Array(pl.Float64, 2)), pl.Series([["3.50"]]).cast(pl.List(pl.Decimal(9, 2))),
        pl.Series(["a", "b", None], dtype=pl.Categorical), pl.Series([["a", None]], dtype=pl.List(pl.Enum(["a"]))),
    ],
    ids=lambda values: str(values.dtype),
)  # fmt: skip
def test_a_value_in_json_is_the_value_of_the_log(values: pl.Series, whole: Callable[[float], float]) -> None:
    """Whatever type the log's column has, and whether or not a client writes 3.0 as 3."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(one) for one in value]
        if isinstance(value, (float, Decimal)):
            return None if value != value else whole(value) if value % 1 == 0 else float(value)
        return value

    listed = isinstance(values.dtype, (pl.List, pl.Array))
    column = spec("event, sequence" if listed else "event")
    known = value_map(column, values, ones(values))
    for value, expected in zip(values.to_list(), known.ids(values), strict=True):
        body = json.dumps({"candidates": [1], "context": {"x": plain(value)}}).encode()
        asked = pl.Series("x", [parsed(body, RankRequest).context["x"]], strict=False)
        assert known.ids(asked)[0].tolist() == expected.tolist(), value


@pytest.mark.parametrize("words", ["event", "event, sequence", "event, numeric"])
@pytest.mark.parametrize(
    "value", [{"a": 1}, [{"a": 1}], [[1]], date(2024, 1, 1), timedelta(1)], ids=lambda value: repr(value)[:12]
)
def test_a_column_that_a_request_cannot_have_is_refused(words: str, value: Any) -> None:
    table = pl.DataFrame({"x": [value]}).lazy()
    with pytest.raises(UserError, match=rf"log: {spec(words).type} column 'x' holds .*, not (texts|numbers)"):
        readable_as("log", table, "x", spec(words))
