"""Nothing of a log is misread in silence: times, ids, repeated events, labels, what is missing."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from ctr_pe.cli import main
from ctr_pe.config.yaml import load_json
from ctr_pe.data.dataset import Dataset
from ctr_pe.data.id_map import UNSEEN
from ctr_pe.data.logs.log import build, summary
from ctr_pe.data.logs.recipe import load_recipe
from ctr_pe.data.logs.roles import id_column, keys, times
from ctr_pe.utils.errors import UserError

START = 1_700_000_000 * 10**9


def moments(values: Any, unit: Any = "s", form: str | None = None) -> list[int]:
    table = pl.LazyFrame({"t": values})
    return table.select(times("log", "t", table, unit, form).at.alias("t")).collect()["t"].to_list()


def built(folder: Path, events: pl.DataFrame | str, items: pl.DataFrame | None = None, **recipe: Any) -> Dataset:
    files = {"interactions": folder / ("log.csv" if isinstance(events, str) else "log.parquet")}
    if isinstance(events, str):
        files["interactions"].write_text(events)
    else:
        events.write_parquet(files["interactions"])
    if items is not None:
        files["items"] = folder / "items.parquet"
        items.write_parquet(files["items"])
    return build(load_recipe(None, {"protocol": "din", **files, **recipe}), folder / "set", overwrite=True)


def log_of(times: Any, users: int = 5, label: str | None = None, **more: Any) -> pl.DataFrame:
    """Users with items of their own at the same times; ``label``: a column of 0 and 1, both at every time."""
    one = pl.DataFrame({"item_id": range(len(times)), "timestamp": times, **more})
    log = pl.concat(
        one.with_columns(user_id=pl.lit(user, pl.Int64), item_id=pl.col("item_id") + user) for user in range(users)
    )
    return log if label is None else log.with_columns((pl.col("item_id") % 2).alias(label))


# --- times ---


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "America/New_York"])
def test_dates_keep_their_precision_and_zones_become_utc(unit: Any, zone: str | None) -> None:
    step = {"ms": 10**6, "us": 10**3, "ns": 1}[unit]
    at = [START + number * step for number in (0, 1, 2, 999)]
    dates = pl.Series(at).cast(pl.Datetime("ns", "UTC")).dt.cast_time_unit(unit)
    dates = dates.dt.replace_time_zone(None) if zone is None else dates.dt.convert_time_zone(zone)
    assert moments(dates) == at


@pytest.mark.parametrize(("unit", "step"), [("s", 10**9), ("ms", 10**6), ("us", 10**3), ("ns", 1)])
def test_numbers_count_in_their_unit(unit: str, step: int) -> None:
    assert moments([START // step, START // step + 1], unit) == [START, START + step]
    assert moments([0.0, 5.0], unit) == [0, 5 * step]


def test_fractions_of_seconds_stay_apart() -> None:
    near = [1_700_000_000.1, np.nextafter(1_700_000_000.1, np.inf)]
    assert 0 < np.diff(moments(near))[0] < 300


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2024-03-01", 0),
        ("2024-03-01 12:30", 45_000),
        ("2024-03-01T12:30:01.25", 45_001.25),
        ("2024-03-01T12:30:01,000000001", 45_001.000000001),
        ("2024-03-01T12:30:00Z", 45_000),
        ("2024-03-01 12:30:00+01:30", 39_600),
        ("2024-03-01T12:30:00-0130", 50_400),
        ("2024-03-01 12:30:00 -01", 48_600),
    ],
)
def test_texts_of_iso_8601(text: str, seconds: float) -> None:
    day = int(datetime(2024, 3, 1, tzinfo=UTC).timestamp())
    assert moments([text]) == [day * 10**9 + round(seconds * 10**9)]


@pytest.mark.parametrize(
    "text", ["01/02/2024", "2024-02-30", "2024-03-01 12:30 CET", "1 Mar 2024", "24-03-01", "2024-03-01 25:00", "17e8"]
)
def test_a_text_that_could_be_several_dates_or_none_is_asked_for(text: str) -> None:
    with pytest.raises(UserError, match=r"log: time column 't' holds no date of ISO 8601.*time_format=.*in row 2\)"):
        moments(["2024-03-01", text])


def test_a_format_reads_texts_and_numbers() -> None:
    assert moments(["02/01/1970 00:00:01.5"], form="%d/%m/%Y %H:%M:%S%.f") == [86_401_500_000_000]
    assert moments(["02/01/1970"], form="%m/%d/%Y") == [32 * 86_400 * 10**9 - 86_400 * 10**9]
    assert moments([19700102], form="%Y%m%d") == [86_400 * 10**9]
    with pytest.raises(
        UserError, match=r"time column 't' holds another form than time_format='%d/%m/%Y' \('x' in row 1\)"
    ):
        moments(["x"], form="%d/%m/%Y")


def test_zones_in_some_rows_only_are_ambiguous() -> None:
    with pytest.raises(UserError, match=r"has zones in 1 rows and none in 2 \(row 1\)"):
        moments(["2024-03-01 12:00", "2024-03-01 12:00Z", "2024-03-01 13:00"])


def test_days_written_as_numbers_are_no_seconds(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"days such as 20240301, no seconds: time_format='%Y%m%d' reads them"):
        built(tmp_path, log_of([20240301, 20240302, 20240303, 20240304]))


@pytest.mark.slow
@pytest.mark.parametrize("csv", [False, True])
@pytest.mark.parametrize("protocol", ["din", "impressions"])
def test_events_of_one_second_are_no_ties(csv: bool, protocol: str, tmp_path: Path) -> None:
    """100 ms apart, as numbers, dates and texts: all are history of what follows, at an age of 0."""
    at = pl.Series([START + 10**8 * place for place in range(9)])
    reports = []
    for given, options in [
        (at // 10**6, {"time_unit": "ms"}), (at // 10**3, {"time_unit": "us"}), (at, {"time_unit": "ns"}),
        (at.cast(pl.Datetime("ns")), {}), (at.cast(pl.Datetime("ns")).dt.to_string("%Y-%m-%dT%H:%M:%S%.fZ"), {}),
        (at / 1e9 if csv else at.cast(pl.Datetime("ns", "Europe/Berlin")).dt.cast_time_unit("ms"), {}),
    ]:  # fmt: skip
        log = log_of(given, label="label")
        more = {"label": None} if protocol == "din" else {"protocol": protocol}
        dataset = built(tmp_path, log.write_csv() if csv else log, **options, **more)
        rows = pl.concat([pl.read_parquet(dataset.split(split)) for split in dataset.rows])
        lengths = sorted(set(rows["item_history"].list.len()))
        assert lengths == ([*range(1, 9)] if protocol == "din" else [0, 1, 2, 3, 4])
        assert rows["age_history"].list.max().max() == 0
        reports.append(load_json(dataset.path / "report.json")["log"]["tied_in_time"])
    assert reports == [0] * 6


# --- ids ---


@pytest.mark.parametrize("csv", [False, True])
def test_whole_floats_are_the_integers(csv: bool, tmp_path: Path) -> None:
    log = log_of(range(6)).with_columns(pl.col("user_id", "item_id").cast(float))
    dataset = built(tmp_path, log.write_csv() if csv else log)
    vocabulary = load_json(dataset.path / "feature_vocab.json")["item_id"]
    assert set(map(str, range(9))) < set(vocabulary)
    assert "user_id: whole numbers · item_id: whole numbers" in summary(dataset)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, 2.5], r"Float64, not integers or strings \(2.5 in row 2\)"),
        (
            [1.0, 1e16 + 2],
            r"whole numbers that a float does not tell apart \(2⁵³\) \(1.0000000000000002e\+16 in row 2\)",
        ),
        ([1.0, float("inf")], r"Float64, not integers or strings \(inf in row 2\)"),
        (pl.Series([1, 2**63], dtype=pl.UInt64), r"numbers of 2⁶³ or more, .* \(9223372036854775808 in row 2\)"),
        ([[1], [2]], r"List\(Int64\), not integers or strings"),
    ],
)
def test_ids_that_are_not_exact_are_refused_by_row(values: Any, message: str) -> None:
    table = pl.LazyFrame({"i": values})
    with pytest.raises(UserError, match=f"log: item column 'i' holds {message}"):
        id_column("log", "item", "i", table)


def test_large_ids_stay_apart() -> None:
    large = [2**63 - 1, 2**63 - 2, 2**53 + 1, 2**53]
    assert keys(pl.Series(large), "log").to_list() == large
    assert keys(pl.Series([1.0, 2.0**53 - 1]), "log").to_list() == [1, 2**53 - 1]


# --- repeated events ---


def repeated() -> pl.DataFrame:
    log = log_of(range(6), label="label")
    return pl.concat([log, log[:4].with_columns(label=1 - pl.col("label"))])


def test_repeated_events_name_the_first_and_what_helps(tmp_path: Path) -> None:
    for protocol in ("din", "impressions"):
        log = repeated() if protocol == "impressions" else repeated().drop("label")
        with pytest.raises(UserError, match=r"4 of 34 rows repeat .*, the first is row 31: keep='first', last or all"):
            built(tmp_path, log, protocol=protocol)


@pytest.mark.parametrize("block_size", [500_000, 7])
@pytest.mark.parametrize(("keep", "left_out"), [("first", 4), ("last", 4), ("all", None)])
def test_keep_says_which_events_count(keep: str, left_out: int | None, block_size: int, tmp_path: Path) -> None:
    repeated().write_parquet(tmp_path / "log.parquet")
    recipe = {"interactions": tmp_path / "log.parquet", "protocol": "impressions", "keep": keep}
    dataset = build(load_recipe(None, recipe), tmp_path / "set", block_size=block_size)
    report = load_json(dataset.path / "report.json")["log"]
    assert report["dropped"] == ({} if left_out is None else {f"repeated events (keep {keep})": left_out})
    rows = pl.concat([pl.read_parquet(dataset.split(split)) for split in dataset.rows])
    expected = repeated() if keep == "all" else repeated().unique(["user_id", "item_id"], keep=keep)  # type: ignore[arg-type]
    assert (rows.height, rows["label"].sum()) == (expected.height, expected["label"].sum())
    again = build(load_recipe(None, recipe), tmp_path / "again" / "set", block_size=block_size)
    assert again.data_hash == dataset.data_hash


# --- labels ---


@pytest.mark.parametrize("values", [[0, 1, 0, 1, 1, 0], [True, False] * 3, [0.0, 1.0] * 3])
@pytest.mark.parametrize("protocol", ["din", "impressions"])
def test_a_label_of_another_name_is_asked_for(values: list[Any], protocol: str, tmp_path: Path) -> None:
    log = log_of(range(12), is_click=values * 2, zero=0)
    with pytest.raises(UserError, match=r"log.parquet: label: which of is_click\? label='is_click', or label=None for"):
        built(tmp_path, log, protocol=protocol)
    assert sum(built(tmp_path, log, label=None).rows.values()) == 5 * 11 * 2
    dropped = load_json(built(tmp_path, log, label="is_click").path / "report.json")["log"]["dropped"]
    assert dropped == {"is_click = 0": 30}


def test_the_command_asks_in_its_own_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log_of(range(6), is_click=[0, 1] * 3).write_csv(tmp_path / "log.csv")
    command = ["data", "build", "--protocol", "din", "--interactions", str(tmp_path / "log.csv")]
    assert main([*command, "--out", str(tmp_path / "set")]) == 2
    assert "which of is_click? --label is_click, or --label none for none" in capsys.readouterr().err
    assert main([*command, "--out", str(tmp_path / "set"), "--label", "none", "--keep", "first", "--strict"]) == 0


# --- what is missing; users of one impression ---


@pytest.mark.parametrize("missing", [None, float("nan"), "", "NaN"])
def test_missing_attributes_are_counted_or_refused(missing: Any, tmp_path: Path) -> None:
    values = [missing, *(f"c{item % 2}" if isinstance(missing, str) else item % 2 for item in range(1, 5))]
    kinds = {None: pl.Int64, "": pl.String, "NaN": pl.String}
    items = pl.DataFrame({"item_id": range(5), "cate_id": pl.Series(values, dtype=kinds.get(missing, pl.Float64))})
    dataset = built(tmp_path, log_of(range(6)), items)  # items 5 to 9 have no row
    assert load_json(dataset.path / "report.json")["items_without"] == {"cate_id": 6}
    assert "items without cate_id: 6" in summary(dataset)
    ids = load_json(dataset.path / "feature_vocab.json")["cate_id"]
    known = pl.read_parquet(dataset.path / "items.parquet").sort("item_id")["cate_id:id"].to_list()
    assert [number == ids[UNSEEN] for number in known] == [True, False, False, False, False, *[True] * 5]
    with pytest.raises(UserError, match=r"missing values, which strict=True refuses: cate_id: 6"):
        built(tmp_path, log_of(range(6)), items, strict=True)


def test_an_attribute_that_no_item_has_does_not_stop_a_build(tmp_path: Path) -> None:
    items = pl.DataFrame({"item_id": range(6), "cate_id": pl.Series([None] * 6)})
    assert load_json(built(tmp_path, log_of(range(6)), items).path / "report.json")["items_without"] == {"cate_id": 10}


def test_users_of_one_impression_cannot_be_compared(tmp_path: Path) -> None:
    log = pl.DataFrame({"user_id": range(300), "item_id": [i % 9 for i in range(300)], "timestamp": range(300)})
    dataset = built(tmp_path, log.with_columns(label=pl.col("user_id") % 2), protocol="impressions")
    said = (
        "gAUC cannot be computed: none of 30 users of valid and 30 users of test has rows of both labels: "
        "train by AUC, monitor='AUC'"
    )
    assert said in summary(dataset)
