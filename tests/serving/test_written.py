"""benchmark --keep-models, run_expid and tune write the folder of the model whose metrics they report."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from ctr_pe.cli import main
from ctr_pe.commands import run_expid
from ctr_pe.data.synthetic.bursts import generate
from ctr_pe.serving.model_folder import read_model
from ctr_pe.training import DataSource, score

QUICK = ["--set", "epochs=1", "--set", "batch_size=256", "--set", "embedding_dim=4"]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    generate(tmp_path / "data" / "synthetic", users=40, valid_users=20, test_users=20, items=60, categories=6)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"


def test_metrics(folder: Path, root: Path) -> dict[str, float]:
    """Those of a folder's model on the test rows."""
    from ctr_pe.data.dataset import open_dataset

    model = read_model(folder).model
    source = DataSource.of(open_dataset("synthetic", root))
    return score(model, source.batches(model.feature_map, ["test"], {})).metrics(["gAUC", "AUC", "logloss"])


test_metrics.__test__ = False  # type: ignore[attr-defined]


@pytest.mark.slow
def test_benchmark(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["benchmark", "--dataset", "synthetic", "--repeats", "1", "--jobs", "1", "--out", "out", *QUICK]
    assert main([*asked, "--pe", "rope"]) == 0  # without its model
    capsys.readouterr()
    assert main([*asked, "--pe", "none,cape,rope", "--keep-models"]) == 0
    assert "1 there already, without models, and not run again" in capsys.readouterr().err
    lines = [json.loads(line) for line in Path("out/results.jsonl").read_text().splitlines()]
    folders = {name.name.split("-")[1]: name for name in Path("out/models").iterdir()}
    assert folders.keys() == {"none", "cape"}
    for line in lines[1:]:
        assert test_metrics(folders[line["pe"]], root) == pytest.approx(line["metrics"], abs=1e-6)
    assert read_model(folders["cape"]).score_one([1, 2, 3], [4, 5]).shape == (2,)


def test_run_expid(root: Path) -> None:
    asked = ["--expid", "DIN_synthetic", "--set", "model_root=kept", "--set", "data_root=data", *QUICK]
    assert run_expid.main(asked) == 0
    assert run_expid.main(asked) == 0  # replaces it
    (folder,) = (path for path in Path("kept/synthetic").iterdir() if path.is_dir())
    assert folder.with_suffix(".safetensors").exists()
    reported = Path("config.csv").read_text().splitlines()[0].partition("[test]")[2].split(" - ")
    found = test_metrics(folder, root)
    assert [f"{name}: {found[name]:.6f}" for name in ("gAUC", "AUC", "logloss")] == [part.strip() for part in reported]


@pytest.mark.slow
def test_tune(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space = [
        "--space",
        "learning_rate=[1e-5, 0.03]",
        "--space",
        "attention_dropout=null",
        "--space",
        "net_dropout=null",
    ]
    asked = ["tune", "--dataset", "synthetic", "--out", "out", "--trials", "4", "--data-root", "data", *space, *QUICK]
    assert main(asked) == 0
    trials = pl.read_csv("out/trials.csv")
    complete = trials.filter(pl.col("state") == "complete")
    best = complete.sort("valid", "trial", descending=[True, False]).row(0, named=True)
    (folder,) = Path("out/models").iterdir()
    assert folder.name == f"trial-{best['trial']}"
    told = {name: best[f"test_{name}"] for name in ("gAUC", "AUC", "logloss")}
    assert test_metrics(folder, root) == pytest.approx(told, abs=1e-6)
    assert f"models/{folder.name}" in capsys.readouterr().out
