"""Weights of rows and of classes: in the loss, in metrics if asked, from a log to the estimator and its updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from sklearn.metrics import roc_auc_score

from ctr_pe import CTRRanker
from ctr_pe.cli import main
from ctr_pe.config.schema import LOSSES
from ctr_pe.data.dataset import WEIGHT, open_dataset
from ctr_pe.evaluation import evaluate
from ctr_pe.utils.errors import UserError
from tests.data.logs.test_columns import tables

MODELS = ["DIN", "DMIN", *(pytest.param(name, marks=pytest.mark.slow) for name in ("DIEN", "BST", "TIN", "SASRec"))]
QUICK: dict[str, Any] = {"epochs": 1, "embedding_dim": 8, "batch_size": 77}
ROWS = 600


def events(weights: Any = None) -> pl.DataFrame:
    log = tables()["interactions"].select("user_id", "item_id", "timestamp", "label")
    return log if weights is None else log.with_columns(w=pl.Series(np.broadcast_to(np.asarray(weights), log.height)))


def half() -> np.ndarray[Any, Any]:
    """Weights, a third of them 0."""
    return np.random.default_rng(3).integers(0, 3, ROWS).astype(float)


def scores(ranker: CTRRanker) -> np.ndarray[Any, Any]:
    return ranker.predict_proba(events().select("user_id", "item_id", "timestamp"))[:, 1]


@pytest.mark.parametrize("model", MODELS)
def test_weights_of_1_change_no_bit_and_others_do(model: str) -> None:
    plain = scores(CTRRanker(model, "cape", **QUICK).fit(events()))
    ones = CTRRanker(model, "cape", weight="w", class_weight={0: 1, 1: 1}, **QUICK).fit(events(1))
    assert np.array_equal(scores(ones), plain)
    named = scores(CTRRanker(model, "cape", weight="w", **QUICK).fit(events(half())))
    assert not np.array_equal(named, plain)
    if model == "DIN":
        given = CTRRanker(model, "cape", **QUICK).fit(events(), sample_weight=half())
        assert np.array_equal(scores(given), named)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_weights_of_1_change_no_bit_whatever_the_loss(loss: str) -> None:
    plain = scores(CTRRanker("DIN", "cape", loss=loss, **QUICK).fit(events()))
    assert np.array_equal(scores(CTRRanker("DIN", "cape", loss=loss, weight="w", **QUICK).fit(events(1))), plain)


def test_a_row_of_weight_0_is_in_histories_and_teaches_nothing() -> None:
    """Its label may be any; its item is still in the histories of later rows."""
    weights = half()
    rows = events(weights)
    turned = rows.with_columns(label=pl.when((pl.col("w") == 0) & (pl.col("item_id") == 3)).then(0).otherwise("label"))
    both = [CTRRanker("DIN", "cape", protocol="impressions", weight="w", **QUICK).fit(one) for one in (rows, turned)]
    assert both[0].report_["splits"]["train"]["history_items"] > both[1].report_["splits"]["train"]["history_items"]
    clicks = rows.filter(pl.col("label") == 1).drop("label")
    report = CTRRanker("DIN", "cape", weight="w", **QUICK).fit(clicks).report_
    plain = CTRRanker("DIN", "cape", **QUICK).fit(clicks.drop("w")).report_
    assert report["splits"]["train"] == plain["splits"]["train"]
    assert report["read_as"]["w"] == f"weights from 0 to 2, {int((clicks['w'] == 0).sum())} are 0"


def test_a_twice_weighted_row_counts_as_two() -> None:
    """The loss of a batch is that of the batch in which each row stands as often as its weight says."""
    import torch

    ranker = CTRRanker("DIN", "none", weight="w", **QUICK).fit(events(half()))
    model = ranker.scorer_.model.eval()
    label = torch.tensor([[1.0], [0.0], [0.0]])
    found = {"y_pred": torch.tensor([[0.3], [0.6], [0.9]]), "weight": torch.tensor([2.0, 1.0, 0.0])}
    often = {name: values[[0, 0, 1]] for name, values in found.items()} | {"weight": None}
    assert float(model.add_loss(found, label)) == pytest.approx(float(model.add_loss(often, label[[0, 0, 1]])))
    found["weight"] = torch.zeros(3)
    assert float(model.add_loss(found, label)) == 0


def test_balanced_classes_weigh_as_scikit_learns() -> None:
    log = events().with_columns(label=pl.when(pl.int_range(pl.len()) % 3 == 0).then("label").otherwise(0))
    quick = QUICK | {"epochs": 2}
    found = CTRRanker("DIN", "cape", class_weight="balanced", **quick).fit(log)
    counts = found.report_["splits"]["train"]
    share = counts["positives"] / counts["rows"]
    same = CTRRanker("DIN", "cape", class_weight={0: 0.5 / (1 - share), 1: 0.5 / share}, **quick).fit(log)
    assert np.array_equal(scores(found), scores(same))
    assert scores(found).mean() > scores(CTRRanker("DIN", "cape", **quick).fit(log)).mean() + 0.01


def test_class_weights_and_weights_stay_with_the_model_folder(tmp_path: Path) -> None:
    ranker = CTRRanker("DIN", "cape", weight="w", class_weight={1: 2.0}, weighted_metrics=True, **QUICK)
    ranker.fit(events(half())).save(tmp_path / "model")
    again = CTRRanker.load(tmp_path / "model")
    assert again.weight == "w"
    assert again.scorer_.model.of_class == {1: 2.0}
    for one in (ranker, again):
        one.partial_fit(events(half()).head(50))
    assert np.array_equal(scores(ranker), scores(again))
    test = events(half()).tail(60)
    wanted = roc_auc_score(test["label"], ranker.predict_proba(test)[:, 1], sample_weight=test["w"])
    assert ranker.evaluate(test)["AUC"] == pytest.approx(wanted)
    with pytest.raises(UserError, match="new_events: no column 'w'"):
        ranker.partial_fit(events())


def test_an_update_reads_weights() -> None:
    cold = [CTRRanker("DIN", "cape", **QUICK).partial_fit(events(), sample_weight=of) for of in (np.ones(ROWS), half())]
    assert not np.array_equal(scores(cold[0]), scores(cold[1]))
    same = scores(CTRRanker("DIN", "cape", **QUICK).partial_fit(events()))
    np.testing.assert_allclose(same, scores(cold[0]), atol=1e-5)  # a weighted mean is summed in another order
    cold[0].partial_fit(events().head(10))  # all count alike
    with pytest.raises(UserError, match="trained without any: fit it with weights"):
        CTRRanker("DIN", "cape", **QUICK).fit(events()).partial_fit(events(), sample_weight=half())


@pytest.mark.usefixtures("worker_threads")
@pytest.mark.slow
def test_a_command_builds_and_benchmarks_with_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    events(half()).write_csv("log.csv")
    made = ["--interactions", "log.csv", "--protocol", "impressions", "--weight", "w", "--out", "data/mine"]
    assert main(["data", "build", *made]) == 0
    assert "w: weights from 0 to 2" in capsys.readouterr().out
    rows = pl.read_parquet(open_dataset("mine").split("train"))
    assert rows[WEIGHT].value_counts().height == 3
    how = ["--set", "epochs=1", "--set", "class_weight=balanced", "--set", "embedding_dim=4"]
    run = ["benchmark", "--dataset", "mine", "--model", "DIN", "--pe", "none", "--repeats", "1", *how]
    found = []
    for number, weighted in enumerate(("false", "true")):
        assert main([*run, "--set", f"weighted_metrics={weighted}", "--out", f"out{number}"]) == 0
        found.append(capsys.readouterr().out)
    assert found[0].split("gAUC")[-1] != found[1].split("gAUC")[-1]


def test_weighted_metrics_are_scikit_learns() -> None:
    draw = np.random.default_rng(0)
    labels, found, users = draw.integers(0, 2, 500), draw.integers(0, 30, 500) / 30, draw.integers(0, 20, 500)
    weights = draw.integers(0, 5, 500) / 4
    auc = roc_auc_score(labels, found, sample_weight=weights)
    assert evaluate(labels, found, metrics=["AUC"], weights=weights)["AUC"] == pytest.approx(auc, abs=1e-12)
    of_users = [np.flatnonzero(users == user) for user in range(20)]
    parts = [roc_auc_score(labels[rows], found[rows], sample_weight=weights[rows]) for rows in of_users]
    mean = np.average(parts, weights=[weights[rows].sum() for rows in of_users])
    assert evaluate(labels, found, users, ["gAUC"], weights)["gAUC"] == pytest.approx(mean, abs=1e-12)
    ones = evaluate(labels, found, users, ["gAUC", "avgAUC", "AUC", "logloss"], np.ones(500))
    assert ones == pytest.approx(evaluate(labels, found, users, list(ones)), abs=1e-12)
    with pytest.raises(UserError, match="NDCG@5: a metric of ranks has no form with weights"):
        evaluate(labels, found, users, ["NDCG@5"], weights)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([None, 1.0], "null values: w: 1 of 600 rows, the first in row 1"),
        ([1.0, float("nan")], "null values: w: 1 of 600 rows, the first in row 2"),
        ([1.0, -0.5], "weight column 'w' holds -0.5 in row 2: a weight is 0 or more"),
        ([1.0, float("inf")], "weight column 'w' holds inf in row 2"),
        (["1", "many"], "weight column 'w' holds String, not numbers of 0 or more ('many' in row 2)"),
        ([0.0], "holds 0 in all rows"),
    ],
)
def test_a_weight_that_is_none_is_one_line(weights: list[Any], message: str) -> None:
    filler = "1" if isinstance(weights[0], str) else 0.0 if weights == [0.0] else 1.0
    log = events().with_columns(w=pl.Series([*weights, *[filler] * (ROWS - len(weights))]))
    with pytest.raises(UserError) as found:
        CTRRanker("DIN", "cape", weight="w", **QUICK).fit(log)
    assert message in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("given", "fitted", "message"),
    [
        ({"weight": "v"}, {}, "no weight column 'v'"),
        ({"weighted_metrics": True}, {}, "has no weights: weight="),
        ({"class_weight": {2: 1.0}}, {}, "class_weight"),
        ({"class_weight": "even"}, {}, "class_weight"),
        ({"class_weight": {1: -1.0}}, {}, "class_weight"),
        ({}, {"sample_weight": np.ones(3)}, "sample_weight: shape (3,), not a weight for each of 600 events"),
    ],
)
def test_a_mistake_is_one_line(given: dict[str, Any], fitted: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as found:
        CTRRanker("DIN", "cape", **QUICK, **given).fit(events(), **fitted)
    assert message in str(found.value)
    assert "\n" not in str(found.value)
