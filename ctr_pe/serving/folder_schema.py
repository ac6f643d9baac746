"""What the files of a model folder have to hold, beyond their hashes: a folder from elsewhere may hash anything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import polars as pl
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ctr_pe.config.schema import Length, Name, Seed
from ctr_pe.data.dataset import ID, ITEM
from ctr_pe.data.dataset_report import FileFacts
from ctr_pe.data.logs.tables import readable
from ctr_pe.serving.encoder import ColumnNames
from ctr_pe.serving.tables import is_key
from ctr_pe.utils.errors import UserError, explain

_STRICT = ConfigDict(strict=True)


class _Group(BaseModel):
    model_config = _STRICT

    target: Annotated[list[str], Field(min_length=1)]
    history: Annotated[list[str], Field(min_length=1)]
    age: str | None
    negative: list[str]
    encoding: str


class _Metrics(BaseModel):
    model_config = _STRICT

    test: dict[str, float | None]


class _Manifest(BaseModel):
    """What is read of model.json; the rest is for readers."""

    model_config = _STRICT

    model: str
    position_encoding: str | list[str]
    params: dict[str, Any]
    groups: Annotated[list[_Group], Field(min_length=1)]
    max_len: Length
    seed: Seed
    dataset_id: Name
    group_id: str | None
    vocabulary: str
    metrics: _Metrics
    history: list[dict[str, Any]]
    files: dict[Name, FileFacts]


def check_manifest(file: Path, content: Any) -> None:
    """Raises UserError if model.json does not describe a model."""
    try:
        _Manifest.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{file}: damaged: {_problem(error)}") from None


def read_columns(file: Path) -> ColumnNames:
    """The content of columns.json. Raises UserError if it is something else."""
    try:
        return TypeAdapter(ColumnNames).validate_json(file.read_bytes(), strict=True)
    except ValidationError as error:
        raise UserError(f"{file}: damaged: {_problem(error)}") from None


def check_vocabularies(file: Path, content: Any, features: Mapping[str, Any]) -> None:
    """Raises UserError unless every feature's ids are below its ``vocab_size``."""
    if not isinstance(content, dict) or not all(isinstance(ids, dict) for ids in content.values()):
        raise UserError(f"{file}: damaged: it does not hold the ids of each feature")
    for name, ids in content.items():
        size = features.get(name, {}).get("vocab_size", 2**31)
        if not set(map(type, ids.values())) <= {int} or not min(ids.values(), default=0) >= 0:
            raise UserError(f"{file}: damaged: an id of '{name}' is no whole number of 0 or more")
        if max(ids.values(), default=0) >= size:
            raise UserError(f"{file}: damaged: an id of '{name}' is {max(ids.values())}, but it has {size} ids")


def check_sizes(file: Path, features: Mapping[str, Any], weights: Path) -> None:
    """Raises UserError for embedding tables larger than all weights, before a model of that size is made."""
    tables = [spec for spec in features.values() if "share_embedding" not in spec and spec["type"] != "meta"]
    needed = 4 * sum(spec.get("vocab_size", 0) for spec in tables)  # bytes, at least
    if needed > weights.stat().st_size:
        raise UserError(f"{file}: damaged: {needed // 4:,} ids need more weights than {weights.name} has")


def read_items(file: Path, features: Mapping[str, Any]) -> pl.DataFrame | None:
    """The catalogue, if there is one. Raises UserError if its ids cannot be the model's."""
    items = read_table(file)
    if items is None:
        return None
    if ITEM not in items.columns or not is_key(items[ITEM].dtype) or items[ITEM].null_count():
        raise UserError(f"{file}: damaged: no column '{ITEM}' with an id in each row")
    for name in items.columns:
        size = features.get(name.removesuffix(ID), {}).get("vocab_size")
        if name.endswith(ID) and size is not None:
            ids = items[name]
            if not ids.dtype.is_integer() or ids.null_count() or not ids.is_between(0, size - 1).all():
                raise UserError(f"{file}: damaged: column '{name}' does not hold ids below {size}")
    return items


def read_table(file: Path) -> pl.DataFrame | None:
    """A table of the folder, if it is there. Raises UserError if it cannot be read."""
    if not file.is_file():
        return None
    with readable(file):
        return pl.read_parquet(file)


def _problem(error: ValidationError) -> str:
    return explain(error.errors(include_url=False)[0], _Manifest)
