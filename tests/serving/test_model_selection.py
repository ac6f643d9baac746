"""The estimator inside scikit-learn's model selection: labels as y, ``score``, clones, pipelines, grids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, GroupKFold, KFold, cross_val_score
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer

from ctr_pe import CTRRanker
from ctr_pe.cli import main
from ctr_pe.evaluation import evaluate
from ctr_pe.utils.errors import UserError
from tests.support.fuzz.small_log import SMALL

QUICK = {**SMALL, "max_len": 10}


@pytest.fixture
def labels(impressions: pl.DataFrame) -> pl.Series:
    return impressions["label"]


def test_private_attributes_are_no_parameters(clicks: pl.DataFrame) -> None:
    """Such as those that scikit-learn sets on an estimator inside a pipeline or a grid."""
    ranker = CTRRanker(learning_rate=0.1, dnn_hidden_units=[4])
    before = ranker.get_params()
    ranker._parent_callback_ctx = object()  # type: ignore[attr-defined]
    ranker.found_ = 1  # type: ignore[attr-defined]
    assert ranker.get_params() == before
    copy = clone(ranker)
    assert copy.get_params() == before
    assert copy.get_params()["dnn_hidden_units"] == [4]
    copy.set_params(embedding_dim=16, epochs=2)
    assert clone(clone(copy)).get_params() == {**before, "embedding_dim": 16, "epochs": 2}
    assert "_parent" not in repr(ranker)


def test_a_hyper_parameter_is_set_together_with_the_model_that_has_it() -> None:
    ranker = CTRRanker("DIN").set_params(num_heads=2, model="BST")
    assert (ranker.model, ranker.get_params()["num_heads"]) == ("BST", 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        lambda y: y.to_pandas(),
        lambda y: y.to_pandas().astype(bool),
        lambda y: y.to_pandas().to_frame("clicked"),
        lambda y: y,
        lambda y: y.to_frame(),
        lambda y: y.to_numpy(),
        lambda y: y.to_numpy().astype(float),
        lambda y: y.to_numpy().reshape(-1, 1),
        lambda y: y.to_list(),
        lambda y: y.to_arrow(),
    ],
    ids="pandas booleans frame polars polars_frame numpy floats column list pyarrow".split(),
)
def test_labels_of_every_kind(
    kind: Callable[[pl.Series], Any], impressions: pl.DataFrame, items: pl.DataFrame, labels: pl.Series
) -> None:
    """The same model as from a column of labels; a pandas table's index is not read."""
    log = impressions.drop("label")
    frame: Any = log.to_pandas().set_index(np.arange(log.height)[::-1]) if isinstance(kind(labels), pd.Series) else log
    want = CTRRanker(**QUICK).fit(impressions, items=items)
    got = CTRRanker(**QUICK).fit(frame, kind(labels), items=items)
    np.testing.assert_array_equal(got.predict_proba(log), want.predict_proba(log))
    assert got.score(frame, kind(labels)) == want.score(impressions)


def test_y_stands_for_the_column_of_labels(impressions: pl.DataFrame, labels: pl.Series) -> None:
    want = CTRRanker(**QUICK).fit(impressions).predict_proba(impressions)
    wrong = impressions.with_columns(label=1 - labels)
    cases: list[tuple[pl.DataFrame, dict[str, Any]]] = [
        (wrong, {}),
        (impressions.drop("label"), {"label": None}),
        (wrong, {"label": "clicked"}),
    ]
    for log, given in cases:
        ranker = CTRRanker(**{**QUICK, **given}).fit(log, labels)
        np.testing.assert_array_equal(ranker.predict_proba(impressions), want)
        assert ranker.score(log, labels) == ranker.score(impressions.rename({"label": given.get("label") or "label"}))
    new = CTRRanker(**QUICK).partial_fit(impressions).predict_proba(impressions)
    np.testing.assert_array_equal(CTRRanker(**QUICK).partial_fit(wrong, labels).predict_proba(impressions), new)


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (lambda log, items: items, "y: not a label per event; a table of items is given by name: items="),
        (lambda log, items: items.to_pandas(), "y: not a label per event"),
        (lambda log, items: items.lazy(), "y: not a label per event"),
        (lambda log, items: items.to_arrow(), "y: not a label per event"),
        (lambda log, items: "items.parquet", "y: not a label per event"),
        (lambda log, items: 1, "y: not a label per event"),
        (lambda log, items: [[1], [1, 0]], "y: not a label per event"),
        (lambda log, items: log["label"].head(9), "y: 9 labels for "),
        (lambda log, items: log["label"].replace(0, None), "y: null values: "),
        (lambda log, items: pa.array([None] * log.height), "y: null values: "),
        (lambda log, items: log["label"] + 1, "y: label column 'y' holds Int8, not only 0 and 1"),
        (lambda log, items: log["item_id"], "y: label column 'y' holds String, not only 0 and 1"),
    ],
)
def test_what_is_no_label(of: Any, message: str, impressions: pl.DataFrame, items: pl.DataFrame) -> None:
    """A table of items above all: y is never read as one."""
    y = of(impressions, items)
    for call in (CTRRanker(**QUICK).fit, CTRRanker(**QUICK).partial_fit):
        with pytest.raises(UserError, match=message):
            call(impressions.drop("label"), y)


def test_score_is_gauc(ranker: CTRRanker, impressions: pl.DataFrame, labels: pl.Series) -> None:
    log = impressions.drop("label")
    scores = ranker.predict_proba(log)[:, 1]
    want = evaluate(labels.to_numpy(), scores, log["user_id"].to_numpy())["gAUC"]
    assert ranker.score(log, labels) == ranker.score(impressions) == pytest.approx(want, abs=1e-12)
    assert ranker.score(log, labels) == ranker.evaluate(impressions)["gAUC"]
    assert ranker.score(log, labels, history=log.head(99)) == ranker.evaluate(impressions, log.head(99))["gAUC"]


def test_users_that_fit_has_not_seen_have_the_rows_before(impressions: pl.DataFrame, tmp_path: Path) -> None:
    """As in a split by users, where no encoding would have anything to encode otherwise."""
    new = pl.col("user_id") >= 130
    ranker = CTRRanker(**QUICK).fit(impressions.filter(~new))
    table = impressions.filter(new)
    assert ranker.score(table) == ranker.evaluate(table, table)["gAUC"] != ranker.evaluate(table)["gAUC"]
    parts = [
        ranker.predict_proba(impressions.filter(~new))[:, 1],
        ranker.predict_proba(table, table.filter(pl.col("label") == 1))[:, 1],
    ]
    both = pl.concat([impressions.filter(~new), table])
    want = evaluate(both["label"].to_numpy(), np.concatenate(parts), both["user_id"].to_numpy())["gAUC"]
    assert ranker.score(both) == pytest.approx(want, abs=1e-6)
    assert ranker.score(table.drop("timestamp")) == ranker.evaluate(table.drop("timestamp"))["gAUC"]
    ranker.save(tmp_path / "bare", histories=False)
    assert CTRRanker.load(tmp_path / "bare").score(table) == ranker.score(table)


def test_a_pipeline(impressions: pl.DataFrame, items: pl.DataFrame, labels: pl.Series) -> None:
    renamed = impressions.drop("label").rename({"user_id": "who"})
    rename = FunctionTransformer(lambda table: table.rename({"who": "user_id"}))
    pipe = Pipeline([("rename", rename), ("rank", CTRRanker(**QUICK))])
    clone(pipe).set_params(rank__position_encoding="rope")
    pipe.fit(renamed, labels, rank__items=items)
    plain = CTRRanker(**QUICK).fit(impressions, items=items)
    np.testing.assert_array_equal(pipe.predict_proba(renamed), plain.predict_proba(impressions))
    assert pipe.score(renamed, labels) == plain.score(impressions)
    assert pipe._repr_html_()
    assert "CTRRanker" in repr(pipe)


@pytest.mark.slow
@pytest.mark.parametrize("folds", ["users", "rows"])
def test_a_grid(folds: str, impressions: pl.DataFrame, items: pl.DataFrame, labels: pl.Series) -> None:
    log = impressions.drop("label").to_pandas()
    cv = GroupKFold(2) if folds == "users" else KFold(2, shuffle=True, random_state=0)
    grid = {"learning_rate": [0.01, 0.001], "position_encoding": ["none", "naive"]}
    search = GridSearchCV(CTRRanker(**QUICK), grid, cv=cv, error_score="raise")
    search.fit(log, labels.to_pandas(), groups=log["user_id"] if folds == "users" else None, items=items)
    found = search.cv_results_["mean_test_score"]
    assert np.isfinite(found).all()
    assert len(set(found)) == 4  # every setting has been used
    assert search.best_params_ == search.cv_results_["params"][int(np.argmax(found))]
    assert search.best_estimator_.get_params()["position_encoding"] == search.best_params_["position_encoding"]
    assert search.predict_proba(log).shape == (len(log), 2)
    assert search.score(log, labels) == search.best_estimator_.score(log, labels)
    scores = cross_val_score(
        CTRRanker(**QUICK).set_params(**search.best_params_), log, labels.to_pandas(), cv=cv, params={"items": items},
        groups=log["user_id"] if folds == "users" else None,
    )  # fmt: skip
    assert scores.mean() == pytest.approx(search.best_score_)


def test_the_order_of_events_is_that_of_data_build(clicks: pl.DataFrame, tmp_path: Path) -> None:
    """Events of one time: a column ``position`` says what is earlier, for the estimator as for the command."""
    tied = clicks.sort("timestamp").with_columns(position=pl.int_range(pl.len()), timestamp=pl.lit(1_000_000))
    repeated = pl.concat([tied, tied.head(50).with_columns(position=pl.int_range(pl.len()) + 5000)])
    ranker = CTRRanker(**QUICK).fit(repeated)
    named = CTRRanker(order="place", **QUICK).fit(repeated.rename({"position": "place"}))
    np.testing.assert_array_equal(
        ranker.predict_proba(repeated), named.predict_proba(repeated.rename({"position": "place"}))
    )
    repeated.write_parquet(tmp_path / "log.parquet")
    build = f"data build --protocol din --interactions {tmp_path}/log.parquet --out {tmp_path}/log --max-len 10"
    assert main(build.split()) == 0
    assert ranker.scorer_.config["metrics"]["test"] == ranker.metrics_
    with pytest.raises(UserError, match=r"^events: \d+ of 949 rows repeat the user_id, item_id, timestamp"):
        CTRRanker(order=None, **QUICK).fit(repeated)


def test_candidates_may_have_a_column_position(ranker: CTRRanker) -> None:
    """Where retrieval has put them: nothing the log knows of, so no clock."""
    candidates = pl.DataFrame({"user_id": [100] * 3, "item_id": ["item 1", "item 2", "item 3"]})
    with_position = candidates.with_columns(position=pl.Series([1, 2, 3]))
    assert ranker.rank(None, with_position).equals(ranker.rank(None, candidates))


@pytest.mark.parametrize(
    ("change", "given", "argument"),
    [
        ({"timestamp": None}, {}, "time= or order="),
        ({"timestamp": pl.col("timestamp") * 1000 + 1_600_000_000_000}, {}, "time_unit='ms'"),
        ({}, {"protocol": "impressions", "label": None}, "label="),
        ({}, {"attributes": ["cate_id"]}, "items="),
        ({"position": -pl.int_range(pl.len())}, {}, "order=None"),
        ({}, {"gpu": 7}, "gpu="),
    ],
)
def test_errors_speak_the_language_of_the_caller(
    change: dict[str, Any], given: dict[str, Any], argument: str, clicks: pl.DataFrame, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Arguments in Python, flags after a command."""
    for name, values in change.items():
        clicks = clicks.drop(name) if values is None else clicks.with_columns(values.alias(name))
    with pytest.raises(UserError) as caught:
        CTRRanker(**{**QUICK, **given}).fit(clicks)
    assert argument in str(caught.value)
    assert "--" not in str(caught.value)
    clicks.write_parquet(tmp_path / "log.parquet")
    options = {"protocol": "din", **given, "interactions": tmp_path / "log.parquet", "out": tmp_path / "set"}
    if options.pop("gpu", None) is None:
        flags = [
            part
            for name, value in options.items()
            for part in (
                f"--{name}",
                "none" if value is None else ",".join(value) if isinstance(value, list) else str(value),
            )
        ]
        assert main(["data", "build", *flags]) == 2
        said = capsys.readouterr().err
        for flag in argument.split(" or "):
            name, _, value = flag.partition("=")
            assert f"--{name.replace('_', '-')}" in said, said
            assert value.strip("'").lower() in said
        assert f"{argument.split('=')[0]}=" not in said


def test_rows_of_one_label_per_user_choose_the_epoch_by_auc(
    impressions: pl.DataFrame, caplog: pytest.LogCaptureFixture
) -> None:
    """One validation row per user, as in a log whose users all came equally often, or one impression per user."""
    one = impressions.with_columns(user_id=pl.int_range(pl.len()))
    ranker = CTRRanker(**QUICK).fit(one.drop("label"), one["label"])
    assert "the best epoch is that of AUC" in caplog.text
    assert ranker.metrics_["AUC"] > 0
    with pytest.raises(UserError, match="gAUC"):
        CTRRanker(monitor="gAUC", **QUICK).fit(one)
    with pytest.raises(UserError, match="events: no user has rows of both labels"):
        ranker.score(one)
