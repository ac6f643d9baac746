"""Configs written for the released CAPE code load and mean what they meant there."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from ctr_pe.config.yaml import parse_yaml
from ctr_pe.fuxictr import older_keys
from ctr_pe.fuxictr.experiment import load_params
from ctr_pe.model_zoo import DIN
from ctr_pe.pe.cape import CAPE
from tests.support.models import batch, feature_map

MODEL_CONFIG = """
Base:
    model_root: ./checkpoints/
    num_workers: 3
    verbose: 1
    early_stop_patience: 2
    pickle_feature_encoder: True
    save_best_only: True
    eval_steps: null
    debug_mode: False
    group_id: null
    use_features: null
    feature_specs: null
    feature_config: null

DIN_small_001:
    model: DIN
    dataset_id: small
    loss: binary_crossentropy
    metrics: [gAUC, AUC, logloss]
    task: binary_classification
    optimizer: adam
    learning_rate: 5.e-4
    embedding_dim: 4
    embedding_regularizer: 5e-3
    net_regularizer: 0
    dnn_hidden_units: [8]
    dnn_activations: Dice
    attention_hidden_units: [6]
    attention_hidden_activations: Dice
    attention_output_activation: null
    attention_dropout: 0
    net_dropout: 0
    batch_norm: False
    din_target_field: [!!python/tuple [item_id, cate_id]]
    din_sequence_field: [!!python/tuple [item_history, cate_history]]
    din_use_softmax: True
    use_cope: True
    position_dim: 3
    max_sequence_length: 4
    batch_size: 32
    epochs: 1
    shuffle: True
    seed: 2019
    monitor: {gAUC: 1, AUC: 1}
    monitor_mode: max
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "model_config.yaml").write_text(MODEL_CONFIG)
    (tmp_path / "dataset_config.yaml").write_text("small: {data_root: data, data_format: parquet}")
    return tmp_path


def translate(**params: Any) -> dict[str, Any]:
    new, line = older_keys.translate({"model": "DIN", "embedding_dim": 8, **params})
    assert "\n" not in line
    return new


def test_a_config_loads_with_one_warning_that_names_the_new_keys(
    config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        params = load_params(config, "DIN_small_001")
    (record,) = caplog.records
    message = record.getMessage()
    assert "DIN_small_001" in message
    assert "use_cope" in message
    assert "position_encoding: cape" in message
    assert "\n" not in message

    model = DIN(feature_map(config), **(params | {"model_root": str(config)}))
    (unit,) = model.attentions
    assert isinstance(unit.pe, CAPE)
    assert unit.pe.table.shape == (5, 3)  # positions from max_sequence_length on share a row
    assert unit.softmax
    assert model.groups[0].target == ("item_id", "cate_id")
    assert model.groups[0].history == ("item_history", "cate_history")
    assert model.optimizer.param_groups[0]["lr"] == 5e-4
    assert model(batch([3, 0, 6]))["y_pred"].shape == (3, 1)


def test_overrides_may_be_of_either_time(config: Path) -> None:
    assert load_params(config, "DIN_small_001", {"use_cope": False})["position_encoding"] == "none"
    assert load_params(config, "DIN_small_001", {"position_encoding": "rope"})["position_encoding"] == "rope"
    assert load_params(config, "DIN_small_001", {"position_dim": 5})["position_dim"] == 5


def test_use_cope_decides() -> None:
    assert translate(use_cope=True, position_dim=16)["position_encoding"] == "cape"
    assert translate(use_cope=False, position_dim=16)["position_encoding"] == "none"
    assert translate(use_cope=True, position_dim=16)["position_dim"] == 16


def test_a_position_dim_that_is_left_out_is_the_width_of_the_target() -> None:
    pair = parse_yaml("[!!python/tuple [item_id, cate_id]]", "x")
    assert translate(use_cope=True, din_target_field=pair)["position_dim"] == 16
    assert translate(use_cope=True, din_target_field="item_id")["position_dim"] == 8
    assert translate(use_cope=True, din_target_field=("item_id", "cate_id"), position_dim=None)["position_dim"] == 16


def test_bst_had_position_vectors_of_its_own() -> None:
    assert translate(model="BST", use_cope=False)["position_encoding"] == "native"
    assert translate(model="BST", use_cope=False, use_position_emb=False)["position_encoding"] == "none"
    new, line = older_keys.translate({"model": "BST", "use_cope": True, "use_position_emb": True, "position_dim": 16})
    assert new["position_encoding"] == "cape"
    assert "takes the place" in line
    assert "use_position_emb" not in new


def test_other_configs_are_left_alone() -> None:
    for params in ({"model": "DIN", "position_encoding": "cope", "position_dim": 16}, {"model": "BST", "num_heads": 2}):
        assert older_keys.translate(params) == (params, "")
