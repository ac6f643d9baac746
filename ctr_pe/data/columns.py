"""A parquet file as memory-mapped columns, cached beside it; a history is a flat array with offsets.

The lists of our own files are histories as they are: a 0 in them is an item without an id. FuxiCTR pads all lists of a
column to one length; such columns of other files are kept from the first to the last slot in which a column of this
length has a value, and marked as ``padded``.

Every column has the smallest integer type that fits, and history columns of equal lengths share their offsets: two
histories of 9 items on average and four scalars take about 50 bytes a row. The cache is in ``columns/<file stem>/``. It
is written to a temporary directory and renamed, so that loaders in several processes can make it at the same time, and
has the parquet's fingerprint in its name, so that a changed file is never read through an old cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ctr_pe.data.dataset import hash_of_file
from ctr_pe.data.root import REPORT
from ctr_pe.utils.errors import UserError, nearest
from ctr_pe.utils.files import scratch_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FORMAT = 2
CHUNK_ROWS = 65_536
TAIL = 1 << 20  # bytes of a parquet file that hold its footer
Array = npt.NDArray[Any]
Chunk = tuple[pa.Array, pa.Array, Array | None]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Want:
    """What the feature map asks of a column. ``kind``: "label", "categorical", "sequence", "meta", "numeric",
    "weight", of a row, or "embedding", a vector per row. ``values``: ids of a field with several categories, in each
    row or history item."""

    kind: str
    vocab_size: int | None = None
    max_len: int | None = None
    values: int | None = None


@dataclass
class Column:
    """One column on disk; ``shortest`` and ``longest``: of the parquet's own lists; ``padded`` by FuxiCTR."""

    file: str
    dtype: str = ""
    offsets: str | None = None  # of a list column
    least: float = 0
    most: float = 0
    values: int = 0
    shortest: int = sys.maxsize
    longest: int = 0
    truncated: int = 0
    padded: bool = False


class Columns:
    """The opened columns of one parquet file.

    Attributes:
        rows: how many.
        data: column name to its values, flat for a history; of several categories (n, values).
        offsets: (rows + 1,) per offsets file; row i of a history is ``offsets[i]:offsets[i + 1]``.
        spans: history column to its offsets file.
        truncated: history column to the rows that were cut to their most recent ``max_len`` items.
        padded: history columns that may begin or end with FuxiCTR's padding.

    Raises:
        UserError: a missing column, null values, an id outside the vocabulary, a label other than 0 and 1, a column of
            the wrong type, a file that is not parquet or has no rows.
    """

    def __init__(self, parquet: Path, wants: Mapping[str, Want]) -> None:
        self.parquet = parquet
        folder = _open_or_make(parquet, wants)
        index = json.loads((folder / "index.json").read_text())
        self.rows: int = index["rows"]
        self.data: dict[str, Array] = {}
        self.offsets: dict[str, Array] = {}
        self.spans: dict[str, str] = {}
        self.truncated: dict[str, int] = {}
        self.padded: set[str] = set()
        for name, want in wants.items():
            column = Column(**index["columns"][name])
            worst = column.least if column.least < 0 else column.most
            if want.vocab_size is not None and not 0 <= worst < want.vocab_size:
                known = f"0 … {want.vocab_size - 1}"
                raise UserError(f"{parquet}: column '{name}' has id {worst}, outside its vocabulary {known}")
            data = _map(folder / column.file, column.dtype)
            self.data[name] = data if want.values is None else data.reshape(-1, want.values)
            if column.offsets is not None:
                self.spans[name] = column.offsets
                self.truncated[name] = column.truncated
                self.padded |= {name} if column.padded else set()
                self.offsets[column.offsets] = _map(folder / column.offsets, index["offsets_dtype"])


def _map(path: Path, dtype: str) -> Array:
    if path.stat().st_size == 0:  # every history is empty; an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r"))  # a plain array: numpy's memmap class is slow to index


def _fingerprint(parquet: Path) -> str:
    """Of the file's size, time and end, in which the footer lists the statistics of all columns."""
    try:
        with parquet.open("rb") as file:
            stat = os.fstat(file.fileno())
            file.seek(max(0, stat.st_size - TAIL))
            end = file.read()
    except OSError as error:
        raise UserError(f"{parquet}: {error.strerror}") from None
    if len(end) < 12 or not end.endswith(b"PAR1"):
        raise UserError(f"{parquet}: not a complete parquet file")
    return hashlib.blake2b(f"{stat.st_size} {stat.st_mtime_ns} ".encode() + end, digest_size=8).hexdigest()


def _is_ours(parquet: Path) -> bool:
    """Whether a data set of this package has the file."""
    for folder in (parquet.parent, parquet.parent.parent):  # a file of a split, or a shard
        try:
            files = json.loads((folder / REPORT).read_text(encoding="utf-8"))["files"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if parquet.relative_to(folder).as_posix() in files:
            return True
    return False


def _open_or_make(parquet: Path, wants: Mapping[str, Want]) -> Path:
    # The vocabulary is checked at each opening and does not change what is stored.
    stored, ours = (
        {
            name: [want.kind, want.max_len, *([want.values] if want.values else [])]
            for name, want in sorted(wants.items())
        },
        _is_ours(parquet),
    )
    wanted = hashlib.blake2b(json.dumps([FORMAT, ours, stored]).encode(), digest_size=8).hexdigest()
    fingerprint = _fingerprint(parquet)
    home = parquet.parent / "columns" / parquet.stem
    folder = home / f"{fingerprint}-{wanted}"
    if folder.exists():
        return folder
    try:
        home.mkdir(parents=True, exist_ok=True)
        with scratch_folder(home) as scratch:
            made = scratch / "columns"
            made.mkdir()
            _make(parquet, wants, made, ours)
            try:
                made.rename(folder)
            except OSError:  # another process was faster
                if not folder.exists():
                    raise
    except OSError as error:
        raise UserError(f"{home}: cannot make the columns of {parquet.name}: {error.strerror or error}") from None
    for other in home.iterdir():
        if re.fullmatch("[0-9a-f]{16}-[0-9a-f]{16}", other.name) and not other.name.startswith(fingerprint):
            shutil.rmtree(other, ignore_errors=True)
    return folder


def _make(parquet: Path, wants: Mapping[str, Want], folder: Path, ours: bool) -> None:
    """Two passes by row group: the first checks everything and finds the types, the second writes."""
    try:
        with pq.ParquetFile(parquet) as file:
            for name in wants:
                if name not in file.schema_arrow.names:
                    raise UserError(f"{parquet}: no column '{name}'; {nearest(name, file.schema_arrow.names)}")
            if file.metadata.num_rows == 0:
                raise UserError(f"{parquet}: no rows")
            columns = _survey(file, parquet, wants, ours)
            offsets_dtype = np.min_scalar_type(max(column.values for column in columns.values())).name
            _write(file, wants, columns, folder, offsets_dtype)
            rows = file.metadata.num_rows
    except pa.ArrowException as error:
        raise UserError(f"{parquet}: {str(error).splitlines()[0]}") from None
    for name, column in columns.items():
        if column.truncated:
            log.warning(
                "%s: column '%s': %d of %d histories are longer than max_len %s; the most recent items are kept",
                *(parquet, name, column.truncated, rows, wants[name].max_len),
            )
    described = {name: asdict(column) for name, column in columns.items()}
    index = {"rows": rows, "offsets_dtype": offsets_dtype, "columns": described}
    (folder / "index.json").write_text(json.dumps(index, indent=1))


def _chunks(file: pq.ParquetFile, wants: Mapping[str, Want]) -> Iterator[dict[str, Chunk]]:
    """Block by block, per column: its rows, their values in one flat array, and of lists the rows' lengths."""
    for batch in batches(file, CHUNK_ROWS, list(wants)):
        block: dict[str, Chunk] = {}
        for name, want in wants.items():
            chunk = array = batch.column(name)
            several = want.values is not None
            if several and pa.types.is_fixed_size_list(array.type):
                block[name] = chunk, array.flatten(), None
                continue
            if pa.types.is_fixed_size_list(array.type):
                array = array.cast(pa.list_(array.type.value_type))
            if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
                flat = array.flatten()
                block[name] = chunk, flat.flatten() if several else flat, np.diff(array.offsets.to_numpy())
            else:
                block[name] = chunk, array, None
        yield block


def batches(file: pq.ParquetFile, rows: int, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
    """All rows, one row group after the other: read in one call, all would stay in memory to the end."""
    for group in range(file.num_row_groups):
        yield from file.iter_batches(rows, row_groups=[group], columns=columns)


def _survey(file: pq.ParquetFile, parquet: Path, wants: Mapping[str, Want], ours: bool) -> dict[str, Column]:
    columns = {name: Column(file=f"{i}.values") for i, name in enumerate(wants)}
    for name, (chunk, flat, lengths) in chain.from_iterable(block.items() for block in _chunks(file, wants)):
        column, kind = columns[name], wants[name].kind
        nulls = chunk.null_count + (flat.null_count if lengths is not None else 0)
        if nulls:
            raise UserError(f"{parquet}: column '{name}' has null values ({nulls} in one block of rows)")
        is_list = kind in ("sequence", "embedding")
        if (lengths is None and wants[name].values is None) if is_list else (lengths is not None and kind != "meta"):
            raise UserError(f"{parquet}: column '{name}' holds {chunk.type}, but the feature map calls it {kind}")
        values = flat.to_numpy(zero_copy_only=False)
        allowed = "biuf" if kind in ("label", "numeric", "embedding", "weight") else "biu"
        if values.dtype.kind not in allowed:
            raise UserError(f"{parquet}: column '{name}' holds {chunk.type}; a {kind} column needs integers")
        if lengths is not None:
            column.offsets = column.file.replace("values", "offsets")
            column.shortest = min(column.shortest, int(lengths.min()))
            column.longest = max(column.longest, int(lengths.max()))
        if len(values):
            if kind == "label" and len(wrong := values[~np.isin(values, (0, 1))]):
                raise UserError(f"{parquet}: label column '{name}' has value {wrong[0]}; labels are 0 or 1")
            least, most = values.min().item(), values.max().item()
            if not np.isfinite([least, most]).all():
                raise UserError(f"{parquet}: column '{name}' has values that are not finite")
            if kind == "weight" and least < 0:
                raise UserError(f"{parquet}: column '{name}' has the weight {least:g}; a weight is 0 or more")
            column.least, column.most = min(least, column.least), max(most, column.most)
            column.values += len(values)
    for name, column in columns.items():
        kind = wants[name].kind
        if kind == "embedding" and column.shortest != column.longest:
            dims = f"{column.shortest} … {column.longest}"
            raise UserError(f"{parquet}: column '{name}' has vectors of {dims} numbers, but all rows need the same")
        jagged = kind == "sequence" and wants[name].values is None
        column.padded = not ours and jagged and 0 < column.shortest == column.longest
        smallest = np.result_type(np.min_scalar_type(int(column.least)), np.min_scalar_type(int(column.most)))
        floats = kind in ("numeric", "embedding", "weight")
        column.dtype = "float32" if floats else "uint8" if kind == "label" else smallest.name
    return columns


def _write(
    file: pq.ParquetFile, wants: Mapping[str, Want], columns: Mapping[str, Column], folder: Path, offsets_dtype: str
) -> None:
    ends = dict.fromkeys(columns, 0)
    with ExitStack() as stack:
        names = [name for column in columns.values() for name in (column.file, column.offsets) if name]
        files = {name: stack.enter_context((folder / name).open("wb")) for name in names}
        for column in columns.values():
            if column.offsets:
                files[column.offsets].write(np.zeros(1, offsets_dtype).tobytes())
        for block in _chunks(file, wants):
            flat = {name: chunk[1].to_numpy(zero_copy_only=False) for name, chunk in block.items()}
            flat |= {name: flat[name].reshape(-1, want.values) for name, want in wants.items() if want.values}
            filled = _filled(flat, columns, wants)
            for name, column in columns.items():
                values, lengths = flat[name], block[name][2]
                if lengths is not None and column.offsets:
                    begin, end = filled.get(column.longest if column.padded else 0, (np.zeros_like(lengths), lengths))
                    if (most := wants[name].max_len) is not None:
                        column.truncated += int(np.count_nonzero(end - begin > most))
                        begin = begin if column.padded else np.maximum(begin, end - most)
                    values, lengths = _cut(values, lengths, begin, end)
                    offsets = ends[name] + np.cumsum(lengths)
                    ends[name] += int(lengths.sum())
                    files[column.offsets].write(offsets.astype(offsets_dtype).tobytes())
                files[column.file].write(values.astype(column.dtype, copy=False).tobytes())
    kept: dict[str, str] = {}
    for column in columns.values():
        if column.offsets:
            same = kept.setdefault(hash_of_file(folder / column.offsets), column.offsets)
            if same != column.offsets:
                (folder / column.offsets).unlink()
                column.offsets = same


def _filled(
    flat: Mapping[str, Array], columns: Mapping[str, Column], wants: Mapping[str, Want]
) -> dict[int, tuple[Array, Array]]:
    """Per width of padded columns: where the slots in which any of them has a value begin and end, in each row; without
    those that are older than the ``max_len`` newest of every column."""
    found = {}
    for width in {column.longest for column in columns.values() if column.padded}:
        same = [name for name, column in columns.items() if column.padded and column.longest == width]
        real = {name: flat[name].reshape(-1, width) != 0 for name in same}
        begin, end = _range(np.logical_or.reduce(list(real.values())))
        limits = {name: limit for name in same if (limit := wants[name].max_len) is not None and limit < width}
        if len(limits) == len(same):
            own = {name: np.where(real[name].any(axis=1), _range(real[name])[1], end) for name in same}
            begin = np.maximum(begin, np.min([own[name] - limit for name, limit in limits.items()], axis=0))
        found[width] = begin, end
    return found


def _range(real: Array) -> tuple[Array, Array]:
    """(n, width) bool -> where the first True is and what comes after the last, (n,) each; 0 and 0 without one."""
    return real.argmax(axis=1), np.where(real.any(axis=1), real.shape[1] - real[:, ::-1].argmax(axis=1), 0)


def _cut(values: Array, lengths: Array, begin: Array, end: Array) -> tuple[Array, Array]:
    """Of lists with ``lengths``, what lies from ``begin`` to ``end``: values and lengths."""
    if not begin.any() and (end is lengths or (end == lengths).all()):
        return values, lengths
    slot = np.arange(len(values)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    keep = (slot >= np.repeat(begin, lengths)) & (slot < np.repeat(end, lengths))
    return values[keep], end - begin
