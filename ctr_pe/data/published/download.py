"""Makes a published data set: downloads its files or reads them from a directory, checks their md5, converts them.

The files are CSV with ``^``-separated lists of original ids, oldest first. Each is parsed once, in blocks, into parquet
with integer lists; a pass over these counts ids in the train rows, another writes the splits. In memory: one block, a
table per vocabulary, and two numbers per train row.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
from tqdm.auto import tqdm

from ctr_pe.data.dataset import LABEL, Dataset, check_out
from ctr_pe.data.id_map import Array, IdMap
from ctr_pe.data.published.sets import MAX_LEN, SETS, Field, Published, found_in
from ctr_pe.data.root import data_root
from ctr_pe.data.vectors import vectors_of
from ctr_pe.data.writer import Content, DatasetWriter, make_dataset
from ctr_pe.fuxictr.feature_specs import history_spec, target_spec
from ctr_pe.utils.errors import UserError, nearest, no_such_file

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK_ROWS = 32_768
ID_LIMIT = 2**28  # ids index tables; the published ones are below 4 million
VALID_SHARE = 0.1


@dataclass(frozen=True)
class PublishedTable:
    """The embedding table of a field; ``ids[original]`` is the id of an original number.

    ``keys``, ``dim``: the original ids that have a pretrained vector, and its dimension; none and 0 without vectors.
    """

    field: Field
    maps: IdMap
    ids: Array
    keys: Array
    dim: int

    def specs(self) -> dict[str, dict[str, Any]]:
        """FuxiCTR's specifications of the feature and its histories; pretrained vectors are frozen and projected."""
        name, known = self.field.name, self.maps.size - 2
        specs = {name: target_spec(known, self.field.source)}
        for history, column in self.field.histories:
            specs[history] = history_spec(name, known, MAX_LEN, chosen=column not in self.field.not_chosen)
        if dim := self.dim:
            for spec in specs.values():
                spec |= {"embedding_dim": dim, "feature_encoder": f"nn.Linear({dim}, {dim}, bias=False)"}
            loaded = {"pretrained_emb": self.pretrained, "pretrain_dim": dim}
            specs[name] |= {**loaded, "pretrain_usage": "init", "freeze_emb": True}
        return specs

    @property
    def pretrained(self) -> str:
        """The vectors' file name in the data set, as FuxiCTR would choose it."""
        return f"pretrained_{self.field.name}.h5"

    def encode(self, originals: Array) -> Array:
        inside = np.minimum(originals, len(self.ids) - 1)
        return np.where(originals == inside, self.ids[inside], self.ids.dtype.type(self.maps.unseen))


def fetch(
    name: str, root: Path | None = None, source: Path | None = None, overwrite: bool = False, progress: bool = False
) -> str:
    """Make a published set below the data root, from the files in ``source`` or from the hub. Generated files make a
    set with a name of its own.

    Returns:
        The report in a few lines.

    Raises:
        UserError: no set of this name, one that exists already, or files that cannot be downloaded or used.
    """
    if name not in SETS:
        raise UserError(f"no published data set '{name}'; {nearest(name, SETS)}")
    published = SETS[name] if source is None else found_in(source, SETS[name])
    out = data_root(root) / published.name
    check_out(out, overwrite)  # before anything is downloaded
    directory = source or download(published, out.parent / "downloads" / name)
    check_files(published, directory)
    dataset = read_published(directory, published, out, overwrite, progress)
    rows = ", ".join(f"{split} {count:,}" for split, count in dataset.rows.items())
    return "\n".join([f"{dataset.path}: {rows} rows", *(f"note: {note}" for note in published.notes)])


def download(published: Published, into: Path) -> Path:
    """Download the files of a set from the dataset hub into ``into``; an interrupted download is continued.

    Raises UserError when it fails.
    """
    import huggingface_hub

    hub = huggingface_hub.hf_hub_download
    for name in published.files:
        try:
            hub(repo_id=published.repository, filename=name, repo_type="dataset", local_dir=into)
        except Exception as error:  # the hub raises a dozen kinds, some from its HTTP library
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise UserError(
                f"{published.repository}/{name}: download stopped ({reason}); run the command again to go on, "
                "or give a directory that has the files with --from"
            ) from None
    return into


def check_files(published: Published, directory: Path) -> None:
    """Raises UserError for a file that is missing or whose md5 sum differs from the published one."""
    for name, expected in published.files.items():
        file = directory / name
        if not file.is_file():
            there = [path.name for path in directory.iterdir()] if directory.is_dir() else []
            hint = nearest(name, there) if there else "(nothing is there)"
            raise UserError(
                f"{directory}: no file '{name}'; {published.name} needs {', '.join(published.files)} {hint}"
            )
        if expected is not None and (found := md5(file)) != expected:
            raise UserError(
                f"{file}: md5 {found}, published {expected}: damaged or another version, not used; "
                "remove the file and run the command again"
            )


def md5(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def read_published(
    directory: Path, published: Published, out: Path, overwrite: bool = False, progress: bool = False
) -> Dataset:
    """Convert ``directory``'s train.csv, test.csv and vectors into the set ``out``, without checking checksums.

    Histories keep their most recent 100 items. The report counts, per split and history, the truncated and the empty
    rows, and per column the unknown ids.

    Raises:
        UserError: a missing file or column, a value of another form, no rows for train or valid.
    """
    vectors = {field.name: _vectors(directory, field) for field in published.fields}
    return make_dataset(
        lambda writer: _read(directory, published, vectors, writer, progress), out, published.name, overwrite
    )


def _read(
    directory: Path, published: Published, vectors: dict[str, tuple[Array, int]], writer: DatasetWriter, progress: bool
) -> Content:
    raw = {name: writer.scratch / name for name in ("train", "test")}
    for name, folder in raw.items():
        _parse(directory / f"{name}.csv", published, folder, progress)
    is_valid = _valid_rows(directory / "train.csv", raw["train"], published)
    counts = _counts(_blocks(raw["train"], ~is_valid, "counting", progress), published)
    users = pl.concat(pl.scan_parquet(folder).select(published.user) for folder in raw.values())
    known_users = users.unique().collect()[published.user].sort().to_numpy()
    tables = [_table(field, counts, *vectors[field.name]) for field in published.fields]
    every = np.ones(pl.scan_parquet(raw["test"]).select(pl.len()).collect().item(), bool)
    parts = {"train": ("train", ~is_valid), "valid": ("train", is_valid), "test": ("test", every)}
    splits: dict[str, Any] = {}
    for split, (name, chosen) in parts.items():
        blocks = _blocks(raw[name], chosen, f"writing {split}", progress)
        splits[split] = _write(writer, split, blocks, published, tables, known_users)
    without: dict[str, int] = {}
    for table in tables:
        if table.field.vectors is not None:
            shutil.copyfile(directory / table.field.vectors, writer.path / table.pretrained)
            with_vector = np.unique(table.encode(table.keys))
            without[table.field.name] = table.maps.size - 2 - int(np.count_nonzero(with_vector != table.maps.unseen))
    features = {published.group_id: {"type": "meta"}}
    for table in tables:
        features |= table.specs()
    report = {
        "published": published.repository,
        "users": len(known_users),
        "splits": splits,
        "known_without_vector": without,
        "notes": list(published.notes),
    }
    vocabs = {table.field.name: table.maps.stored for table in tables}
    return Content(LABEL, published.group_id, features, published.groups, vocabs, report)


def _length(column: str) -> str:
    return f"{column} length"


def _parse(csv: Path, published: Published, into: Path, progress: bool) -> None:
    """The columns in use as integers, a parquet file per block; of a list the most recent items and its full length."""
    if not csv.is_file():
        raise no_such_file(csv)
    real = {published.label, *filter(None, [published.time])}  # written as 1 or 1.0
    scalars = dict.fromkeys([*real, published.user, *(field.column for field in published.fields)])
    lists = dict.fromkeys(column for field in published.fields for _, column in field.histories)
    types = dict.fromkeys(scalars, pl.Int64) | dict.fromkeys(real, pl.Float64) | dict.fromkeys(lists, pl.String)
    columns = [pl.col(name) for name in scalars]
    for name in lists:
        items = pl.when(pl.col(name) != "").then(pl.col(name).str.split("^")).otherwise(pl.lit([], pl.List(pl.String)))
        columns.append(items.list.tail(MAX_LEN).cast(pl.List(pl.UInt32), strict=False).alias(name))
        columns.append(items.list.len().alias(_length(name)))
    into.mkdir()
    try:
        header = pl.scan_csv(csv, infer_schema=False).collect_schema().names()  # reads one line
        if missing := [name for name in types if name not in header]:
            raise UserError(f"{csv}: no column '{missing[0]}'; {nearest(missing[0], header)}")
        blocks = pl.scan_csv(csv, schema_overrides=types).select(columns)
        with tqdm(unit=" rows", desc=f"reading {csv.name}", disable=not progress, unit_scale=True) as bar:
            for number, frame in enumerate(blocks.collect_batches(chunk_size=BLOCK_ROWS, maintain_order=True)):
                _check(csv, frame, published)
                frame.write_parquet(into / f"{number:08}.parquet")
                bar.update(len(frame))
    except pl.exceptions.PolarsError as error:
        raise UserError(f"{csv}: {str(error).splitlines()[0]}") from None
    if not any(into.iterdir()):
        raise UserError(f"{csv}: no rows")


def _check(csv: Path, frame: pl.DataFrame, published: Published) -> None:
    """Raises UserError for values that are missing, not numbers, or not in their range."""
    with_ids = {column for field in published.fields for column in field.columns}
    for column in frame:
        name, ids = column.name, column
        if nulls := column.null_count():
            raise UserError(f"{csv}: column '{name}' is empty in {nulls} of {len(frame)} rows")
        if name == published.label and not column.is_in([0.0, 1.0]).all():
            raise UserError(f"{csv}: label column '{name}' has values other than 0 and 1")
        if column.dtype == pl.List:
            ids = _flat(column)
            if nulls := ids.null_count():
                raise UserError(f"{csv}: column '{name}' has {nulls} list items that are not whole numbers from 0")
        if name in with_ids and not ids.is_between(0, ID_LIMIT - 1).all():
            raise UserError(f"{csv}: column '{name}' has an id outside 0 … {ID_LIMIT - 1}")


def _flat(column: pl.Series) -> pl.Series:
    """A list column's items, or the column itself."""
    return column.list.explode(keep_nulls=False, empty_as_null=False) if column.dtype == pl.List else column


def _valid_rows(csv: Path, raw: Path, published: Published) -> npt.NDArray[np.bool_]:
    """(train.csv rows,) True for validation rows."""
    if published.time is not None:
        time = pl.col(published.time)
        is_valid = time >= time.sort().get(
            (pl.len() * (1 - VALID_SHARE)).cast(pl.Int64)
        )  # rows of one time stay together
    else:
        length = pl.col(_length(published.fields[0].histories[0][1]))
        is_valid = length == length.max().over(published.user)
    rows = pl.scan_parquet(raw).select(is_valid.alias("valid")).collect()["valid"].to_numpy()
    if rows.all():
        raise UserError(f"{csv}: {len(rows)} rows, all of them the latest ones: none is left for training")
    return rows


def _blocks(raw: Path, chosen: npt.NDArray[np.bool_], description: str, progress: bool) -> Iterator[pl.DataFrame]:
    """The chosen rows of a parsed file, in blocks."""
    first = 0
    with tqdm(total=len(chosen), unit=" rows", desc=description, disable=not progress, unit_scale=True) as bar:
        for file in sorted(raw.iterdir()):
            block = pl.read_parquet(file)
            rows = block.filter(chosen[first : first + len(block)])
            if len(rows):
                yield rows
            first += len(block)
            bar.update(len(block))


def _counts(blocks: Iterator[pl.DataFrame], published: Published) -> dict[str, Array]:
    """Per CSV column, how often each original id occurs."""
    columns = {column for field in published.fields for column in field.columns}
    counts = dict.fromkeys(sorted(columns), np.zeros(0, np.int64))
    for block in blocks:
        for name, total in counts.items():
            more = np.bincount(_flat(block[name]).to_numpy(), minlength=len(total))
            more[: len(total)] += total
            counts[name] = more
    return counts


def _table(field: Field, counts: dict[str, Array], keys: Array, dim: int) -> PublishedTable:
    """Ids that one column has ``min_count`` times, sorted by total count, then the other ids that have a vector."""
    columns = [counts[name] for name in dict.fromkeys(field.columns)]
    size = max(len(column) for column in columns)
    padded = np.stack([np.pad(column, (0, size - len(column))) for column in columns])
    total = np.where(padded.max(axis=0) >= field.min_count, padded.sum(axis=0), 0)
    maps = IdMap.by_frequency(pl.Series(np.arange(size)), total, np.sort(keys))
    largest = max(int(np.max(np.flatnonzero(total), initial=0)), int(np.max(keys, initial=0)))
    return PublishedTable(field, maps, maps.table(largest + 1), keys, dim)


def _write(
    writer: DatasetWriter,
    split: str,
    blocks: Iterator[pl.DataFrame],
    published: Published,
    tables: list[PublishedTable],
    users: Array,
) -> dict[str, Any]:
    """Write a split; returns its counts."""
    counts, unseen = Counter[str](), Counter[str]()
    for block in blocks:
        label = block[published.label].to_numpy().astype(np.uint8)
        user = np.searchsorted(users, block[published.user].to_numpy()).astype(np.min_scalar_type(len(users)))
        columns: dict[str, Any] = {LABEL: label, published.group_id: user}
        counts["rows"] += len(block)
        counts["positives"] += int(label.sum())
        for table in tables:
            for name, source in ((table.field.name, table.field.column), *table.field.histories):
                columns[name] = ids = table.encode(_flat(block[source]).to_numpy())
                unseen[name] += int(np.count_nonzero(ids == table.maps.unseen))
                if block[source].dtype == pl.List:
                    length = block[_length(source)].to_numpy()
                    kept = np.minimum(length, MAX_LEN)
                    offsets = np.concatenate([[0], np.cumsum(kept)]).astype(np.int32)
                    columns[name] = pa.ListArray.from_arrays(offsets, ids)
                    counts[f"{name}_items"] += int(kept.sum())
                    counts[f"{name}_longest"] = max(counts[f"{name}_longest"], int(length.max()))
                    counts[f"{name}_empty"] += int(np.count_nonzero(length == 0))
                    counts[f"{name}_truncated"] += int(np.count_nonzero(length > MAX_LEN))
        writer.add(split, pa.table(columns))
    return {**counts, "unseen": dict(unseen)}


def _vectors(directory: Path, field: Field) -> tuple[Array, int]:
    """The original ids that have a pretrained vector, and its dimension."""
    if field.vectors is None:
        return np.zeros(0, np.int64), 0
    file = directory / field.vectors
    keys, values = vectors_of(file)
    if keys.dtype.kind not in "iu" or (len(keys) and not 0 <= keys.min() <= keys.max() < ID_LIMIT):
        raise UserError(f"{file}: 'key' has an id outside 0 … {ID_LIMIT - 1}")
    return keys, int(values.shape[1])
