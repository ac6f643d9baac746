"""Raw events and requests become the rows that the builder of data sets makes of the same log."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from ctr_pe import CTRRanker
from ctr_pe.config.field_groups import Group
from ctr_pe.data.id_map import Index
from ctr_pe.data.loader import BatchLoader
from ctr_pe.data.logs.log import build
from ctr_pe.data.logs.recipe import Recipe
from ctr_pe.fuxictr.csv import build_csv
from ctr_pe.serving.encoder import Encoder
from ctr_pe.serving.model_folder import scorer_of
from ctr_pe.training import DataSource, Outcome, Run, build_model
from ctr_pe.utils.errors import UserError

MAX_LEN = 6


def encoder_of(folder: Path, log: pl.DataFrame, items: pl.DataFrame, **recipe: object) -> tuple[Encoder, pl.DataFrame]:
    """The encoder of a model of the log's data set, and this set's rows, by user, oldest first."""
    log.write_parquet(folder / "log.parquet")
    items.write_parquet(folder / "items.parquet")
    given = {"interactions": folder / "log.parquet", "items": folder / "items.parquet", "max_len": MAX_LEN}
    data = build(Recipe.model_validate(given | {"protocol": "impressions", "negatives": True} | recipe), folder / "d")
    run = Run("DIN", data.path, "time_bias" if "timestamp" in log.columns else "cape", 0, params={"embedding_dim": 4})
    model = build_model(run, data, str(folder))
    outcome = Outcome({}, 1, 0.0, np.zeros(0, np.float32), 1)
    rows = pl.concat([pl.read_parquet(data.split(split)) for split in ("train", "valid", "test")])
    return scorer_of(model, run, DataSource.of(data), outcome).encoder, rows.sort("user_id", maintain_order=True)


@pytest.mark.parametrize("unit", ["s", "ms", "dates"])
def test_every_row_of_a_log_is_encoded_as_the_builder_did(
    unit: str, impressions: pl.DataFrame, items: pl.DataFrame, tmp_path: Path
) -> None:
    """With ties in time, unseen items, empty histories and truncated ones, chosen and not chosen items."""
    if unit == "ms":
        impressions = impressions.with_columns(pl.col("timestamp") * 1000)
    elif unit == "dates":
        impressions = impressions.with_columns(pl.from_epoch("timestamp"))
    encoder, rows = encoder_of(tmp_path, impressions, items, time_unit="ms" if unit == "ms" else "s")
    requests = impressions.sort("user_id", "timestamp", "item_id")
    shuffled = impressions.sample(fraction=1.0, shuffle=True, seed=1)
    batch = encoder.requests(requests, encoder.events(shuffled)).batch(np.arange(len(requests)))
    assert encoder.unseen("item_id") in rows["item_id"].to_list()
    lengths = rows["item_history"].list.len()
    assert lengths.min() == 0
    assert lengths.max() == MAX_LEN
    for name in ("item_id", "cate_id"):
        assert batch[name].tolist() == rows[name].to_list()
    for name in ("item", "cate", "age"):
        for listed in ("history", "neg_history"):
            column = f"{name}_{listed}"
            width = batch[column].shape[1]
            padded = [[*values, *[0] * (width - len(values))] for values in rows[column].to_list()]
            assert batch[column].tolist() == padded


def test_an_order_decides_between_events_of_the_same_time(
    impressions: pl.DataFrame, items: pl.DataFrame, tmp_path: Path
) -> None:
    log = impressions.sample(fraction=1.0, shuffle=True, seed=2).sort("timestamp", maintain_order=True)
    log = log.with_columns(position=pl.int_range(pl.len()))
    encoder, rows = encoder_of(tmp_path, log, items)
    requests = log.sort("user_id", "position")
    events = encoder.events(log.sample(fraction=1.0, shuffle=True, seed=3))
    batch = encoder.requests(requests, events).batch(np.arange(len(requests)))
    assert batch["item_id"].tolist() == rows["item_id"].to_list()
    got = [[i for i in history if i] for history in batch["item_history"].tolist()]
    assert got == rows["item_history"].to_list()
    by_time = encoder.requests(requests.drop("position"), events).lists[0]  # events of its own time are not seen
    first = np.flatnonzero(requests["timestamp"].diff().fill_null(0).to_numpy() == 0)
    assert (by_time.end - by_time.begin)[first].tolist() != [len(got[i]) for i in first]


def test_an_item_without_a_value_is_served_as_it_was_trained(tmp_path: Path) -> None:
    """Of FuxiCTR's CSV files: histories as columns of the requests, and as events."""
    histories = [("1^2^3", "^y^z"), ("1^^3", "x^y^"), ("^^", "^^z"), ("2", ""), ("", "")]
    frame = pl.DataFrame(histories, schema=["item_history", "cate_history"], orient="row").with_columns(
        label=pl.int_range(5) % 2, user_id=pl.int_range(5), item_id=pl.lit("1"), cate_id=pl.lit("x")
    )
    for split in ("train", "valid", "test"):
        frame.write_csv(tmp_path / f"{split}.csv")
    ids = {"active": True, "dtype": "str", "type": "categorical"}
    lists = {"active": True, "dtype": "str", "type": "sequence", "max_len": 3, "feature_encoder": None}
    params = {
        "dataset_id": "mine", "data_root": str(tmp_path), "data_format": "csv", "label_col": {"name": "label"},
        **{f"{split}_data": str(tmp_path / f"{split}.csv") for split in ("train", "valid", "test")},
        "feature_cols": [
            {**ids, "name": ["item_id", "cate_id"]}, {**lists, "name": "item_history", "share_embedding": "item_id"},
            {**lists, "name": "cate_history", "share_embedding": "cate_id"},
        ],
    }  # fmt: skip
    data = build_csv(params, [Group(("item_id", "cate_id"), ("item_history", "cate_history"))])
    run = Run("DIN", data.path, "cape", 0, params={"embedding_dim": 4})
    model = build_model(run, data, str(tmp_path))
    encoder = scorer_of(model, run, DataSource.of(data), Outcome({}, 1, 0.0, np.zeros(0, np.float32), 1)).encoder
    (wanted,) = BatchLoader(model.feature_map, data.split("test"), "test")
    lengths = wanted.lengths["item_history"].tolist()
    assert lengths == [3, 3, 3, 1, 0]
    texts = pl.col("item_history", "cate_history")
    in_lists = texts.str.split("^").list.eval(pl.element().replace("", None)).list.head(pl.col("length"))
    requests = frame.with_columns(length=pl.Series(lengths)).with_columns(in_lists)
    events = requests.select("user_id", item_id="item_history", cate_id="cate_history")
    events = events.explode("item_id", "cate_id", empty_as_null=False).fill_null("")
    events = events.with_columns(timestamp=pl.int_range(pl.len()))
    served = [encoder.requests(requests), encoder.requests(frame.drop(texts), encoder.events(events))]
    for batch in (encoded.batch(np.arange(5)) for encoded in served):
        for name in ("item_history", "cate_history"):
            assert batch.lengths[name].tolist() == lengths
            assert batch.histories[name].tolist() == wanted.histories[name].tolist()


def test_a_request_sees_only_what_is_before_it(ranker: CTRRanker) -> None:
    encoder = ranker.scorer_.encoder
    history = pl.DataFrame({"user_id": [1] * 3, "item_id": ["item 1", "item 2", "item 3"], "timestamp": [10, 20, 30]})
    requests = pl.DataFrame({"user_id": [1] * 4, "item_id": ["item 5"] * 4, "timestamp": [10, 20, 21, 99]})
    lists = encoder.requests(requests, encoder.events(history)).lists[0]
    assert (lists.end - lists.begin).tolist() == [0, 1, 2, 3]
    lists = encoder.requests(requests.drop("timestamp"), encoder.events(history)).lists[0]
    assert (lists.end - lists.begin).tolist() == [3, 3, 3, 3]


def test_items_come_from_the_catalogue_then_from_their_columns_and_else_are_unseen(ranker: CTRRanker) -> None:
    encoder = ranker.scorer_.encoder
    categories = encoder.vocabularies["cate_id"]
    requests = pl.DataFrame(
        {"user_id": [1, 1, 1], "item_id": ["item 44", "new", "new"], "cate_id": ["other", "c3", "other"]}
    )
    history = pl.DataFrame({"user_id": [1], "item_id": ["item 0"], "timestamp": [5]})
    encoded = encoder.requests(requests, encoder.events(history))
    assert encoded.scalars["item_id"].tolist() == [encoder.unseen("item_id")] * 3
    assert encoded.scalars["cate_id"].tolist() == [categories["c2"], categories["c3"], encoder.unseen("cate_id")]
    assert encoded.counts["unknown items"] == 3


@pytest.mark.parametrize("history", [[], ["item 3"], [f"item {i % 40}" for i in range(150)]], ids=["0", "1", "150"])
def test_one_user_is_scored_as_a_table_is(ranker: CTRRanker, history: list[str]) -> None:
    scorer, asked = ranker.scorer_, ["item 1", "item 44", "nowhere"]
    times = list(range(len(history)))
    past = pl.DataFrame({"user_id": [1] * len(history), "item_id": history, "timestamp": times}).cast(
        {"user_id": pl.Int64, "item_id": pl.String, "timestamp": pl.Int64}
    )
    table = scorer.score_requests(past, pl.DataFrame({"user_id": [1] * 3, "item_id": asked}))
    np.testing.assert_allclose(scorer.score_one(history, asked), table, atol=1e-6)
    np.testing.assert_allclose(scorer.score_one(history, asked, times), table, atol=1e-6)


def test_tables_without_rows(ranker: CTRRanker) -> None:
    nothing = pl.DataFrame({"user_id": [], "item_id": [], "timestamp": []})
    asked = pl.DataFrame({"user_id": [1, 2], "item_id": ["item 1", "item 2"]})
    alone = [ranker.scorer_.score_one([], [item])[0] for item in asked["item_id"]]
    np.testing.assert_allclose(ranker.scorer_.score_requests(nothing, asked), alone, atol=1e-6)
    assert ranker.scorer_.score_requests(None, nothing).shape == (0,)
    assert ranker.scorer_.score_one(["item 1"], []).shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"user_id": None}, "requests: no column 'user_id'"),
        ({"item_id": None}, "requests: no column 'item_id'"),
        ({"item_id": pl.Series([1, 2])}, "requests: column 'item_id' holds Int64, the model's items String"),
        ({"item_id": pl.Series(["item 1", None])}, "requests: column 'item_id' has null values: 1 of 2 rows"),
        ({"user_id": pl.Series(["a", "b"])}, "requests: column 'user_id' holds String, in the history it holds Int64"),
        ({"user_id": pl.Series([0.5, 1.5])}, "requests: column 'user_id' holds Float64, not integers or strings"),
        ({"timestamp": pl.Series(["a", "b"])}, "requests: time column 'timestamp' holds no date of ISO 8601"),
        (
            {"timestamp": pl.Series([1_700_000_000, 1_700_000_000_000])},
            "'timestamp', row 2: 1700000000000 is 2023-11-14 .* one unit",
        ),
        (
            {"timestamp": pl.Series([1_700_000_000] * 2)},
            "'timestamp': .* is the year 1970 in seconds",
        ),  # events: from 0
    ],
)
def test_errors_name_the_column(ranker: CTRRanker, change: dict[str, pl.Series | None], message: str) -> None:
    requests = pl.DataFrame({"user_id": [100, 101], "item_id": ["item 1", "item 2"]})
    for name, values in change.items():
        requests = requests.drop(name) if values is None else requests.with_columns(values.alias(name))
    with pytest.raises(UserError, match=message):
        ranker.scorer_.score_requests(None, requests)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("keys", [[], [5], [30, 10, 20], ["b", "a", "é"]])
def test_an_index_finds_what_it_knows_and_nothing_else(keys: list[int] | list[str], many: bool) -> None:
    """By a join for many, by a search for a few."""
    strings = bool(keys) and isinstance(keys[0], str)
    known = pl.Series(keys, dtype=pl.String if strings else pl.Int64)
    more = [f"x{i}" if strings else 1000 + i for i in range(0 if many else 500)]
    index = Index(pl.concat([known, pl.Series(more, dtype=known.dtype)]))
    wanted = [*keys, *(["", "zz"] if strings else [-1, 15, 99])]
    assert index.find(index.of(wanted)).tolist() == [keys.index(key) if key in keys else -1 for key in wanted]  # type: ignore[arg-type]
    assert index.find(index.of([None])).tolist() == [-1]


def test_repeated_events_of_a_history_are_told(
    ranker: CTRRanker, clicks: pl.DataFrame, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = ranker.scorer_.encoder
    with caplog.at_level("WARNING"):
        encoder.events(clicks)
    assert not caplog.records
    with caplog.at_level("WARNING"):
        encoder.events(pl.concat([clicks, clicks.head(3)]))
    assert [record.getMessage().split(":")[1] for record in caplog.records] == [
        " 3 rows repeat the event of another row and all count"
    ]
