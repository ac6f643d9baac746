"""``ctr-pe benchmark``: refuses before it starts, keeps what it has, gives the same numbers however it is run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from ctr_pe.config.yaml import parse_overrides
from ctr_pe.data.dataset import open_dataset
from ctr_pe.data.synthetic.built_in import BUILT_IN
from ctr_pe.data.synthetic.bursts import generate
from ctr_pe.evaluation import evaluate
from ctr_pe.study.benchmark import Request, run
from ctr_pe.study.runner import Job, run_all
from ctr_pe.study.store import Store
from ctr_pe.study.users import user_statistics
from ctr_pe.training import train
from ctr_pe.utils.errors import UserError
from tests.support.fake_training import train_on_data_set as fast
from tests.support.processes import PATIENCE, wait_for, workers_of


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root with a small synthetic set."""
    folder = tmp_path_factory.mktemp("data")
    generate(folder / "synthetic", users=120, valid_users=30, test_users=40, items=200, categories=10)
    return folder


def arguments(root: Path, out: Path | None, **changes: Any) -> Request:
    """A small benchmark; ``pe``, ``model`` and ``set`` as the command line has them."""
    names = {"pe": "encodings", "model": "models"}
    given = {names.get(key, key): value for key, value in changes.items()}
    given["params"] = parse_overrides(given.pop("set", []))
    return Request(**{"dataset": "synthetic", "repeats": 2, "out": out, "jobs": 1, "data_root": root} | given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ["DINN"]}, "model 'DINN' is unknown: did you mean 'DIN'?"),
        ({"pe": ["none", "cap"]}, "position encoding 'cap' is unknown: did you mean 'cape'?"),
        ({"pe": []}, "at least one name"),
        ({"dataset": "synthetics"}, "no data set 'synthetics'"),
        ({"protocol": "papers"}, "did you mean 'paper'?"),
        ({"set": ["learning_rat=1"]}, "learning_rate"),
        ({"set": ["position_encoding=cape"]}, "--set position_encoding: use --pe"),
        ({"set": ["epochs"]}, "--set epochs: write key=value"),
        ({"repeats": 0}, "--repeats 0: at least 1"),
        ({"jobs": 0}, "--jobs 0: at least 1"),
        ({"threads": 0}, "--threads 0: at least 1"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(
    root: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as error:
        run(arguments(root, tmp_path / "out", **changes), fast)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("worker_threads")
def test_tables_and_store_grow_with_each_call(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "log"
    monkeypatch.setattr(
        "ctr_pe.study.benchmark.check_params", lambda *_: None
    )  # the stand-in's key is no hyper-parameter
    setting = {"set": [f"log={log}"]}
    assert run(arguments(root, None, pe=["none", "cape", "none"], **setting), fast) == 0
    shown = capsys.readouterr()
    out = Path("results/synthetic-heldout")
    assert (
        "synthetic: DIN × none, cape × 2 seeds = 4 runs, 1 at once; results in results/synthetic-heldout" in shown.err
    )
    assert "DIN on synthetic, protocol heldout, 2 seeds, 320 test rows of 40 users" in shown.out
    written = "table.md, table.csv, table.tex, forest.png, forest.pdf, results.jsonl (one line per run)"
    assert shown.out.rstrip().endswith(f"{out}: {written}")
    assert log.read_text().split("\n")[:-1] == ["none 0", "cape 0", "none 1", "cape 1"]

    assert run(arguments(root, None, pe=["rope"], repeats=3, **setting), fast) == 0
    shown = capsys.readouterr()
    assert "no runs of 'none'" not in shown.err  # they are there
    assert log.read_text().split("\n")[4:-1] == ["rope 0", "rope 1", "rope 2"]
    assert (out / "table.md").read_text().count("\n| ") == 5  # with the runs that were there
    assert (out / "table.tex").read_text().count(r" \\") == 4
    assert all((out / f"forest.{kind}").stat().st_size > 0 for kind in ("png", "pdf"))
    assert len((out / "table.csv").read_text().splitlines()) == 4
    records = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert {record["pe"] for record in records} == {"none", "cape", "rope"}
    assert len({record["config_hash"] for record in records}) == 1

    assert run(arguments(root, None, pe=["none"], **setting), fast) == 0
    assert "all 2 runs are there already" in capsys.readouterr().err
    assert len(log.read_text().splitlines()) == 7


@pytest.mark.usefixtures("worker_threads")
def test_a_table_without_a_baseline_is_announced(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctr_pe.study.benchmark.check_params", lambda *_: None)
    asked = [{"model": ["DIN"], "pe": ["none", "cape"]}, {"model": ["DIN", "BST"], "pe": ["rope"]}]
    for models in asked:  # the second finds the runs of none in DIN
        assert run(arguments(root, tmp_path, repeats=1, **models), fast) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "no runs of 'none'" in line]
    assert len(lines) == 1
    assert lines[0].startswith("BST on synthetic: ")


@pytest.mark.usefixtures("worker_threads")
def test_failed_runs_make_the_exit_code_1(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctr_pe.study.benchmark.check_params", lambda *_: None)
    changes = {"set": ["fail={cape: user}"], "repeats": 1}
    assert run(arguments(root, tmp_path, **changes), fast) == 1
    shown = capsys.readouterr()
    assert "DIN cape seed 0 failed: no such column" in shown.err
    assert "1 of 2 runs failed" in shown.err
    assert "none" in shown.out


@pytest.mark.usefixtures("worker_threads")
@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_set_is_generated_once(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], small_built_in_sets: None
) -> None:
    assert run(arguments(tmp_path / "data", tmp_path / "out", dataset=name, repeats=1), fast) == 0
    assert "generating the built-in data set" in capsys.readouterr().err
    assert open_dataset(name, tmp_path / "data").dataset_id == name
    assert run(arguments(tmp_path / "data", tmp_path / "out", dataset=name, repeats=1), fast) == 0
    assert "generating" not in capsys.readouterr().err


@pytest.mark.slow
def test_training_side_by_side_gives_what_one_after_another_in_this_process_does(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Job] = []

    def noting(jobs: Sequence[Job], *others: Any) -> int:
        asked.extend(jobs)
        return run_all(jobs, *others)

    monkeypatch.setattr("ctr_pe.study.runner.run_all", noting)
    assert run(arguments(root, tmp_path, set=["epochs=1", "batch_size=64"], repeats=1, jobs=2)) == 0
    store = Store(tmp_path)
    assert store.read().keys() == {job.key for job in asked}
    assert len(asked) == 2
    rows = pl.read_parquet(root / "synthetic" / "test.parquet", columns=["label", "user_id"])
    for job in asked:
        result, scores, alone = store.read()[job.key], np.asarray(store.scores(job.key)), train(job.run)
        assert result.metrics == alone.metrics
        assert result.epoch == alone.epoch == 1
        np.testing.assert_array_equal(scores, alone.scores)
        again = evaluate(rows["label"].to_numpy(), scores, rows["user_id"].to_numpy())
        assert again == pytest.approx(result.metrics, abs=1e-6)  # scores are in the order of the file
        rate = pl.read_parquet(root / "synthetic" / "train.parquet", columns=["label"])["label"].mean()
        base = evaluate(rows["label"].to_numpy(), np.full(len(rows), rate), metrics="logloss")["logloss"]
        assert user_statistics(store, job.key.data_hash).base_logloss == pytest.approx(base)


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on(root: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "ctr_pe.cli",
        "benchmark",
        "--dataset",
        "synthetic",
        "--data-root",
        str(root),
        "--out",
        str(tmp_path / "out"),
    ]
    command += ["--set", "epochs=1000", "--set", "early_stop_patience=1000", "--jobs", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    assert "2 at once" in process.stderr.readline()
    wait_for(lambda: len(workers_of(process.pid)) == 2)
    for worker in workers_of(process.pid):  # from their first instruction on, while they import, Ctrl-C is not theirs
        blocked = Path(f"/proc/{worker}/status").read_text().split("SigBlk:")[1].split()[0]
        assert int(blocked, 16) >> (signal.SIGINT - 1) & 1
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    estimated, *last = error.splitlines()
    assert estimated.startswith("estimated time: ")
    assert last == ["stopped: 0 of 10 runs are stored; repeat the same command to run what is missing"]


@pytest.mark.usefixtures("worker_threads")
def test_weights_are_kept_where_asked_for_and_are_no_part_of_a_runs_key(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments(root, tmp_path, pe=["none"], repeats=1), fast) == 0
    capsys.readouterr()
    jobs: list[Job] = []
    monkeypatch.setattr("ctr_pe.study.runner.run_all", lambda asked, *_: jobs.extend(asked) or 0)
    assert run(arguments(root, tmp_path, repeats=1), fast) == 0
    assert [job.run.weights for job in jobs] == [None, None]
    assert "without weights" not in capsys.readouterr().err
    keys = [job.key for job in jobs]
    jobs.clear()
    assert run(arguments(root, tmp_path, repeats=1, keep_weights=True), fast) == 0
    assert [job.key for job in jobs] == keys
    assert [job.run.weights for job in jobs] == [tmp_path / "weights" / f"{key.name}.safetensors" for key in keys]
    assert "1 there already, without weights" in capsys.readouterr().err
