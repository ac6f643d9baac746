"""The keys of the published benchmark configurations (DIN, DIEN, BST, DMIN × four data sets): each is validated, run
and accounted for in docs/fuxictr.md. The sections are our own, with the keys and the types of values of those files.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ctr_pe.cli import main
from ctr_pe.commands.run_expid import main as run_expid
from ctr_pe.data.synthetic.bursts import generate
from ctr_pe.fuxictr.experiment import load_params
from ctr_pe.fuxictr.older_keys import UNREAD, translate

FIELDS, HISTORIES = ("item_id", "cate_id"), ("item_history", "cate_history")
EVERY: dict[str, Any] = {
    "batch_norm": True, "batch_size": 64, "dataset_id": "mine", "debug_mode": False, "dnn_activations": "relu",
    "dnn_hidden_units": [8], "early_stop_patience": 1, "embedding_dim": 4, "embedding_regularizer": 1e-5, "epochs": 1,
    "feature_specs": [{"name": list(HISTORIES), "feature_encoder": None}], "group_id": "user_id", "learning_rate": 1e-3,
    "loss": "binary_crossentropy", "metrics": ["gAUC", "AUC", "logloss"], "model_id": "some_base",
    "model_root": "./kept/", "monitor": {"AUC": 1, "gAUC": 1}, "monitor_mode": "max", "net_dropout": 0.1,
    "net_regularizer": 0, "num_workers": 1, "optimizer": "adam", "pickle_feature_encoder": True, "save_best_only": True,
    "seed": 7, "shuffle": True, "task": "binary_classification", "verbose": 0,
}  # fmt: skip
EARLIER: dict[str, Any] = {"eval_interval": 1, "ordered_features": None}
LATER: dict[str, Any] = {"eval_steps": None, "feature_config": None, "use_features": None}
MODELS: dict[str, dict[str, Any]] = {
    "DIN": EARLIER | {
        "attention_dropout": 0.1, "attention_hidden_activations": "Dice", "attention_hidden_units": [8, 4],
        "attention_output_activation": None, "din_sequence_field": HISTORIES, "din_target_field": FIELDS,
        "din_use_softmax": True,
    },
    "BST": EARLIER | {
        "attention_dropout": 0.1, "bst_sequence_field": [HISTORIES], "bst_target_field": [FIELDS],
        "layer_norm": False, "num_heads": 4, "seq_pooling_type": "target", "stacked_transformer_layers": 1,
        "use_causal_mask": True, "use_position_emb": True, "use_residual": False,
    },
    "DIEN": LATER | {
        "attention_activation": "Dice", "attention_dropout": 0.1, "attention_hidden_units": [8, 4],
        "attention_type": "bilinear_attention", "aux_activation": "ReLU", "aux_hidden_units": [8], "aux_loss_alpha": 0,
        "dien_neg_seq_field": [], "dien_sequence_field": HISTORIES, "dien_target_field": FIELDS,
        "enable_sum_pooling": False, "gru_type": "AUGRU", "use_attention_softmax": True,
    },
    "DMIN": LATER | {
        "attention_activation": "Dice", "attention_dropout": 0.1, "attention_hidden_units": [8, 4],
        "aux_activation": "ReLU", "aux_hidden_units": [8], "aux_loss_lambda": 0, "bn_only_once": False,
        "enable_sum_pooling": True, "layer_norm": True, "neg_seq_field": None, "num_heads": 2, "pos_emb_dim": 2,
        "sequence_field": HISTORIES, "target_field": FIELDS, "use_behavior_refiner": True, "use_pos_emb": True,
    },
}  # fmt: skip
OF_DATA = [
    *"data_format data_root feature_cols label_col min_categr_count test_data train_data valid_data".split(),
    *"active dtype embedding_dim feature_encoder max_len name padding preprocess pretrained_emb remap".split(),
    *"share_embedding splitter type".split(),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    generate(tmp_path / "data" / "mine", users=10, valid_users=5, test_users=5)
    return tmp_path


def written(here: Path, model: str, **changes: Any) -> None:
    (here / "config").mkdir(exist_ok=True)
    section = {"model": model, **EVERY, **MODELS[model], **changes}
    section = {key: value for key, value in section.items() if value != "left out"}
    text = yaml.dump({f"{model}_mine_001": section})  # tuples as the published files write them
    (here / "config" / "model_config.yaml").write_text(text)


@pytest.mark.parametrize("model", MODELS)
def test_a_section_with_every_key_is_valid_and_runs(model: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(here, model)
    unread = ", ".join(UNREAD.keys() & {**EVERY, **MODELS[model]}.keys())
    assert main(["validate", "config/model_config.yaml"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert all(key in line for key in unread.split(", "))
    assert run_expid(["--expid", f"{model}_mine_001"]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "without effect" in line]
    assert all(key in line for key in unread.split(", "))
    assert Path("kept/synthetic", f"{model}_mine_001.safetensors").is_file()  # named as FuxiCTR does, by the section


@pytest.mark.parametrize(("model", "switch"), [("BST", "use_position_emb"), ("DMIN", "use_pos_emb")])
@pytest.mark.parametrize(
    ("on", "given", "encoding"),
    [(True, {}, "native"), (False, {}, "none"), (True, {"position_encoding": "cape"}, "cape")],
)
def test_a_switch_of_positions_says_native_unless_an_encoding_is_given(
    model: str, switch: str, on: bool, given: dict[str, Any], encoding: str, here: Path
) -> None:
    written(here, model, **{switch: on})
    params = load_params("config", f"{model}_mine_001", given)
    assert params["position_encoding"] == encoding
    assert switch not in params
    written(here, model, **{switch: on}, **given)
    assert main(["validate", "config/model_config.yaml"]) == 0
    assert load_params("config", f"{model}_mine_001")["position_encoding"] == encoding


@pytest.mark.parametrize("key", ["use_position_emb", "use_pos_emb"])
def test_a_wrong_switch_is_refused_alike(key: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = "BST" if key == "use_position_emb" else "DMIN"
    written(here, model, **{key: "yes"})
    assert main(["validate", "config/model_config.yaml"]) == run_expid(["--expid", f"{model}_mine_001"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if f"{key} must be" in line]
    assert len(lines) == 2


@pytest.mark.parametrize("key", sorted(UNREAD))
def test_keys_of_any_version_are_known_and_told(key: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(here, "DIN", **{key: {"feature_config": {}, "valid_size": 0.1, "test_size": 0.1}.get(key, "left out")})
    given = {"split_type": "random", "feature_config": "null", "data_block_size": "-1", "partition_block_size": "-1"}
    given |= dict.fromkeys(["rebuild_dataset", "pickle_feature_encoder", "use_hdf5"], "false")
    value = given.get(key, "0.1")
    small = ["--set", "epochs=1", "--set", "dnn_hidden_units=[4]"]
    assert run_expid(["--expid", "DIN_mine_001", *small, "--set", f"{key}={value}"]) == 0
    assert re.search(rf"without effect here: .*\b{key}\b", capsys.readouterr().err)


def test_an_option_of_another_encoding_is_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["benchmark", "--dataset", "mine", "--pe", "cape", "--repeats", "1", "--out", "out", "--dry-run"]
    assert main([*command, "--set", "rope_base=5", "--set", "position_dim=4", "--set", "workers=3"]) == 0
    said = capsys.readouterr().err
    assert "without effect here: workers (now num_workers), rope_base (no option of cape)" in said


def test_every_key_is_in_the_table_of_the_documents(checkout: Path) -> None:
    table = (checkout / "docs" / "fuxictr.md").read_text(encoding="utf-8").partition("## Keys of the published")[2]
    described = set(
        re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in table.splitlines() if line[:1] == "|"))
    )
    keys = {"model", *EVERY, *OF_DATA, *(key for section in MODELS.values() for key in section)}
    assert keys <= described, sorted(keys - described)


def test_a_config_of_today_is_left_alone() -> None:
    params = {"model": "BST", "position_encoding": "cape", "num_heads": 2}
    assert translate(params) == (params, "")
