"""Reads CSV files as a FuxiCTR dataset config describes them (``feature_cols``) into a data set.

FuxiCTR's own preprocessing takes what it finds at its place for done, from whatever files and however far it came, and
runs text of the config as code. Here the data set lies in a directory of its own, appears whole or not at all, and
knows which files and which description it was made from.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import h5py
import polars as pl
from pydantic import BaseModel, ConfigDict, ValidationError

from ctr_pe.data.dataset import REPORT, SPLITS, Dataset, open_dataset
from ctr_pe.data.specs import feature_vocab, target_spec
from ctr_pe.data.vocabulary import Vocabulary
from ctr_pe.data.writer import Content, DatasetWriter, make_dataset
from ctr_pe.errors import UserError, explain, nearest
from ctr_pe.fields import Group

BLOCK_ROWS = 65_536
FOLDER = "ctr_pe"  # below <data_root>/<dataset_id>, where a user's files and FuxiCTR's own cache may lie
log = logging.getLogger(__name__)


class Column(BaseModel):
    """One entry of ``feature_cols``, under FuxiCTR's keys. Of ``padding`` only the real items count."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    type: Literal["categorical", "sequence", "meta", "numeric"]
    dtype: Literal["str", "int", "float"]
    active: bool = True
    source: str = ""
    share_embedding: str | None = None
    embedding_dim: int | None = None
    emb_output_dim: int | None = None
    feature_encoder: str | list[str] | None = "default"
    splitter: str = "^"
    max_len: int = 0
    padding: Literal["post", "pre"] = "post"
    fill_na: str | int | float | None = None
    min_categr_count: int | None = None
    remap: bool = True
    preprocess: str | None = None
    pretrained_emb: str | None = None
    pretrain_dim: int | None = None
    pretrain_usage: Literal["init", "sum", "concat"] = "init"
    freeze_emb: bool = True

    @property
    def read_from(self) -> str:
        """The CSV column: its own, or with ``preprocess: copy_from(x)`` another."""
        copied = re.fullmatch(r"copy_from\((\w+)\)", self.preprocess or "")
        if self.preprocess and not copied:
            raise UserError(f"feature_cols: '{self.name}': preprocess '{self.preprocess}' is not copy_from(column)")
        return copied[1] if copied else self.name


def build_csv(params: Mapping[str, Any], groups: Sequence[Group] = ()) -> Dataset:
    """The data set of a FuxiCTR config with ``data_format: csv``, in ``<data_root>/<dataset_id>/ctr_pe``.

    It is built once, and again when the files or the description of the columns have changed. Histories keep their
    most recent ``max_len`` items on whichever side FuxiCTR would pad (it would keep the oldest with ``padding: post``).
    Ids go by frequency in the train rows; the rarer than ``min_categr_count`` in every column of a table are unknown.

    Args:
        params: an experiment's parameters: data_root, dataset_id, feature_cols, label_col, train_data, ….
        groups: which histories are compared with which targets.

    Raises:
        UserError: a key, type or reference of ``feature_cols`` that means nothing, a file or column that is not
            there, a value that is not of its column's type, a missing label, a directory that is somebody else's.
    """
    columns, label = _columns(params), _label(params)
    files = _files(params)
    out = Path(params.get("data_root") or "data") / str(params["dataset_id"]) / FOLDER
    source = _fingerprint(params, files)
    if (out / REPORT).is_file():
        report = json.loads((out / REPORT).read_text(encoding="utf-8"))
        if report.get("source") == source:
            log.info("Data set as built before: %s", out)
            return open_dataset(str(out.resolve()))
        if "source" not in report:
            raise UserError(f"{out}: a data set that was not made from CSV files: remove it or change dataset_id")
        log.warning("%s: the files or feature_cols have changed: building again", out)
    name = str(params["dataset_id"])
    given = Given(columns, label, files, params, groups, source)
    return make_dataset(lambda writer: _read(given, writer), out, name, overwrite=True)


def feature_specs(params: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The features that ``feature_cols`` would give, with tables of one id: enough to check a model against them.

    Raises:
        UserError: as :func:`build_csv`.
    """
    columns = _columns(params)
    return _specs(columns, {_root(column, columns): Vocabulary([]) for column in columns if _has_ids(column)}, {}, {})


def _columns(params: Mapping[str, Any]) -> list[Column]:
    columns, problems = _read_columns(params)
    if problems:
        raise UserError(problems[0])
    return columns


def column_problems(params: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The features that ``feature_cols`` names, and all that is wrong with it, a line each."""
    columns, problems = _read_columns(params)
    return [column.name for column in columns], problems


def _read_columns(params: Mapping[str, Any]) -> tuple[list[Column], list[str]]:
    if not params.get("feature_cols"):
        return [], ["feature_cols is missing: which columns of the CSV files are what"]
    columns, problems = [], []
    for entry in params["feature_cols"]:
        names = entry.get("name") if isinstance(entry, dict) else None
        if not names:
            problems.append(f"feature_cols: {entry!r} is no mapping with a name")
            continue
        for name in names if isinstance(names, list) else [names]:
            try:
                columns.append(Column(**{**entry, "name": name}))
                _ = columns[-1].read_from
            except ValidationError as error:
                problems += [f"feature_cols: '{name}': {explain(problem, Column)}" for problem in error.errors()]
            except UserError as error:
                problems.append(str(error))
    columns = [column for column in columns if column.active]
    names = [column.name for column in columns]
    dotted = [column.name for column in columns if "." in column.name and column.type != "meta"]
    problems += [f"feature_cols: '{name}': an input's name has no dot (torch takes it for a path)" for name in dotted]
    problems += [f"feature_cols: '{name}' is given twice" for name, count in Counter(names).items() if count > 1]
    for column in columns:
        if column.share_embedding is not None and column.share_embedding not in names:
            problems.append(
                f"feature_cols: '{column.name}' shares the embedding of '{column.share_embedding}', which is no "
                f"feature: {nearest(column.share_embedding, names)}"
            )
    return columns, problems


def _label(params: Mapping[str, Any]) -> str:
    label = params.get("label_col")
    if isinstance(label, list) and len(label) == 1:
        label = label[0]
    if not isinstance(label, dict) or not label.get("name"):
        raise UserError("label_col: one label is needed, such as {name: label, dtype: float}")
    return str(label["name"])


def _files(params: Mapping[str, Any]) -> dict[str, Path]:
    files = {split: Path(params[f"{split}_data"]) for split in SPLITS if params.get(f"{split}_data")}
    for split in ("train", "test"):
        if split not in files:
            raise UserError(f"{split}_data is missing: the CSV file of the {split} rows")
    for file in files.values():
        if not file.is_file():
            there = [path.name for path in file.parent.iterdir()] if file.parent.is_dir() else []
            raise UserError(f"{file}: no such file" + (f": {nearest(file.name, there)}" if there else ""))
    return files


def _fingerprint(params: Mapping[str, Any], files: Mapping[str, Path]) -> str:
    keys = ("feature_cols", "label_col", "min_categr_count", "sep")
    facts = {split: (str(file), file.stat().st_size, file.stat().st_mtime_ns) for split, file in files.items()}
    text = json.dumps([{key: params.get(key) for key in keys}, facts], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _root(column: Column, columns: Sequence[Column]) -> str:
    """The feature whose table a column uses."""
    by_name = {column.name: column for column in columns}
    seen = [column.name]
    while (shared := by_name[seen[-1]].share_embedding) is not None:
        if shared in seen:
            raise UserError(f"feature_cols: share_embedding goes round in a circle: {' → '.join([*seen, shared])}")
        seen.append(shared)
    return seen[-1]


def _has_ids(column: Column) -> bool:
    return column.type in ("categorical", "sequence")


@dataclass(frozen=True)
class Given:
    """What a config says about its CSV files."""

    columns: list[Column]
    label: str
    files: Mapping[str, Path]
    params: Mapping[str, Any]
    groups: Sequence[Group]
    fingerprint: str


def _read(given: Given, writer: DatasetWriter) -> Content:
    columns, label, files, params = given.columns, given.label, given.files, given.params
    frames = {split: _scan(file, columns, label, str(params.get("sep") or ",")) for split, file in files.items()}
    try:
        vectors = {
            column.name: Path(column.pretrained_emb)
            for column in columns
            if column.pretrained_emb is not None and _has_ids(column) and column.name == _root(column, columns)
        }
        vocabularies = _vocabularies(columns, frames["train"], int(params.get("min_categr_count") or 1), vectors)
        lengths = _max_lens(columns, frames["train"])
        metas = _metas(columns, frames)
        splits = {}
        for split, frame in frames.items():
            log.info("Reading %s", files[split])
            rows = _encoded(frame, columns, label, vocabularies, lengths, metas)
            splits[split] = _write(writer, split, rows, files[split], columns, label, vocabularies)
        for name, file in vectors.items():
            shutil.copyfile(file, writer.path / f"pretrained_{name}.h5")
    except pl.exceptions.PolarsError as error:
        raise UserError(f"{files['train'].parent}: {str(error).splitlines()[0]}") from None
    _say(splits, columns)
    features = _specs(columns, vocabularies, lengths, vectors)
    vocabs = {name: feature_vocab(vocabulary.originals) for name, vocabulary in vocabularies.items()}
    report = {"source": given.fingerprint, "splits": splits}
    return Content(label, params.get("group_id"), features, given.groups, vocabs, report)


def _scan(file: Path, columns: Sequence[Column], label: str, separator: str) -> pl.LazyFrame:
    """The columns in use under the features' names: ids as text, lists of text, numbers; the label as it is."""
    header = pl.read_csv(file, n_rows=0, separator=separator).columns
    for name in (label, *(column.read_from for column in columns)):
        if name not in header:
            raise UserError(f"{file}: no column '{name}': {nearest(name, header)}")
    text = {column.read_from: pl.String for column in columns}
    frame = pl.scan_csv(file, separator=separator, schema_overrides={**text, label: pl.Float64})
    return frame.select(pl.col(label), *[_parsed(column).alias(f"{column.name} ") for column in columns]).rename(
        {f"{column.name} ": column.name for column in columns}
    )


def _parsed(column: Column) -> pl.Expr:
    raw = pl.col(column.read_from)
    if column.type == "sequence":
        nothing = pl.lit([], dtype=pl.List(pl.String))
        return pl.when(raw.fill_null("") != "").then(raw.str.split(column.splitter)).otherwise(nothing)
    if column.fill_na is not None:
        raw = raw.fill_null(str(column.fill_na))
    if column.type == "numeric":
        return raw.fill_null("0").cast(pl.Float64)
    if column.type == "meta":
        return raw
    # as FuxiCTR, which reads int columns as numbers: 07 is 7; an id that is missing is unknown
    return raw.cast(pl.Int64).cast(pl.String) if column.dtype == "int" else raw.replace("", None)


def _vocabularies(
    columns: Sequence[Column], train: pl.LazyFrame, least: int, vectors: Mapping[str, Path]
) -> dict[str, Vocabulary]:
    tables: dict[str, list[pl.DataFrame]] = {}
    with_ids = [column for column in columns if _has_ids(column)]
    counted = pl.collect_all([_counts(train, column) for column in with_ids], engine="streaming")
    for column, counts in zip(with_ids, counted, strict=True):
        known = pl.col("count") >= (column.min_categr_count or least)
        tables.setdefault(_root(column, columns), []).append(counts.with_columns(known.alias("known")))
    vocabularies = {}
    for name, parts in tables.items():
        total = pl.concat(parts).group_by("value").agg(pl.col("count").sum(), pl.col("known").any())
        total = total.filter("known").sort(["count", "value"], descending=[True, False])
        values = total["value"].to_list()
        known_values = set(values)
        more = _keys(vectors[name]) if name in vectors else []
        vocabularies[name] = Vocabulary([*values, *(key for key in more if key not in known_values)])
    return vocabularies


def _counts(train: pl.LazyFrame, column: Column) -> pl.LazyFrame:
    values = train.select(pl.col(column.name).alias("value"))
    if column.type == "sequence":
        values = values.explode("value", empty_as_null=False)
    return values.filter(pl.col("value") != "").group_by("value").agg(pl.len().alias("count"))


def _keys(file: Path) -> list[str]:
    """Original ids that have a vector. An id without one in train may still occur in test: all get a number."""
    try:
        with h5py.File(file) as content:
            keys = content["key"][:]
    except (OSError, KeyError) as error:
        raise UserError(f"{file}: not an HDF5 file with 'key' and 'value' ({str(error).splitlines()[0]})") from None
    return [key.decode() if isinstance(key, bytes) else str(key) for key in keys.tolist()]


def _max_lens(columns: Sequence[Column], train: pl.LazyFrame) -> dict[str, int]:
    lengths = {column.name: column.max_len for column in columns if column.type == "sequence"}
    if unknown := [name for name, length in lengths.items() if length == 0]:
        found = train.select(pl.col(name).list.len().max() for name in unknown).collect(engine="streaming")
        lengths |= {name: max(1, int(found[name][0] or 0)) for name in unknown}
    return lengths


def _metas(columns: Sequence[Column], frames: Mapping[str, pl.LazyFrame]) -> dict[str, pl.DataType]:
    """Whole numbers stay as they are; other group ids are numbered over all splits."""
    metas: dict[str, pl.DataType] = {}
    for column in columns:
        if column.type == "meta" and column.dtype != "int":
            values = pl.concat([frame.select(column.name) for frame in frames.values()]).unique().collect()
            metas[column.name] = pl.Enum(values[column.name].drop_nulls().sort())
    return metas


def _encoded(
    frame: pl.LazyFrame,
    columns: Sequence[Column],
    label: str,
    vocabularies: Mapping[str, Vocabulary],
    lengths: Mapping[str, int],
    metas: Mapping[str, pl.DataType],
) -> pl.LazyFrame:
    made = [pl.col(label)]
    for column in columns:
        value = pl.col(column.name)
        if column.type == "sequence":
            item = pl.element()
            ids = vocabularies[_root(column, columns)].ids(item)
            ids = pl.when(item == "").then(0).otherwise(ids)  # an item without this attribute
            made.append(value.list.len().alias(f"{column.name} length"))
            made.append(value.list.tail(lengths[column.name]).list.eval(ids))
        elif column.type == "categorical":
            made.append(vocabularies[_root(column, columns)].ids(value))
        elif column.name in metas:
            made.append(value.cast(metas[column.name]).to_physical().cast(pl.Int64))
        else:
            made.append(value.cast(pl.Int64) if column.type == "meta" else value)
    return frame.select(made)


def _write(
    writer: DatasetWriter,
    split: str,
    rows: pl.LazyFrame,
    file: Path,
    columns: Sequence[Column],
    label: str,
    vocabularies: Mapping[str, Vocabulary],
) -> dict[str, Any]:
    """Write a split, block by block; returns its counts."""
    counts: Counter[str] = Counter()
    for frame in _blocks(rows, file):
        wrong = frame.filter(~pl.col(label).is_in([0.0, 1.0]).fill_null(False))
        if len(wrong):
            raise UserError(f"{file}: label '{label}' has value {wrong[label][0]}: labels are 0 or 1")
        counts["rows"] += len(frame)
        counts["positives"] += int(frame[label].sum())
        for column in columns:
            values = frame[column.name]
            if values.null_count():
                raise UserError(f"{file}: column '{column.name}' has rows without a value: give it a fill_na")
            if _has_ids(column):
                ids = values.explode(empty_as_null=False) if column.type == "sequence" else values
                unseen = vocabularies[_root(column, columns)].unseen
                counts[f"{column.name}_unseen"] += int((ids == unseen).sum())
            if column.type == "sequence":
                length = frame[f"{column.name} length"]
                counts[f"{column.name}_empty"] += int((length == 0).sum())
                counts[f"{column.name}_truncated"] += int((length > values.list.len()).sum())
        kept_columns = [pl.col(label).cast(pl.UInt8), *[column.name for column in columns]]
        writer.add(split, frame.select(kept_columns).to_arrow())
    if not counts["rows"]:
        raise UserError(f"{file}: no rows")
    return dict(counts)


def _blocks(rows: pl.LazyFrame, file: Path) -> Iterator[pl.DataFrame]:
    try:
        yield from rows.collect_batches(chunk_size=BLOCK_ROWS, maintain_order=True)
    except pl.exceptions.PolarsError as error:
        raise UserError(f"{file}: {str(error).splitlines()[0]}") from None


def _specs(
    columns: Sequence[Column],
    vocabularies: Mapping[str, Vocabulary],
    lengths: Mapping[str, int],
    vectors: Mapping[str, Path],
) -> dict[str, dict[str, Any]]:
    """FuxiCTR's specifications."""
    specs: dict[str, dict[str, Any]] = {}
    for column in columns:
        spec: dict[str, Any] = {"type": column.type}
        if column.type != "meta":
            spec["source"] = column.source
        if _has_ids(column):
            root = _root(column, columns)
            spec |= target_spec(len(vocabularies[root]), column.source) | {"type": column.type}
            if column.name != root:
                spec["share_embedding"] = root
            if column.name in vectors:
                spec |= {
                    "pretrained_emb": f"pretrained_{root}.h5",
                    "pretrain_usage": column.pretrain_usage,
                    "freeze_emb": column.freeze_emb,
                }
                if dim := column.pretrain_dim or column.embedding_dim:
                    spec["pretrain_dim"] = dim
        encoder = column.feature_encoder
        if column.type == "sequence":
            spec["max_len"] = lengths.get(column.name) or column.max_len or 1
            encoder = "layers.MaskedAveragePooling()" if encoder == "default" else encoder  # FuxiCTR's default
        if encoder not in ("default", "null", "None", "none"):
            spec["feature_encoder"] = encoder
        for key in ("embedding_dim", "emb_output_dim"):
            if getattr(column, key) is not None:
                spec[key] = getattr(column, key)
        specs[column.name] = spec
    return specs


def _say(splits: Mapping[str, Mapping[str, int]], columns: Sequence[Column]) -> None:
    for split, counts in splits.items():
        log.info("%s: %d rows, %d positives", split, counts["rows"], counts["positives"])
        for column in columns:
            if cut := counts.get(f"{column.name}_truncated"):
                log.info("%s: %d histories of %s cut to their most recent items", split, cut, column.name)
            if unseen := counts.get(f"{column.name}_unseen"):
                log.info("%s: %d ids of %s are not, or too rarely, in the train rows", split, unseen, column.name)


__all__ = ["Column", "build_csv", "column_problems", "feature_specs"]
