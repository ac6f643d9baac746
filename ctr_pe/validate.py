"""``ctr-pe validate FILE``: everything that is wrong with a config, one line each, before anything runs.

Keys and values are held against the signatures that will get them, and every model is built once, with tables of a few
rows, on the fields of its data set.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from ctr_pe import legacy
from ctr_pe.benchmark.suite import Grid, Suite, cells
from ctr_pe.config import load_yaml, packaged_yaml
from ctr_pe.data.built_in import BUILT_IN
from ctr_pe.data.dataset import REPORT, data_root
from ctr_pe.data.recipe import Recipe, SplitColumn
from ctr_pe.errors import UserError, explain, nearest

Rate = Annotated[float, Field(ge=0, lt=1)]
# What FuxiCTR's own parameters hold; its signatures say nothing.
FUXICTR: dict[str, Any] = {
    "batch_size": PositiveInt,
    "data_format": Literal["csv", "parquet", "npz"],
    "debug_mode": bool,
    "early_stop_patience": NonNegativeInt,
    "epochs": PositiveInt,
    "eval_steps": PositiveInt | None,
    "gpu": int,
    "group_id": str | None,
    "label_col": dict[str, Any] | list[dict[str, Any]],
    "loss": str,
    "max_gradient_norm": float,
    "metrics": list[str],
    "min_categr_count": PositiveInt,
    "model_root": str,
    "monitor": str | dict[str, float],
    "monitor_mode": Literal["max", "min"],
    "num_workers": NonNegativeInt,
    "optimizer": str,
    "reduce_lr_on_plateau": bool,
    "save_best_only": bool,
    "seed": NonNegativeInt,
    "shuffle": bool,
    "task": Literal["binary_classification"],
    "use_features": list[str] | None,
    "verbose": int,
}
DATASET_KEYS = frozenset(
    "data_root data_format train_data valid_data test_data group_id target_field sequence_field age_field feature_cols"
    " label_col min_categr_count sep rebuild_dataset data_block_size split_type valid_size test_size".split()
)
DATASET_MARKS = {"data_root", "data_format", "train_data", "feature_cols"}


def main(args: argparse.Namespace) -> int:
    """``ctr-pe validate FILE``: 0 and "ok", or 2 and a line on stderr for each problem."""
    kind, problems = check(args.file, data_root(args.data_root))
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(f"{args.file}: ok ({kind})")
    return 2 if problems else 0


def check(file: Path, root: Path) -> tuple[str, list[str]]:
    """What a file is, and its problems, each a line that begins with the file's name."""
    try:
        content = load_yaml(file)
    except UserError as error:
        return "", [str(error)]
    if not isinstance(content, dict):
        return "", [f"{file}: not a mapping: a model config, dataset config, recipe, suite or tuner config is one"]
    sections = {str(name): section for name, section in content.items() if isinstance(section, dict)}
    if "grids" in content:
        kind, found = "suite", check_suite(content, root)
    elif "tuner_space" in content:
        kind, found = "tuner config", check_tuner(content, file.parent, root)
    elif "protocol" in content:
        kind, found = "recipe", check_recipe(content)
    elif any(DATASET_MARKS & section.keys() and "model" not in section for section in sections.values()):
        kind, found = f"dataset config, {_many(len(sections), 'data set')}", check_datasets(sections)
    elif sections:
        experiments = len(sections.keys() - {"Base"})
        kind, found = f"model config, {_many(experiments, 'experiment')}", check_models(sections, file.parent, root)
    else:
        kind, found = "", iter(["neither a model config nor a dataset config, recipe, suite or tuner config"])
    return kind, [f"{file}: {problem}" for problem in dict.fromkeys(found)]


def check_models(sections: Mapping[str, dict[str, Any]], folder: Path, root: Path) -> Iterator[str]:
    """Problems of the experiments of a model config; ``folder``: where its dataset config may lie."""
    base = sections.get("Base", {})
    for name, section in sections.items():
        if name != "Base":
            params = {**base, **section}
            params |= _dataset_params(folder, str(params.get("dataset_id")))
            yield from (f"{name}: {problem}" for problem in check_params(params, root))


def check_params(params: Mapping[str, Any], root: Path) -> Iterator[str]:
    """Problems of one experiment's parameters."""
    from ctr_pe.model_zoo.keys import unknown_keys
    from ctr_pe.training import model_class

    if legacy.is_legacy(params):
        params, _ = legacy.translate(params)
    if "model" not in params:
        yield "'model' is missing"
        return
    try:
        cls = model_class(str(params["model"]))
    except UserError as error:
        yield str(error)
        return
    good = dict(params)
    types, unknown = known_types(cls), unknown_keys(cls, params)
    for key, value in params.items():
        for problem in [unknown[key]] if key in unknown else _check_value(types, key, value):
            yield problem
            good.pop(key)
    yield from _check_fit(cls, good, root)


def known_types(cls: Any) -> dict[str, Any]:
    """Type of every key that a model, its base classes and the encodings take."""
    from ctr_pe.pe import REGISTRY

    types = dict(FUXICTR)
    for place in REGISTRY.values():
        module, _, name = place.partition(":")
        types |= _annotations(getattr(importlib.import_module(module), name))
    for base in reversed(cls.__mro__):
        if "__init__" in vars(base) and base.__module__.startswith("ctr_pe"):
            types |= _annotations(base)
    return {key: Rate if key.endswith("dropout") and kind is float else kind for key, kind in types.items()}


def _annotations(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls.__init__)
    named = [p.name for p in inspect.signature(cls).parameters.values() if p.kind is not p.VAR_KEYWORD]
    return {name: hints[name] for name in named if name in hints}


def _check_value(types: Mapping[str, Any], key: str, value: Any) -> Iterator[str]:
    from ctr_pe.training import check_encoding

    try:
        if key in types:
            TypeAdapter(types[key], config=ConfigDict(strict=True, arbitrary_types_allowed=True)).validate_python(value)
        if key == "position_encoding":
            for name in [value] if isinstance(value, str) else value:
                check_encoding(name)
    except UserError as error:
        yield str(error)
    except ValidationError as error:
        message = " or ".join(dict.fromkeys(_short(problem["msg"]) for problem in error.errors()))
        yield f"'{key}': {message} (given: {value!r})"


def _short(message: str) -> str:
    return f"{message[0].lower()}{message[1:]}".removeprefix("input should be ")


def _check_fit(cls: Any, params: dict[str, Any], root: Path) -> Iterator[str]:
    """What only shows on the data set's fields: those that are missing, and what the model refuses to be built with."""
    import torch

    from ctr_pe.experiment import field_groups

    try:
        specs, defaults = data_specs(params, root)
        known = bool(specs)
        groups = field_groups(params)
    except UserError as error:
        yield str(error)
        return
    if not groups:
        fields = defaults or STAND_IN
        params |= {key: fields[key] for key in ("target_field", "sequence_field")}
        params |= {key: params.get(key) or fields.get(key) for key in ("age_field", "group_id")}
        groups = field_groups(params)
    there = list(specs)
    specs, missing = _stand_ins(specs, groups, params)
    for name in missing:
        yield f"no feature '{name}' in data set '{params.get('dataset_id')}': {nearest(name, there)}"
    specs |= {name: {"type": "meta"} for name in missing if name not in specs}
    monitor = params.get("monitor", "AUC")
    group_id = params.get("group_id") or defaults.get("group_id")
    if known and "gAUC" in (monitor if isinstance(monitor, dict) else [monitor]) and not group_id:
        yield "monitor gAUC needs a group_id: the column whose rows are compared with each other"
    try:
        with torch.random.fork_rng(devices=[]):
            cls(_feature_map(specs, params), **params | {"gpu": -1})
    except (UserError, ValueError) as error:
        yield str(error)


STAND_IN = {
    "target_field": [("item_id", "cate_id")],
    "sequence_field": [("item_history", "cate_history")],
    "age_field": [None],
}


def data_specs(params: Mapping[str, Any], root: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Features of an experiment's data set, and the field groups it comes with.

    From its ``feature_cols``, from the data set if it is built, or from what is published about it; empty if nothing
    is known.

    Raises:
        UserError: ``feature_cols`` that mean nothing.
    """
    from ctr_pe.data.csv_input import feature_specs
    from ctr_pe.data.published import SETS
    from ctr_pe.data.specs import history_spec, target_spec

    name = str(params.get("dataset_id"))
    if params.get("feature_cols"):
        return feature_specs(params), {}
    places = [Path(str(params["train_data"])).parent] if params.get("train_data") else []
    for folder in (*places, root / name, Path(str(params.get("data_root") or root)) / name):
        if (folder / "feature_map.json").is_file():
            features = json.loads((folder / "feature_map.json").read_text(encoding="utf-8"))["features"]
            specs = {field: dict(spec) for feature in features for field, spec in feature.items()}
            report = json.loads((folder / REPORT).read_text()) if (folder / REPORT).is_file() else {}
            return specs, _defaults(report.get("groups", []), report.get("group_id"))
    if name in SETS:
        published = SETS[name]
        specs = {published.group_id: {"type": "meta"}}
        for field in published.fields:
            width = {"embedding_dim": 64, "feature_encoder": "nn.Linear(64, 64, bias=False)"} if field.vectors else {}
            specs[field.name] = target_spec(1, field.source) | width
            specs |= {history: history_spec(field.name, 1, 100) | width for history, _ in field.histories}
        groups = [{"target": group.target, "history": group.history, "age": group.age} for group in published.groups]
        return specs, _defaults(groups, published.group_id)
    if name in BUILT_IN:
        return {}, _defaults([{**_group(STAND_IN), "age": "age_history"}], "user_id")
    return {}, {}


def _group(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"target": fields["target_field"][0], "history": fields["sequence_field"][0]}


def _defaults(groups: list[dict[str, Any]], group_id: str | None) -> dict[str, Any]:
    return {
        "target_field": [tuple(group["target"]) for group in groups],
        "sequence_field": [tuple(group["history"]) for group in groups],
        "age_field": [group["age"] for group in groups],
        "group_id": group_id,
    }


def _stand_ins(
    specs: dict[str, dict[str, Any]], groups: list[Any], params: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The specs with every field in use, and those that had to be added although the data set is known."""
    from ctr_pe.data.specs import age_spec, history_spec, target_spec

    specs, known, missing = {name: dict(spec) for name, spec in specs.items()}, bool(specs), []
    ages = params.get("age_field")
    used: dict[str, dict[str, Any]] = {}
    for group in groups:
        used |= {name: target_spec(1) for name in group.target}
        used |= {by: history_spec(of, 1, 100) for of, by in zip(group.target, group.history, strict=True)}
    for age in [ages] if isinstance(ages, str) else ages or []:
        used |= {age: age_spec(100)} if age else {}
    for name, spec in used.items():
        if name not in specs:
            specs[name] = spec
            missing += [name] if known else []
    if group_id := params.get("group_id"):
        if group_id not in specs and known:
            missing.append(group_id)
        specs.setdefault(group_id, {"type": "meta"})
    for change in params.get("feature_specs") or []:
        names = change["name"] if isinstance(change["name"], list) else [change["name"]]
        for name in names:
            if name not in specs:
                missing += [name] if known else []
                continue
            specs[name] |= {key: value for key, value in change.items() if key != "name"}
    return specs, list(dict.fromkeys(missing))


def _feature_map(specs: Mapping[str, dict[str, Any]], params: Mapping[str, Any]) -> Any:
    """Tables of three rows and no vectors: the same model in everything that can be refused."""
    from fuxictr.features import FeatureMap

    feature_map = FeatureMap(str(params.get("dataset_id")), "")
    for name, spec in specs.items():
        kept = {key: value for key, value in spec.items() if not key.startswith(("pretrain", "freeze"))}
        feature_map.features[name] = kept | ({"vocab_size": 3} if "vocab_size" in spec else {})
    feature_map.labels = ["label"]
    feature_map.group_id = params.get("group_id")
    feature_map.default_emb_dim = params.get("embedding_dim")
    return feature_map


def check_datasets(sections: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """Problems of a dataset config."""
    from ctr_pe.data.csv_input import column_problems
    from ctr_pe.experiment import field_groups

    for name, section in sections.items():
        for key, value in section.items():
            if key not in DATASET_KEYS:
                yield f"{name}: key '{key}' is unknown: {nearest(key, DATASET_KEYS)}"
            elif key in FUXICTR:
                try:
                    TypeAdapter(FUXICTR[key], config=ConfigDict(strict=True)).validate_python(value)
                except ValidationError as error:
                    yield f"{name}: '{key}': {_short(error.errors()[0]['msg'])} (given: {value!r})"
        if section.get("data_format") == "csv":
            for key in ("train_data", "valid_data", "test_data", "feature_cols", "label_col"):
                if not section.get(key):
                    yield f"{name}: '{key}' is missing"
        features: list[str] = []
        if section.get("feature_cols"):
            features, problems = column_problems(section)
            yield from (f"{name}: {problem}" for problem in problems)
        try:
            groups = field_groups(section)
        except UserError as error:
            yield f"{name}: {error}"
            continue
        used = [field for group in groups for field in (*group.target, *group.history)]
        for field in [*used, *filter(None, [section.get("group_id")])]:
            if features and field not in features:
                yield f"{name}: no feature '{field}' in feature_cols: {nearest(field, features)}"


def check_recipe(content: Mapping[str, Any]) -> Iterator[str]:
    """Problems of a recipe; the files may be named on the command line."""
    try:
        Recipe.model_validate({"interactions": "log.parquet", **content})
    except ValidationError as error:
        for problem in error.errors():
            yield explain(problem, Recipe, SplitColumn)


def check_suite(content: Mapping[str, Any], root: Path) -> Iterator[str]:
    """Problems of a suite: its own keys, then every cell as an experiment."""
    from ctr_pe.config import model_params

    try:
        suite = Suite.model_validate(content)
    except ValidationError as error:
        for problem in error.errors():
            yield explain(problem, Suite, Grid)
        return
    if suite.published is not None and suite.published not in packaged_yaml("published"):
        yield f"'published': there is no '{suite.published}': {nearest(suite.published, packaged_yaml('published'))}"
    for cell in cells(suite):
        try:
            params = model_params(cell.model, cell.dataset, cell.overrides)
        except UserError as error:
            yield str(error)
            continue
        own = {"position_encoding": cell.pe, "group_id": None, "monitor": "AUC"}
        yield from (f"{cell}: {problem}" for problem in check_params({**params, **own}, root))


def check_tuner(content: Mapping[str, Any], folder: Path, root: Path) -> Iterator[str]:
    """Problems of a config for FuxiCTR's tuner: its base experiment with each value of the space."""
    from ctr_pe.experiment import model_section

    known = {"base_config", "base_expid", "dataset_id", "dataset_config", "model_config", "tuner_space"}
    for key in content.keys() - known:
        yield f"key '{key}' is unknown: {nearest(key, known)}"
    space = {key: value if isinstance(value, list) else [value] for key, value in content["tuner_space"].items()}
    config, expid = Path(str(content.get("base_config", folder))), str(content.get("base_expid"))
    if not config.exists():  # FuxiCTR means the working directory; the file's own is as good a guess
        config = folder / config
    first = {key: values[0] for key, values in space.items() if values}
    dataset_id = {"dataset_id": content["dataset_id"]} if "dataset_id" in content else {}
    inline = dict((content.get("dataset_config") or {}).get(content.get("dataset_id")) or {})
    try:
        base, _ = model_section(config, expid)
    except UserError as error:
        yield str(error)
        return
    for key in space.keys() - base.keys() - inline.keys() - DATASET_KEYS:
        yield f"tuner_space: '{key}' is not in {expid}: FuxiCTR's tuner varies only keys that the base experiment has"
    for key, values in space.items():
        for value in values:
            params = {**base, **dataset_id, **inline, **first, key: value}
            yield from (f"tuner_space: {problem}" for problem in check_params(params, root))


def _dataset_params(folder: Path, dataset_id: str) -> dict[str, Any]:
    """The section of the dataset config beside a model config: in the same directory, or in the one above."""
    for place in (folder, folder.parent):
        for file in (place / "dataset_config.yaml", *sorted((place / "dataset_config").glob("*.yaml"))):
            sections = load_yaml(file) if file.is_file() else {}
            if isinstance(sections, dict) and isinstance(sections.get(dataset_id), dict):
                return dict(sections[dataset_id])
    return {}


def _many(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


__all__ = ["check", "check_params", "main"]
