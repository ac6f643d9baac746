"""Without settings of one's own every way to train takes the same ones; a FuxiCTR config keeps its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ctr_pe import CTRRanker
from ctr_pe.fuxictr.experiment import load_params
from ctr_pe.model_zoo import MODELS
from ctr_pe.models.sections import model_class
from ctr_pe.study.benchmark import run_params
from ctr_pe.training import Run
from ctr_pe.training.run import OF_RUN

DATA: dict[str, Any] = {"data_format": "parquet", "label_col": {"name": "label", "dtype": "float"}}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data root with the config of a data set that nobody tuned to."""
    (tmp_path / "data" / "mine").mkdir(parents=True)
    (tmp_path / "data" / "mine" / "dataset_config.yaml").write_text(yaml.dump({"mine": DATA}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CTR_PE_DATA", raising=False)
    return tmp_path / "data"


@pytest.mark.parametrize("model", MODELS)
def test_each_backbone_has_one_set_of_default_settings(model: str, root: Path) -> None:
    wanted = run_params(model, "mine")  # of benchmark and tune
    assert {"learning_rate", "embedding_regularizer", "batch_size", "epochs"} <= wanted.keys()
    assert Run(model, root / "mine", "none", 0).params == wanted
    assert Run(model_class(model), root / "mine", "none", 0).params == wanted
    assert CTRRanker(model)._params() == wanted | {"max_len": 100}  # a data set has its own, 100 by default
    experiment = load_params(None, f"{model}_default", {"dataset_id": "mine"})
    added = {*OF_RUN, *DATA, "data_root", "model_id"}
    assert {name: value for name, value in experiment.items() if name not in added} == wanted


def test_settings_of_one_s_own_are_all_that_a_run_has(root: Path) -> None:
    assert Run("DIN", root / "mine", "none", 0, params={"epochs": 1}).params == {"epochs": 1}


def test_a_config_of_fuxictr_keeps_its_own(root: Path, tmp_path: Path) -> None:
    own = {"model": "DIN", "dataset_id": "mine", "learning_rate": 1.0e-3, "batch_size": 512}
    (tmp_path / "model_config.yaml").write_text(yaml.dump({"Base": {"epochs": 3}, "X": own}))
    (tmp_path / "dataset_config.yaml").write_text(yaml.dump({"mine": DATA}))
    found = load_params(tmp_path, "X")
    assert {name: value for name, value in found.items() if name not in DATA} == {
        **own,
        "epochs": 3,
        "seed": 0,
        "model_id": "X",
    }
