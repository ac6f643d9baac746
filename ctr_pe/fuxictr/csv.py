"""Reads CSV or parquet files as a FuxiCTR dataset config describes them (``feature_cols``) into a data set.

FuxiCTR's own preprocessing reuses whatever it finds in its output directory, even if it was made from other files or is
incomplete, and runs strings of the config as code. Here the data set has a directory of its own, appears complete or
not at all, and records which files and which description it was made from.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import polars as pl
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from ctr_pe.config.field_groups import Group
from ctr_pe.config.schema import Count, DataSection, Encoder, Place, Width, check, problems
from ctr_pe.data.dataset import SPLITS, Dataset, open_dataset
from ctr_pe.data.id_map import NO_VALUE, IdMap
from ctr_pe.data.logs.tables import check_start
from ctr_pe.data.root import REPORT
from ctr_pe.data.vectors import file_of, vectors_of
from ctr_pe.data.writer import Content, DatasetWriter, make_dataset
from ctr_pe.fuxictr.feature_specs import target_spec
from ctr_pe.utils.errors import UserError, explain, nearest, no_such_file, quoted, shown
from ctr_pe.utils.names import LONGEST

BLOCK_ROWS = 65_536
FOLDER = "ctr_pe"  # below <data_root>/<dataset_id>, which may also hold the user's files and FuxiCTR's own cache
COPIED = re.compile(r"copy_from\((\w+)\)")
LOGGED = {
    "truncated": "histories of %s cut to their most recent items",
    "missing": "items of %s have no value",
    "filled": "numbers of %s are missing, NaN or infinite and are its fill_na",
    "unseen": "ids of %s are out of vocabulary: not in the train rows, or too rarely",
}
"""What is counted of a column in a split -> how the log says it."""
log = logging.getLogger(__name__)


_BUCKETS = "FuxiCTR 2.3 cannot build with it either: write the number of the bucket as a column of its own"
REFUSED = {
    **dict.fromkeys(("category_processor", "category_encoder", "num_buckets"), _BUCKETS),
    **dict.fromkeys(
        ("embedding_callback", "embedding_hook"), "now feature_encoder, such as nn.Linear(64, 64, bias=False)"
    ),
    "vocab_size": "ids are counted in the train rows; a data set that FuxiCTR has built is read with its own",
}
"""Options of a column that some version of FuxiCTR has -> why they are not read, and what to do."""


class FeatureColumn(BaseModel):
    """One entry of ``feature_cols``, under FuxiCTR's keys, also those before 2.1, ``na_value`` and ``encoder``.
    ``padding`` has no effect, as the loader pads."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1, max_length=LONGEST)
    type: Literal["categorical", "sequence", "meta", "numeric", "embedding"]
    dtype: Literal["str", "int", "float", "list"]
    active: bool = True
    source: str = ""
    share_embedding: str | None = None
    embedding_dim: Width | None = None
    emb_output_dim: Width | None = None
    feature_encoder: Encoder | list[Encoder] | None = "default"
    splitter: str = Field("^", min_length=1)
    max_len: int = Field(0, ge=0, le=10**6)
    padding: Literal["post", "pre"] = "post"
    fill_na: str | int | float | None = Field(None, validation_alias=AliasChoices("fill_na", "na_value"))
    min_categr_count: Count | None = None
    remap: bool = True
    preprocess: str | None = None
    normalizer: Literal["StandardScaler", "MinMaxScaler"] | None = None
    pretrained_emb: Place | None = None
    pretrain_dim: Width | None = None
    pretrain_usage: Literal["init", "sum", "concat"] = "init"
    freeze_emb: bool = True

    @property
    def read_from(self) -> str:
        """The CSV column: its own, or with ``preprocess: copy_from(x)`` another."""
        copied = COPIED.fullmatch(self.preprocess or "")
        return copied[1] if copied else self.name

    @property
    def filling(self) -> float:
        """The number that missing, NaN and infinite ones of a numeric column become; NaN for a wrong ``fill_na``."""
        try:
            return float(self.fill_na or 0)
        except ValueError:
            return float("nan")

    @model_validator(mode="before")
    @classmethod
    def _of_any_version(cls, given: dict[str, Any]) -> dict[str, Any]:
        for key in REFUSED.keys() & given.keys():
            raise ValueError(f"'{key}' is not read: {REFUSED[key]}")
        encoder = given.get("encoder")
        if encoder is None or "feature_encoder" in given:
            return given
        new = {key: value for key, value in given.items() if key != "encoder"}
        return new | {"feature_encoder": "null" if encoder in ("null", "None", "none") else f"layers.{encoder}()"}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.remap and self.type != "meta":
            raise ValueError(f"remap: false is for meta columns: a {self.type} column is numbered: leave it out")
        if self.pretrained_emb and self.type not in ("categorical", "sequence"):
            raise ValueError(f"a {self.type} column has no ids: pretrained_emb has vectors of ids, leave it out")
        if self.type == "numeric" and not np.isfinite(self.filling):
            raise ValueError(f"fill_na of a numeric column is a finite number, not {shown(self.fill_na)}")
        if self.normalizer and self.type != "numeric":
            raise ValueError(f"a {self.type} column has no normalizer, numeric ones have")
        if self.type == "embedding" and not self.pretrain_dim:
            raise ValueError("an embedding column needs pretrain_dim, its numbers per row")
        if self.preprocess and not COPIED.fullmatch(self.preprocess):
            raise ValueError(
                f"preprocess '{self.preprocess}' is not copy_from(column), and no other function is run: write what it "
                "makes as a column of the files"
            )
        return self


def build_csv(params: Mapping[str, Any], groups: Sequence[Group] = ()) -> Dataset:
    """The data set of a FuxiCTR config with ``feature_cols``, in ``<data_root>/<dataset_id>/ctr_pe``: from CSV files,
    or with ``data_format: parquet`` from parquet files, whose histories and vectors may be lists.

    It is built once, and again when the files or the description of the columns have changed. Histories keep their
    most recent ``max_len`` items whatever ``padding`` says (FuxiCTR keeps the oldest with ``padding: post``). Ids are
    sorted by frequency in the train rows; values with fewer than ``min_categr_count`` rows in every column of a table
    are unknown.

    Args:
        params: an experiment's parameters: data_root, dataset_id, feature_cols, label_col, train_data, ….
        groups: which histories are compared with which targets.

    Raises:
        UserError: an invalid key, type or reference in ``feature_cols``, a missing file or column, a value that does
            not have its column's type, a missing label, a directory that holds another data set.
    """
    build = _Build(params, groups)
    name = str(params["dataset_id"])
    out = Path(params.get("data_root") or "data") / name / FOLDER
    if (out / REPORT).is_file():
        report = json.loads((out / REPORT).read_text(encoding="utf-8"))
        if report.get("source") == build.fingerprint:
            log.info("Data set as built before: %s", out)
            return open_dataset(str(out.resolve()))
        if "source" not in report:
            raise UserError(f"{out}: a data set that was not made from CSV files: remove it or change dataset_id")
        log.warning("%s: the files or feature_cols have changed: building again", out)
    return make_dataset(build.read, out, name, overwrite=True)


def feature_specs(params: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The features that ``feature_cols`` would give, with tables of one id: enough to check a model against them.

    Raises:
        UserError: as :func:`build_csv`.
    """
    columns, tables = _described(params)
    specs = {}
    for column in columns:
        table = tables.get(column.name)
        vectors = ("", 0) if column.pretrained_emb and table == column.name else None
        specs[column.name] = _spec(column, table, 0, column.max_len or 1, vectors)
    return specs


def _described(params: Mapping[str, Any]) -> tuple[list[FeatureColumn], dict[str, str]]:
    """The columns, and for each column with ids the one whose embedding table it uses."""
    columns, problems = read_columns(params)
    if problems:
        raise UserError(problems[0])
    shared = {column.name: column.share_embedding for column in columns}
    tables = {}
    for column in columns:
        if column.type in ("categorical", "sequence"):
            seen = [column.name]
            while (other := shared[seen[-1]]) is not None:
                if other in seen:
                    circle = " → ".join([*seen, other])
                    raise UserError(f"feature_cols: share_embedding goes round in a circle: {circle}")
                seen.append(other)
            tables[column.name] = seen[-1]
    return columns, tables


def read_columns(params: Mapping[str, Any]) -> tuple[list[FeatureColumn], list[str]]:
    """The columns that ``feature_cols`` describes, and all that is wrong with it, one string each."""
    if not params.get("feature_cols"):
        return [], ["feature_cols is missing: which columns of the CSV files are what"]
    if invalid := problems(DataSection, {"feature_cols": params["feature_cols"]}):
        return [], [*invalid.values()]
    columns, found = [], []
    for entry in params["feature_cols"]:
        names = entry.get("name") if isinstance(entry, dict) else None
        if not names:
            found.append(f"feature_cols: {shown(entry)} is not a mapping with a name")
            continue
        for name in names if isinstance(names, list) else [names]:
            try:
                columns.append(FeatureColumn(**{**entry, "name": name}))
            except ValidationError as error:
                wrong = (explain(problem, FeatureColumn) for problem in error.errors())
                found += [f"feature_cols: {shown(name)}: {one}" for one in wrong]
    columns = [column for column in columns if column.active]
    names = [column.name for column in columns]
    found += [f"feature_cols: '{name}' is given twice" for name, count in Counter(names).items() if count > 1]
    for column in columns:
        if "." in column.name and column.type != "meta":
            found.append(f"feature_cols: '{column.name}': an input's name has no dot (torch reads it as a path)")
        if column.share_embedding is not None and column.share_embedding not in names:
            found.append(
                f"feature_cols: '{column.name}' share_embedding {quoted(column.share_embedding)} is no "
                f"feature: {nearest(column.share_embedding, names)}"
            )
    return columns, found


def _label(params: Mapping[str, Any]) -> str:
    check(DataSection, {key: value for key, value in params.items() if key in DataSection.model_fields})
    label = params.get("label_col")
    label = label[0] if isinstance(label, list) else label
    if not label:
        raise UserError("label_col: one label is needed, such as {name: label, dtype: float}")
    return str(label["name"])


def _files(params: Mapping[str, Any]) -> dict[str, Path]:
    files = {split: Path(params[f"{split}_data"]) for split in SPLITS if params.get(f"{split}_data")}
    if missing := [split for split in ("train", "valid") if split not in files]:
        raise UserError(
            f"{missing[0]}_data is missing: the file of the {missing[0]} rows (test_data alone is optional)"
        )
    if gone := [file for file in files.values() if not file.is_file()]:
        raise no_such_file(gone[0])
    return files


class _Build:
    """Builds one data set. ``fingerprint`` identifies the files and their description."""

    def __init__(self, params: Mapping[str, Any], groups: Sequence[Group]) -> None:
        self.params, self.groups = params, groups
        self.columns, self.tables = _described(params)
        self.label, self.files = _label(params), _files(params)
        described = {key: params.get(key) for key in ("feature_cols", "label_col", "min_categr_count", "sep")}
        facts = {split: (str(file), file.stat().st_size, file.stat().st_mtime_ns) for split, file in self.files.items()}
        described |= {"rules": 2}  # of an earlier version, numbers that are NaN or infinite stayed so
        text = json.dumps([described, facts], sort_keys=True, default=str)
        self.fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def read(self, writer: DatasetWriter) -> Content:
        frames = {split: self._scan(file) for split, file in self.files.items()}
        vectors = {
            column.name: vectors_of(Path(column.pretrained_emb))
            for column in self.columns
            if column.pretrained_emb is not None and self.tables.get(column.name) == column.name
        }
        try:
            tables = self._vocabularies(frames["train"], {name: _texts(keys) for name, (keys, _) in vectors.items()})
            self.maps = {name: tables[table] for name, table in self.tables.items()}
            self.max_lens = self._max_lens(frames["train"])
            self.scales = self._scales(frames["train"])
            made = [self._encoded(column, frames.values()) for column in self.columns]
            made += [pl.col(name).list.len().alias(f"{name} length") for name in self.max_lens]
            made += [pl.col(f"{column.name} filled") for column in self.columns if column.type == "numeric"]
            splits = {
                name: self._write(writer, name, frame.select(self.label, *made)) for name, frame in frames.items()
            }
        except pl.exceptions.PolarsError as error:
            raise UserError(f"{self.files['train'].parent}: {str(error).splitlines()[0]}") from None
        features = {}
        for column in self.columns:
            table, known = (
                self.tables.get(column.name),
                0 if column.name not in self.maps else self.maps[column.name].size - 2,
            )
            kept = _keep_vectors(column, *vectors[column.name], writer.path) if column.name in vectors else None
            features[column.name] = _spec(column, table, known, self.max_lens.get(column.name, 1), kept)
        vocabs = {name: ids.stored for name, ids in tables.items()}
        if vectors and len(vocabs) == 1:  # FuxiCTR's layer of pretrained vectors fails where there is one entry
            vocabs |= {name: ids.stored for name, ids in self.maps.items()}
        report = {"source": self.fingerprint, "splits": splits, "normalizers": self.scales}
        report["fill_na"] = {column.name: column.filling for column in self.columns if column.type == "numeric"}
        return Content(self.label, self.params.get("group_id"), features, self.groups, vocabs, report)

    def _scan(self, file: Path) -> pl.LazyFrame:
        """The columns in use under the features' names: ids as text, lists of text, numbers; the label unchanged."""
        separator, is_parquet = str(self.params.get("sep") or ","), self.params.get("data_format") == "parquet"
        if is_parquet:
            frame = pl.scan_parquet(file)
            types: Mapping[str, Any] = frame.collect_schema()
        else:
            check_start(file, separator, "sep")
            types = pl.scan_csv(file, separator=separator, infer_schema=False).collect_schema()  # reads one line
        for name in (self.label, *(column.read_from for column in self.columns)):
            if name not in types:
                raise UserError(f"{file}: no column '{name}': {nearest(name, types)}")
        if is_parquet:
            frame = frame.with_columns(pl.col(self.label).cast(pl.Float64))
        else:
            text = {column.read_from: pl.String for column in self.columns}
            frame = pl.scan_csv(file, separator=separator, schema_overrides={**text, self.label: pl.Float64})
        read = [_parsed(column, types[column.read_from] if is_parquet else pl.String()) for column in self.columns]
        named = [parsed.alias(column.name) for column, parsed in zip(self.columns, read, strict=True)]
        frame = frame.select(self.label, *named)
        numeric = {column.name: column.filling for column in self.columns if column.type == "numeric"}
        frame = frame.with_columns(pl.col(name).is_null().alias(f"{name} filled") for name in numeric)
        frame = frame.with_columns(pl.col(name).fill_null(filling) for name, filling in numeric.items())
        for fields in filter(None, self._histories()):
            # An empty text is also what a history of one item without this attribute looks like.
            one = pl.any_horizontal(pl.col(fields).list.len() == 1) & (pl.col(fields).list.len() == 0)
            frame = frame.with_columns(pl.when(one).then(pl.lit([""])).otherwise(pl.col(fields)).name.keep())
        return frame

    def _histories(self) -> list[list[str]]:
        """Columns of one history, as far as they are read."""
        read = [column.name for column in self.columns if column.type == "sequence"]
        return [[name for name in group.history if name in read] for group in self.groups]

    def _vocabularies(self, train: pl.LazyFrame, more: Mapping[str, list[str]]) -> dict[str, IdMap]:
        """Of each table, by the counts in all of its columns."""
        least = int(self.params.get("min_categr_count") or 1)
        counts: dict[str, list[pl.LazyFrame]] = {table: [] for table in self.tables.values()}
        for column in self.columns:
            if column.name in self.tables:
                values = train.select(value=column.name)
                values = values.explode("value", empty_as_null=False) if column.type == "sequence" else values
                known = pl.len() >= (column.min_categr_count or least)
                values = values.filter(pl.col("value") != "").group_by("value").agg(count=pl.len(), known=known)
                counts[self.tables[column.name]].append(values)
        totals = [
            pl.concat(columns).group_by("value").agg(pl.col("count").sum(), pl.col("known").any()).filter("known")
            for columns in counts.values()
        ]
        found = zip(counts, pl.collect_all(totals, engine="streaming"), strict=True)
        return {
            name: IdMap.by_frequency(total["value"], total["count"].to_numpy(), more.get(name, []))
            for name, total in found
        }

    def _max_lens(self, train: pl.LazyFrame) -> dict[str, int]:
        lengths = {column.name: column.max_len for column in self.columns if column.type == "sequence"}
        if unknown := [name for name, length in lengths.items() if length == 0]:
            found = train.select(pl.col(name).list.len().max() for name in unknown).collect(engine="streaming")
            lengths |= {name: max(1, int(found[name][0] or 0)) for name in unknown}
        return lengths

    def _scales(self, train: pl.LazyFrame) -> dict[str, tuple[float, float]]:
        """What a normalizer subtracts and divides by, of the train rows, as scikit-learn's: constant columns by 1."""
        pairs = []
        for column in self.columns:
            value = pl.col(column.name)
            if column.normalizer == "MinMaxScaler":
                pairs.append(pl.concat_list(value.min(), value.max() - value.min()))
            elif column.normalizer:
                pairs.append(pl.concat_list(value.mean(), value.std(ddof=0)))
        found = train.select(pairs).collect(engine="streaming").row(0, named=True) if pairs else {}
        return {name: (shift, scale or 1.0) for name, (shift, scale) in found.items()}

    def _encoded(self, column: FeatureColumn, frames: Iterable[pl.LazyFrame]) -> pl.Expr:
        """A column as numbers; group ids that are not whole numbers are numbered over all splits."""
        name, value = column.name, pl.col(column.name)
        if column.type == "sequence":  # an item without this attribute has id 0
            item = pl.element()
            ids = pl.when(item == "").then(0).otherwise(self.maps[name].ids_of_texts(item))
            return value.list.tail(self.max_lens[name]).list.eval(ids)
        if column.type == "categorical":
            return self.maps[name].ids_of_texts(value)
        if name in self.scales:
            shift, scale = self.scales[name]
            return (value - shift) / scale
        if column.type == "meta" and column.dtype != "int":
            values = pl.concat([frame.select(name) for frame in frames]).unique().collect()[name]
            return value.cast(pl.Enum(values.drop_nulls().sort())).to_physical().cast(pl.Int64)
        return value.cast(pl.Int64) if column.type == "meta" else value

    def _write(self, writer: DatasetWriter, split: str, rows: pl.LazyFrame) -> dict[str, int]:
        """Write a split, block by block; returns its counts."""
        file, label = self.files[split], self.label
        log.info("Reading %s", file)
        counts = Counter[str]()
        try:
            for frame in rows.collect_batches(chunk_size=BLOCK_ROWS, maintain_order=True):
                wrong = frame.filter(~pl.col(label).is_in([0.0, 1.0]).fill_null(False))
                if len(wrong):
                    raise UserError(f"{file}: label '{label}' has value {wrong[label][0]}: labels are 0 or 1")
                for first, *others in filter(None, self._histories()):
                    for name in others:
                        one, other = frame[f"{first} length"], frame[f"{name} length"]
                        if (row := (one != other).arg_max()) is not None and one[row] != other[row]:
                            found = f"'{first}' has {one[row]} items, '{name}' {other[row]}"
                            raise UserError(f"{file}: row {counts['rows'] + row + 1}: of one history {found}")
                counts["rows"] += len(frame)
                counts["positives"] += int(frame[label].sum())
                for column in self.columns:
                    values = frame[column.name]
                    if values.null_count():
                        raise UserError(f"{file}: column '{column.name}' has rows without a value: give it a fill_na")
                    if column.type == "embedding" and (other := values.list.len() != column.pretrain_dim).any():
                        found = values.filter(other).list.len()[0]
                        given = f"has {found} numbers in a row, but pretrain_dim is {column.pretrain_dim}"
                        raise UserError(f"{file}: column '{column.name}' {given}")
                    if column.name in self.maps:
                        ids = values.explode(empty_as_null=False) if column.type == "sequence" else values
                        counts[f"{column.name}_unseen"] += int((ids == self.maps[column.name].unseen).sum())
                    if column.type == "numeric":
                        counts[f"{column.name}_filled"] += int(frame[f"{column.name} filled"].sum())
                    if column.type == "sequence":
                        length = frame[f"{column.name} length"]
                        counts[f"{column.name}_empty"] += int((length == 0).sum())
                        counts[f"{column.name}_missing"] += int((ids == 0).sum())
                        counts[f"{column.name}_truncated"] += int((length > values.list.len()).sum())
                kept = [pl.col(label).cast(pl.UInt8), *[column.name for column in self.columns]]
                writer.add(split, frame.select(kept).to_arrow())
        except pl.exceptions.PolarsError as error:
            raise UserError(f"{file}: {str(error).splitlines()[0]}") from None
        if not counts["rows"]:
            raise UserError(f"{file}: no rows")
        log.info("%s: %d rows, %d positives", split, counts["rows"], counts["positives"])
        for column in self.columns:
            for kind, text in LOGGED.items():
                if count := counts[f"{column.name}_{kind}"]:
                    log.info(f"%s: %d {text}", split, count, column.name)
        return dict(counts)


def _parsed(column: FeatureColumn, kind: pl.DataType) -> pl.Expr:
    raw = pl.col(column.read_from)
    if column.type == "embedding":
        numbers = raw.str.split(column.splitter) if kind == pl.String else raw
        return numbers.cast(pl.List(pl.Float64))
    fill = "" if column.fill_na is None else str(column.fill_na)
    if column.type == "sequence":
        lists = raw.cast(pl.List(pl.String))
        if kind == pl.String:
            lists = pl.when(~raw.is_in(["", fill])).then(raw.str.split(column.splitter))
        lists = lists.list.eval((pl.element().replace(fill, "") if fill else pl.element()).fill_null(""))
        return pl.coalesce(lists, pl.lit([], dtype=pl.List(pl.String)))
    raw = raw.cast(pl.String)
    if column.type == "numeric":
        number = pl.when(~raw.is_in(list(NO_VALUE))).then(raw).cast(pl.Float64)
        return pl.when(number.is_finite()).then(number)
    if column.type == "meta" and column.fill_na is not None:
        raw = raw.fill_null(fill)
    if column.type == "meta":
        return raw
    # FuxiCTR reads int columns as numbers, so 07 is 7; a missing id is unknown, and so is fill_na, as in FuxiCTR
    raw = raw.cast(pl.Int64).cast(pl.String) if column.dtype == "int" else raw.replace("", None)
    return raw.replace(fill, None) if fill else raw


def _texts(keys: Any) -> list[str]:
    return [key.decode() if isinstance(key, bytes) else str(key) for key in keys.tolist()]


def _keep_vectors(column: FeatureColumn, keys: Any, values: Any, folder: Path) -> tuple[str, int]:
    """Keep the vectors of a column beside its rows, in a form that FuxiCTR reads: the file's name, their dim."""
    file, dim = Path(str(column.pretrained_emb)), int(values.shape[1])
    if column.pretrain_dim not in (None, dim):
        raise UserError(f"{file}: vectors of dim {dim}, but '{column.name}' has pretrain_dim: {column.pretrain_dim}")
    if file.suffix != ".parquet":
        return Path(shutil.copyfile(file, folder / f"pretrained_{column.name}{file.suffix}")).name, dim
    kept = file_of(column.name)  # FuxiCTR reads only parquet's arrays, no lists
    np.savez(folder / kept, key=np.array(_texts(keys)), value=values)
    return kept, dim


def _spec(
    column: FeatureColumn, table: str | None, known: int, max_len: int, vectors: tuple[str, int] | None
) -> dict[str, Any]:
    """FuxiCTR's specification of a column that has ``known`` ids in ``table``; ``vectors``: the file and dim of
    pretrained ones."""
    spec: dict[str, Any] = {"type": column.type} | ({} if column.type == "meta" else {"source": column.source})
    if table:
        spec |= target_spec(known, column.source) | {"type": column.type}
        if column.name != table:
            spec["share_embedding"] = table
        if vectors:
            spec |= dict(zip(("pretrained_emb", "pretrain_dim"), vectors, strict=True))
            spec |= {"pretrain_usage": column.pretrain_usage, "freeze_emb": column.freeze_emb}
    if column.type == "embedding":
        spec["pretrain_dim"] = column.pretrain_dim
    encoder = column.feature_encoder
    if column.type == "sequence":
        spec["max_len"] = max_len
        encoder = "layers.MaskedAveragePooling()" if encoder == "default" else encoder  # FuxiCTR's default
    if encoder not in ("default", "null", "None", "none"):
        spec["feature_encoder"] = encoder
    return spec | column.model_dump(include={"embedding_dim", "emb_output_dim"}, exclude_none=True)
