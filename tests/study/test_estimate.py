"""The estimate of a benchmark: real steps, counted as training counts them, and nothing left behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ctr_pe.cli import main
from ctr_pe.data.synthetic.bursts import generate
from ctr_pe.study.benchmark import Request, run, run_params
from ctr_pe.study.estimate import Estimate, PlannedRuns, measure, plan_table, total
from ctr_pe.study.executors.local import LocalExecutor
from ctr_pe.study.rendering import as_text, between, duration
from ctr_pe.study.runner import Job
from ctr_pe.study.store import Store
from ctr_pe.study.suite import Cell
from ctr_pe.training import Run, build_model, train
from ctr_pe.utils.errors import UserError
from tests.support.fake_training import result_of, scores_of
from tests.support.fake_training import train_on_data_set as fast

SMALL = {"embedding_dim": 4, "attention_hidden_units": [8], "dnn_hidden_units": [8], "batch_size": 64}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    generate(folder / "synthetic", users=60, valid_users=30, test_users=30, items=100, categories=10)
    return folder


def a_run(root: Path, **params: Any) -> Run:
    return Run("DIN", root / "synthetic", "cape", 0, params={**run_params("DIN", "synthetic"), **SMALL, **params})


@pytest.mark.parametrize("eval_steps", [None, 2])
def test_steps_are_those_of_training(root: Path, eval_steps: int | None) -> None:
    patient = a_run(root, epochs=3, early_stop_patience=99, eval_steps=eval_steps)
    found = measure(patient)
    assert found.steps[1] == found.steps[0]
    steps = train(patient).history[-1].steps
    assert found.steps[1] - (found.steps[1] % (eval_steps or 1)) == steps
    stuck = a_run(root, epochs=9, early_stop_patience=1, eval_steps=eval_steps, learning_rate=1e-12)
    found = measure(stuck)
    outcome = train(stuck)
    assert len(outcome.history) == 2
    assert found.steps[0] == outcome.history[-1].steps < found.steps[1]
    assert 0 < found.step < 5
    assert 0 < found.batch < 5


def test_measuring_leaves_nothing_behind(root: Path) -> None:
    torch.manual_seed(3)
    threads, expected = torch.get_num_threads(), torch.rand(1)
    torch.manual_seed(3)
    measure(replace(a_run(root), threads=2))
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.rand(1), expected)


def test_what_measuring_kept_is_given_back_before_workers_start(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(
        "ctr_pe.study.estimate.measure", lambda run: order.append("measure") or Estimate(1, 1, *[(1, 1)] * 2)
    )
    monkeypatch.setattr("ctr_pe.study.estimate.give_back", lambda: order.append("give back"))
    monkeypatch.setattr("ctr_pe.study.runner.run_all", lambda *_: order.append("run") or 0)
    run(Request(models=["DIN"], encodings=["none"], repeats=1, out=tmp_path, dataset="synthetic", data_root=root))
    assert order == ["measure", "give back", "run"]


def test_a_dry_run_says_what_is_missing_and_trains_nothing(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def store_all(jobs: Sequence[Job], store: Store, executor: LocalExecutor) -> int:
        assert executor.train.__name__ == fast.__name__
        for job in jobs:
            store.append(result_of(job.key), scores_of(job.key.pe, job.key.seed))
        return 0

    monkeypatch.setattr("ctr_pe.study.runner.run_all", store_all)
    out = tmp_path / "out"
    request = Request(
        models=["DIN", "BST"],
        repeats=3,
        out=out,
        dataset="synthetic",
        data_root=root,
        jobs=2,
        params={"batch_size": 64},
    )
    assert run(replace(request, dry_run=True)) == 0
    shown = capsys.readouterr()
    assert not out.exists()
    assert shown.out.startswith("Dry run. synthetic: DIN, BST × none, cape × 3 seeds = 12 runs, 2 at once\n")
    header, *rows = [line.split() for line in shown.out.splitlines()[2:7]]
    assert header == "model encoding runs step steps time of a run".split()
    assert [row[:3] for row in rows] == [[m, pe, "3"] for m in ("DIN", "BST") for pe in ("none", "cape")]
    assert "Estimated time: " in shown.out

    assert run(replace(request, models=["DIN"], repeats=1), fast) == 0
    assert "estimated" not in capsys.readouterr().err  # a stand-in takes another time
    stored = (out / "results.jsonl").read_bytes()
    assert run(replace(request, dry_run=True)) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[3:7]]
    assert [row[2] for row in rows] == ["2", "2", "3", "3"]
    assert run(replace(request, models=["DIN"], repeats=1, dry_run=True)) == 0
    assert capsys.readouterr().out == "Dry run. synthetic: DIN × none, cape × 1 seed = 2 runs: all are there already\n"
    assert (out / "results.jsonl").read_bytes() == stored


def test_a_dry_run_finds_what_would_fail(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(run: Run, *others: Any) -> Any:
        if run.pe != "none":
            raise {"rope": UserError("too odd"), "cape": RuntimeError("out of\nmemory")}[run.pe]
        return build_model(run, *others)

    monkeypatch.setattr("ctr_pe.study.estimate.build_model", build)
    command = ["benchmark", "--dry-run", "--pe", "none,rope,cape", "--dataset", "synthetic", "--data-root", str(root)]
    assert main([*command, "--out", str(tmp_path / "out")]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "DIN rope synthetic cannot be run: too odd" in out
    assert "DIN cape synthetic cannot be run: RuntimeError: out of memory" in out
    assert out.count("cannot be run") == 2
    assert not (tmp_path / "out").exists()


def planned(runs: int, low: float, high: float) -> PlannedRuns:
    return PlannedRuns(Cell("DIN", "d", "none"), runs, Estimate(1.0, 0.0, (int(low), int(high)), (0, 0)))


def test_runs_share_the_workers_and_none_is_shorter_than_itself() -> None:
    assert Estimate(2.0, 0.5, (10, 20), (4, 8)).seconds == (22.0, 44.0)
    assert total([planned(4, 10, 20), planned(2, 5, 30)], 2) == (25.0, 70.0)
    assert total([planned(1, 10, 20), planned(1, 5, 6)], 8) == (10.0, 20.0)
    assert total([PlannedRuns(Cell("DIN", "d", "none"), 3, problem="no")], 2) == (0.0, 0.0)


def test_what_varies_has_its_column() -> None:
    cells = [Cell("DIN", "d", "none", {"max_len": 5}), Cell("DIN", "e", "cape", {"position_dim": 8})]
    text = as_text(plan_table("Plan", [PlannedRuns(cell, 1, Estimate(0.01, 0.0, (9, 9), (0, 0))) for cell in cells], 1))
    assert [line.split() for line in text.splitlines()[2:5]] == [
        "model max_len position_dim encoding data set runs step steps time of a run".split(),
        "DIN 5 – none d 1 10 ms 9 1 s".split(),
        "DIN – 8 cape e 1 10 ms 9 1 s".split(),
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.01, "1 s"),
        (89.4, "89 s"),
        (90, "2 min"),
        (3599, "1 h"),
        (5400, "1 h 30 min"),
        (86399, "1 d"),
        (1e6, "11 d 14 h"),
    ],
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text
    assert between(seconds, seconds) == text
