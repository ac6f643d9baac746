"""Everything that is wrong with a config file, one line each; its keys tell which kind of file it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ctr_pe.checks import FUXICTR, param_problems, value_problems
from ctr_pe.config import load_yaml, packaged_yaml
from ctr_pe.data.recipe import Recipe, SplitColumn
from ctr_pe.errors import UserError, counted, explain, nearest
from ctr_pe.fields import field_groups
from ctr_pe.study.suite import Grid, Suite, cells

DATASET_KEYS = frozenset(
    "data_root data_format train_data valid_data test_data group_id target_field sequence_field age_field feature_cols"
    " label_col min_categr_count sep rebuild_dataset data_block_size split_type valid_size test_size".split()
)
DATASET_MARKS = {"data_root", "data_format", "train_data", "feature_cols"}


def check(file: Path, root: Path) -> tuple[str, list[str]]:
    """The kind of a file, and its problems, each a line that begins with the file's name."""
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
        kind, found = f"dataset config, {counted(len(sections), 'data set')}", check_datasets(sections)
    elif sections:
        experiments = len(sections.keys() - {"Base"})
        kind, found = f"model config, {counted(experiments, 'experiment')}", check_models(sections, file.parent, root)
    else:
        kind, found = "", iter(["neither a model config nor a dataset config, recipe, suite or tuner config"])
    return kind, [f"{file}: {problem}" for problem in dict.fromkeys(found)]


def check_models(sections: Mapping[str, dict[str, Any]], folder: Path, root: Path) -> Iterator[str]:
    """Problems of the experiments of a model config; ``folder``: where its dataset config may be."""
    base = sections.get("Base", {})
    for name, section in sections.items():
        if name != "Base":
            params = {**base, **section}
            params |= _dataset_params(folder, str(params.get("dataset_id")))
            yield from (f"{name}: {problem}" for problem in param_problems(params, root))


def check_datasets(sections: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """Problems of a dataset config."""
    from ctr_pe.data.sources.fuxictr_csv import read_columns

    for name, section in sections.items():
        for key, value in section.items():
            if key not in DATASET_KEYS:
                yield f"{name}: key '{key}' is unknown: {nearest(key, DATASET_KEYS)}"
            else:
                yield from (f"{name}: {problem}" for problem in value_problems(FUXICTR, key, value))
        if section.get("data_format") == "csv":
            for key in ("train_data", "valid_data", "test_data", "feature_cols", "label_col"):
                if not section.get(key):
                    yield f"{name}: '{key}' is missing"
        features: list[str] = []
        if section.get("feature_cols"):
            columns, problems = read_columns(section)
            features = [column.name for column in columns]
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
        yield from (f"{cell}: {problem}" for problem in param_problems({**params, **own}, root))


def check_tuner(content: Mapping[str, Any], folder: Path, root: Path) -> Iterator[str]:
    """Problems of a config for FuxiCTR's tuner: its base experiment with each value of the space."""
    from ctr_pe.experiment import model_section

    known = {"base_config", "base_expid", "dataset_id", "dataset_config", "model_config", "tuner_space"}
    for key in content.keys() - known:
        yield f"key '{key}' is unknown: {nearest(key, known)}"
    space = {key: value if isinstance(value, list) else [value] for key, value in content["tuner_space"].items()}
    config, expid = Path(str(content.get("base_config", folder))), str(content.get("base_expid"))
    if not config.exists():  # FuxiCTR resolves it in the working directory; try the file's own directory too
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
            yield from (f"tuner_space: {problem}" for problem in param_problems(params, root))


def _dataset_params(folder: Path, dataset_id: str) -> dict[str, Any]:
    """The section of the dataset config beside a model config: in the same directory, or in the one above."""
    for directory in (folder, folder.parent):
        for file in (directory / "dataset_config.yaml", *sorted((directory / "dataset_config").glob("*.yaml"))):
            sections = load_yaml(file) if file.is_file() else {}
            if isinstance(sections, dict) and isinstance(sections.get(dataset_id), dict):
                return dict(sections[dataset_id])
    return {}
