"""YAML as FuxiCTR users write it, without what it does silently."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ctr_pe.config.yaml import (
    load_json,
    load_yaml,
    model_params,
    packaged_yaml,
    parse_overrides,
    parse_yaml,
    training_recipe,
)
from ctr_pe.utils.errors import UserError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("5e-3", 5e-3),
        ("1E5", 1e5),
        ("-2.5e+3", -2500.0),
        ("1.e4", 1e4),
        (".5e1", 5.0),
        ("0.1", 0.1),
        ("1.0e-3", 1e-3),
    ],
)
def test_numbers_with_an_exponent_are_numbers(text: str, value: float) -> None:
    for read in (parse_yaml(text, "x"), parse_yaml(f"a: {text}", "x")["a"], parse_yaml(f"[{text}]", "x")[0]):
        assert isinstance(read, float)
        assert read == value


@pytest.mark.parametrize("text", ["e3", "1e", "a1e3", "1e3b", "1:1:1", "12:30", "'1e-3'", '"1e-3"', "1-e3"])
def test_text_stays_text(text: str) -> None:
    assert parse_yaml(text, "x") == text.strip("'\"")


def test_integers_stay_integers() -> None:
    read = parse_yaml("[1, 0, -7, 1024]", "x")
    assert read == [1, 0, -7, 1024]
    assert all(type(value) is int for value in read)


def test_agrees_with_the_plain_safe_loader_on_fuxictr_configs() -> None:
    for text in packaged_yaml("model_config").values():
        assert parse_yaml(text, "x") == yaml.safe_load(text)


def test_tuples() -> None:
    assert parse_yaml("a: !!python/tuple [item_id, [x, y]]", "x") == {"a": ("item_id", ["x", "y"])}


def test_dates_are_text() -> None:
    assert parse_yaml("a: 2014-07-01", "x") == {"a": "2014-07-01"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "f.yaml:3: key 'a' is given twice"),
        ("DIN:\n  x: 1\n  y: 2\n  x: 1", "f.yaml:4: key 'x' is given twice"),
        ("a: [1\nb: 2", "f.yaml:2: expected"),
        ("a: !!python/object/apply:os.system [ls]", "f.yaml:1: could not determine a constructor"),
        ("a: !!python/name:os.system", "f.yaml:1: could not determine a constructor"),
        ("a: 1\n---\nb: 2", "f.yaml:2: but found another document"),
        ("a: *nothing", "f.yaml:1: found undefined alias"),
        ("a: \x07", "f.yaml: unacceptable character"),
        ("5: 3", "f.yaml:1: key '5' is no text"),
        ("? [a]\n: 3", "f.yaml:1: key of a sequence is no text"),
    ],
)
def test_errors_are_one_line_with_file_and_line(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse_yaml(text, "f.yaml")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_merged_keys_may_be_overridden() -> None:
    assert parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}", "x")["b"] == {"x": 3, "y": 2}


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    with pytest.raises(UserError, match="No such file") as missing:
        load_yaml(file)
    assert str(file) in str(missing.value)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="UTF-8"):
        load_yaml(file)
    file.write_text("a: 1e-3", encoding="utf-8")
    assert load_yaml(file) == {"a": 1e-3}


def test_overrides_are_yaml_and_the_last_wins() -> None:
    pairs = ["learning_rate=1e-3", "dnn_hidden_units=[64, 32]", "net_regularizer=l2(1=2)", "epochs=1", "epochs=2", "x="]
    assert parse_overrides(pairs) == {
        "learning_rate": 1e-3,
        "dnn_hidden_units": [64, 32],
        "net_regularizer": "l2(1=2)",
        "epochs": 2,
        "x": None,
    }


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("epochs", "write key=value"),
        ("=1", "write key=value"),
        ("a=[1", "expected"),
    ],
)
def test_bad_overrides(pair: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse_overrides([pair])
    assert str(error.value).startswith(f"--set {pair}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_special_section_wins_over_the_default() -> None:
    default, special = model_params("DIN", "my_own_log"), model_params("DIN", "kuaivideo_x1")
    assert default["dataset_id"] == "my_own_log"
    assert default["monitor"] == "gAUC"  # from Base
    assert default["embedding_dim"] == 32  # from DIN_default
    assert default["min_batches"] == 200
    assert "min_batches" not in model_params("DIN", "my_own_log", {"batch_size": 1024})  # which is asked for
    assert "min_batches" not in special
    assert special["embedding_dim"] == 64
    assert special["monitor"] == {"gAUC": 1, "AUC": 1}
    assert special["optimizer"] == "adam"
    default, special = model_params("DMIN", "my_own_log"), model_params("DMIN", "kuaivideo_x1")
    assert (default["layer_norm"], default["min_batches"]) == (False, 100)
    assert special["layer_norm"]
    assert "min_batches" not in special


def test_overrides_win_over_all_and_unknown_keys_stay() -> None:
    special = model_params("DIN", "kuaivideo_x1")
    assert model_params("DIN", "kuaivideo_x1", {"embedding_dim": 8, "unheard_of": 1}) == {
        **special,
        "embedding_dim": 8,
        "unheard_of": 1,
    }


def test_model_and_data_set_are_those_asked_for() -> None:
    params = model_params("DIN", "synthetic", {"model": "X", "dataset_id": "Y"})
    assert (params["model"], params["dataset_id"]) == ("DIN", "synthetic")


@pytest.mark.parametrize(
    "dataset",
    ["synthetic", "synthetic_time", "synthetic_shuffled", "synthetic_context", "amazonelectronics_x1", "kuaivideo_x1"],
)
@pytest.mark.parametrize("model", sorted(packaged_yaml("model_config")))
def test_fuxictrs_own_reader_gets_the_same_parameters(model: str, dataset: str, checkout: Path) -> None:
    """It takes Base from whichever file it reads, so that of all models must be the same."""
    from fuxictr.utils import load_model_config

    theirs = load_model_config(str(checkout / "config"), f"{model}_{dataset}")
    assert theirs == {**model_params(model, dataset), "model_id": f"{model}_{dataset}"}
    assert {"debug_mode", "seed"} <= theirs.keys()  # its tuner reads the first, and varies only keys that are there


@pytest.mark.parametrize("model", sorted(packaged_yaml("model_config")))
def test_the_published_configurations_are_trained_as_their_authors_do(model: str) -> None:
    """Base has a recipe of our own."""
    theirs = training_recipe("fuxictr")
    assert all(model_params(model, "amazon_sports")[key] != theirs[key] for key in ("weight_average", "epochs"))
    for dataset in ("amazonelectronics_x1", "kuaivideo_x1"):
        params = model_params(model, dataset)
        assert {key: params.get(key, 1e-4) for key in theirs} == theirs


def test_unknown_model_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'DIN'"):
        model_params("DINN", "synthetic")


def test_a_key_that_was_null_may_be_given_again() -> None:
    """FuxiCTR's own demo of DIN does so with ``feature_specs``."""
    assert parse_yaml("a: null\nb: 1\na: [2]", "x") == {"a": [2], "b": 1}
    with pytest.raises(UserError, match="given twice"):
        parse_yaml("a: null\na: 1\na: 2", "x")


def test_the_shipped_configurations_hold_only_known_keys() -> None:
    from ctr_pe.models.sections import check_params

    for model, text in packaged_yaml("model_config").items():
        for section in parse_yaml(text, model):
            check_params(model, model_params(model, section.removeprefix(f"{model}_")))


def test_an_unknown_key_is_refused() -> None:
    from ctr_pe.models.sections import check_params

    with pytest.raises(UserError, match="did you mean 'attention_hidden_units'"):
        check_params("DIN", model_params("DIN", "synthetic", parse_overrides(["attention_hidden_unit=[64]"])))


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[]", "\xff", "5" * 5000])
def test_json_that_is_none(text: str, tmp_path: Path) -> None:
    file = tmp_path / "given.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=r"given\.json: not (a|readable)") as error:
        load_json(file)
    assert "\n" not in str(error.value)


def test_another_monitor_brings_its_own_mode() -> None:
    assert "monitor_mode" in model_params("DIN", "synthetic")
    assert "monitor_mode" not in model_params("DIN", "synthetic", {"monitor": "logloss"})
    assert model_params("DIN", "synthetic", {"monitor": "AUC", "monitor_mode": "min"})["monitor_mode"] == "min"
