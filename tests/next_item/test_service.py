"""``POST /recommend`` answers with what ``recommend`` gives, says what is wrong, and what to do with a click model."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from fastapi.testclient import TestClient

from ctr_pe import CTRRanker, NextItemRanker
from ctr_pe.serving import service
from ctr_pe.serving.service import application
from ctr_pe.serving.service_options import Limits, Queueing, ServiceOptions
from ctr_pe.utils.errors import UserError
from tests.support.next_item import categories, events, random_histories
from tests.support.processes import PATIENCE, wait_for

FAST: dict[str, Any] = {"epochs": 1, "embedding_dim": 8, "num_blocks": 1, "batch_size": 16, "max_len": 6}
HISTORIES = {f"u{user}": [f"i{item}" for item in items] for user, items in random_histories().items()}
LOG, CATALOGUE = events(HISTORIES), categories().with_columns(item_id=pl.format("i{}", "item_id"))


@pytest.fixture(scope="module")
def ranker() -> NextItemRanker:
    return NextItemRanker("SASRecF", "cape", **FAST).fit(LOG, items=CATALOGUE)


@pytest.fixture(scope="module")
def timed() -> NextItemRanker:
    """One that reads ages."""
    return NextItemRanker("SASRec", "time_bias", **FAST).fit(LOG)


@pytest.fixture(scope="module")
def clicks() -> CTRRanker:
    return CTRRanker("DIN", "none", epochs=1, embedding_dim=8, batch_size=64, max_len=6).fit(LOG, items=CATALOGUE)


@pytest.fixture
def client(ranker: NextItemRanker, tmp_path: Path) -> Iterator[TestClient]:
    ranker.save(tmp_path / "model")
    limits = Limits(history=50, candidates=20, body=4000)
    options = ServiceOptions(limits, poll=0.02, queueing=Queueing(wait=30))
    with TestClient(application(tmp_path / "model", options)) as client:
        yield client


def same(answer: dict[str, Any], wanted: pl.DataFrame) -> None:
    found = pl.DataFrame(answer["recommended"], {"item": pl.String, "score": pl.Float64, "rank": pl.Int64})
    assert found["item"].to_list() == wanted["item_id"].to_list()
    assert found["rank"].to_list() == wanted["rank"].to_list()
    assert found["score"].to_list() == pytest.approx(wanted["score"].to_list(), abs=1e-5)


PAST: list[list[str]] = [[], ["i3"], [f"i{1 + i % 12}" for i in range(9)], ["new", "i4", "other"]]


@pytest.mark.parametrize("history", PAST)
@pytest.mark.parametrize("filter_seen", [True, False])
def test_recommended_is_what_the_ranker_recommends(
    client: TestClient, ranker: NextItemRanker, history: list[str], filter_seen: bool
) -> None:
    request = {"history": history, "k": 5, "filter_seen": filter_seen}
    answer = client.post("/recommend", json=request).json()
    same(answer, ranker.recommend(["me"], 5, filter_seen, history=events({"me": history, "other": ["i1"]})))
    assert answer["unknown_history"] == sum(item in ("new", "other") for item in history)
    assert answer["model"] == client.get("/health").json()["model"]["name"]


def test_users_of_the_log_and_unknown_ones(client: TestClient, ranker: NextItemRanker) -> None:
    for user in ("u1", "u7", "nobody"):
        answer = client.post("/recommend", json={"user": user}).json()
        same(answer, ranker.recommend([user]))
        assert answer.get("counts") == ({"unknown users": 1} if user == "nobody" else None)


def test_attributes_of_items_that_the_model_does_not_know(client: TestClient, ranker: NextItemRanker) -> None:
    past = events({"me": ["new", "i4", "other"]}).with_columns(cate_id=pl.Series([0, 1, 2]))
    request = {"history": ["new", "i4", "other"], "history_context": {"cate_id": [0, 1, 2]}, "k": 4}
    answer = client.post("/recommend", json=request).json()
    same(answer, ranker.recommend(k=4, history=past))
    without = client.post("/recommend", json={"history": ["new", "i4", "other"], "k": 4}).json()
    assert without["recommended"] != answer["recommended"]


def test_a_model_that_reads_ages(timed: NextItemRanker, tmp_path: Path) -> None:
    timed.save(tmp_path / "m")
    times, newest = [1_577_836_800, 1_577_923_200], int(LOG["timestamp"].max())  # type: ignore[arg-type]
    with TestClient(application(tmp_path / "m")) as client:
        answer = client.post("/recommend", json={"history": ["i1", "i2"], "times": times}).json()
        past = pl.DataFrame({"user_id": ["me", "me"], "item_id": ["i1", "i2"], "timestamp": times})
        same(answer, timed.recommend(history=past))
        for more in ({}, {"now": newest}):
            same(client.post("/recommend", json={"user": "u3", **more}).json(), timed.recommend(["u3"]))
        for body, message in (
            ({"history": ["i1"]}, "give the time of each item"),
            ({"user": "u3", "now": 1}, "before the newest"),
        ):
            answer = client.post("/recommend", json=body)
            assert answer.status_code == 422
            assert message in answer.json()["detail"][0]["msg"]


@pytest.mark.parametrize(
    ("body", "path", "message"),
    [
        ({}, [], "a user or a history, one of them"),
        ({"user": "u1", "history": []}, [], "not both"),
        ({"user": 7}, [], "String"),
        ({"history": ["i1", 2]}, ["history", 1], "this model's items are strings"),
        ({"history": ["i1"] * 51}, ["history"], "at most 50 items, not 51"),
        ({"history": [], "k": 21}, ["k"], "at most 20 items, not 21"),
        ({"history": [], "k": 0}, ["k"], "greater than or equal to 1"),
        ({"history": [], "filter_seen": 1}, ["filter_seen"], "valid boolean"),
        ({"history": ["i1"], "times": [1, 2]}, ["times"], "2 for 1 items"),
        ({"history": ["i1"], "history_context": {"colour": ["x"]}}, [], "no field 'colour' in this model"),
        ({"history": ["i1"], "history_context": {"cate_id": []}}, [], "0 values of 'cate_id' for 1 items"),
        ({"user": "u1", "history_context": {"cate_id": [1]}}, ["history_context"], "has of this user"),
        ({"history": [], "candidates": ["i1"]}, ["candidates"], "not permitted"),
    ],
)
def test_what_is_wrong_is_said_with_its_path(
    client: TestClient, body: dict[str, Any], path: list[Any], message: str
) -> None:
    answer = client.post("/recommend", json=body)
    assert answer.status_code == 422
    problem = answer.json()["detail"][0]
    assert problem["loc"] == ["body", *path]
    assert message in problem["msg"]


def test_each_kind_of_model_says_what_to_ask_it(client: TestClient, clicks: CTRRanker, tmp_path: Path) -> None:
    """Also where the folder's model is replaced by one of the other kind."""
    wrong = client.post("/rank", json={"candidates": ["i1"]})
    assert (wrong.status_code, wrong.json()["detail"][0]["loc"]) == (422, ["path"])
    assert "this model finds the items that come next by itself: POST /recommend" in wrong.json()["detail"][0]["msg"]
    before = client.get("/health").json()["model"]["name"]
    clicks.save(tmp_path / "model")
    end = time.monotonic() + 20
    while client.get("/health").json()["model"]["name"] == before and time.monotonic() < end:
        time.sleep(0.02)
    wrong = client.post("/recommend", json={"history": []})
    assert "this model scores the candidates that it gets: POST /rank" in wrong.json()["detail"][0]["msg"]
    assert client.post("/rank", json={"candidates": ["i1"]}).status_code == 200


def test_a_folder_without_histories_asks_for_them(ranker: NextItemRanker, tmp_path: Path) -> None:
    ranker.save(tmp_path / "model", histories=False)
    with TestClient(application(tmp_path / "model")) as client:
        problem = client.post("/recommend", json={"user": "u1"}).json()["detail"][0]
        assert (problem["loc"], problem["msg"][:41]) == (["body", "user"], "the model folder has no histories of user")
        assert client.post("/recommend", json={"history": ["i1"]}).status_code == 200


def test_requests_that_wait_together_get_the_answers_that_they_get_alone(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any k, with and without seen items, of users and of histories, and one with a mistake."""
    requests: list[dict[str, Any]] = [
        {"history": past, "k": 1 + 3 * i, "filter_seen": i % 2 == 0} for i, past in enumerate(PAST)
    ]
    requests += [{"user": "u2", "k": 3}, {"user": "u3", "filter_seen": False}, {"user": "nobody"}, {"user": 3}]
    alone = [client.post("/recommend", json=request).json() for request in requests]
    go, sizes, answers = threading.Event(), list[int](), service._answers

    def counted(model: Any, together: Any) -> Any:
        sizes.append(len(together))
        assert go.wait(PATIENCE)
        return answers(model, together)

    app = client.app
    monkeypatch.setattr(batches_of(app), "_score", counted)
    with ThreadPoolExecutor(len(requests) + 1) as pool:
        first = pool.submit(client.post, "/recommend", json=requests[0])
        wait_for(lambda: len(sizes) == 1)
        others = [pool.submit(client.post, "/recommend", json=request) for request in requests[1:]]
        wait_for(lambda: f"ctr_pe_open_requests {len(requests)}.0" in client.get("/metrics").text)
        go.set()
        found = [one.result().json() for one in (first, *others)]
    assert sizes == [1, len(requests) - 1]
    for mine, wanted in zip(found, alone, strict=True):
        assert json.dumps(mine, sort_keys=True)[:20] == json.dumps(wanted, sort_keys=True)[:20]
        if "recommended" in wanted:
            assert [one["item"] for one in mine["recommended"]] == [one["item"] for one in wanted["recommended"]]
            scores = ([one["score"] for one in answer["recommended"]] for answer in (mine, wanted))
            assert next(scores) == pytest.approx(next(scores), abs=1e-5)


def batches_of(app: Any) -> Any:
    (door,) = (one for one in app.user_middleware if one.cls is service.Door)
    return door.kwargs["admission"].batches


def test_metrics_and_openapi(client: TestClient) -> None:
    client.post("/recommend", json={"history": ["i1", "new"], "k": 3})
    client.post("/recommend", json={})
    text = client.get("/metrics").text.splitlines()
    for line in (
        'ctr_pe_requests_total{status="200"} 1.0',
        'ctr_pe_requests_total{status="422"} 1.0',
        "ctr_pe_recommended_items_total 3.0",
        'ctr_pe_unknown_ids_total{of="history"} 1.0',
    ):
        assert line in text
    body = client.get("/openapi.json").json()["paths"]["/recommend"]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"]["properties"].keys() >= {"user", "history", "k", "filter_seen"}


def test_serve_serves_the_model(ranker: NextItemRanker, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []

    def serve(folder: Path, port: int, host: str, options: ServiceOptions) -> None:
        with TestClient(application(folder, options)) as client:
            served.append(client.post("/recommend", json={"user": "u1", "k": 3}).json())

    monkeypatch.setattr(service, "serve", serve)
    ranker.serve(8000)
    same(served[0], ranker.recommend(["u1"], 3))
    monkeypatch.undo()
    with pytest.raises(UserError, match="no such host"):
        ranker.serve(8000, host="no such host")
