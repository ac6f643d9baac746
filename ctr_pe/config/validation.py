"""Everything that is wrong with a config file, one line each; its keys tell which kind of file it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ctr_pe.config.field_groups import field_groups
from ctr_pe.config.schema import DatasetSection, Name, Place, problems
from ctr_pe.config.yaml import load_yaml, model_params, next_item_params, packaged_yaml
from ctr_pe.data.logs.recipe import Recipe, SplitColumn
from ctr_pe.fuxictr.csv import feature_specs, read_columns
from ctr_pe.fuxictr.experiment import model_section
from ctr_pe.models.sections import check_params, model_class, unread
from ctr_pe.study.suite import Grid, Suite, cells
from ctr_pe.training.dry_build import param_problems
from ctr_pe.utils.errors import UserError, counted, explain, nearest, one_line, quoted, shown
from ctr_pe.utils.names import RULE, is_name

DATASET_MARKS = {"data_root", "data_format", "train_data", "feature_cols"}


def check(file: Path, root: Path) -> tuple[str, list[str]]:
    """The kind of a file, and its problems, each a line that begins with the file's name."""
    try:
        content = load_yaml(file)
    except UserError as error:
        return "", [str(error)]
    if not isinstance(content, dict):
        return "", [f"{file}: not a mapping: a model config, dataset config, recipe, suite or tuner config is one"]
    sections = {name: section for name, section in content.items() if isinstance(section, dict)}
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
    if "config" in kind and kind != "tuner config":
        others = [name for name in content if name not in sections]
        found = chain((f"{_section(name)}: a section is a mapping of keys" for name in others), found)
    return kind, [f"{file}: {problem}" for problem in dict.fromkeys(map(one_line, found))]


def without_effect(file: Path) -> list[str]:
    """One line for the keys of a model config that nothing reads, if there are any."""
    sections = load_yaml(file)
    keys: dict[str, dict[str, Any]] = {}
    for section in [section for name, section in sections.items() if name != "Base" and isinstance(section, dict)]:
        params = {**sections.get("Base", {}), **section}
        if "model" in params:
            keys[params["model"]] = {**keys.get(params["model"], {}), **params}
    lines = [f"{file}: {line}" for model, params in keys.items() if (line := unread(model, [], params))]
    return list(dict.fromkeys(lines))


def check_models(sections: Mapping[str, dict[str, Any]], folder: Path, root: Path) -> Iterator[str]:
    """Problems of the experiments of a model config; ``folder``: where its dataset config may be."""
    base = sections.get("Base", {})
    if not sections.keys() - {"Base"}:
        yield "no experiment: a section beside Base"
    for name, section in sections.items():
        if name != "Base":
            params = {"model_id": name, **base, **section}
            params = {**_dataset_params(folder, str(params.get("dataset_id"))), **params}
            yield from (f"{_section(name)}: {problem}" for problem in param_problems(params, root))


def check_datasets(sections: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """Problems of a dataset config."""
    for name, section in sections.items():
        named = f"the name of a data set must be {RULE}, got {shown(name)}"
        found = [*([] if is_name(name) else [named]), *_of_dataset(section)]
        yield from (f"{_section(name)}: {problem}" for problem in found)


def _of_dataset(section: Mapping[str, Any]) -> Iterator[str]:
    wrong = problems(DatasetSection, section)
    yield from wrong.values()
    demanded = {"csv": ("train_data", "valid_data", "feature_cols")}.get(str(section.get("data_format")), ())
    for key in (*demanded, *(["label_col"] if demanded or section.get("feature_cols") else [])):
        if not section.get(key):
            yield f"'{key}' is missing"
    features: list[str] = []
    if section.get("feature_cols") and "feature_cols" not in wrong:
        columns, found = read_columns(section)
        features = [column.name for column in columns]
        yield from found
        try:
            _ = found or feature_specs(section)
        except UserError as error:
            yield str(error)
    if wrong.keys() & {"target_field", "sequence_field", "age_field"}:
        return
    try:
        groups = field_groups(section)
    except UserError as error:
        yield str(error)
        return
    for group in groups:
        named = {"target_field": group.target, "sequence_field": group.history, "age_field": [group.age]}
        for key, fields in {**named, "group_id": [] if "group_id" in wrong else [section.get("group_id")]}.items():
            for field in filter(None, fields):
                if features and field not in features:
                    yield f"{key}: no feature {quoted(field)} in feature_cols: {nearest(field, features)}"


def check_recipe(content: Mapping[str, Any]) -> Iterator[str]:
    """Problems of a recipe; the files may be named on the command line."""
    try:
        Recipe.model_validate({"interactions": "log.parquet", **content})
    except ValidationError as error:
        for problem in error.errors():
            yield explain(problem, Recipe, SplitColumn)


def check_suite(content: Mapping[str, Any], root: Path) -> Iterator[str]:
    """Problems of a suite: its own keys, then every cell as an experiment."""
    try:
        suite = Suite.model_validate(content)
    except ValidationError as error:
        for problem in error.errors():
            yield explain(problem, Suite, Grid)
        return
    if suite.published is not None and suite.published not in packaged_yaml("published"):
        yield f"'published': there is no '{suite.published}': {nearest(suite.published, packaged_yaml('published'))}"
    for cell in [row.with_chosen(chosen) for row in cells(suite) for chosen in row.combinations()]:
        if suite.task != "click":
            try:
                own = next_item_params(cell.model, Path(cell.dataset).name, cell.overrides)
                given = {key: value for key, value in own.items() if key not in ("model", "dataset_id")}
                check_params(model_class(cell.model, suite.task), {**given, "position_encoding": cell.pe})
            except UserError as error:
                yield f"grids: {cell}: {error}"
            continue
        try:
            params = model_params(cell.model, cell.dataset, cell.overrides)
        except UserError as error:
            yield f"grids: {cell}: {error}"
            continue
        own = {"position_encoding": cell.pe, "group_id": None, "monitor": "AUC"}
        yield from (f"grids: {cell}: {problem}" for problem in param_problems({**params, **own}, root))


class Tuner(BaseModel):
    """A config of FuxiCTR's tuner: the values of ``tuner_space`` in turn, in an experiment of another config."""

    model_config = ConfigDict(extra="forbid", strict=True)

    base_config: Place | None = None
    base_expid: str
    dataset_id: Name | None = None
    dataset_config: dict[str, dict[str, Any]] = {}
    model_config_: Any = Field(None, alias="model_config")
    tuner_space: dict[str, Any]


def check_tuner(content: Mapping[str, Any], folder: Path, root: Path) -> Iterator[str]:
    """Problems of a config for FuxiCTR's tuner: its base experiment with each value of the space."""
    try:
        tuner = Tuner.model_validate(content)
    except ValidationError as error:
        yield from (explain(problem, Tuner) for problem in error.errors())
        return
    space = {key: value if isinstance(value, list) else [value] for key, value in tuner.tuner_space.items()}
    config = Path(tuner.base_config or folder)
    if not config.exists():  # FuxiCTR resolves it in the working directory; try the file's own directory too
        config = folder / config
    first = {key: values[0] for key, values in space.items() if values}
    dataset_id = {"dataset_id": tuner.dataset_id} if tuner.dataset_id else {}
    inline = tuner.dataset_config.get(tuner.dataset_id or "", {})
    try:
        base, _ = model_section(config, tuner.base_expid)
    except UserError as error:
        yield f"base_config, base_expid: {error}"
        return
    for key in space.keys() - base.keys() - inline.keys() - DatasetSection.model_fields.keys():
        yield f"tuner_space: {shown(key)} is not in {tuner.base_expid}: FuxiCTR's tuner varies only keys that it has"
    for key, values in space.items():
        if not values:
            yield f"tuner_space: {shown(key)} has no value"
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


def _section(name: str) -> str:
    return quoted(name)[1:-1]
