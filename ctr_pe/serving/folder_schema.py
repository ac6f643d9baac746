"""The files of a model folder and what each may contain.

model.json            written last: format, versions, model, encoding, parameters, field groups, metrics, history of
                      the epochs, hash of the vocabulary, sizes and hashes of the other files
model.safetensors     weights
feature_map.json      FuxiCTR's, and
feature_vocab.json    id of each original value, as text, per feature
columns.json          what the columns of raw tables are called
items.parquet         the catalogue, of models whose data set was made from a log
histories.parquet     optional: the newest events of each user
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ctr_pe.config.schema import Count, Name, Seed
from ctr_pe.data.dataset import FileFacts, facts_of
from ctr_pe.fuxictr.feature_specs import FEATURES
from ctr_pe.utils.errors import UserError, explain

FORMAT = 1
MANIFEST, WEIGHTS = "model.json", "model.safetensors"
VOCABULARY, COLUMNS = "feature_vocab.json", "columns.json"
ITEMS, HISTORIES = "items.parquet", "histories.parquet"


class FieldGroup(BaseModel):
    """Fields of a target and of a history, and the encoding between them."""

    model_config = ConfigDict(strict=True)

    target: Annotated[list[str], Field(min_length=1)]
    history: Annotated[list[str], Field(min_length=1)]
    age: str | None
    negative: list[str]
    encoding: str


class FinalMetrics(BaseModel):
    model_config = ConfigDict(strict=True)

    test: dict[str, float | None]


class Manifest(BaseModel):
    """What is read of model.json; the rest is for readers."""

    model_config = ConfigDict(strict=True)

    model: str
    position_encoding: str | list[str]
    params: dict[str, Any]
    groups: Annotated[list[FieldGroup], Field(min_length=1)]
    max_len: Count
    seed: Seed
    dataset_id: Name
    group_id: str | None
    vocabulary: str
    metrics: FinalMetrics
    history: list[dict[str, Any]]
    files: dict[Name, FileFacts]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The content of model.json.

    Raises:
        UserError: no model folder, one of another format, or a file that is missing or not what model.json says.
    """
    file = folder / MANIFEST
    if not file.is_file():
        what = "not a model folder" if folder.is_dir() else "no such model folder"
        raise UserError(f"{folder}: {what}: it has no {MANIFEST}")
    content: dict[str, Any] = read_json(file, dict[str, Any])
    if content.get("format") != FORMAT:
        found = content.get("format")
        raise UserError(f"{folder}: model format {found}, this version reads {FORMAT}: train the model again")
    with _one_line(file):
        files = Manifest.model_validate(content).files
    if not {WEIGHTS, FEATURES, VOCABULARY, COLUMNS} <= files.keys():
        raise UserError(f"{file}: damaged: it does not list the files of a model")
    for name, facts in files.items():
        if not (folder / name).is_file():
            raise UserError(f"{folder / name}: missing: the model folder is incomplete")
        if facts != facts_of(folder / name):
            raise UserError(f"{folder / name}: damaged: it is not what {MANIFEST} says")
    return content


def write_manifest(folder: Path, config: Mapping[str, Any]) -> None:
    """model.json, with the size and hash of every file that is in the folder."""
    files = {file.name: facts_of(file).model_dump() for file in sorted(folder.iterdir())}
    write_json(folder / MANIFEST, {**config, "files": files})


def read_json(file: Path, schema: Any) -> Any:
    """The content of a JSON file as a type, such as a dataclass or a mapping. Raises UserError if it is another."""
    with _one_line(file):
        return TypeAdapter(schema).validate_json(file.read_bytes(), strict=True)


def write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


@contextmanager
def _one_line(file: Path) -> Iterator[None]:
    """Errors of a file that cannot be read, or of a content that its schema does not allow."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        what = "cannot be read" if problem["type"] == "json_invalid" else "damaged"
        raise UserError(f"{file}: {what}: {explain(problem, Manifest)}") from None
