"""Makes a data set from a published one: CSV with ``^``-separated lists of original ids, oldest first.

Each CSV is parsed once, in blocks, into parquet with integer lists; a pass over these counts ids in the train rows,
another writes the splits. In memory: one block, a table per vocabulary, and two numbers per train row.
"""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from ctr_pe.data.columns import batches
from ctr_pe.data.dataset import SPLITS, Dataset
from ctr_pe.data.published import MAX_LEN, Field, Published
from ctr_pe.data.specs import history_spec, target_spec
from ctr_pe.data.vocabulary import Vocabulary
from ctr_pe.data.writer import Content, DatasetWriter, make_dataset
from ctr_pe.errors import UserError, nearest, no_such_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCK_ROWS = 32_768
ID_LIMIT = 2**28  # ids index tables; the published ones are below 4 million
VALID_SHARE = 0.1
LABEL = "label"
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Vectors:
    """Pretrained vectors: the original ids that have one, and their dimension."""

    file: Path
    keys: Array
    dim: int


@dataclass(frozen=True)
class Table:
    """The embedding table of a field; ``ids[original]`` is the id of an original number."""

    field: Field
    vocabulary: Vocabulary
    ids: Array
    vectors: Vectors | None

    def specs(self) -> dict[str, dict[str, Any]]:
        """FuxiCTR's specifications of the feature and its histories; pretrained vectors are frozen and projected."""
        name, known = self.field.name, len(self.vocabulary)
        specs = {name: target_spec(known, self.field.source)}
        for history, column in self.field.histories:
            specs[history] = history_spec(name, known, MAX_LEN, chosen=column not in self.field.not_chosen)
        if self.vectors is not None:
            dim = self.vectors.dim
            for spec in specs.values():
                spec |= {"embedding_dim": dim, "feature_encoder": f"nn.Linear({dim}, {dim}, bias=False)"}
            loaded = {"pretrained_emb": self.pretrained, "pretrain_dim": dim}
            specs[name] |= {**loaded, "pretrain_usage": "init", "freeze_emb": True}
        return specs

    @property
    def pretrained(self) -> str:
        """The vectors' file name in the data set, as FuxiCTR would choose it."""
        return f"pretrained_{self.field.name}.h5"


def read_published(
    directory: Path, published: Published, out: Path, overwrite: bool = False, progress: bool = False
) -> Dataset:
    """Convert ``directory``'s train.csv, test.csv and vectors into the set ``out``, without checking checksums.

    Histories keep their most recent 100 items. The report counts, per split and history, the truncated and the empty
    rows, and per column the unknown ids.

    Raises:
        UserError: a missing file or column, a value of another form, no rows for train or valid.
    """
    vectors = {field.name: _vectors(directory / field.vectors) for field in published.fields if field.vectors}
    return make_dataset(
        lambda writer: _read(directory, published, vectors, writer, progress), out, published.name, overwrite
    )


def _read(
    directory: Path, published: Published, vectors: dict[str, Vectors], writer: DatasetWriter, progress: bool
) -> Content:
    raw = {name: writer.scratch / name for name in ("train", "test")}
    for name, file in raw.items():
        _parse(directory / f"{name}.csv", published, file, progress)
    is_valid = _valid_rows(directory / "train.csv", raw["train"], published)
    counts = _counts(raw["train"], ~is_valid, published, progress)
    users = np.unique(np.concatenate([_column(file, published.user) for file in raw.values()]))
    tables = [_table(field, counts, vectors.get(field.name)) for field in published.fields]
    splits: dict[str, Any] = {}
    for split in SPLITS:
        chosen = {"train": ~is_valid, "valid": is_valid, "test": None}[split]
        blocks = _blocks(raw["test" if split == "test" else "train"], chosen, f"writing {split}", progress)
        splits[split] = _write(writer, split, blocks, published, tables, users)
    for table in tables:
        if table.vectors is not None:
            shutil.copyfile(table.vectors.file, writer.path / table.pretrained)
    features = {name: spec for table in tables for name, spec in table.specs().items()}
    vocabs = {table.field.name: table.vocabulary.stored() for table in tables}
    report = {
        "published": published.repository,
        "users": len(users),
        "splits": splits,
        "known_without_vector": {
            table.field.name: int(np.count_nonzero(~np.isin(table.vocabulary.originals, table.vectors.keys)))
            for table in tables
            if table.vectors is not None
        },
        "notes": list(published.notes),
    }
    features = {published.group_id: {"type": "meta"}, **features}
    return Content(LABEL, published.group_id, features, published.groups, vocabs, report)


def _length(column: str) -> str:
    return f"{column} length"


def _parse(csv: Path, published: Published, into: Path, progress: bool) -> None:
    """The columns in use as integers; of a list the most recent items and its full length."""
    if not csv.is_file():
        raise no_such_file(csv)
    scalars = [published.label, published.user, *([published.time] if published.time else [])]
    scalars = list(dict.fromkeys([*scalars, *(field.column for field in published.fields)]))
    lists = list(dict.fromkeys(column for field in published.fields for _, column in field.histories))
    real = {published.label, published.time}  # written as 1 or 1.0
    types = dict.fromkeys(lists, pl.String) | {name: pl.Float64 if name in real else pl.Int64 for name in scalars}
    columns = [pl.col(name) for name in scalars]
    for name in lists:
        nothing = pl.lit([], dtype=pl.List(pl.String))
        items = pl.when(pl.col(name) != "").then(pl.col(name).str.split("^")).otherwise(nothing)
        columns.append(items.list.tail(MAX_LEN).cast(pl.List(pl.UInt32), strict=False).alias(name))
        columns.append(items.list.len().alias(_length(name)))
    writer: pq.ParquetWriter | None = None
    try:
        header = pl.read_csv(csv, n_rows=0).columns
        if missing := [name for name in (*scalars, *lists) if name not in header]:
            raise UserError(f"{csv}: no column '{missing[0]}'; {nearest(missing[0], header)}")
        blocks = pl.scan_csv(csv, schema_overrides=types).select(columns)
        with tqdm(unit=" rows", desc=f"reading {csv.name}", disable=not progress, unit_scale=True) as bar:
            for frame in blocks.collect_batches(chunk_size=BLOCK_ROWS, maintain_order=True):
                _check(csv, frame, published, scalars, lists)
                table = frame.to_arrow()
                writer = writer or pq.ParquetWriter(into, table.schema, compression="zstd")
                writer.write_table(table)
                bar.update(len(frame))
    except pl.exceptions.PolarsError as error:
        raise UserError(f"{csv}: {str(error).splitlines()[0]}") from None
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        raise UserError(f"{csv}: no rows")


def _check(csv: Path, frame: pl.DataFrame, published: Published, scalars: list[str], lists: list[str]) -> None:
    for name in scalars:
        if nulls := frame[name].null_count():
            raise UserError(f"{csv}: column '{name}' is empty in {nulls} of {len(frame)} rows")
        if name == published.label and not frame[name].is_in([0.0, 1.0]).all():
            raise UserError(f"{csv}: label column '{name}' has values other than 0 and 1")
    for name in lists:
        if nulls := frame[name].list.explode(keep_nulls=False, empty_as_null=False).null_count():
            raise UserError(f"{csv}: column '{name}' has {nulls} list items that are not whole numbers from 0")
    for name in (*(field.column for field in published.fields), *lists):
        values = frame[name] if name in scalars else frame[name].list.max()
        least, most = (frame[name].min() if name in scalars else 0), values.max()
        if most is not None and not (least >= 0 and most < ID_LIMIT):  # type: ignore[operator]
            raise UserError(f"{csv}: column '{name}' has an id outside 0 … {ID_LIMIT - 1}")


def _column(raw: Path, name: str) -> Array:
    values: Array = pq.read_table(raw, columns=[name])[name].to_numpy()
    return values


def _valid_rows(csv: Path, raw: Path, published: Published) -> npt.NDArray[np.bool_]:
    """(train.csv rows,) True for validation rows."""
    if published.time is not None:
        time = _column(raw, published.time)
        cut = np.partition(time, at := int(len(time) * (1 - VALID_SHARE)))[at]
        is_valid = time >= cut  # rows of one time stay together
    else:
        user, length = _column(raw, published.user), _column(raw, _length(published.fields[0].histories[0][1]))
        _, dense = np.unique(user, return_inverse=True)
        longest = np.zeros(dense.max() + 1, length.dtype)
        np.maximum.at(longest, dense, length)
        is_valid = length == longest[dense]
    if is_valid.all():
        raise UserError(f"{csv}: {len(is_valid)} rows, all of them the latest ones: none is left for training")
    return np.asarray(is_valid)


def _blocks(
    raw: Path, chosen: npt.NDArray[np.bool_] | None, description: str, progress: bool
) -> Iterator[pa.RecordBatch]:
    """The chosen rows of a parsed file, in blocks."""
    first = 0
    with (
        pq.ParquetFile(raw) as file,
        tqdm(
            total=file.metadata.num_rows, unit=" rows", desc=description, disable=not progress, unit_scale=True
        ) as bar,
    ):
        for block in batches(file, BLOCK_ROWS):
            rows = len(block)
            if chosen is not None:
                block = block.filter(pa.array(chosen[first : first + rows]))
            if len(block):
                yield block
            first += rows
            bar.update(rows)


def _flat(array: pa.Array) -> Array:
    if pa.types.is_large_list(array.type) or pa.types.is_list(array.type):
        array = array.flatten()
    values: Array = array.to_numpy()
    return values


def _counts(raw: Path, train: npt.NDArray[np.bool_], published: Published, progress: bool) -> dict[str, Array]:
    """Per CSV column, how often each original id occurs in the train rows."""
    columns = {column for field in published.fields for column in field.columns}
    counts = dict.fromkeys(sorted(columns), np.zeros(0, np.int64))
    for block in _blocks(raw, train, "counting", progress):
        for name, total in counts.items():
            more = np.bincount(_flat(block.column(name)), minlength=len(total))
            more[: len(total)] += total
            counts[name] = more
    return counts


def _table(field: Field, counts: dict[str, Array], vectors: Vectors | None) -> Table:
    """Ids that one column has ``min_count`` times, sorted by total count, then the other ids that have a vector."""
    columns = [counts[name] for name in dict.fromkeys(field.columns)]
    size = max(len(column) for column in columns)
    padded = np.stack([np.pad(column, (0, size - len(column))) for column in columns])
    total = np.where(padded.max(axis=0) >= field.min_count, padded.sum(axis=0), 0)
    vocabulary = Vocabulary.by_frequency(total, () if vectors is None else vectors.keys)
    largest = int(np.max(vocabulary.originals, initial=0))
    return Table(field, vocabulary, vocabulary.table(largest + 1), vectors)


def _write(
    writer: DatasetWriter,
    split: str,
    blocks: Iterator[pa.RecordBatch],
    published: Published,
    tables: list[Table],
    users: Array,
) -> dict[str, Any]:
    """Write a split; returns its counts."""
    counts: Counter[str] = Counter()
    unseen: Counter[str] = Counter()
    user_type = np.min_scalar_type(len(users))
    for block in blocks:
        label = _flat(block.column(published.label)).astype(np.uint8)
        user = np.searchsorted(users, _flat(block.column(published.user))).astype(user_type)
        columns: dict[str, Any] = {LABEL: label, published.group_id: user}
        counts["rows"] += len(block)
        counts["positives"] += int(label.sum())
        for table in tables:
            for name, source in ((table.field.name, table.field.column), *table.field.histories):
                array = block.column(source)
                ids = _encode(table, _flat(array))
                unseen[name] += int(np.count_nonzero(ids == table.vocabulary.unseen))
                columns[name] = ids
                if name != table.field.name:
                    offsets = array.offsets.to_numpy()
                    columns[name] = pa.ListArray.from_arrays((offsets - offsets[0]).astype(np.int32), ids)
                    _count_lengths(counts, name, _flat(block.column(_length(source))))
        writer.add(split, pa.table(columns))
    return {**counts, "unseen": dict(unseen)}


def _encode(table: Table, originals: Array) -> Array:
    inside = np.minimum(originals, len(table.ids) - 1)
    return np.where(originals == inside, table.ids[inside], table.ids.dtype.type(table.vocabulary.unseen))


def _count_lengths(counts: Counter[str], name: str, length: Array) -> None:
    counts[f"{name}_items"] += int(np.minimum(length, MAX_LEN).sum())
    counts[f"{name}_longest"] = max(counts[f"{name}_longest"], int(length.max()))
    counts[f"{name}_empty"] += int(np.count_nonzero(length == 0))
    counts[f"{name}_truncated"] += int(np.count_nonzero(length > MAX_LEN))


def _vectors(file: Path) -> Vectors:
    if not file.is_file():
        raise no_such_file(file)
    try:
        with h5py.File(file) as content:
            if missing := {"key", "value"} - set(content):
                raise UserError(f"{file}: no data set '{min(missing)}'; {nearest(min(missing), content)}")
            keys, shape = content["key"][:], content["value"].shape
    except OSError as error:
        raise UserError(f"{file}: not a readable HDF5 file ({str(error).splitlines()[0]})") from None
    if keys.ndim != 1 or keys.dtype.kind not in "iu" or len(shape) != 2 or len(keys) != shape[0]:
        raise UserError(f"{file}: needs 'key' (n,) of integers and 'value' (n, dim), has {keys.shape} and {shape}")
    if len(keys) and not (keys.min() >= 0 and keys.max() < ID_LIMIT):
        raise UserError(f"{file}: 'key' has an id outside 0 … {ID_LIMIT - 1}")
    return Vectors(file, keys, int(shape[1]))
