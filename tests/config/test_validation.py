"""``ctr-pe validate``: everything that is wrong, one line each, and nothing that is right."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from ctr_pe.cli import main
from ctr_pe.config import yaml as yaml_config
from ctr_pe.config.validation import check
from ctr_pe.data.synthetic.bursts import generate

SECTION: dict[str, Any] = {
    "model": "DIN",
    "dataset_id": "mine",
    "monitor": "AUC",
    "embedding_dim": 4,
    "attention_hidden_units": [8],
    "dnn_hidden_units": [8],
    "position_encoding": "cape",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    generate(folder / "mine", users=10, valid_users=5, test_users=5)
    return folder


def problems(content: Any, tmp_path: Path, root: Path | None = None) -> list[str]:
    file = tmp_path / "given.yaml"
    file.write_text(content if isinstance(content, str) else yaml.dump(content, sort_keys=False))
    _, found = check(file, root or tmp_path)
    assert all(line.startswith(f"{file}:") for line in found)
    assert not any("\n" in line for line in found)
    return [line.removeprefix(f"{file}: ") for line in found]


def of_model(tmp_path: Path, root: Path, **changes: Any) -> list[str]:
    return problems({"X": {**SECTION, **changes}}, tmp_path, root)


@pytest.mark.slow
def test_what_is_shipped_is_right(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = cache(yaml_config.parse_yaml)  # once per file, and not for every cell of a suite
    monkeypatch.setattr(yaml_config, "parse_yaml", lambda text, source: deepcopy(parsed(text, source)))
    for kind in ("model_config", "dataset_config", "recipe", "benchmark"):
        for file in sorted((checkout / "config" / kind).glob("*.yaml")):
            assert check(file, tmp_path)[1] == []


def test_the_command(tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "given.yaml"
    file.write_text(yaml.dump({"Base": {"epochs": 1}, "A": SECTION, "B": SECTION}))
    assert main(["validate", str(file), "--data-root", str(root)]) == 0
    assert capsys.readouterr() == (f"{file}: ok (model config, 2 experiments)\n", "")
    file.write_text(yaml.dump({"Base": {"epoch": 1}, "A": SECTION, "B": {**SECTION, "batch_size": "big"}}))
    assert main(["validate", str(file), "--data-root", str(root)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.removeprefix(f"{file}: ").split(": ")[0] for line in err.splitlines()] == ["A", "B", "B"]
    assert main(["validate", str(tmp_path / "nowhere.yaml")]) == 2
    assert "nowhere.yaml: No such file" in capsys.readouterr().err


def test_all_problems_are_told_at_once(tmp_path: Path, root: Path) -> None:
    found = of_model(
        tmp_path,
        root,
        net_droput=0.1,
        attention_hidden_units=[8, "many"],
        batch_norm="yes",
        epochs=0,
        position_dim="16",
        din_target_field=[["item_id", "cate"]],
        din_sequence_field=[["item_history", "cate_history"]],
    )
    assert len(found) == 6
    text = "\n".join(found)
    for part in (
        "key 'net_droput' is unknown: did you mean 'net_dropout'?",
        "attention_hidden_units must be a list of positive integers",
        "batch_norm must be true or false, got 'yes'",
        "epochs must be a positive integer, got 0",
        "position_dim must be a positive integer, got '16'",
        "no feature 'cate' in data set 'mine': did you mean 'cate_id'?",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "DINN"}, "did you mean 'DIN'?"),
        ({"position_encoding": "cap"}, "did you mean 'cape'?"),
        ({"position_encoding": ["cape", "rope"]}, "position_encoding has 2 entries for 1 field groups"),
        ({"learning_rate": "fast"}, "learning_rate must be a positive number, got 'fast'"),
        ({"net_dropout": 1.0}, "net_dropout must be from 0 to less than 1, got 1.0"),
        ({"max_len": 0}, "max_len"),
        ({"monitor": "gAUC", "group_id": "userid"}, "did you mean 'user_id'?"),
        ({"feature_specs": [{"name": "item_histori", "feature_encoder": None}]}, "did you mean 'item_history'?"),
        ({"rope_layout": "diagonal", "position_encoding": "rope"}, "half, interleaved"),
        ({"age_field": "age_histori"}, "did you mean 'age_history'?"),
        ({"target_field": ["item_id", "cate_id"], "sequence_field": [["item_history"]]}, "can mean two things"),
        ({"model": "BST", "attention_hidden_units": [8], "num_heads": 4}, "'attention_hidden_units' is unknown"),
    ],
)
def test_one_mistake_is_one_line(changes: dict[str, Any], message: str, tmp_path: Path, root: Path) -> None:
    (found,) = of_model(tmp_path, root, **changes)
    assert message in found


def test_heads_that_do_not_divide_the_item(tmp_path: Path, root: Path) -> None:
    section = {key: value for key, value in SECTION.items() if key != "attention_hidden_units"}
    (found,) = problems({"X": {**section, "model": "BST", "num_heads": 3}}, tmp_path, root)
    assert "num_heads=3" in found
    assert "8" in found


def test_time_is_needed(tmp_path: Path, root: Path) -> None:
    pe = {"position_encoding": "cape_time"}
    assert of_model(tmp_path, root, **pe) == []
    (found,) = of_model(tmp_path, root, age_field=[None], **fields(), **pe)
    assert "needs event times" in found
    assert of_model(tmp_path, root, dataset_id="synthetic_time", **pe) == []  # not generated yet
    (found,) = of_model(tmp_path, root, dataset_id="amazonelectronics_x1", **pe)  # as published it has no times
    assert "needs event times" in found


def fields() -> dict[str, Any]:
    return {"target_field": [["item_id", "cate_id"]], "sequence_field": [["item_history", "cate_history"]]}


def test_gauc_needs_groups(tmp_path: Path) -> None:
    columns = [
        {"name": "item_id", "active": True, "dtype": "str", "type": "categorical"},
        {"name": "clicks", "active": True, "dtype": "str", "type": "sequence", "share_embedding": "item_id",
         "max_len": 5, "feature_encoder": None},
    ]  # fmt: skip
    given = {"feature_cols": columns, "data_format": "csv", "target_field": "item_id", "sequence_field": "clicks"}
    (found,) = of_model(tmp_path, tmp_path, **given, monitor={"gAUC": 1, "AUC": 1})
    assert "needs a group_id" in found
    (found,) = of_model(tmp_path, tmp_path, **given, metrics=["gAUC", "AUC", "NDCG(k=5)"], monitor="AUC")
    assert "metrics NDCG(k=5) needs a group_id" in found
    assert of_model(tmp_path, tmp_path, **given) == []


def test_published_sets_need_not_be_here(tmp_path: Path) -> None:
    assert of_model(tmp_path, tmp_path, dataset_id="kuaivideo_x1", monitor="gAUC") == []
    found = of_model(tmp_path, tmp_path, dataset_id="kuaivideo_x1", **fields())
    assert [line.split("'")[1] for line in found][:3] == ["cate_id", "item_history", "cate_history"]


def test_the_dataset_config_beside_it_is_used(tmp_path: Path) -> None:
    columns = [{"name": "clicks", "dtype": "str", "type": "sequence", "max_len": 5}]
    (tmp_path / "dataset_config.yaml").write_text(yaml.dump({"mine": {"data_format": "csv", "feature_cols": columns}}))
    found = of_model(tmp_path, tmp_path, target_field="item", sequence_field="clicks")
    assert any("no feature 'item'" in line for line in found)


def test_released_cape_configs(tmp_path: Path, root: Path) -> None:
    section = {key: value for key, value in SECTION.items() if key != "position_encoding"}
    released = {**section, "use_cope": True, "max_sequence_length": 100, "position_dim": 16, "din_use_softmax": True}
    assert problems({"X": released}, tmp_path, root) == []
    (found,) = problems({"X": {**released, "position_dim": "16"}}, tmp_path, root)
    assert "position_dim" in found


def test_dataset_configs(tmp_path: Path) -> None:
    section: dict[str, Any] = {
        "data_root": "data",
        "data_format": "csv",
        "train_dat": "train.csv",
        "valid_data": "valid.csv",
        "test_data": "test.csv",
        "min_categr_count": "1",
        "feature_cols": [
            {"name": "item_id", "active": True, "dtype": "str", "type": "categorial"},
            {"name": "clicks", "active": True, "dtype": "str", "type": "sequence", "max_length": 5},
        ],
        "target_field": [["item"]],
        "sequence_field": [["clicks", "cates"]],
    }
    found = "\n".join(problems({"mine": section}, tmp_path))
    for part in (
        "key 'train_dat' is unknown: did you mean 'train_data'?",
        "'train_data' is missing",
        "'label_col' is missing",
        "min_categr_count must be a positive integer, got '1'",
        "'item_id': 'type'",
        "key 'max_length' is unknown: did you mean 'max_len'?",
        "must pair up",
    ):
        assert part in found


def test_recipes(tmp_path: Path) -> None:
    assert problems({"protocol": "din"}, tmp_path) == []
    found = problems({"protocol": "dinn", "max_len": 0, "usr": "uid"}, tmp_path)
    assert len(found) == 3
    assert any("did you mean 'user'?" in line for line in found)


def test_suites(tmp_path: Path) -> None:
    grid = {"models": ["DIN"], "encodings": ["none", "cape"], "datasets": ["synthetic"]}
    suite = {"title": "x", "grids": [grid]}
    assert problems(suite, tmp_path) == []
    found = problems({**suite, "seed": 3, "grids": [{**grid, "encoding": ["none"]}]}, tmp_path)
    assert len(found) == 2
    assert any("did you mean 'seeds'?" in line for line in found)
    assert any("did you mean 'encodings'?" in line for line in found)
    wrong = {**grid, "models": ["DIN", "DINN"], "encodings": ["cap"], "vary": {"position_dim": [8, 0]}}
    found = problems({**suite, "grids": [grid, wrong]}, tmp_path)
    assert any("'DINN' is unknown" in line for line in found)
    assert any("did you mean 'cape'?" in line for line in found)
    found = problems({**suite, "grids": [{**grid, "vary": {"position_dim": [8, 0]}}]}, tmp_path)
    assert [line.split(": ")[1] for line in found] == [f"DIN {pe} synthetic position_dim=0" for pe in ("none", "cape")]


def test_tuner_configs(tmp_path: Path, checkout: Path) -> None:
    tuner = {"base_config": str(checkout / "config"), "base_expid": "DIN_synthetic"}
    assert problems({**tuner, "tuner_space": {"position_dim": [16, 32], "net_dropout": 0.1}}, tmp_path) == []
    found = problems({**tuner, "tuner_space": {"position_dim": [16, "32"], "num_heads": [1, 2]}}, tmp_path)
    assert any("position_dim must be a positive integer, got '32'" in line for line in found)
    assert any("'num_heads' is not in DIN_synthetic" in line for line in found)


def test_a_tuner_config_may_name_its_base_from_where_the_command_runs(
    tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FuxiCTR takes it: the released CAPE configs lie one folder below where they are run."""
    monkeypatch.chdir(checkout)
    assert problems({"base_config": "./config", "base_expid": "DIN_synthetic", "tuner_space": {}}, tmp_path) == []
    (found,) = problems({"base_config": "nowhere", "base_expid": "DIN_synthetic", "tuner_space": {}}, tmp_path)
    assert "no such config" in found


@pytest.mark.parametrize("text", ["", "- a", "a: 1", "{}", "a: [1"])
def test_what_is_no_config(text: str, tmp_path: Path) -> None:
    (found,) = problems(text, tmp_path)
    assert found
