"""Every kind of declared column, from a log to the scores of the estimator and the service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest
from fastapi.testclient import TestClient

from ctr_pe import CTRRanker
from ctr_pe.cli import main
from ctr_pe.serving.service import application
from ctr_pe.utils.errors import UserError
from tests.data.logs.test_columns import COLUMNS, tables

MODELS = ["DIN", "BST", *(pytest.param(name, marks=pytest.mark.slow) for name in ("DIEN", "DMIN", "TIN", "SASRec"))]
QUICK: dict[str, Any] = {"epochs": 1, "embedding_dim": 8, "batch_size": 256, "columns": COLUMNS}
EVENT = ("hour", "price", "seen")
COUNT = 60


@pytest.fixture(scope="module")
def given() -> dict[str, pl.DataFrame]:
    found = tables()
    return {"events": found["interactions"], "items": found["items"], "users": found["users"]}


def fitted(given: dict[str, pl.DataFrame], model: str = "DIN", **options: Any) -> CTRRanker:
    return CTRRanker(model, "cape", **QUICK, **options).fit(**given)


@pytest.fixture(scope="module", params=MODELS)
def ranker(request: pytest.FixtureRequest, given: dict[str, pl.DataFrame]) -> CTRRanker:
    return fitted(given, request.param)


@pytest.fixture(scope="module")
def din(given: dict[str, pl.DataFrame]) -> CTRRanker:
    """To be read only."""
    return fitted(given)


def asked(given: dict[str, pl.DataFrame]) -> pl.DataFrame:
    """Requests for known and unknown items of known and unknown users, with and without a price."""
    draw = np.random.default_rng(1)
    prices = [None if place % 5 == 0 else float(price) for place, price in enumerate(draw.random(COUNT))]
    return pl.DataFrame({
        "user_id": draw.integers(0, 34, COUNT), "item_id": draw.integers(0, 24, COUNT),
        "hour": draw.integers(0, 26, COUNT), "price": prices, "seen": ["0|9", None, "2"] * (COUNT // 3),
        "size": [None, 4.0, 5.5, 100.0] * (COUNT // 4),
    })  # fmt: skip


def offline(ranker: CTRRanker, requests: pl.DataFrame) -> npt.NDArray[np.float64]:
    return ranker.predict_proba(requests)[:, 1]


def bodies(ranker: CTRRanker, requests: pl.DataFrame) -> list[dict[str, Any]]:
    """The same requests as the service takes them, with the histories that the model has stored."""
    assert ranker.scorer_.histories is not None
    past = ranker.scorer_.histories.sort("user_id", "timestamp", "item_id", maintain_order=True)
    found = []
    for row in requests.iter_rows(named=True):
        own = past.filter(pl.col("user_id") == row["user_id"])
        context = {name: row[name] for name in (*EVENT, "size")}
        of_past = {name: own[name].to_list() for name in (*EVENT, "watch_time")}
        found.append({
            "history": own["item_id"].to_list(), "candidates": [row["item_id"]], "user": row["user_id"],
            "context": context, "history_context": of_past,
        })  # fmt: skip
    return found


def test_the_service_gives_the_scores_of_the_estimator(
    ranker: CTRRanker, given: dict[str, pl.DataFrame], tmp_path: Path
) -> None:
    requests = asked(given)
    ranker.save(tmp_path / "model")
    with TestClient(application(tmp_path / "model")) as client:
        answers = [client.post("/rank", json=body) for body in bodies(ranker, requests)]
    assert {answer.status_code for answer in answers} == {200}
    served = [answer.json()["ranked"][0]["score"] for answer in answers]
    np.testing.assert_allclose(served, offline(ranker, requests), atol=1e-5)


def test_candidates_of_one_request_have_the_scores_of_requests_of_their_own(
    ranker: CTRRanker, given: dict[str, pl.DataFrame]
) -> None:
    body = next(body for body in bodies(ranker, asked(given)) if len(body["history"]) > 3)
    candidates = list(range(24))
    together = ranker.scorer_.score_one(**{**body, "candidates": candidates})
    alone = [ranker.scorer_.score_one(**{**body, "candidates": [item]})[0] for item in candidates]
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_a_saved_model_and_the_command_give_the_same(
    din: CTRRanker, given: dict[str, pl.DataFrame], tmp_path: Path
) -> None:
    ranker, requests = din, asked(given)
    ranker.save(tmp_path / "model")
    again = CTRRanker.load(tmp_path / "model")
    assert np.array_equal(offline(again, requests), offline(ranker, requests))
    assert again.columns == QUICK["columns"] or set(again.columns or {}) == set(COLUMNS)
    requests.write_parquet(tmp_path / "requests.parquet")
    made = ["--input", str(tmp_path / "requests.parquet"), "--output", str(tmp_path / "scores.parquet")]
    assert main(["predict", "--model", str(tmp_path / "model"), *made]) == 0
    scores = pl.read_parquet(tmp_path / "scores.parquet")["score"].to_numpy()
    np.testing.assert_allclose(scores, offline(ranker, requests), atol=1e-6)


def test_an_attribute_in_a_request_overrides_the_catalogue_s(din: CTRRanker, given: dict[str, pl.DataFrame]) -> None:
    requests = asked(given).filter(pl.col("user_id") < 25)
    other = requests.with_columns(group=pl.lit("g3"))
    same = requests.join(given["users"].drop("age"), on="user_id", how="left", maintain_order="left")
    assert np.array_equal(offline(din, same), offline(din, requests))
    assert not np.array_equal(offline(din, other), offline(din, requests))


def test_what_is_known_afterwards_is_not_read_of_a_request(din: CTRRanker, given: dict[str, pl.DataFrame]) -> None:
    requests = asked(given)
    leaked = requests.with_columns(watch_time=pl.Series(np.linspace(0, 1, COUNT)))
    assert np.array_equal(offline(din, leaked), offline(din, requests))


def test_fields_without_a_value_are_counted(
    din: CTRRanker, given: dict[str, pl.DataFrame], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the answer of the service, of the request, of its user and of its history; and by ``predict``."""
    requests = asked(given)
    din.save(tmp_path / "model")
    whole = {"hour": 3, "price": 0.5, "seen": "1", "size": 4.0}
    past = {"hour": [1, 2], "price": [0.1, 0.2], "seen": ["1", "2"], "watch_time": [0.1, None]}
    missing = lambda **counts: {f"missing values of {name}": count for name, count in counts.items()}  # noqa: E731
    of_user = dict.fromkeys(("group", "age", "likes"), 3)
    cases: list[tuple[dict[str, Any], dict[str, int]]] = [
        ({"user": 1, "context": whole}, {}),
        ({"user": 1, "context": {}}, missing(**dict.fromkeys(whole, 3))),
        ({"user": 1, "context": whole | {"hour": None, "seen": ""}}, missing(hour=3, seen=3)),
        ({"context": whole}, missing(**of_user)),
        ({"context": whole | {"group": "g1", "age": 30.0, "likes": 1}}, {}),
        ({"user": 1, "context": whole, "candidate_context": {"hour": [1, None, 2]}}, missing(hour=1)),
        ({"user": 1, "context": whole, "history": [1, 2], "history_context": past}, missing(watch_time=1)),
        ({"user": 1, "context": whole, "history": [1, 2]}, missing(**dict.fromkeys(past, 2))),
    ]
    with TestClient(application(tmp_path / "model")) as client:
        for body, counts in cases:
            answer = client.post("/rank", json={"candidates": [1, 2, 3], **body}).json()
            assert answer.get("counts", {}) == counts, body
    requests.write_parquet(tmp_path / "requests.parquet")
    made = ["--input", str(tmp_path / "requests.parquet"), "--output", str(tmp_path / "scores.parquet")]
    assert main(["predict", "--model", str(tmp_path / "model"), *made]) == 0
    shown = capsys.readouterr().out
    lacking = {name: requests[name].null_count() for name in ("price", "seen", "size")}
    without = requests.filter(pl.col("user_id") > 24).height
    for name, count in (lacking | dict.fromkeys(("group", "likes"), without)).items():
        assert f"{count} missing values of {name}" in shown
    assert "missing values of hour" not in shown


@pytest.mark.parametrize("of", ["context", "candidate_context"])
def test_nor_is_it_of_a_request_to_the_service(of: str, din: CTRRanker, tmp_path: Path) -> None:
    din.save(tmp_path / "model")
    body = {"history": [], "candidates": [1, 2], "context": {"hour": 3, "price": 0.5}}
    leak = {of: body.get(of, {}) | {"watch_time": 0.9 if of == "context" else [0.9, 0.1]}}
    with TestClient(application(tmp_path / "model")) as client:
        plain, leaked = (client.post("/rank", json=one).json() for one in (body, body | leak))
    assert leaked["ranked"] == plain["ranked"]


def test_the_daily_update_learns_new_values_of_every_kind(given: dict[str, pl.DataFrame]) -> None:
    ranker = fitted(given)
    before = offline(ranker, asked(given))
    new = (
        given["events"]
        .tail(80)
        .with_columns(timestamp=pl.col("timestamp") + 10**6, item_id=pl.col("item_id") + 15, hour=pl.col("hour") + 5)
    )
    items = pl.DataFrame(
        {"item_id": range(19, 35), "cate_id": 1, "tags": "a|zz", "cost": 2.5, "mood": [["x", "w"]] * 16}
    )
    images = [None if item == 30 else [1.0, 2.0, float(item)] for item in range(19, 35)]
    items = items.with_columns(image=pl.Series(images), sound=pl.lit([0.5, 1.5]))
    users = pl.DataFrame({"user_id": [26, 27], "group": ["g9", "g1"], "age": [30.0, None], "likes": [1, 77]})
    ranker.partial_fit(new, items=items, users=users)
    grown = {name: count for name, count in ranker.updates_[-1]["new_ids"].items() if count}
    assert grown.keys() == {"item_id", "cate_id", "tags", "mood", "group", "hour", "image", "sound"}
    assert (grown["tags"], grown["mood"], grown["group"], grown["cate_id"], grown["image"]) == (1, 1, 1, 1, 14)
    of_items, known = ranker.scorer_.encoder.items, ranker.scorer_.model.state_dict()
    assert of_items is not None
    for name, wanted in (("image", {5: [0.0] * 3, 19: [1.0, 2.0, 19.0], 30: [0.0] * 3, 34: [1.0, 2.0, 34.0]}),):
        vectors = known[f"embedding_layer.embedding_layers.{name}.pretrain_embedding.weight"]
        by_item = dict(of_items.select("item_id", f"{name}:id").iter_rows())
        assert {item: vectors[by_item[item]].tolist() for item in wanted} == wanted
    assert not np.array_equal(offline(ranker, asked(given)), before)
    again = CTRRanker("DIN", "cape", **QUICK).partial_fit(
        **{"new_events" if k == "events" else k: v for k, v in given.items()}
    )
    vectors = again.scorer_.model.embedding_layer.embedding_layers["image"].pretrain_embedding.weight
    assert sorted(vectors.tolist())[-1] == [19.0, 1.0, -2.0]
    assert np.isfinite(offline(again, asked(given))).all()


def test_columns_that_are_not_declared_are_named_once(
    given: dict[str, pl.DataFrame], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        fitted(given)
    lines = [record.getMessage() for record in caplog.records if "not read" in record.getMessage()]
    assert lines == ["events: not read: spare (columns={'spare': 'event'} reads one)"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": {"huor": 3}}, "context: no field 'huor' in this model: did you mean 'hour'?"),
        ({"history_context": {"tag": []}}, "history_context: no field 'tag' in this model: did you mean 'tags'"),
        ({"history_context": {"tags": [["a"]]}}, "1 values of 'tags' for 0 items of the history"),
        ({"history": [1], "history_context": {"hour": [1, 2]}}, "2 values of 'hour' for 1 items"),
        ({"context": {"hour": {"a": 1}}}, "a value is text, a number, true, false or null, or a list of these"),
    ],
)
def test_a_wrong_request_is_told_in_one_line(
    change: dict[str, Any], message: str, din: CTRRanker, tmp_path: Path
) -> None:
    din.save(tmp_path / "model")
    with TestClient(application(tmp_path / "model")) as client:
        answer = client.post("/rank", json={"history": [], "candidates": [1]} | change)
    assert answer.status_code == 422
    assert message in str(answer.json())


def test_a_missing_column_of_the_event_is_named(din: CTRRanker, given: dict[str, pl.DataFrame]) -> None:
    with pytest.raises(UserError, match="requests: no column 'hour'"):
        offline(din, asked(given).drop("hour"))


def test_lists_stand_where_a_field_has_several_categories(din: CTRRanker, tmp_path: Path) -> None:
    """Anything else is the client's mistake, named, whichever part of a request it is in."""
    din.save(tmp_path / "model")
    names = {*EVENT, "watch_time"}
    cases: list[list[Any]] = [
        ["1"], ["1", ["2"]], [["1"], None], [["1"], []], [["1", None], ["2"]], [True, None]
    ]  # fmt: skip
    with TestClient(application(tmp_path / "model"), raise_server_exceptions=False) as client:
        for part in ("context", "candidate_context", "history_context"):
            for name in names - ({"watch_time"} if part != "history_context" else set()):
                for values in cases:
                    count = 1 if part == "context" else 2
                    if len(values) < count:
                        continue
                    given = values[0] if part == "context" else values
                    body = {"history": [1, 2], "candidates": [3, 4], part: {name: given}}
                    answer = client.post("/rank", json=body)
                    kinds = {isinstance(one, list) for one in ([given] if count == 1 else given) if one is not None}
                    wrong = kinds == {True, False} or (True in kinds and name != "seen")
                    assert answer.status_code == (422 if wrong else 200), (part, name, given)
                    if wrong:
                        assert f"{part}: '{name}' has " in answer.json()["detail"][0]["msg"]
