"""FuxiCTR's own loaders and layers read a converted data set, and find the same rows in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from fuxictr.features import FeatureMap
from fuxictr.pytorch.dataloaders import RankDataLoader
from fuxictr.pytorch.layers import DIN_Attention, FeatureEmbeddingDict, MLP_Block
from fuxictr.pytorch.models import BaseModel
from fuxictr.utils import load_dataset_config

from ctr_pe.cli import main
from ctr_pe.config.field_groups import Group
from ctr_pe.data.dataset import Dataset
from ctr_pe.data.loader import BatchLoader
from ctr_pe.data.synthetic.bursts import generate
from ctr_pe.fuxictr.convert import convert
from ctr_pe.fuxictr.csv import build_csv
from ctr_pe.fuxictr.experiment import open_source
from ctr_pe.training import Run, train
from ctr_pe.utils.errors import UserError
from tests.data.logs.test_columns import built

SMALL = {"embedding_dim": 4, "dnn_hidden_units": [8], "attention_hidden_units": [4], "epochs": 1, "batch_size": 64}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("data")
    return generate(folder / "synthetic", users=60, valid_users=30, test_users=30, items=100, categories=10)


class DIN(BaseModel):  # type: ignore[misc]
    """FuxiCTR's DIN, from FuxiCTR's layers."""

    def __init__(self, feature_map: Any, embedding_dim: int, learning_rate: float, **kwargs: Any) -> None:
        super().__init__(feature_map, model_id="DIN", **kwargs)
        self.embedding_layer = FeatureEmbeddingDict(feature_map, embedding_dim)
        self.attention = DIN_Attention(2 * embedding_dim, attention_units=[8])
        self.dnn = MLP_Block(4 * embedding_dim, [8], output_dim=1, output_activation="sigmoid")
        self.compile(kwargs["optimizer"], kwargs["loss"], learning_rate)
        self.reset_parameters()
        self.model_to_device()

    def forward(self, inputs: Any) -> dict[str, Any]:
        ids = self.get_inputs(inputs)
        embedded = self.embedding_layer(ids)
        target = torch.cat([embedded["item_id"], embedded["cate_id"]], -1)
        history = torch.cat([embedded["item_history"], embedded["cate_history"]], -1)
        interest = self.attention(target, history, ids["item_history"].long() != 0)
        return {"y_pred": self.dnn(torch.cat([target, interest], -1))}


def for_fuxictr(folder: Path) -> tuple[FeatureMap, dict[str, Any]]:
    """The feature map and parameters as FuxiCTR's run_expid reads them."""
    params = load_dataset_config(str(folder), folder.name)
    params |= {"group_id": "user_id", "embedding_dim": 4}
    feature_map = FeatureMap(params["dataset_id"], str(Path(params["data_root"]) / params["dataset_id"]))
    feature_map.load(str(folder / "feature_map.json"), params)
    return feature_map, params


@pytest.fixture
def ray_ends_after() -> Iterator[None]:
    """FuxiCTR's loader of parquet files begins a Ray on this machine, and leaves it there."""
    yield
    import ray

    ray.shutdown()


@pytest.mark.parametrize("data_format", ["npz", "parquet"])
@pytest.mark.usefixtures("ray_ends_after")
@pytest.mark.slow
def test_fuxictr_trains_on_it(dataset: Dataset, tmp_path: Path, data_format: str) -> None:
    out = tmp_path / "theirs"
    convert(dataset, out, data_format)
    feature_map, params = for_fuxictr(out)
    files = {key: params[key] for key in ("train_data", "valid_data", "test_data")}
    loaders = RankDataLoader(feature_map, "both", **files, batch_size=64, data_format=data_format, shuffle=True)
    given: dict[str, Any] = {
        "optimizer": "adam",
        "loss": "binary_crossentropy",
        "metrics": ["gAUC", "AUC"],
        "monitor": "AUC",
    }
    given |= {"task": "binary_classification", "model_root": str(tmp_path), "verbose": 0}
    model = DIN(feature_map, learning_rate=0.01, embedding_dim=4, **given)
    model.fit(loaders[0], epochs=2, validation_data=loaders[1])
    found = model.evaluate(loaders[2])
    assert 0 < found["gAUC"] < 1
    assert sum(len(batch["label"]) for batch in loaders[2]) == dataset.rows["test"]


@pytest.mark.parametrize("data_format", ["npz", "parquet"])
def test_the_rows_are_the_same(dataset: Dataset, tmp_path: Path, data_format: str) -> None:
    """In this package's own models too, where ages do not matter."""
    assert convert(dataset, tmp_path / "theirs", data_format) == ["age_history"]
    section = yaml.safe_load((tmp_path / "theirs" / "dataset_config.yaml").read_text())["theirs"]
    groups = {"target_field": [["item_id", "cate_id"]], "sequence_field": [["item_history", "cate_history"]]}
    params = {**SMALL, **groups, **section, "dataset_id": "theirs", "shuffle": False, "group_id": "user_id"}
    source = open_source(params)
    ours = next(iter(BatchLoader(dataset.feature_map(4), dataset.split("test"), batch_size=10_000)))
    theirs = next(iter(source.batches(source.feature_map(params), ["test"], {**params, "batch_size": 10_000})))
    assert ours.keys() - theirs.keys() == {"age_history"}
    for name, values in theirs.items():
        found = values[:, : ours[name].shape[1]] if values.ndim == 2 else values
        assert torch.equal(found.double(), ours[name].double()), name
    how = {"seed": 1, "params": {**SMALL, "shuffle": False, "max_len": 100}, "threads": 1}
    scores = [train(Run("DIN", one, "cape", **{**how, "params": given})).scores for one, given in
              ((dataset.path, how["params"]), (source, params))]  # fmt: skip
    np.testing.assert_allclose(scores[0], scores[1], rtol=0, atol=1e-5)


def test_pretrained_vectors_come_along(tmp_path: Path) -> None:
    """Also where they are the only table, of which FuxiCTR's layer takes a second for granted."""
    np.savez(tmp_path / "vectors.npz", key=np.array([5, 7]), value=np.ones((2, 4)))
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.csv").write_text("label,item_id,item_history\n1,5,7^6\n0,6,\n1,7,5\n0,5,7\n")
    history = {"type": "sequence", "share_embedding": "item_id", "feature_encoder": None, "max_len": 2}
    columns = [
        {"name": "item_id", "type": "categorical", "dtype": "str", "pretrained_emb": str(tmp_path / "vectors.npz")},
        {"name": "item_history", "dtype": "str", **history},
    ]
    files = {f"{split}_data": str(tmp_path / f"{split}.csv") for split in ("train", "valid", "test")}
    params = {"data_root": str(tmp_path), "dataset_id": "tiny", "data_format": "csv", "feature_cols": columns, **files}
    label = {"name": "label", "dtype": "float"}
    dataset = build_csv({**params, "label_col": label}, [Group(("item_id",), ("item_history",))])
    convert(dataset, tmp_path / "theirs", "npz")
    feature_map, _ = for_fuxictr(tmp_path / "theirs")
    layer = FeatureEmbeddingDict(feature_map, 4).embedding_layers["item_id"]
    vocabulary = json.loads((tmp_path / "theirs" / "feature_vocab.json").read_text())["item_id"]
    assert layer.pretrain_embedding.weight[vocabulary["7"]].tolist() == [1.0] * 4


def test_several_categories_per_item_are_refused_by_name(tmp_path: Path) -> None:
    """FuxiCTR's histories have one id per slot."""
    dataset = built(tmp_path, "impressions")
    with pytest.raises(UserError, match="'tags' has several categories per value, which FuxiCTR's loaders do not take"):
        convert(dataset, tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


def test_the_command(dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["data", "convert", "synthetic", "--data-root", str(dataset.path.parent), "--out", str(tmp_path / "theirs")]
    assert main(argv) == 0
    assert "left out, because FuxiCTR has no lists of seconds: age_history" in capsys.readouterr().out
    assert main(argv) == 2
    assert "exists already: choose another --out" in capsys.readouterr().err
    with pytest.raises(UserError, match="did you mean 'npz'"):
        convert(dataset, tmp_path / "other", "npy")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]  # nothing half-made
