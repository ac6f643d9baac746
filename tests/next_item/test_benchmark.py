"""``benchmark --task next-item``: what is refused before a run, tables with intervals and published figures."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from benchmark.published import publish
from ctr_pe.config.yaml import next_item_params, packaged_yaml, parse_yaml
from ctr_pe.evaluation.ranking import is_ranking_metric, ranking_metrics
from ctr_pe.model_zoo.next_item import NEXT_ITEM_MODELS
from ctr_pe.models.sections import check_params, model_class, registered_name
from ctr_pe.pe import available_pes
from ctr_pe.study.benchmark import Request, plan, run
from ctr_pe.study.next_item import RankStatistics, published, write_tables
from ctr_pe.study.store import Result, RunKey, Store
from ctr_pe.study.suite import Cell
from ctr_pe.training.run import OF_RUN, default_params
from ctr_pe.utils.errors import UserError
from tests.support.next_item import categories, dataset, events, random_histories

USERS = np.repeat(np.arange(50), 2)
NAMES = ("Recall@10", "NDCG@10", "COV@10")


def result(pe: str, seed: int, ranks: np.ndarray) -> Result:
    return Result(
        model="SASRec",
        dataset="amazon_beauty_next",
        pe=pe,
        seed=seed,
        protocol="heldout",
        metrics=ranking_metrics(ranks, NAMES, {10: 0.5 + 0.01 * seed}),
        epoch=1,
        config_hash="c",
        data_hash="d",
        revision=None,
        versions={},
        seconds=1.0,
        threads=1,
        parameters=1,
        finished="2026-01-01",
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Runs of none, and of rope, whose ranks are a quarter better."""
    store = Store(tmp_path / "results")
    store.save_rows("d", np.ones(len(USERS)), USERS, next_item=np.array(True))
    draw = np.random.default_rng(0)
    for seed in range(3):
        for pe, best in (("none", 40), ("rope", 30)):
            ranks = draw.integers(1, best, len(USERS)).astype(np.float32)
            ranks[:3] = math.inf
            store.append(result(pe, seed, ranks), ranks)
    return store


def keys_of(store: Store) -> dict[Cell, list[RunKey]]:
    found: dict[Cell, list[RunKey]] = {}
    for key in store.read():
        found.setdefault(Cell(key.model, key.dataset, key.pe), []).append(key)
    return found


def test_tables_have_intervals_and_published_figures(store: Store) -> None:
    (table,) = write_tables(store, None, keys_of(store), {"amazon_beauty_next": "leave-one-out"})
    by_pe = {cell["encoding"]: cell for cell in table.cells}
    lines = {line["pe"]: line for line in table.lines}
    gap = lines["rope"]["NDCG@10_mean"] - lines["none"]["NDCG@10_mean"]
    assert lines["rope"]["NDCG@10_minus_none"] == pytest.approx(gap)
    assert lines["rope"]["NDCG@10_minus_none_low"] < gap < lines["rope"]["NDCG@10_minus_none_high"]
    assert by_pe["none"]["NDCG@10 − none [95 % interval]"] is None
    assert any("3 test answers no training row has" in note for note in table.notes)
    assert "100 test rows of 50 users" in table.title
    assert published("amazon_beauty_next", "leave-one-out", "SASRec")["figures"]["naive"]["NDCG@10"] == 0.0371
    assert (store.path / "table.md").read_text().startswith("## SASRec on amazon_beauty_next")


def test_intervals_are_those_of_a_metric_of_rows(store: Store) -> None:
    """Of users and seeds; that of COV, which no user has a value of, of seeds alone."""
    statistics = RankStatistics(store, "d")
    runs: dict[str, dict[int, Result]] = {}
    for key, one in store.read().items():
        runs.setdefault(key.pe, {})[key.seed] = one
    recall = statistics.difference(runs["rope"], runs["none"], "Recall@10")
    assert recall.low < recall.users_low < recall.value < recall.users_high < recall.high
    coverage = statistics.difference(runs["rope"], runs["none"], "COV@10")
    assert coverage.users_low == coverage.users_high == coverage.value == pytest.approx(0)
    assert coverage.low < 0 < coverage.high


def test_runs_whose_ranks_are_gone_have_no_interval(store: Store) -> None:
    for file in (store.path / "scores").glob("SASRec-rope-*"):
        file.unlink()
    (table,) = write_tables(store, None, keys_of(store), {})
    line = next(line for line in table.lines if line["pe"] == "rope")
    assert math.isfinite(line["NDCG@10_minus_none"])
    assert math.isnan(line["NDCG@10_minus_none_low"])


def test_published_results_have_the_intervals_without_the_ranks(store: Store, tmp_path: Path) -> None:
    store.append(result("cape", 0, np.ones(len(USERS), np.float32)), np.ones(len(USERS), np.float32))
    next((store.path / "scores").glob("SASRec-cape-*")).unlink()  # it has none, and takes none from the others
    (table,) = write_tables(store, None, keys_of(store), {})
    publish(store)
    for name in ("results.jsonl", "users"):
        (tmp_path / "published").mkdir(exist_ok=True)
        (store.path / name).rename(tmp_path / "published" / name)
    kept = Store(tmp_path / "published")
    (again,) = write_tables(kept, None, keys_of(kept), {})
    assert (again.title, again.cells) == (table.title, table.cells)
    for ours, theirs in zip(again.lines, table.lines, strict=True):
        assert ours == pytest.approx(theirs, nan_ok=True)


@pytest.mark.parametrize("model", NEXT_ITEM_MODELS)
def test_packaged_settings_can_be_used(model: str) -> None:
    cls = model_class(model, "next-item")
    assert registered_name(cls) == model
    params = {key: value for key, value in next_item_params(model, "log").items() if key not in ("model", "dataset_id")}
    check_params(cls, params)
    assert default_params(cls, "log") == {key: value for key, value in params.items() if key not in OF_RUN}


def test_published_figures_are_of_models_encodings_and_metrics_that_exist() -> None:
    file = parse_yaml(packaged_yaml("published")["next_item"], "")
    for of_protocol in file.values():
        for found in of_protocol.values():
            assert found.keys() == {"source", "setup", "figures"}
            for model, by_pe in found["figures"].items():
                assert model in NEXT_ITEM_MODELS
                assert set(by_pe) <= set(available_pes())
                assert all(is_ranking_metric(name) for figures in by_pe.values() for name in figures)


@pytest.mark.parametrize("name", ["cape_depth", "dif", "euler", "kernel", "pdm"])
def test_suites_can_be_run(name: str, tmp_path: Path) -> None:
    """Names, keys and metrics of every row."""
    data = dataset(tmp_path / "log", events(random_histories()), categories())
    suite, rows = plan(Request(suite=name, dataset=str(data.path)))
    assert suite is not None
    assert suite.task == "next-item"
    assert len({str(row) for row in rows}) == len(rows)
    for row in rows:
        check_params(model_class(row.model, "next-item"), {**row.overrides, "position_encoding": row.pe})
        assert all(is_ranking_metric(metric) for metric in row.overrides.get("metrics", []))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(task="next-item"), "--task next-item needs --dataset"),
        (Request(task="next-item", models=["DIN"], dataset="x"), "model 'DIN' is unknown"),
        (Request(task="next-item", dataset="x", protocol="paper"), "task next-item has heldout alone"),
        (Request(task="next-item", dataset="x", params={"dnn_hidden_units": [8]}), "dnn_hidden_units"),
        (Request(suite="small_cape_table2", task="next-item"), "suite 'small_cape_table2' is of task click"),
    ],
)
def test_requests_that_are_refused(request_: Request, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(request_)


@pytest.mark.slow
def test_a_benchmark_from_log_to_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Repeating the command runs nothing again; a data set of clicks is refused."""
    data = dataset(tmp_path / "log", events(random_histories()))
    small = {"epochs": 2, "embedding_dim": 8, "batch_size": 16, "ffn_dim": 8}
    request = Request(
        task="next-item",
        models=["SASRec"],
        encodings=["none", "rope"],
        dataset=str(data.path),
        repeats=2,
        params=small,
        out=tmp_path / "out",
        jobs=1,
    )
    assert run(request) == 0
    assert "NDCG@10 − none" in capsys.readouterr().out
    before = (tmp_path / "out" / "results.jsonl").read_text()
    assert run(request) == 0
    assert (tmp_path / "out" / "results.jsonl").read_text() == before
    clicks = dataset(tmp_path / "clicks", events(random_histories()), protocol="din")
    with pytest.raises(UserError, match="its rows ask whether an item is clicked"):
        run(
            Request(
                task="next-item", encodings=["none"], dataset=str(clicks.path), out=tmp_path / "other", params=small
            )
        )
