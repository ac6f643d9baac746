"""FuxiCTR users' path: run_expid.py on data sets of this package, on FuxiCTR's own, and on CSV files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml

from ctr_pe.commands.run_expid import main
from ctr_pe.config.validation import without_effect
from ctr_pe.data.synthetic.built_in import BUILT_IN
from ctr_pe.data.synthetic.bursts import generate
from ctr_pe.fuxictr.experiment import load_params, run
from ctr_pe.training import Run, train
from ctr_pe.utils.errors import UserError

SMALL = ["attention_hidden_units=[8]", "dnn_hidden_units=[8]", "embedding_dim=4", "epochs=2", "batch_size=50"]


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    generate(folder / "synthetic", users=60, valid_users=30, test_users=40, items=100, categories=10)
    return folder


@pytest.fixture
def synthetic(data: Path, tmp_path: Path) -> Path:
    """data/synthetic, where the shipped dataset config looks for it."""
    (tmp_path / "data").symlink_to(data)
    return tmp_path


def overrides(*pairs: str) -> list[str]:
    return [part for pair in (*SMALL, *pairs) for part in ("--set", pair)]


def results(name: str = "config.csv") -> list[str]:
    return Path(name).read_text().splitlines()


def test_an_experiment_is_what_the_benchmark_runs(synthetic: Path, checkout: Path) -> None:
    argv = ["--config", str(checkout / "config"), "--expid", "DIN_synthetic", "--gpu", "-1"]
    assert main([*argv, *overrides("position_encoding=cape", "position_dim=4", "seed=3")]) == 0
    (line,) = results()
    params = load_params(checkout / "config", "DIN_synthetic", {"attention_hidden_units": [8]})
    params |= {"dnn_hidden_units": [8], "embedding_dim": 4, "epochs": 2, "batch_size": 50, "position_dim": 4}
    fields = ("target_field", "sequence_field", "age_field", "seed", "model_id", "model_root")
    params = {key: value for key, value in params.items() if key not in fields}
    outcome = train(Run("DIN", synthetic / "data" / "synthetic", "cape", 3, params=params))
    printed = " - ".join(f"{name}: {value:.6f}" for name, value in outcome.metrics.items())
    assert line.endswith(f"[test] {printed}")
    assert "[exp_id] DIN_synthetic_" in line
    assert "--set position_encoding=cape" in line
    checkpoints = sorted(path.suffix for path in (synthetic / "checkpoints" / "synthetic").iterdir())
    assert checkpoints == ["", ".log", ".safetensors"]  # the model as a folder, its log, its weights


def test_overrides_have_checkpoints_of_their_own(checkout: Path) -> None:
    names = {
        load_params(checkout / "config", "DIN_synthetic", given)["model_id"]
        for given in ({}, {"position_dim": 8}, {"position_dim": 16})
    }
    assert "DIN_synthetic" in names
    assert len(names) == 3


def test_a_data_set_that_was_built_needs_no_dataset_config(data: Path, tmp_path: Path, checkout: Path) -> None:
    generate(tmp_path / "data" / "mine", users=10, valid_users=5, test_users=5)
    argv = ["--config", str(checkout / "config"), "--expid", "DIN_default", *overrides("dataset_id=mine", "epochs=1")]
    assert main(argv) == 0
    assert "[dataset_id] mine" in results()[0]


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_set_is_made_at_first_use(name: str, small_built_in_sets: None) -> None:
    assert main(["--expid", f"DIN_{name}", *overrides("epochs=1")]) == 0  # with the installed config
    assert Path(f"data/{name}/report.json").is_file()


def by_its_path(checkout: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """As FuxiCTR's tuner starts the script."""
    command = [sys.executable, "-u", str(checkout / "model_zoo" / "run_expid.py"), "--config", str(checkout / "config")]
    return subprocess.run([*command, "--gpu", "-1", *options], capture_output=True, text=True)


@pytest.mark.slow
def test_the_script_starts_by_its_path(checkout: Path) -> None:
    ended = by_its_path(checkout, "--expid", "DIN_syntetic")
    assert ended.returncode == 2
    assert "did you mean 'DIN_synthetic'?" in ended.stderr


@pytest.mark.slow
def test_the_script_runs_by_its_path(synthetic: Path, checkout: Path) -> None:
    ended = by_its_path(checkout, "--expid", "DIN_synthetic", *overrides("epochs=1"))
    assert ended.returncode == 0, ended.stderr
    assert "[test] gAUC" in results()[0]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--expid", "DIN_syntetic"], "did you mean 'DIN_synthetic'?"),
        (["--expid", "DIN_synthetic", "--config", "nowhere"], "nowhere: no such config"),
        (["--expid", "DIN_default"], "data set 'default'"),
        (["--expid", "DIN_amazonelectronics_x1"], "ctr-pe data fetch amazonelectronics_x1"),
        (["--expid", "DIN_synthetic", "--set", "net_droput=0.1"], "did you mean 'net_dropout'?"),
        (["--expid", "DIN_synthetic", "--set", "position_encoding=cap"], "did you mean 'cape'?"),
        (["--expid", "DIN_synthetic", "--set", "group_id=userid"], "did you mean 'user_id'?"),
        (["--expid", "DIN_synthetic", "--set", "model=DINN"], "did you mean 'DIN'?"),
        (["--expid", "DIN_synthetic", "--set", "use_features=[itemid]"], "did you mean 'item_id'?"),
    ],
)
def test_mistakes_are_one_line(
    synthetic: Path, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("run_expid: error:")]
    assert message in line
    assert not Path("config.csv").exists()


def test_base_is_that_of_the_same_file(tmp_path: Path) -> None:
    """FuxiCTR takes the Base of whichever file it reads last."""
    folder = tmp_path / "model_config"
    folder.mkdir()
    for name, patience in (("A", 1), ("B", 2), ("C", 3)):
        section = {"model": name, "dataset_id": "x"}
        text = yaml.dump({f"{name}_x": section, "Base": {"early_stop_patience": patience}})
        (folder / f"{name}.yaml").write_text(text)
    (tmp_path / "dataset_config.yaml").write_text("x: {data_root: data}")
    assert [load_params(tmp_path, f"{name}_x")["early_stop_patience"] for name in "ABC"] == [1, 2, 3]


class TestFuxiCTRsOwnData:
    """A directory with feature_map.json, as FuxiCTR leaves it."""

    @pytest.fixture
    def folder(self, data: Path, tmp_path: Path) -> Path:
        """The synthetic set in FuxiCTR's padded form."""
        folder = tmp_path / "data" / "padded"
        folder.mkdir(parents=True)
        spec = json.loads((data / "synthetic" / "feature_map.json").read_text())
        slots = 50
        spec |= {"dataset_id": "padded", "features": [f for f in spec["features"] if "age_history" not in f]}
        (folder / "feature_map.json").write_text(json.dumps(spec))
        for split in ("train", "valid", "test"):
            frame = pl.read_parquet(data / "synthetic" / f"{split}.parquet").drop("age_history")
            lists = [name for name in frame.columns if name.endswith("_history")]
            padding = pl.lit([0] * slots, dtype=pl.List(pl.Int64))
            frame = frame.with_columns(
                pl.concat_list(pl.col(name).cast(pl.List(pl.Int64)), padding).list.head(slots) for name in lists
            )
            frame.write_parquet(folder / f"{split}.parquet")
            arrays = {name: np.array(frame[name].to_list()) for name in frame.columns}
            np.savez(folder / f"{split}.npz", **arrays)
        return folder

    def config(self, tmp_path: Path, folder: Path, data_format: str, **changes: Any) -> Path:
        section = {"data_root": str(folder.parent), "data_format": data_format, "group_id": "user_id"}
        section |= {f"{split}_data": str(folder / f"{split}.{data_format}") for split in ("train", "valid", "test")}
        (tmp_path / "c").mkdir(exist_ok=True)
        (tmp_path / "c" / "dataset_config.yaml").write_text(yaml.dump({"padded": section | changes}))
        model = {"model": "DIN", "dataset_id": "padded", "monitor": "AUC", "metrics": ["gAUC", "AUC"], "epochs": 1}
        model |= {"din_target_field": [("item_id", "cate_id")], "embedding_dim": 4, "learning_rate": "1e-3"}
        model |= {"din_sequence_field": [("item_history", "cate_history")], "position_encoding": "cape"}
        model |= {"attention_hidden_units": [8], "dnn_hidden_units": [8], "shuffle": False, "batch_size": 64}
        (tmp_path / "c" / "model_config.yaml").write_text(yaml.dump({"DIN_x": model}))
        return tmp_path / "c"

    def test_parquet_and_npz_train_to_the_same_model(self, tmp_path: Path, folder: Path) -> None:
        found = {}
        for data_format in ("parquet", "npz"):
            config = self.config(tmp_path, folder, data_format, num_workers=0)
            found[data_format] = run(load_params(config, "DIN_x"))
        assert found["parquet"][1].keys() == {"gAUC", "AUC"}
        for ours, theirs in zip(found["parquet"], found["npz"], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)

    def test_half_built_and_wrong_data_are_refused(self, tmp_path: Path, folder: Path) -> None:
        config = self.config(tmp_path, folder, "parquet")
        params = load_params(config, "DIN_x")
        (folder / "valid.parquet").rename(folder / "kept")
        with pytest.raises(UserError, match="half-built"):
            run(params)
        (folder / "kept").rename(folder / "valid.parquet")
        spec = json.loads((folder / "feature_map.json").read_text())
        (folder / "feature_map.json").write_text(json.dumps(spec | {"dataset_id": "another"}))
        with pytest.raises(UserError, match="of data set 'another', not 'padded'"):
            run(params)


TUNER = """
base_config: {config}
base_expid: BST_synthetic
tuner_space:
    model_root: ./checkpoints
    embedding_dim: 4
    dnn_hidden_units: [[8]]
    epochs: 1
    position_encoding: cape
    position_dim: [2, 4]
    num_heads: [1, 2]
    net_dropout: 0.1
"""


@pytest.mark.slow
def test_fuxictrs_tuner_drives_the_script(synthetic: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fuxictr import autotuner

    monkeypatch.setattr(autotuner.time, "sleep", lambda _: None)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # it calls `python`
    Path("tuner.yaml").write_text(TUNER.format(config=checkout / "config"))
    folder = autotuner.enumerate_params("tuner.yaml")
    autotuner.grid_search(folder, [-1], script=str(checkout / "model_zoo" / "run_expid.py"))
    lines = results("tuner.csv")
    assert len(lines) == 4
    assert len({line.split("[exp_id] ")[1].split(",")[0] for line in lines}) == 4
    assert all("[test] gAUC" in line for line in lines)


def test_the_module_is_importable() -> None:
    from ctr_pe.model_zoo import run_expid

    assert Path(str(run_expid.__file__)).is_file()
    assert run_expid.main is main  # type: ignore[attr-defined]


@pytest.mark.parametrize("missing", ["model", "dataset_id"])
def test_a_section_without_a_key_that_every_experiment_has(missing: str, tmp_path: Path) -> None:
    kept = {"model": "DIN", "dataset_id": "mine"}
    del kept[missing]
    (tmp_path / "model_config.yaml").write_text(f"DIN_mine: {kept}\n")
    (tmp_path / "dataset_config.yaml").write_text("mine: {data_format: csv}\n")
    with pytest.raises(UserError, match=f"model_config.yaml: DIN_mine: '{missing}' is missing"):
        load_params(tmp_path, "DIN_mine")


def test_experiments_of_a_file_are_no_data_sets(tmp_path: Path) -> None:
    file = tmp_path / "all.yaml"
    file.write_text("Base: {seed: 1}\nDIN_mine: {model: DIN, dataset_id: mine}\n")
    with pytest.raises(UserError, match=r"data set 'mine' is neither in .*: no section describes a data set$"):
        load_params(file, "DIN_mine")
    file.write_text(file.read_text() + "mines: {data_format: csv}\n")
    with pytest.raises(UserError, match=r"did you mean 'mines'\? \(mines\)$"):
        load_params(file, "DIN_mine")


def test_a_key_without_effect_is_named_once(tmp_path: Path) -> None:
    """However many models read it as little."""
    file = tmp_path / "model_config.yaml"
    file.write_text("Base: {pickle_feature_encoder: true}\nA: {model: DIN}\nB: {model: BST}\n")
    assert without_effect(file) == [f"{file}: without effect here: pickle_feature_encoder"]
