"""Broken config files, one mistake each, drawn by a seeded generator, and hostile ones, written out.

A broken file is right but for one key: its value is of another type or out of range, its name has a typing error, or
what it needs is missing. Which values are wrong for a key is said here, apart from the package.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, NamedTuple

import yaml

MODEL: dict[str, Any] = {
    "model": "DIN",
    "dataset_id": "mine",
    "position_encoding": "cape",
    "embedding_dim": 4,
    "attention_hidden_units": [8],
    "dnn_hidden_units": [8],
    "monitor": "AUC",
}
COLUMNS: list[dict[str, Any]] = [
    {"name": "user_id", "type": "meta", "dtype": "str"},
    {"name": "item_id", "type": "categorical", "dtype": "str"},
    {"name": "clicks", "type": "sequence", "dtype": "str", "max_len": 5, "share_embedding": "item_id",
     "feature_encoder": None},
]  # fmt: skip
DATASET: dict[str, Any] = {
    "data_root": "data",
    "data_format": "csv",
    "train_data": "train.csv",
    "valid_data": "valid.csv",
    "test_data": "test.csv",
    "label_col": {"name": "label", "dtype": "float"},
    "feature_cols": COLUMNS,
    "target_field": "item_id",
    "sequence_field": "clicks",
    "group_id": "user_id",
}
GRID: dict[str, Any] = {"models": ["DIN"], "encodings": ["none", "cape"], "datasets": ["synthetic"]}
SUITE: dict[str, Any] = {"title": "mine", "seeds": 2, "grids": [GRID]}
RECIPE: dict[str, Any] = {
    "protocol": "impressions",
    "interactions": "log.csv",
    "user": "user_id",
    "split": {"column": "day", "test": 2, "valid": 1},
}

NOT_TEXT = [5, -1.5, True, [], {}, [["x"]], {"a": 1}]
NOT_A_NUMBER = ["many", [], {}, [1], {"a": 1}, True, "1 000", "0x10g", "__import__('os')"]
COUNTS = [0, -1, -64, 1.5, 2**70, 10**30, float("nan"), float("inf"), *NOT_A_NUMBER]
POSITIVE = [0, -0.001, -1e300, float("inf"), float("nan"), *NOT_A_NUMBER]
WEIGHTS = [-1, -1e-9, float("nan"), float("inf"), "l2(abc)", "l2(-1)", "l2(nan)", "l1_l2(1)", "l3(1)", "l2(1", [], {}]
RATES = [1, 1.0, 1.5, -0.1, float("nan"), float("inf"), *NOT_A_NUMBER]
SWITCHES = ["maybe", 1, 0, 0.5, [], {}, "True"]
WIDTHS = [[0], [-64], [8, 0], [1.5], ["many"], [[8]], 8, "8", {"a": 8}]
NAMES = ["../x", "a/b", "/etc/passwd", "..", ".", "", "a\0b", "a\nb", "x" * 300, "..\\x", 5, [], {}, 1.5]
CHOICES = ["adamm", "lambda: 1", "", "binary", "x" * 5000, *NOT_TEXT]
ENCODINGS = ["cap", "none+", "+", "rope+cap", "", "x" * 5000, 5, [], [5], {"a": 1}, ["cape", "rope"], "os:system"]

PATHS = [5, "", "a\0b", [], {}, "x" * 5000]

OF_MODEL: dict[str, list[Any]] = {
    **dict.fromkeys(["epochs", "batch_size", "eval_steps", "max_len", "max_position"], COUNTS),
    **dict.fromkeys(["embedding_dim", "position_dim", "likeness_dim", "kernel_band", "min_categr_count"], COUNTS),
    "like_length": [-1, 1.5, *NOT_A_NUMBER],
    **dict.fromkeys(
        ["learning_rate", "embedding_init", "linear_init", "max_gradient_norm", "weight_average"], POSITIVE
    ),
    **dict.fromkeys(["rope_base", "sinusoidal_scale", "time_unit", "session_gap", "alibi_slope"], POSITIVE),
    **dict.fromkeys(["embedding_regularizer", "net_regularizer"], WEIGHTS),
    **dict.fromkeys(["net_dropout", "attention_dropout"], RATES),
    **dict.fromkeys(
        ["amp", "deterministic", "shuffle", "batch_norm", "din_use_softmax", "save_best_only", "debug_mode"], SWITCHES
    ),
    **dict.fromkeys(["dnn_hidden_units", "attention_hidden_units"], WIDTHS),
    **dict.fromkeys(["dataset_id", "model_id"], NAMES),
    **dict.fromkeys(["optimizer", "loss", "dnn_activations", "learning_rate_schedule", "task"], CHOICES),
    **dict.fromkeys(["rope_layout", "kernel_u", "position_index", "euler_planes", "dif_fusion"], CHOICES),
    "seed": [-1, 2**32, 2**70, 1.5, *NOT_A_NUMBER],
    "early_stop_patience": [-1, 1.5, 2**40, *NOT_A_NUMBER],
    "num_workers": [-1, 1.5, 10**6, *NOT_A_NUMBER],
    "gpu": [-2, 1.5, 10**6, *NOT_A_NUMBER],
    "model": ["DINN", "Base", "", "os:system", "x" * 5000, *NOT_TEXT],
    "position_encoding": ENCODINGS,
    "metrics": ["AUC", [], ["auc"], ["AUC", 5], {"AUC": 1}, 5],
    "monitor": ["auc", "loss", "", {}, {"auc": 1}, {"AUC": "much"}, {"AUC": 1, "logloss": 1}, {"AUC": 0}, [], 5],
    "monitor_mode": ["min", "up", "", 5, [], {}],
    "target_field": [5, {"a": 1}, [[5]], ["item_id", "cate_id"], [["item_id"], ["cate_id"]]],
    "use_features": [5, [], [5], ["no_such"], "item_id"],
    "feature_specs": [5, "x", [5], [{}], [{"name": "item_id", "max_len": -5}], [{"name": "no_such"}], {"name": 1}],
    "track": ["nothing", "", 5, [], {}],
    "age_field": ["no_such", 5, {"a": 1}, ["a", "b"]],
    "feature_map": ["x", {}],
}
OF_DATASET: dict[str, list[Any]] = {
    **dict.fromkeys(["train_data", "data_root"], PATHS),
    "data_format": ["cvs", "", 5, []],
    "sep": ["", "ab", 5, "\n", []],
    "valid_size": [-1, 2, "many", [], float("nan")],
    "min_categr_count": COUNTS,
    "rebuild_dataset": SWITCHES,
    "label_col": [5, "label", [], {}, {"dtype": "float"}, {"name": ""}, {"name": 5}, {"name": "label", "dtyp": "int"}],
    "feature_cols": [5, "item_id", {}, [5], [{}], [{"name": ""}], [{"name": 5}], []],
    "target_field": [5, "item", [["item_id", "cate_id"]], {"a": 1}],
    "group_id": ["users", 5, []],
    "age_field": ["ages", 5],
}
OF_COLUMN: dict[str, list[Any]] = {
    "max_len": [-5, 1.5, 10**12, "many"],
    "embedding_dim": [0, -1, 1.5, 2**70, "wide"],
    "type": ["categorial", "", 5],
    "dtype": ["string", "eval", 5, []],
    "feature_encoder": ["open('x')", "nn.Linear(1)", "layers.Masked()", 5],
    "share_embedding": ["clicks", "items", 5],
    "splitter": ["", 5],
    "preprocess": ["copy_from()", "x(y)", 5],
    "active": ["maybe", 5],
}
OF_SUITE: dict[str, list[Any]] = {
    "seeds": [0, -1, 1.5, "two", 10**9, []],
    "title": [5, [], {}],
    "protocol": ["held", "", 5],
    "published": ["../x", "nowhere", 5],
    "grids": [[], 5, "x", [5], [{}]],
}
OF_GRID: dict[str, list[Any]] = {
    "models": [[], "DIN", ["DINN"], [5], 5],
    "encodings": [[], "none", ["cap"], [5], 5],
    "datasets": [[], "synthetic", [5], ["a\0b"], 5],
    "vary": [{"position_dim": []}, {"position_dim": 8}, {"position_dim": [0]}, {"seed": [1]}, {"loss": ["[x"]}, 5],
    "set": [{"model": "BST"}, {"position_encoding": "rope"}, {"learning_rate": 0}, {"epochs": 1.7}, {"x": 1}, 5, []],
}
OF_RECIPE: dict[str, list[Any]] = {
    "protocol": ["dinn", "", 5, []],
    "max_len": [0, -5, 1.5, 10**20, "many"],
    "seed": [-1, 2**70, "x"],
    "user": [5, [], {}],
    "time_unit": ["years", 5, []],
    "valid_fraction": [0, 1, -0.1, float("nan"), "many"],
    "split": [5, {}, {"column": "day", "test": 1, "valid": 1}, {"column": "day", "test": 1}, "day"],
    "drop": [5, "x", {"a": {"b": 1}}],
}
OF_TUNER: dict[str, list[Any]] = {
    "base_expid": ["Y", 5, [], "x" * 5000],
    "base_config": [5, "nowhere", [], "a\0b"],
    "tuner_space": [5, [], {"position_dim": [0]}, {"position_dim": []}, {"heads": [1]}, {"learning_rate": [1, "x"]}],
    "dataset_id": ["../x", 5, []],
}
TEXTS = [
    "", "a: [1", "- x", "a: 1", "X: {model: DIN, model: BST}", "X: &a [*a]", "X: !!python/name:os.system", "5: {a: 1}",
    "X: !!binary aGk=", "a: *b", "\t- x", "X: 5\nY: {model: DIN}", "Base: {epochs: 1}", "{}", "null", "X: {? [a] : 1}",
    "X: {model: DIN, a: 1:2:3}", "X: {model: DIN, a: 0x" + "f" * 99 + "}", "%YAML 9.9\n---\na", "a: 'x", "X: {a: !t 1}",
]  # fmt: skip


class Broken(NamedTuple):
    """A file's text, what names its mistake, and how it comes in: ``validate``, or pairs of ``--set``."""

    text: str
    key: str
    kind: str


def _in(base: dict[str, Any], *at: Any) -> Callable[[str, Any], dict[str, Any]]:
    """A copy of ``base`` in which one key of the mapping at ``at`` has another value, or is gone."""

    def changed(key: str, value: Any) -> dict[str, Any]:
        copy = deepcopy(base)
        place: Any = copy
        for step in at:
            place = place[step]
        place[key] = value
        return copy

    return changed


KINDS: dict[str, tuple[Callable[[str, Any], dict[str, Any]], dict[str, list[Any]]]] = {
    "model config": (_in({"X": MODEL}, "X"), OF_MODEL),
    "dataset config": (_in({"mine": DATASET}, "mine"), OF_DATASET),
    "column of a dataset config": (_in({"mine": DATASET}, "mine", "feature_cols", 1), OF_COLUMN),
    "suite": (_in(SUITE), OF_SUITE),
    "grid of a suite": (_in(SUITE, "grids", 0), OF_GRID),
    "recipe": (_in(RECIPE), OF_RECIPE),
    "tuner config": (_in({"base_config": "config", "base_expid": "X", "tuner_space": {}}), OF_TUNER),
}


def every_broken() -> list[Broken]:
    """All mistakes of the lists above, and of typing a key."""
    found = [Broken(text, "", "text that is no config") for text in TEXTS]
    for kind, (changed, wrong) in KINDS.items():
        for key, values in wrong.items():
            found += [Broken(_written(changed(key, value)), key, kind) for value in values]
            typo = f"{key[:-1]}{key[-1]}z"
            found.append(Broken(_written(changed(typo, 1)), typo, kind))
    for key, values in OF_MODEL.items():
        pairs = [f"{key}={yaml.safe_dump(value, default_flow_style=True).splitlines()[0]}" for value in values]
        found += [Broken(pair, key, "--set") for pair in pairs if "\0" not in pair]
    return found


def broken(count: int, seed: int = 0) -> Iterator[Broken]:
    """``count`` of them, without repetition as long as there are some."""
    draw, every = random.Random(seed), every_broken()
    while count > 0:
        draw.shuffle(every)
        yield from every[:count]
        count -= len(every)


def _written(content: Any) -> str:
    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
