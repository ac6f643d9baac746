"""A trained model is one folder, which says all that is needed to score raw ids in another process.

model.json            written last: format, versions, model, encoding, parameters, field groups, metrics, history of
                      the epochs, hash of the vocabulary, sizes and hashes of the other files
model.safetensors     weights
feature_map.json      FuxiCTR's, and
feature_vocab.json    id of each original value, as text, per feature
columns.json          what the columns of raw tables are called
items.parquet         the catalogue, of models whose data set was made from a log
users.parquet         likewise the users, where columns of theirs were declared
histories.parquet     optional: the newest events of each user
profile.parquet       how often each value was in the training rows, which `ctr-pe monitor` compares new rows with
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import polars as pl
import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from ctr_pe.config.field_groups import FIELD_KEYS, field_keys
from ctr_pe.config.schema import Count, DataSection, Name, Seed
from ctr_pe.data.dataset import ITEMS, USERS, FileFacts, facts_of
from ctr_pe.data.logs.tables import readable
from ctr_pe.data.published.sets import SETS, original
from ctr_pe.data.root import REPORT
from ctr_pe.fuxictr.feature_specs import FEATURES, read_feature_map
from ctr_pe.models.groups import SizedGroup
from ctr_pe.models.history_model import HistoryModel
from ctr_pe.models.sections import model_class, prefixes, registered_name, task_of
from ctr_pe.serving.encoder import ColumnNames, Encoder
from ctr_pe.serving.profile import training_profile
from ctr_pe.serving.scorer import Scorer
from ctr_pe.training.source import DataSource
from ctr_pe.training.weights import load, save
from ctr_pe.utils.errors import UserError, explain, say
from ctr_pe.utils.files import new_folder, write_json, write_vocabularies

if TYPE_CHECKING:
    from ctr_pe.training import Outcome, Run

FORMAT = 1
MANIFEST, WEIGHTS = "model.json", "model.safetensors"
VOCABULARY, COLUMNS = "feature_vocab.json", "columns.json"
GROUP = ("target", "history", "age", "negative", "encoding")
HISTORIES, PROFILE = "histories.parquet", "profile.parquet"
Vocabularies = dict[str, dict[str, int]]  # feature -> original as text -> id
NOT_OF_MODEL = {*DataSection.model_fields, "model_root", "model_id", "model", "dataset_id", "gpu", "seed", "debug_mode"}


class FinalMetrics(BaseModel):
    model_config = ConfigDict(strict=True)

    test: dict[str, float | None]


class Manifest(BaseModel):
    """What is read of model.json; the rest is for readers."""

    model_config = ConfigDict(strict=True)

    model: str
    position_encoding: str | list[str]
    params: dict[str, Any]
    groups: Annotated[list[SizedGroup], Field(min_length=1)]
    max_len: Count
    seed: Seed
    dataset_id: Name
    group_id: str | None
    vocabulary: str
    metrics: FinalMetrics
    history: list[dict[str, Any]]
    files: dict[Name, FileFacts]


def scorer_of(model: Any, run: Run, source: DataSource, outcome: Outcome) -> Scorer:
    """The scorer of a model that ``run`` has just trained on ``source``."""
    from ctr_pe.study.runner import versions

    feature_map = read_feature_map(source.folder / FEATURES)
    file = source.folder / VOCABULARY
    vocabularies = read_json(file, Vocabularies) if file.is_file() else {}  # files of FuxiCTR may lack one
    report = read_json(source.folder / REPORT, dict[str, Any]) if (source.folder / REPORT).is_file() else {}
    recipe = report.get("recipe", {})
    config = {
        "format": FORMAT,
        "model": registered_name(type(model)),
        **({"task": task} if (task := task_of(type(model))) != "click" else {}),
        **({"sampled": True} if recipe.get("protocol") == "din" else {}),
        "position_encoding": run.pe,
        "params": _parameters(model, run.params),
        "groups": [{key: getattr(group, key) for key in GROUP} for group in model.groups],
        "max_len": max(group.max_len for group in model.groups),
        "seed": run.seed,
        "protocol": run.protocol,
        "dataset_id": source.dataset_id,
        "data_hash": source.dataset.data_hash if source.dataset else None,
        "group_id": model.feature_map.group_id,
        "vocabulary": vocabulary_hash(vocabularies),
        "metrics": {"valid": dict(outcome.valid), "test": dict(outcome.metrics)},
        "epoch": outcome.epoch,
        "history": [asdict(epoch) for epoch in outcome.history],
        "parameters": outcome.parameters,
        "seconds": round(outcome.seconds, 3),
        "versions": versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    columns = _columns(source.dataset_id, recipe, model.feature_map.group_id)
    of_report = {"fill_na": report.get("fill_na", {}), "normalizers": report.get("normalizers", {})}
    columns = replace(columns, **of_report, zoned=report.get("zoned"))
    encoder = Encoder(
        model, feature_map, vocabularies, columns, _table(source.folder / ITEMS), _table(source.folder / USERS)
    )
    if task != "click" and recipe:
        read = [name for name in recipe["attributes"] or () if name in encoder.features]
        config["log"] = {"protocol": recipe["protocol"], "attributes": None if encoder.items is None else read}
    config = from_json(to_json(config, inf_nan_mode="null", fallback=str))
    return Scorer(model, encoder, config, profile=training_profile(encoder, model.feature_map, source, run.protocol))


def keep_model(folder: Path, model: Any, run: Run, source: DataSource, outcome: Outcome) -> None:
    """Write the folder of a model that was just trained; ``partial(keep_model, folder)`` is a ``Run.keep``.

    Models of FuxiCTR's form that are none of this package have a checkpoint only, which is said.
    """
    if not isinstance(model, HistoryModel):
        say(f"{type(model).__name__} is no HistoryModel: no model folder is written, only FuxiCTR's checkpoint")
        return
    write_model(folder, scorer_of(model, run, source, outcome))


def write_model(folder: str | Path, scorer: Scorer, histories: bool = True) -> None:
    """Write a model folder, all or nothing; an earlier model folder of this name is replaced.

    Args:
        histories: also the newest events of the users it was trained on, where the scorer has them.

    Raises:
        UserError: the folder exists and is none of a model, or it cannot be written.
    """
    folder, encoder = Path(folder), scorer.encoder
    if folder.exists() and not (folder / MANIFEST).is_file():
        raise UserError(f"{folder} exists and is not a model folder: remove it or choose another name")
    try:
        with new_folder(folder, replace=True) as made:
            save(scorer.model, made / WEIGHTS)
            write_json(made / FEATURES, encoder.feature_map.content)
            write_vocabularies(made / VOCABULARY, encoder.vocabularies)
            write_json(made / COLUMNS, asdict(encoder.columns), allow_nan=False)
            if encoder.items is not None:
                encoder.items.write_parquet(made / ITEMS)
            if encoder.users is not None:
                encoder.users.write_parquet(made / USERS)
            if histories and scorer.histories is not None:
                scorer.histories.write_parquet(made / HISTORIES)
            if scorer.profile is not None:
                scorer.profile.write_parquet(made / PROFILE)
            write_stand_ins(made, encoder)
            files = {file.name: facts_of(file).model_dump() for file in sorted(made.iterdir())}
            write_json(made / MANIFEST, {**scorer.config, "files": files}, allow_nan=False)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror or error}") from None


def read_model(folder: str | Path, gpu: int = -1, model: type | None = None, task: str | None = "click") -> Scorer:
    """The scorer of a model folder.

    Args:
        gpu: -1 for the CPU.
        model: the class of a model that is not one of this package's.
        task: ``click`` or ``next-item``, what the caller asks; None for either.

    Raises:
        UserError: no model folder, one of another format or task, or a file that is missing or damaged.
    """
    folder = Path(folder)
    config = read_manifest(folder)
    if (found := config.get("task", "click")) != task and task is not None:
        how = "NextItemRanker" if found == "next-item" else "CTRRanker"
        raise UserError(f"{folder}: a model of task {found}, not {task}: ctr_pe.{how}.load reads it")
    columns = read_json(folder / COLUMNS, ColumnNames)
    feature_map = read_feature_map(folder / FEATURES)
    vocabularies = read_json(folder / VOCABULARY, Vocabularies)
    if vocabulary_hash(vocabularies) != config["vocabulary"]:
        raise UserError(f"{folder / VOCABULARY}: not the vocabulary of this model (another hash than in {MANIFEST})")
    try:
        built = rebuild(folder, config, gpu, model)
    except ValueError as error:  # a UserError, or what a unit raises
        raise UserError(f"{folder / MANIFEST}: {error}") from None
    load(built, folder / WEIGHTS)
    encoder = Encoder(built, feature_map, vocabularies, columns, _table(folder / ITEMS), _table(folder / USERS))
    return Scorer(built, encoder, config, _table(folder / HISTORIES), _table(folder / PROFILE))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The content of model.json, of a folder that has all files that it names."""
    file = folder / MANIFEST
    if not file.is_file():
        what = "not a model folder" if folder.is_dir() else "no such model folder"
        raise UserError(f"{folder}: {what}: it has no {MANIFEST}")
    content: dict[str, Any] = read_json(file, dict[str, Any])
    if content.get("format") != FORMAT:
        found = content.get("format")
        raise UserError(f"{folder}: model format {found}, this version reads {FORMAT}: train the model again")
    files = read_json(file, Manifest).files
    if not {WEIGHTS, FEATURES, VOCABULARY, COLUMNS} <= files.keys():
        raise UserError(f"{file}: damaged: it does not list the files of a model")
    for name, facts in files.items():
        if not (folder / name).is_file():
            raise UserError(f"{folder / name}: missing: the model folder is incomplete")
        if facts != facts_of(folder / name):
            raise UserError(f"{folder / name}: damaged: it is not what {MANIFEST} says")
    return content


def read_json(file: Path, schema: Any) -> Any:
    """The content of a JSON file as a type, such as a dataclass or a mapping. Raises UserError if it is another."""
    try:
        return TypeAdapter(schema).validate_json(file.read_bytes(), strict=True)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        what = "cannot be read" if problem["type"] == "json_invalid" else "damaged"
        raise UserError(f"{file}: {what}: {explain(problem, Manifest)}") from None


def vocabulary_hash(vocabularies: Mapping[str, Mapping[str, int]]) -> str:
    """Of the originals of every feature and their ids."""
    digest = hashlib.blake2b(digest_size=16)
    for feature in sorted(vocabularies):
        ids = sorted(vocabularies[feature].items(), key=lambda pair: pair[1])
        digest.update(json.dumps([feature, ids], ensure_ascii=False).encode())
    return digest.hexdigest()


def rebuild(folder: Path, config: Mapping[str, Any], gpu: int, given: type | None) -> Any:
    """The model with initial weights; draws nothing from the caller's random numbers."""
    cls = given or model_class(str(config["model"]), config.get("task", "click"))
    if registered_name(cls) != config["model"]:
        raise UserError(f"{folder}: a model of class {config['model']}, not {cls.__name__}")
    groups, params = config["groups"], config["params"]
    for key in GROUP:
        if any(key not in group for group in groups):
            raise UserError(f"groups: a group has no '{key}'")
    source = DataSource(folder, config["dataset_id"], {})
    feature_map = source.feature_map({"embedding_dim": 64, **params, "group_id": config["group_id"]})
    fields: dict[str, Any] = {
        "target_field": [group["target"] for group in groups],
        "sequence_field": [group["history"] for group in groups],
        "age_field": [group["age"] for group in groups],
        "position_encoding": [group["encoding"] for group in groups],
    }
    if any(group["negative"] for group in groups):
        fields["neg_seq_field"] = [group["negative"] for group in groups]
    with torch.random.fork_rng(devices=[]):
        return cls(feature_map, model_id=cls.__name__, **{**params, **fields, "gpu": gpu})


def _columns(dataset_id: str, recipe: Mapping[str, Any], group_id: str | None) -> ColumnNames:
    """What raw columns are called: as the recipe of a log says, as a published set does, or as the features."""
    if published := SETS.get(original(dataset_id)):
        names = {field.name: field.column for field in published.fields}
        names |= {name: column for field in published.fields for name, column in field.histories}
        raw = {name: column for name, column in names.items() if name != column}
        return ColumnNames(user=published.user, time=published.time, label=published.label, raw=raw)
    roles = "user item time order label weight time_unit time_format keep columns behaviours".split()
    given = {ours: recipe[ours] for ours in roles if ours in recipe}
    return ColumnNames(**{"user": group_id or "user_id", **given})


def _parameters(model: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a model is built with, without its fields, which are the groups', and paths of this machine."""
    fields = {name for key in FIELD_KEYS for name in field_keys(key, prefixes(type(model)))}
    left_out = NOT_OF_MODEL | fields | {"age_field", "position_encoding"}
    return {key: value for key, value in params.items() if key not in left_out}


def write_stand_ins(folder: Path, encoder: Encoder) -> None:
    """Files of pretrained vectors without vectors: a model opens them when it is built, and then gets its weights."""
    for spec in encoder.features.values():
        if "pretrained_emb" in spec and not (folder / spec["pretrained_emb"]).exists():
            import h5py
            import numpy as np

            file, dim = folder / spec["pretrained_emb"], int(spec.get("pretrain_dim") or spec["embedding_dim"])
            key, value = np.zeros(0, np.int64), np.zeros((0, dim), np.float32)
            if file.suffix == ".npz":
                np.savez(file, key=key, value=value)
                continue
            with h5py.File(file, "w") as made:
                made["key"], made["value"] = key, value


def _table(file: Path) -> pl.DataFrame | None:
    """A table of the folder, if it is there."""
    if not file.is_file():
        return None
    with readable(file):
        return pl.read_parquet(file)
