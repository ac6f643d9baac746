"""Clicks, carts and purchases: a history of each, the same in training and at every request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest
import torch
from fastapi.testclient import TestClient

from ctr_pe import CTRRanker
from ctr_pe.cli import main
from ctr_pe.config.yaml import load_json
from ctr_pe.data.dataset import LABEL, SPLITS, USER, open_dataset
from ctr_pe.data.logs.events import COLUMN, Log
from ctr_pe.data.logs.log import build
from ctr_pe.data.logs.recipe import load_recipe
from ctr_pe.ops import native
from ctr_pe.serving.batch_predict import predict
from ctr_pe.serving.export import description
from ctr_pe.serving.request_graph import RequestGraph, inputs_from, random_request
from ctr_pe.serving.service import application
from ctr_pe.utils.errors import UserError
from tests.data.logs.test_columns import tables
from tests.serving.test_one_path import as_lists, encoder_of, rows_of
from tests.support.exported import graph_inputs, onnx_scores

MODELS = ("DIN", "DIEN", "BST", "DMIN", "TIN", "SASRec")
LISTED = ["click", "cart", "buy"]
BEHAVIOURS = {"action": LISTED}
QUICK: dict[str, Any] = {"epochs": 1, "embedding_dim": 8, "batch_size": 256, "max_len": 6}
COLUMNS = {"hour": "event"}


def log(seed: int = 0, labelled: bool = True) -> pl.DataFrame:
    """Events of three behaviours, of one that nobody lists, and of none."""
    draw, given = np.random.default_rng(seed), tables()["interactions"]
    kinds = draw.choice(["click", "cart", "buy", "view", None], given.height, p=[0.5, 0.2, 0.15, 0.1, 0.05])
    given = given.select("user_id", "item_id", "timestamp", "label", "hour", action=pl.Series(kinds.tolist()))
    given = given.with_columns(timestamp=pl.col("timestamp") // 180 * 180)  # three events at a time
    kind = pl.when(pl.col("action").is_in(LISTED)).then("action").otherwise(pl.lit("other"))  # of which two are alike
    same = pl.struct("user_id", "item_id", "timestamp", kind.alias("kind"))
    given = given.filter(same.is_first_distinct())
    return given if labelled else given.drop("label")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("numbers", [False, True])
def test_a_training_row_is_what_a_request_is_encoded_as(seed: int, numbers: bool, tmp_path: Path) -> None:
    """Every impression of a log, field by field, with a history of each behaviour and one of earlier negatives."""
    given = log(seed)
    listed: list[Any] = LISTED
    if numbers:  # missing values make floats of them
        listed = [3, 1, 2]
        code = dict(zip(LISTED, (3.0, 1.0, 2.0), strict=True)) | {"view": 7.0}
        given = given.with_columns(pl.col("action").replace_strict(code, default=None))
    given.sample(fraction=1.0, shuffle=True, seed=seed).write_parquet(tmp_path / "log.parquet")
    recipe = {"interactions": tmp_path / "log.parquet", "protocol": "impressions", "negatives": seed % 2 == 0}
    recipe |= {"max_len": 1 + 2 * seed, "columns": COLUMNS, "behaviours": {"column": "action", "values": listed}}
    dataset = build(load_recipe(None, recipe), tmp_path / "set")
    rows = rows_of(dataset)
    requests = given.sort("user_id", "timestamp", "item_id", "action", maintain_order=True)
    found = as_lists(encoder_of(dataset, tmp_path), requests, given.sample(fraction=1.0, shuffle=True, seed=9))
    assert set(found) == set(rows.columns) - {LABEL, USER}
    names = sorted(found)
    owner = (requests["user_id"].rank("dense") - 1).to_list()
    encoded = [repr([row, *(found[name][place] for name in names)]) for place, row in enumerate(owner)]
    written = [repr([row[USER], *(row[name] for name in names)]) for row in rows.iter_rows(named=True)]
    assert sorted(encoded) == sorted(written)
    assert all(any(found[f"item_{text}_history"]) for text in listed)


@pytest.mark.parametrize("seed", range(3))
def test_a_clicked_item_is_what_a_request_is_encoded_as(seed: int, tmp_path: Path) -> None:
    """Protocol din: targets are clicks alone, histories have carts and purchases too."""
    given = log(seed, labelled=False)
    given.write_parquet(tmp_path / "log.parquet")
    recipe = {"interactions": tmp_path / "log.parquet", "protocol": "din", "max_len": 4, "behaviours": BEHAVIOURS}
    dataset = build(load_recipe(None, recipe), tmp_path / "set")
    clicked = rows_of(dataset).filter(pl.col(LABEL) == 1)
    by = ["user_id", "timestamp", "item_id"]
    later = given.sort(by, maintain_order=True).filter(pl.int_range(pl.len()).over("user_id") > 0)
    requests = later.filter(pl.col("action") == "click")
    found = as_lists(encoder_of(dataset, tmp_path), requests, given)
    assert clicked.height == requests.height
    names = sorted(found)
    encoded = [repr([found[name][place] for name in names]) for place in range(requests.height)]
    assert sorted(encoded) == sorted(repr([row[name] for name in names]) for row in clicked.iter_rows(named=True))
    own = rows_of(dataset).group_by(USER).agg(pl.col(LABEL).sum())
    assert own[LABEL].sum() == requests.height
    assert {split: pl.read_parquet(dataset.split(split)).height > 0 for split in SPLITS} == dict.fromkeys(SPLITS, True)


def asked() -> pl.DataFrame:
    """Requests for known and unknown items of known and unknown users."""
    draw = np.random.default_rng(2)
    return pl.DataFrame({
        "user_id": draw.integers(0, 33, 40), "item_id": draw.integers(0, 22, 40), "hour": draw.integers(0, 24, 40),
    })  # fmt: skip


def offline(ranker: CTRRanker, requests: pl.DataFrame) -> npt.NDArray[np.float64]:
    return ranker.predict_proba(requests)[:, 1]


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("DIN", "SASRec"))) for name in MODELS]
)
def test_the_service_gives_the_scores_of_the_estimator(model: str, tmp_path: Path) -> None:
    """And so does the folder, after an update, too; the groups have encodings of their own."""
    ranker = CTRRanker(model, ["cape", "none", "rope"], behaviours=BEHAVIOURS, columns=COLUMNS, **QUICK).fit(log())
    ranker.partial_fit(log(1).with_columns(timestamp=pl.col("timestamp") + 100_000).head(200))
    ranker.save(tmp_path / "model")
    again = CTRRanker.load(tmp_path / "model")
    assert again.behaviours == BEHAVIOURS
    requests = asked()
    assert np.array_equal(offline(again, requests), offline(ranker, requests))
    past = ranker.scorer_.histories
    assert past is not None
    assert set(past["action"]) == set(LISTED)
    assert past.group_by("user_id", "action").len()["len"].max() == QUICK["max_len"]
    past, served = past.sort("user_id", "timestamp", "item_id"), []
    with TestClient(application(tmp_path / "model")) as client:
        for row in requests.iter_rows(named=True):
            mine = past.filter(pl.col("user_id") == row["user_id"])
            context = {"hour": mine["hour"].to_list(), "action": mine["action"].to_list()}
            body = {"history": mine["item_id"].to_list(), "candidates": [row["item_id"]], "user": row["user_id"]}
            body |= {"context": {"hour": row["hour"]}, "history_context": context}
            answer = client.post("/rank", json=body)
            assert answer.status_code == 200, answer.text
            served.append(answer.json()["ranked"][0]["score"])
        answer = client.post("/rank", json={"history": [1, 2], "candidates": [3]})
    assert answer.status_code == 422
    assert "0 values of 'action' for 2 items of the history" in answer.text
    np.testing.assert_allclose(served, offline(ranker, requests), atol=1e-5)
    inputs = description(ranker.scorer_)["inputs"]
    assert [inputs[f"item_{text}_history"]["behaviour"] for text in LISTED] == LISTED


def test_predict_gives_the_scores_of_the_estimator_and_counts_other_behaviours_once(tmp_path: Path) -> None:
    """With the stored histories, and with a log of its own, which all parts of the input share."""
    ranker = CTRRanker("DIN", ["cape", "none", "rope"], behaviours=BEHAVIOURS, columns=COLUMNS, **QUICK).fit(log())
    ranker.save(tmp_path / "model")
    requests = asked()
    requests.write_parquet(tmp_path / "requests.parquet")
    log(1).write_parquet(tmp_path / "log.parquet")
    unlisted = log(1).filter(~pl.col("action").is_in(LISTED).fill_null(False)).height
    for events, history, count in ((None, None, 0), (tmp_path / "log.parquet", log(1), unlisted)):
        files = (tmp_path / "model", tmp_path / "requests.parquet", tmp_path / "scores.parquet", events)
        report = predict(*files, overwrite=True, part_rows=16)
        scores = pl.read_parquet(tmp_path / "scores.parquet")["score"].to_numpy()
        np.testing.assert_allclose(scores, ranker.predict_proba(requests, history)[:, 1], atol=1e-6)
        assert report.counts["history items of other behaviours"] == count
        assert (f"{count} history items of other behaviours" in str(report)) == (count > 0)


@pytest.mark.parametrize("model", MODELS)
def test_the_graph_of_an_exported_file_gives_the_scores_of_the_estimator(model: str) -> None:
    ranker = CTRRanker(model, ["cape", "none", "rope"], behaviours=BEHAVIOURS, columns=COLUMNS, **QUICK).fit(log())
    scorer = ranker.scorer_
    with torch.no_grad(), native.portable():
        found = RequestGraph(scorer.model)(graph_inputs(scorer, asked(), scorer.stored))
    np.testing.assert_allclose(found[:, 0].numpy(), offline(ranker, asked()), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "encodings", "options"),
    [("DIN", ["cape", "none", "rope"], {}), ("SASRec", ["none", "rope"], {"num_blocks": 1})],
)
def test_an_exported_file_gives_the_scores_of_the_estimator(
    model: str, encodings: list[str], options: dict[str, int], tmp_path: Path
) -> None:
    """Each history has a length of its own; a trace takes longer with each. ``test_export.py`` exports all models."""
    kinds = {"action": LISTED[: len(encodings)]}
    ranker = CTRRanker(model, encodings, behaviours=kinds, columns=COLUMNS, **options, **QUICK).fit(log())
    ranker.save(tmp_path / "model")
    file = tmp_path / "model.onnx"
    assert main(["export", "--model", str(tmp_path / "model"), "--format", "onnx", "--output", str(file)]) == 0
    found = onnx_scores(ranker.scorer_, file, asked(), ranker.scorer_.stored)
    np.testing.assert_allclose(found, offline(ranker, asked()), atol=1e-5)


def test_inputs_of_an_exported_file_have_lengths_of_their_own_and_as_many_slots() -> None:
    """A trace takes two inputs that are one tensor for one, and a file has one number of slots."""
    ranker = CTRRanker("DIN", "none", behaviours=BEHAVIOURS, columns=COLUMNS, **QUICK).fit(log())
    scorer, rows = ranker.scorer_, np.arange(3)
    drawn = random_request(scorer.model, 5, 6, 2)
    assert len({id(values) for values in drawn.values()}) == len(drawn)
    lengths = [drawn[f"item_{kind}_history_length"].tolist() for kind in LISTED]
    assert len({str(some) for some in lengths}) == len(LISTED)
    history = pl.DataFrame({"user_id": [0] * 5, "item_id": range(5), "timestamp": range(5), "hour": 1})
    history = history.with_columns(action=pl.Series(["click"] * 4 + ["buy"]))
    requests = asked().with_columns(user_id=pl.lit(0, pl.Int64)).head(3)
    encoded = scorer.encoder.requests(requests, scorer.encoder.events(history))
    given = inputs_from(scorer.model, encoded.histories(rows), encoded.fields(rows))
    assert {given[f"item_{kind}_history"].shape for kind in LISTED} == {(3, 4)}
    assert [given[f"item_{kind}_history_length"][0].item() for kind in LISTED] == [4, 0, 1]


def test_each_history_matters() -> None:
    """Another behaviour of a past event is another score; one that is not listed is as if it had not been."""
    ranker = CTRRanker("DIN", "cape", behaviours=BEHAVIOURS, **{**QUICK, "epochs": 3}).fit(log())
    score = lambda *kinds: ranker.scorer_.score_one([1, 2], [3], history_context={"action": kinds})[0]  # noqa: E731
    found = {
        kinds: score(*kinds) for kinds in (("click", "click"), ("click", "cart"), ("cart", "buy"), ("buy", "view"))
    }
    assert len(set(found.values())) == 4
    counts = ranker.scorer_.encoder.one([1, 2], [3], history_context={"action": ["buy", "view"]}).counts
    assert counts["history items of other behaviours"] == 1
    assert score("buy", "view") == ranker.scorer_.score_one([1], [3], history_context={"action": ["buy"]})[0]


def test_a_repeated_row_of_a_history_is_said_and_two_behaviours_at_once_are_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranker = CTRRanker("DIN", "cape", behaviours=BEHAVIOURS, **QUICK).fit(log())
    once = log().filter(pl.col("action").is_not_null())
    requests = once.select("user_id", "item_id").head(5)
    ranker.predict_proba(requests, once)
    assert "repeat the event of another row" not in caplog.text
    ranker.predict_proba(requests, pl.concat([once, once.head(1)]))
    assert "history: 1 row repeat the event of another row" in caplog.text


def test_updates_of_a_new_model_and_of_clicks() -> None:
    given = log(labelled=False)
    ranker = CTRRanker("DIN", "cape", behaviours=BEHAVIOURS, **QUICK).partial_fit(given)
    first = given.sort("user_id", "timestamp", "item_id", maintain_order=True)
    clicks = first.filter((pl.int_range(pl.len()).over("user_id") > 0) & (pl.col("action") == "click")).height
    assert clicks < ranker.updates_[0]["rows"] <= 2 * clicks
    assert ranker.scorer_.stored is not None
    assert ranker.scorer_.stored.unlisted == 0


@pytest.mark.usefixtures("worker_threads")
def test_flags_and_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    given = log()
    given.write_csv("log.csv")
    made = ["data", "build", "--interactions", "log.csv", "--protocol", "impressions", "--out", "data/mine"]
    assert main([*made, "--behaviours", "action=click,cart,buy"]) == 0
    counts = dict(given["action"].fill_null("missing").value_counts().iter_rows())
    said = f"action: behaviours click {counts['click']}, cart {counts['cart']}, buy {counts['buy']}; in no history: "
    assert said + f"view {counts['view']}, missing {counts['missing']}" in capsys.readouterr().out
    report = load_json(open_dataset("mine").path / "report.json")
    assert report["unlisted_behaviours"] == {"view": counts["view"], "missing": counts["missing"]}
    assert {"click_history_items", "cart_history_items", "buy_history_items"} <= report["splits"]["train"].keys()
    run = ["benchmark", "--dataset", "mine", "--model", "DIN", "--pe", "cape", "--repeats", "1", "--out", "out"]
    assert main([*run, "--set", "epochs=1", "--set", "embedding_dim=4"]) == 0


@pytest.mark.parametrize(
    ("behaviours", "message"),
    [
        ({"action": ["click", "byu"]}, "behaviours: column 'action' has no row with 'byu': did you mean 'buy'?"),
        ({"acton": ["click"]}, "no event column 'acton': did you mean 'action'?"),
        ({"action": ["click", "click"]}, "'click' stands twice"),
        ({"action": []}, "behaviours"),
        ({"item_id": ["click"]}, "column 'item_id' is both 'item' and 'behaviours'"),
        ({"column": "action"}, "behaviours"),
    ],
)
def test_a_mistake_is_one_line(behaviours: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as found:
        CTRRanker("DIN", "cape", behaviours=behaviours, **QUICK).fit(log())
    assert message in str(found.value)
    assert "\n" not in str(found.value)


def test_what_is_tied_in_all_else_stays_in_the_order_of_the_rows(tmp_path: Path) -> None:
    """Two behaviours of one item at one time, in a log of as many rows as several threads read at once."""
    place = np.arange(600_000)
    kinds = pl.Series(["click", "cart"]).gather(place % 2)
    log = pl.DataFrame({
        "user_id": place // 2 % 500, "item_id": place // 2 % 97, "timestamp": 1_600_000_000 + place // 2,
        "action": kinds, "hour": place,
    })  # fmt: skip
    log.write_parquet(tmp_path / "log.parquet")
    recipe = {"interactions": tmp_path / "log.parquet", "protocol": "din", "columns": {"hour": "event, numeric"}}
    found = Log(load_recipe(None, {**recipe, "label": None, "behaviours": {"column": "action", "values": LISTED[:2]}}))
    rows = found.blocks(tmp_path, found.kept)[0].collect()
    assert rows[f"{COLUMN}hour"].is_sorted()
