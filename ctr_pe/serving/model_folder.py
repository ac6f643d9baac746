"""A trained model is one folder, which says all that is needed to score raw ids in another process."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import torch

from ctr_pe.config.field_groups import FIELD_KEYS, field_keys
from ctr_pe.config.schema import DataSection
from ctr_pe.data.logs.tables import readable
from ctr_pe.data.published.sets import SETS, original
from ctr_pe.data.root import REPORT
from ctr_pe.fuxictr.feature_specs import FEATURES, read_feature_map
from ctr_pe.models.rank_model import RankModel
from ctr_pe.models.sections import model_class, prefixes
from ctr_pe.serving.encoder import ColumnNames, Encoder
from ctr_pe.serving.folder_schema import (
    COLUMNS,
    FORMAT,
    HISTORIES,
    ITEMS,
    MANIFEST,
    VOCABULARY,
    WEIGHTS,
    read_json,
    read_manifest,
    write_json,
    write_manifest,
)
from ctr_pe.serving.scorer import Scorer
from ctr_pe.training.source import DataSource
from ctr_pe.training.weights import load, save
from ctr_pe.utils.errors import UserError, say
from ctr_pe.utils.files import new_folder

if TYPE_CHECKING:
    from ctr_pe.training import Outcome, Run

Vocabularies = dict[str, dict[str, int]]  # feature -> original as text -> id
NOT_OF_MODEL = {*DataSection.model_fields, "model_root", "model_id", "model", "dataset_id", "gpu", "seed", "debug_mode"}


def scorer_of(model: Any, run: Run, source: DataSource, outcome: Outcome) -> Scorer:
    """The scorer of a model that ``run`` has just trained on ``source``."""
    from ctr_pe.study.runner import versions

    feature_map = read_feature_map(source.folder / FEATURES)
    file = source.folder / VOCABULARY
    vocabularies = read_json(file, Vocabularies) if file.is_file() else {}  # files of FuxiCTR may lack one
    report = read_json(source.folder / REPORT, dict[str, Any]) if (source.folder / REPORT).is_file() else {}
    config = {
        "format": FORMAT,
        "model": type(model).__name__,
        "position_encoding": run.pe,
        "params": _parameters(model, run.params),
        "groups": [
            {"target": g.target, "history": g.history, "age": g.age, "negative": g.negative, "encoding": g.encoding}
            for g in model.groups
        ],
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
    columns = _columns(source.dataset_id, report.get("recipe", {}), model.feature_map.group_id)
    columns = replace(columns, normalizers=report.get("normalizers", {}))
    encoder = Encoder(model, feature_map, vocabularies, columns, _table(source.folder / ITEMS))
    return Scorer(model, encoder, _jsonable(config))


def keep_model(folder: Path, model: Any, run: Run, source: DataSource, outcome: Outcome) -> None:
    """Write the folder of a model that was just trained; ``partial(keep_model, folder)`` is a ``Run.keep``.

    Models of FuxiCTR's form that are none of this package have a checkpoint only, which is said.
    """
    if not isinstance(model, RankModel):
        say(f"{type(model).__name__} is no RankModel: no model folder is written, only FuxiCTR's checkpoint")
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
            write_json(made / VOCABULARY, encoder.vocabularies)
            write_json(made / COLUMNS, asdict(encoder.columns))
            if encoder.items is not None:
                encoder.items.write_parquet(made / ITEMS)
            if histories and scorer.histories is not None:
                scorer.histories.write_parquet(made / HISTORIES)
            write_stand_ins(made, encoder)
            write_manifest(made, scorer.config)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror or error}") from None


def read_model(folder: str | Path, gpu: int = -1, model: type | None = None) -> Scorer:
    """The scorer of a model folder.

    Args:
        gpu: -1 for the CPU.
        model: the class of a model that is not one of this package's.

    Raises:
        UserError: no model folder, one of another format, or a file that is missing or damaged.
    """
    folder = Path(folder)
    config = read_manifest(folder)
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
    encoder = Encoder(built, feature_map, vocabularies, columns, _table(folder / ITEMS))
    return Scorer(built, encoder, config, _table(folder / HISTORIES))


def vocabulary_hash(vocabularies: Mapping[str, Mapping[str, int]]) -> str:
    """Of the originals of every feature and their ids."""
    digest = hashlib.blake2b(digest_size=16)
    for feature in sorted(vocabularies):
        ids = sorted(vocabularies[feature].items(), key=lambda pair: pair[1])
        digest.update(json.dumps([feature, ids], ensure_ascii=False).encode())
    return digest.hexdigest()


def rebuild(folder: Path, config: Mapping[str, Any], gpu: int, given: type | None) -> Any:
    """The model with initial weights; draws nothing from the caller's random numbers."""
    cls = given or model_class(str(config["model"]))
    if cls.__name__ != config["model"]:
        raise UserError(f"{folder}: a model of class {config['model']}, not {cls.__name__}")
    groups, params = config["groups"], config["params"]
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
    given = {ours: recipe[ours] for ours in ("user", "item", "time", "order", "label", "time_unit") if ours in recipe}
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

            with h5py.File(folder / spec["pretrained_emb"], "w") as file:
                file["key"] = np.zeros(0, np.int64)
                file["value"] = np.zeros((0, int(spec.get("pretrain_dim") or spec["embedding_dim"])), np.float32)


def _table(file: Path) -> pl.DataFrame | None:
    """A table of the folder, if it is there."""
    if not file.is_file():
        return None
    with readable(file):
        return pl.read_parquet(file)


def _jsonable(value: Any) -> Any:
    """What JSON gives back: lists for tuples, None for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {str(key): _jsonable(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
