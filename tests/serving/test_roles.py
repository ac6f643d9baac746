"""Times, ids, repeated events and labels are read at every request and update as they were in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from fastapi.testclient import TestClient

from ctr_pe import CTRRanker
from ctr_pe.cli import main
from ctr_pe.data.logs.log import build
from ctr_pe.data.logs.recipe import load_recipe
from ctr_pe.serving.service import application
from ctr_pe.training import Run, train
from ctr_pe.utils.errors import UserError
from tests.support.fuzz.small_log import SMALL

START = 1_700_000_000 * 10**9


def clicks() -> pl.DataFrame:
    """Of each user 12 events, 100 ms apart."""
    draw = np.random.default_rng(0)
    items = np.concatenate([draw.choice(25, 12, replace=False) for _ in range(30)])
    at = pl.Series([START + 10**8 * (place % 12) for place in range(360)]).cast(pl.Datetime("ns"))
    return pl.DataFrame({"user_id": np.repeat(np.arange(30), 12), "item_id": items, "timestamp": at})


@pytest.fixture(scope="module")
def ranker() -> CTRRanker:
    """Of an encoding that reads ages."""
    return CTRRanker("DIN", "time_bias", **SMALL).fit(clicks())


def lengths(ranker: CTRRanker, requests: pl.DataFrame, history: pl.DataFrame | None) -> list[int]:
    encoder = ranker.scorer_.encoder
    lists = encoder.requests(requests, ranker._events(history)).lists[0]
    return list(lists.end - lists.begin)


def test_a_request_sees_the_events_of_its_own_second(ranker: CTRRanker) -> None:
    """900 ms after the first event, and 1 ns more; as dates, in a zone and as texts; with and without a history."""
    at = pl.Series([START + 9 * 10**8, START + 9 * 10**8 + 1]).cast(pl.Datetime("ns"))
    for times in (at, at.dt.replace_time_zone("UTC").dt.convert_time_zone("Asia/Tokyo"), at.dt.to_string("iso")):
        requests = pl.DataFrame({"user_id": [3, 3], "item_id": [1, 1], "timestamp": times})
        for history in (None, clicks()):
            assert lengths(ranker, requests, history) == [9, 10]


def test_an_update_keeps_the_precision(ranker: CTRRanker, tmp_path: Path) -> None:
    ranker.save(tmp_path / "model")
    updated, table = CTRRanker.load(tmp_path / "model"), clicks()
    later = (
        table.filter(pl.col("user_id") == 3).head(3).with_columns(pl.col("timestamp") + pl.duration(milliseconds=1150))
    )
    updated.partial_fit(later.with_columns(item_id=pl.Series([40, 41, 42])), epochs=np.int64(1))  # type: ignore[arg-type]
    at = pl.Series([START + ms * 10**6 for ms in (1101, 1151, 1251, 1351)]).cast(pl.Datetime("ns"))
    requests = pl.DataFrame({"user_id": [3] * 4, "item_id": [1] * 4, "timestamp": at})
    assert lengths(updated, requests, None) == [12, 13, 14, 15]


def test_a_service_takes_dates(ranker: CTRRanker, tmp_path: Path) -> None:
    ranker.save(tmp_path / "model")
    request: dict[str, Any] = {"history": [1, 2.0], "candidates": [3, 4, 5.0]}
    with TestClient(application(tmp_path / "model")) as client:
        scores = []
        for times, now in [
            (["2023-11-14T22:13:20.9Z", "2023-11-14T22:13:21.1Z"], "2023-11-14T22:13:21.8Z"),
            ([1_700_000_000.9, 1_700_000_001.1], 1_700_000_001.8),
        ]:
            answer = client.post("/rank", json={**request, "times": times, "now": now})
            assert answer.status_code == 200, answer.json()
            scores.append([one["score"] for one in answer.json()["ranked"]])
        wrong = client.post("/rank", json={**request, "times": ["01/02/2024", "01/03/2024"]})
    assert scores[0] == scores[1]
    assert wrong.status_code == 422
    assert "ISO 8601" in str(wrong.json())


@pytest.mark.parametrize("kind", ["dates", "texts", "format"])
def test_times_without_the_zone_of_the_log_s_are_counted_and_said_once(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """In tables, in ``predict``, in the service and in an update; those that have zones are not, nor stored ones."""
    at = pl.col("timestamp").dt.replace_time_zone("UTC").dt.convert_time_zone("Asia/Tokyo")
    form = "%Y-%m-%d %H:%M:%S%.f%z"
    written = {"dates": at, "texts": at.dt.to_string("iso:strict"), "format": at.dt.to_string(form)}[kind]
    log, given = clicks().with_columns(written), SMALL | ({"time_format": form} if kind == "format" else {})
    CTRRanker("DIN", "time_bias", **given).fit(log).save(tmp_path / "model")
    ranker, said = CTRRanker.load(tmp_path / "model"), "times without a zone, read as UTC"
    requests = log.group_by("user_id", maintain_order=True).last()
    ranker.predict_proba(requests)
    ranker.predict_proba(requests, log)
    ranker.partial_fit(log.with_columns(pl.col("item_id") + 1).head(20))
    assert said not in ranker.unknown_
    assert said not in caplog.text
    naive = requests.with_columns(timestamp=pl.lit("2023-11-15T07:13:30").str.to_datetime("%Y-%m-%dT%H:%M:%S"))
    assert (ranker.predict_proba(naive), ranker.predict_proba(naive))[0].shape == (30, 2)
    assert ranker.unknown_[said] == 30
    assert caplog.text.count(f"requests: {said}: those of the log had zones") == 1
    naive.write_parquet(tmp_path / "requests.parquet")
    files = ["--input", str(tmp_path / "requests.parquet"), "--output", str(tmp_path / "scores.parquet")]
    assert main(["predict", "--model", str(tmp_path / "model"), *files]) == 0
    assert f"30 {said}" in capsys.readouterr().out
    if kind == "format":
        return
    with TestClient(application(tmp_path / "model")) as client:
        for zone, count in (("", {"counts": {said: 3}}), ("Z", {})):
            times = [f"2023-11-14T22:13:2{second}{zone}" for second in range(3)]
            body = {"history": [1, 2], "times": times[:2], "now": times[2], "candidates": [3]}
            answer = client.post("/rank", json=body).json()
            assert {name: answer[name] for name in answer if name == "counts"} == count


def test_whole_floats_are_the_ids(ranker: CTRRanker) -> None:
    requests = pl.DataFrame({"user_id": [3, 4], "item_id": [1, 2]})
    floats = requests.to_pandas().astype(float)
    assert np.array_equal(ranker.predict_proba(requests), ranker.predict_proba(floats))
    score = ranker.scorer_.score_one
    alike = [score([], ids) for ids in ([1, 2], [1.0, 2.0], np.array([1, 2]), np.array([1.0, 2.0], np.float32))]
    assert all(np.array_equal(one, alike[0]) for one in alike)
    nowhere = ranker.scorer_.encoder.one([], [1.5, float("nan"), 1e17])
    assert nowhere.counts["unknown items"] == 3
    with pytest.raises(UserError, match=r"requests: column 'user_id' holds Float64, .* \(1.5 in row 2\)"):
        ranker.predict_proba(pl.DataFrame({"user_id": [1.0, 1.5], "item_id": [1, 2]}))


def test_numbers_of_numpy_are_arguments(ranker: CTRRanker) -> None:
    given = {"epochs": np.int64(1), "max_len": np.int32(9), "random_state": np.uint8(3), "gpu": np.int64(-1)}
    other = CTRRanker("DIN", **{**SMALL, **given, "learning_rate": np.float32(0.01), "strict": np.bool_(True)})
    assert other.fit(clicks()).scorer_.config["max_len"] == 9
    assert ranker.rank(None, pl.DataFrame({"user_id": [3, 3], "item_id": [1, 2]}), k=np.int64(1)).height == 1  # type: ignore[arg-type]


def test_repeated_events_of_a_history_count_as_in_training(ranker: CTRRanker, caplog: pytest.LogCaptureFixture) -> None:
    history, requests = pl.concat([clicks(), clicks().head(5)]), pl.DataFrame({"user_id": [0], "item_id": [1]})
    assert lengths(ranker, requests, history) == [17]
    assert "history: 5 rows repeat the event of another row and all count: keep='first'" in caplog.text
    with pytest.raises(
        UserError, match=r"5 of 365 rows repeat the user_id, item_id, timestamp .*, the first is row 361"
    ):
        CTRRanker("DIN", **SMALL).fit(history)
    for keep, seen in (("first", 12), ("last", 12), ("all", 17)):
        kept = CTRRanker("DIN", **SMALL, keep=keep).fit(history)
        assert (lengths(kept, requests, None), lengths(kept, requests, history)) == ([seen], [seen])


def test_a_label_of_another_name_is_asked_for() -> None:
    log = clicks().with_columns(is_click=pl.int_range(pl.len()) % 2)
    with pytest.raises(UserError, match=r"events: label: which of is_click\? label='is_click', or label=None for none"):
        CTRRanker(**SMALL).fit(log)
    with pytest.raises(UserError, match=r"new_events: label: which of is_click\?"):
        CTRRanker(**SMALL).fit(clicks()).partial_fit(log)
    assert CTRRanker(**SMALL, label=None).fit(log).report_["log"]["rows"] == log.height


def test_a_category_that_pandas_made_a_float_is_read() -> None:
    items = pl.DataFrame({"item_id": range(25), "cate_id": [None if item % 7 == 0 else item % 5 for item in range(25)]})
    ranker = CTRRanker(**SMALL).fit(clicks(), items=items.to_pandas())
    assert ranker.report_["items_without"] == {"cate_id": 4}
    assert set(ranker.scorer_.encoder.vocabularies["cate_id"]) >= set("01234")


def test_where_no_user_can_be_compared_it_is_said_before_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    log = pl.DataFrame({"user_id": range(300), "item_id": [i % 9 for i in range(300)], "timestamp": range(300)})
    log = log.with_columns(label=pl.col("user_id") % 2)
    said = "none of 30 users has rows of both labels, which gAUC compares"
    assert np.isfinite(CTRRanker(**SMALL).fit(log).metrics_["AUC"])
    assert f"validation rows: {said}: the best epoch is that of AUC" in caplog.text
    with pytest.raises(UserError, match=f"^monitor gAUC: validation rows: {said}: .*AUC, monitor='AUC'$"):
        CTRRanker(**SMALL, monitor={"gAUC": 1, "AUC": 0.1}).fit(log)
    log.write_parquet(tmp_path / "log.parquet")
    recipe = load_recipe(None, {"interactions": tmp_path / "log.parquet", "protocol": "impressions"})
    params = {**SMALL, "monitor": "gAUC", "batch_size": 64}
    with pytest.raises(UserError, match=f"monitor gAUC: .*valid.*: {said}: .*AUC, monitor='AUC'"):
        train(Run("DIN", build(recipe, tmp_path / "set").path, "cape", 0, params=params))
    asked = ["benchmark", "--dataset", str(tmp_path / "set"), "--out", str(tmp_path / "b"), "--repeats", "1"]
    assert main([*asked, "--set", "group_id=usr_id", "--dry-run"]) == 2
    assert "no column 'usr_id': did you mean 'user_id'?" in capsys.readouterr().err
    assert main([*asked, "--dry-run"]) == 2
    shown = capsys.readouterr().err
    assert shown.count(said) == 1
    assert shown.endswith("choose the epoch by AUC, --set monitor=AUC\n")
    assert main([*asked, "--dry-run", "--set", "monitor=AUC"]) == 0


def test_a_split_of_one_label_says_how_to_split_otherwise() -> None:
    """The case one_impression: all that is newest is of one label."""
    log = pl.DataFrame(
        {"user_id": range(400), "item_id": [i % 9 for i in range(400)], "label": [i % 2 for i in range(400)]}
    )
    log = log.with_columns(timestamp=pl.col("user_id") % 10 * 3600)
    with pytest.raises(
        UserError, match=r"split 'valid' needs .*: other valid_fraction= and test_fraction= \(now 0.1, 0.1\)"
    ):
        CTRRanker(**SMALL).fit(log)
    ranker = CTRRanker(**SMALL, valid_fraction=0.2, test_fraction=0.2).fit(log)
    assert [ranker.report_["splits"][split]["rows"] for split in ("train", "valid", "test")] == [240, 80, 80]
    assert np.isfinite(ranker.metrics_["AUC"])
