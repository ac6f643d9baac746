"""The estimator: scikit-learn's conventions, any kind of table, and ranks that follow from the scores."""

from __future__ import annotations

import copy
import html
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.utils import InputTags, Tags, TargetTags
from sklearn.utils.estimator_checks import parametrize_with_checks

from ctr_pe import CTRRanker, load
from ctr_pe.evaluation import evaluate
from ctr_pe.serving.tables import AnyTable
from ctr_pe.utils.errors import UserError
from tests.support.fuzz.small_log import SMALL

LOG = "fit takes a table of events with the columns of a log, not a matrix X"
MESSAGES = "asks for scikit-learn's words about a matrix; the errors here name the table and column"
NOT_FOR_LOGS = {
    **dict.fromkeys(
        "check_fit_score_takes_y check_estimators_overwrite_params check_dont_overwrite_parameters"
        " check_estimators_fit_returns_self check_readonly_memmap_input check_n_features_in_after_fitting"
        " check_positive_only_tag_during_fit check_estimators_dtypes check_dtype_object check_pipeline_consistency"
        " check_estimators_pickle check_f_contiguous_array_estimator check_methods_sample_order_invariance"
        " check_methods_subset_invariance check_dict_unchanged check_fit_idempotent check_fit_check_is_fitted"
        " check_n_features_in check_fit2d_predict1d check_sample_weights_pandas_series"
        " check_sample_weights_not_an_array check_sample_weights_list check_all_zero_sample_weights_error"
        " check_sample_weights_shape"
        " check_sample_weights_not_overwritten check_sample_weight_equivalence_on_dense_data".split(),
        LOG,
    ),
    **dict.fromkeys(
        "check_complex_data check_estimators_empty_data_messages check_estimators_nan_inf check_fit2d_1sample"
        " check_fit2d_1feature".split(),
        MESSAGES,
    ),
}
"""Public checks that do not apply, with the reason. Tests below ask for the same properties on logs."""


class OfMatrices(CTRRanker):
    """The estimator with tags that do not exempt it from any check."""

    def __sklearn_tags__(self) -> Tags:
        return Tags(estimator_type=None, target_tags=TargetTags(required=False), input_tags=InputTags())


@parametrize_with_checks([CTRRanker(), OfMatrices()], expected_failed_checks=lambda _: NOT_FOR_LOGS, xfail_strict=True)  # type: ignore[untyped-decorator]
def test_scikit_learns_checks(estimator: CTRRanker, check: Any) -> None:
    check(estimator)


CANDIDATES = pl.DataFrame(
    {"user_id": [101, 100, 101, 100, 101, 9], "item_id": ["item 1", "item 2", "item 3", "item 1", "nowhere", "item 1"]}
)


def test_fit_gives_itself_and_changes_no_parameter(clicks: pl.DataFrame, items: pl.DataFrame) -> None:
    ranker = CTRRanker(**SMALL)
    before, tables = copy.deepcopy(ranker.get_params()), (clicks.clone(), items.clone())
    assert ranker.fit(clicks, items=items) is ranker
    assert ranker.get_params() == before
    assert {name for name in vars(ranker) if name not in before} == {
        *("scorer_", "classes_", "metrics_", "history_", "report_", "tuned_", "updates_")
    }
    assert clicks.equals(tables[0])
    assert items.equals(tables[1])


def test_the_same_fit_gives_the_same_model_whatever_the_order_of_the_rows(
    ranker: CTRRanker, clicks: pl.DataFrame, items: pl.DataFrame
) -> None:
    again = clone(ranker).fit(clicks.sample(fraction=1.0, shuffle=True, seed=1), items=items.reverse())
    np.testing.assert_array_equal(again.predict_proba(CANDIDATES), ranker.predict_proba(CANDIDATES))
    other = clone(ranker).set_params(random_state=1).fit(clicks, items=items)
    assert (other.predict_proba(CANDIDATES) != ranker.predict_proba(CANDIDATES)).any()
    drawn = CTRRanker(random_state=np.random.RandomState(3))._seed()
    assert drawn == CTRRanker(random_state=np.random.RandomState(3))._seed()


def test_a_row_is_scored_alike_alone_and_among_others(ranker: CTRRanker) -> None:
    whole = ranker.predict_proba(CANDIDATES)
    assert whole.shape == (6, 2)
    np.testing.assert_allclose(whole.sum(axis=1), 1)
    np.testing.assert_allclose(ranker.predict_proba(CANDIDATES.reverse()), whole[::-1], atol=1e-6)
    alone = [ranker.predict_proba(CANDIDATES[i : i + 1])[0] for i in range(6)]
    np.testing.assert_allclose(alone, whole, atol=1e-6)


def test_copies_and_pickles_score_alike(ranker: CTRRanker) -> None:
    want = ranker.predict_proba(CANDIDATES)
    for other in (copy.deepcopy(ranker), pickle.loads(pickle.dumps(ranker))):  # noqa: S301  of our own
        np.testing.assert_array_equal(other.predict_proba(CANDIDATES), want)


@pytest.mark.parametrize("kind", ["pandas", "pyarrow", "lazy", "parquet", "csv"])
def test_tables_of_every_kind(
    kind: str, ranker: CTRRanker, clicks: pl.DataFrame, items: pl.DataFrame, tmp_path: Path
) -> None:
    def of(table: pl.DataFrame) -> AnyTable:
        if kind == "pandas":
            return table.to_pandas()
        if kind == "pyarrow":
            return table.to_arrow()
        if kind == "lazy":
            return table.lazy()
        file = tmp_path / f"{len(table)}.{kind}"
        (table.write_parquet if kind == "parquet" else table.write_csv)(file)
        return file if kind == "parquet" else str(file)

    fitted = clone(ranker).fit(of(clicks), items=of(items))
    want = ranker.rank(clicks, CANDIDATES, 2)
    assert fitted.rank(of(clicks), of(CANDIDATES), 2).equals(want)
    assert ranker.rank(None, of(CANDIDATES), 2).equals(want)


def test_ranks_are_those_of_the_scores(ranker: CTRRanker) -> None:
    scored = CANDIDATES.with_columns(score=pl.Series(ranker.predict_proba(CANDIDATES)[:, 1]).cast(pl.Float32))
    ranked = ranker.rank(None, CANDIDATES, 2)
    assert ranked.columns == ["user_id", "item_id", "score", "rank"]
    assert ranked["user_id"].to_list() == [101, 101, 100, 100, 9]
    assert ranked["rank"].to_list() == [1, 2, 1, 2, 1]
    for user in (101, 100, 9):
        best = scored.filter(pl.col("user_id") == user).sort("score", descending=True).head(2)
        assert ranked.filter(pl.col("user_id") == user)["item_id"].to_list() == best["item_id"].to_list()
    at = pl.concat([CANDIDATES.with_columns(timestamp=pl.lit(time)) for time in (0, 2_000_000)])
    ranked = ranker.rank(None, at, 1)
    assert ranked["timestamp"].to_list() == [0] * 3 + [2_000_000] * 3  # every user and time alone
    assert ranker.rank(None, CANDIDATES.clear(), 3).is_empty()
    for k in (0, 1.5, "3"):
        with pytest.raises(UserError, match="the number of items to keep"):
            ranker.rank(None, CANDIDATES, k)  # type: ignore[arg-type]


def test_a_rankers_history_is_what_it_was_fitted_on(ranker: CTRRanker, clicks: pl.DataFrame) -> None:
    np.testing.assert_array_equal(ranker.predict_proba(CANDIDATES), ranker.predict_proba(CANDIDATES, clicks))
    new = pl.DataFrame({"user_id": [100], "item_id": ["item 30"], "timestamp": [3_000_000]})
    longer = ranker.predict_proba(CANDIDATES, pl.concat([clicks, new]))
    changed = (longer != ranker.predict_proba(CANDIDATES)).any(axis=1)
    assert changed.tolist() == (CANDIDATES["user_id"] == 100).to_list()


def test_unknown_items_and_users_are_counted(ranker: CTRRanker, clicks: pl.DataFrame) -> None:
    assert np.isfinite(ranker.predict_proba(CANDIDATES)).all()
    assert ranker.unknown_["requests"] == 6
    assert (ranker.unknown_["unknown items"], ranker.unknown_["unknown users"]) == (1, 1)
    odd = clicks.head(3).with_columns(item_id=pl.Series(["item 1", "gone", "gone too"]))
    ranker.predict_proba(CANDIDATES, odd)
    assert ranker.unknown_["unknown history items"] == 2


def test_evaluate_is_that_of_the_scores(ranker: CTRRanker, impressions: pl.DataFrame, clicks: pl.DataFrame) -> None:
    scores = ranker.predict_proba(impressions, clicks)[:, 1]
    want = evaluate(impressions["label"].to_numpy(), scores, impressions["user_id"].to_numpy())
    assert ranker.evaluate(impressions, clicks) == pytest.approx(want)
    with pytest.raises(UserError, match="requests: no column 'label'"):
        ranker.evaluate(clicks, clicks)
    with pytest.raises(UserError, match="requests: label column 'label' holds Int64, not only 0 and 1"):
        ranker.evaluate(clicks.with_columns(label=pl.lit(2, pl.Int64)), clicks)


def test_a_ranker_is_chosen_by_any_metric(impressions: pl.DataFrame) -> None:
    monitor = {"NDCG(k=3)": 1.0, "MRR": 0.5}
    fitted = CTRRanker("DIN", "cape", **SMALL, monitor=monitor, metrics=["AUC", "HR@2"]).fit(impressions)
    assert set(fitted.metrics_) == {"AUC", "HR@2"}
    assert {"NDCG(k=3)", "MRR"} <= fitted.history_[0]["metrics"].keys()
    assert list(fitted.evaluate(impressions)) == ["gAUC", "AUC", "logloss", "HR@2"]
    with pytest.raises(UserError, match="monitor 'NDGC@3' is unknown: did you mean 'NDCG@3'"):
        CTRRanker("DIN", monitor="NDGC@3").fit(impressions)


def test_a_log_of_impressions_learns_from_its_labels(
    impressions: pl.DataFrame, items: pl.DataFrame, tmp_path: Path
) -> None:
    """Other names, booleans, dates, no attributes; the history has the chosen items only."""
    names = {"user_id": "who", "item_id": "asin", "timestamp": "at", "label": "bought"}
    log = impressions.rename(names).with_columns(pl.col("bought") == 1, pl.from_epoch("at"))
    columns = {"user": "who", "item": "asin", "time": "at", "label": "bought"}
    ranker = CTRRanker("DIN", "time_bias", attributes=[], **columns, **SMALL).fit(
        log, items=items.rename({"item_id": "asin"})
    )
    assert ranker.report_["recipe"]["protocol"] == "impressions"
    assert ranker.scorer_.encoder.item_fields == ["item_id"]
    chosen = log.filter("bought").drop("bought")
    requests = log.head(40)
    np.testing.assert_array_equal(ranker.predict_proba(requests, log), ranker.predict_proba(requests, chosen))
    ranker.save(tmp_path / "m")
    again = load(tmp_path / "m")
    assert again.evaluate(requests, log) == ranker.evaluate(requests, log)
    ranked = again.rank(None, requests.drop("at", "bought"), 1)
    assert ranked.columns == ["who", "asin", "score", "rank"]


def test_columns_of_items_that_cannot_be_read_are_named(
    clicks: pl.DataFrame, items: pl.DataFrame, caplog: pytest.LogCaptureFixture
) -> None:
    more = items.with_columns(price=pl.lit(1.5), tags=pl.lit([1, 2]), brand=pl.lit("b"))
    ranker = CTRRanker(**SMALL).fit(clicks, items=more)
    assert ranker.scorer_.encoder.item_fields == ["item_id", "cate_id", "brand"]
    assert "items: not read, neither integers nor strings: price, tags" in caplog.text


def test_a_loaded_ranker_has_the_parameters_of_the_saved_one(
    ranker: CTRRanker, clicks: pl.DataFrame, items: pl.DataFrame, tmp_path: Path
) -> None:
    ranker.save(tmp_path / "m")
    again = load(tmp_path / "m")
    assert {name: again.get_params()[name] for name in SMALL} == SMALL
    assert (again.model, again.position_encoding, again.random_state) == ("DIN", "cape", 0)
    assert again.metrics_ == ranker.metrics_
    np.testing.assert_array_equal(again.predict_proba(CANDIDATES), ranker.predict_proba(CANDIDATES))
    refitted = clone(again).fit(clicks, items=items)
    np.testing.assert_array_equal(refitted.predict_proba(CANDIDATES), ranker.predict_proba(CANDIDATES))


def test_a_notebook_shows_parameters_and_metrics(ranker: CTRRanker) -> None:
    page = ranker._repr_html_()
    assert f"<caption>{html.escape(repr(ranker), quote=True)}</caption>" in page
    assert f"<td>{ranker.metrics_['AUC']:.4f}</td>" in page
    assert f"<td>{len(ranker.history_)}</td>" in page
    assert CTRRanker("DIN")._repr_html_() == "<code>CTRRanker()</code>: not fitted"


def test_parameters() -> None:
    ranker = CTRRanker("BST", "rope", learning_rate=0.1)
    assert ranker.get_params()["learning_rate"] == 0.1
    assert repr(ranker) == "CTRRanker(model='BST', position_encoding='rope', learning_rate=0.1)"
    assert clone(ranker).get_params() == ranker.get_params()
    assert ranker.set_params(num_heads=2, epochs=3).get_params()["num_heads"] == 2
    with pytest.raises(UserError, match="BST: key 'num_head' is unknown: did you mean 'num_heads'"):
        ranker.set_params(num_head=2)
    with pytest.raises(NotFittedError, match="not fitted: call fit"):
        ranker.predict_proba(CANDIDATES)


@pytest.mark.parametrize(
    ("given", "change", "message"),
    [
        ({"model": "DINN"}, {}, "model 'DINN' is unknown: did you mean 'DIN'"),
        ({"position_encoding": "cap"}, {}, "'cap' is unknown: did you mean 'cape'"),
        ({"learning_rat": 1}, {}, "key 'learning_rat' is unknown: did you mean 'learning_rate'"),
        ({"dataset_id": "x"}, {}, "'dataset_id' is not a parameter"),
        ({"epochs": 0}, {}, "epochs must be a positive integer"),
        ({"max_len": 0}, {}, "max_len must be a positive integer"),
        ({"protocol": "clicks"}, {}, "'protocol': "),
        ({"user": "who"}, {}, "^events: no user column 'who'"),
        ({"attributes": ["colour"]}, {}, "^items: no attribute column 'colour'"),
        ({}, {"timestamp": None}, "^events: neither a time nor an order column"),
        ({}, {"user_id": pl.lit(None, pl.Int64)}, "^events: null values: user_id: 8"),
        ({}, {"item_id": pl.lit("unlisted")}, "^items: 1 \\(unlisted\\) of 1 items of the log have no row here"),
    ],
)
def test_fit_refuses_in_one_line(
    given: dict[str, Any], change: dict[str, Any], message: str, clicks: pl.DataFrame, items: pl.DataFrame
) -> None:
    for name, values in change.items():
        clicks = clicks.drop(name) if values is None else clicks.with_columns(values.alias(name))
    with pytest.raises(UserError, match=message) as caught:
        CTRRanker(**given).fit(clicks, items=items)
    assert "\n" not in str(caught.value)
