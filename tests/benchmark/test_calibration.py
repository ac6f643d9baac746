"""The intervals hold for trained runs: equal encodings seldom seem to differ, and a planted effect is found.

Of the published runs, made by benchmark/calibration.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from benchmark import calibration
from benchmark.calibration import Split, rejected
from ctr_pe.data.synthetic.bursts import generate
from ctr_pe.evaluation import evaluate
from ctr_pe.evaluation.metrics import METRICS
from ctr_pe.study.differences import settings
from ctr_pe.study.store import RunKey, Store
from tests.support.fake_training import result_of, train_on_data_set

STORE = Store(calibration.OUT)


@pytest.mark.slow
@pytest.mark.parametrize("split", calibration.CHANCE, ids=lambda split: "-".join(split))
def test_runs_of_one_encoding_seldom_seem_to_differ(split: Split) -> None:
    rates = rejected(calibration.OUT, split)
    assert max(rates.values()) <= 0.07, rates


@pytest.mark.slow
def test_the_planted_effect_is_found() -> None:
    rates = rejected(calibration.OUT, calibration.PLANTED)
    assert min(rates.values()) > 0.95, rates


@pytest.mark.parametrize("dataset", calibration.TRAINED)
def test_the_published_runs_are_those_of_the_command(dataset: str) -> None:
    (setting,) = (one for one in settings(STORE) if one.key.dataset == dataset)
    assert sorted(setting.runs) == sorted(calibration.TRAINED[dataset][0])
    assert all(sorted(runs) == list(range(calibration.SEEDS)) for runs in setting.runs.values())
    for result in setting.results:
        assert len(result.history) >= result.epoch
    names = [result.key.name for result in setting.results]
    for metric in METRICS:
        distances = setting.statistics.distances(names, metric)
        assert (distances[~np.eye(len(names), dtype=bool)] > 0).all()
        assert (distances == distances.T).all()


def made_up(folder: Path, gain: float) -> None:
    """Twelve runs of none and cape each, whose scores have a part of their own."""
    store, draw = Store(folder), np.random.default_rng(0)
    users = np.repeat(np.arange(60), 8)
    labels = draw.integers(0, 2, len(users))
    store.save_rows("d", labels, users)
    shared = draw.normal(size=len(users))
    for pe in ("none", "cape"):
        for seed in range(12):
            strength = 0.8 + gain * (pe == "cape") + 0.2 * draw.normal()
            scores = 1 / (1 + np.exp(-(strength * (2 * labels - 1) + shared + 0.5 * draw.normal(size=len(users)))))
            key = RunKey("DIN", "synthetic", "heldout", "c", "d", pe, seed)
            store.append(result_of(key, metrics=evaluate(labels, scores, users)), scores)


@pytest.mark.slow
def test_splits_of_made_up_runs(tmp_path: Path) -> None:
    for name, gain in {"same": 0.0, "better": 0.8}.items():
        made_up(tmp_path / name, gain)
        assert max(rejected(tmp_path / name, Split("synthetic", "none", "none"), splits=200).values()) < 0.12
        found = min(rejected(tmp_path / name, Split("synthetic", "cape", "none"), splits=200).values())
        assert found > 0.9 if gain else found < 0.12


@pytest.mark.slow
def test_the_command_trains_what_is_missing_and_prints_the_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {**(generate.__kwdefaults__ or {}), "users": 20, "valid_users": 10, "test_users": 10}
    monkeypatch.setattr("ctr_pe.data.synthetic.bursts.generate.__kwdefaults__", small)
    monkeypatch.setattr("ctr_pe.study.benchmark.train", train_on_data_set)
    monkeypatch.setattr(calibration, "SPLITS", 20)
    draw = np.random.default_rng(0)
    log = {"user_id": draw.integers(0, 20, 400), "item_id": draw.integers(0, 30, 400), "timestamp": np.arange(400)}
    events = pl.DataFrame(log).with_columns(position=pl.int_range(pl.len()).over("user_id"))
    (tmp_path / "logs" / "amazon_beauty").mkdir(parents=True)
    events.write_parquet(tmp_path / "logs" / "amazon_beauty" / "interactions.parquet")
    items = pl.DataFrame({"item_id": range(30), "cate_id": [i % 4 for i in range(30)]})
    items.write_parquet(tmp_path / "logs" / "amazon_beauty" / "items.parquet")
    command = [str(tmp_path / "logs"), "--out", str(tmp_path / "out"), "--data-root", str(tmp_path / "data")]
    assert calibration.main([*command, "--repeats", "10"]) == 0
    shown = capsys.readouterr()
    assert "amazon_beauty, none against none: p < 0.05 in gAUC " in shown.out
    assert shown.out.count("p < 0.05 in") == 5
    assert len((tmp_path / "out" / "results.jsonl").read_text().splitlines()) == 40
    assert calibration.main([*command, "--repeats", "10"]) == 0
    assert capsys.readouterr().err.count("runs are there already") == 3
