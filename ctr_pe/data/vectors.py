"""Pretrained vectors of a vocabulary's values: from a file or from a list column, as FuxiCTR's layer reads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import h5py
import numpy as np
import polars as pl

from ctr_pe.data.dataset import ITEM
from ctr_pe.data.id_map import UNSEEN, Array, texts
from ctr_pe.utils.errors import UserError, nearest, no_such_file

if TYPE_CHECKING:
    from ctr_pe.config.columns import DeclaredColumn


@dataclass(frozen=True)
class ItemVectorTable:
    """``keys`` (n,) texts, all different, and the vector of each, ``values`` (n, dim) float32."""

    keys: pl.Series
    values: Array

    @property
    def dim(self) -> int:
        return int(self.values.shape[1])

    def found(self, wanted: pl.Series) -> pl.Series:
        """(n,) the keys that these raw values have as texts; null for one without a vector."""
        keys = texts(wanted)
        return keys.set(~keys.is_in(self.keys.implode()).fill_null(False), None)

    def among(self, keys: pl.Series) -> ItemVectorTable:
        """Those of these keys."""
        there = self.keys.is_in(keys.drop_nulls().implode())
        return ItemVectorTable(self.keys.filter(there), self.values[there.to_numpy()])

    def over(self, earlier: ItemVectorTable | None) -> ItemVectorTable:
        """These, and the earlier ones of all other keys."""
        if earlier is None:
            return self
        if earlier.dim != self.dim and len(self.keys):
            raise UserError(f"vectors of {self.dim} numbers, where the earlier ones have {earlier.dim}")
        old = ~earlier.keys.is_in(self.keys.implode())
        values = np.concatenate([self.values.reshape(-1, earlier.dim), earlier.values[old.to_numpy()]])
        return ItemVectorTable(pl.concat([self.keys, earlier.keys.filter(old)]), values)

    def write(self, file: Path) -> None:
        """In FuxiCTR's form; the vector of values without one is zeros."""
        values = np.concatenate([self.values, np.zeros((1, self.dim), np.float32)])
        np.savez(file, key=np.array([*self.keys, UNSEEN], str), value=values)

    @classmethod
    def read(cls, file: Path) -> ItemVectorTable:
        """What :meth:`write` wrote."""
        with np.load(file, allow_pickle=False) as content:
            return cls(pl.Series(content["key"][:-1].tolist(), dtype=pl.String), content["value"][:-1])


def file_of(name: str) -> str:
    """The file of a feature's vectors in a data set."""
    return f"pretrained_{name}.npz"


def item_vectors(name: str, spec: DeclaredColumn, table: pl.DataFrame, id_column: str, what: str) -> ItemVectorTable:
    """The vectors of a declared column: of the column of a table ``what`` of items, or of the file that ``spec`` names,
    where ``id_column`` may be a parquet file's column of ids.

    Raises UserError for vectors that are not numbers, or not of one length.
    """
    items = table[ITEM]
    if name in table.columns:
        return _checked(f"{what}: embedding column '{name}'", items, _lists(table[name], spec.splitter))
    if spec.pretrained_emb is None:
        raise UserError(f"{what}: no item column '{name}': {nearest(name, table.columns)}")
    file = Path(str(spec.pretrained_emb))
    if file.suffix == ".npy" and file.is_file():
        values = _opened(file, np.load)
        if values.ndim != 2 or len(values) != len(items):
            shape = " × ".join(map(str, values.shape))
            raise UserError(f"{file}: {shape} numbers for the {len(items):,} rows of {what}: a row per item, in order")
        keys = items
    elif file.suffix == ".parquet" and file.is_file() and id_column in (there := pl.read_parquet_schema(file)):
        if name not in there:
            raise UserError(f"{file}: no column '{name}': {nearest(name, there)}")
        content = pl.read_parquet(file, columns=[id_column, name])
        return _checked(f"{file}: column '{name}'", content[id_column], _lists(content[name], spec.splitter))
    else:
        known, values = vectors_of(file)
        keys = pl.Series([key.decode() if isinstance(key, bytes) else str(key) for key in known.tolist()])
    return _checked(str(file), keys, pl.Series(np.asarray(values, np.float32)).arr.to_list())


def _lists(values: pl.Series, splitter: str) -> pl.Series | None:
    """As lists of float32; None where they are no numbers."""
    if values.dtype == pl.String:
        values = values.str.split(splitter)
    elif isinstance(values.dtype, pl.Array):
        values = values.arr.to_list()
    if values.dtype == pl.Null:
        return values.cast(pl.List(pl.Float32))
    try:
        return values.cast(pl.List(pl.Float32)) if isinstance(values.dtype, pl.List) else None
    except pl.exceptions.PolarsError:
        return None


def _checked(what: str, items: pl.Series, lists: pl.Series | None) -> ItemVectorTable:
    """Without those that are missing or have a number that is not finite."""
    if lists is None:
        raise UserError(f"{what} holds no lists of numbers")
    table = pl.DataFrame({"key": texts(items), "list": lists}).with_row_index("row", 1)
    bad = pl.col("list").list.eval(~pl.element().is_finite().fill_null(False)).list.any()
    table = table.filter(pl.col("key").is_not_null() & (pl.col("list").list.len() > 0) & ~bad)
    if not table.height:
        return ItemVectorTable(table["key"], np.zeros((0, 0), np.float32))
    lengths = table["list"].list.len()
    if len(other := table.filter(lengths != lengths[0])):
        found = f"{len(other['list'][0])} numbers in row {other['row'][0]}, {lengths[0]} in row {table['row'][0]}"
        raise UserError(f"{what} has {found}: vectors have one length")
    if repeated := table.height - table["key"].n_unique():
        raise UserError(f"{what} has {repeated:,} of {table.height:,} vectors of items that have another")
    return ItemVectorTable(table["key"], table["list"].list.to_array(lengths[0]).to_numpy())


def vectors_of(file: Path) -> tuple[Any, Any]:
    """Original ids (n,) that have a vector, and the vectors (n, dim) of an .h5, .npz or .parquet file with ``key``
    and ``value``. All these ids are known to a vocabulary: one that train rows lack may occur in test rows.

    Raises:
        UserError: another kind of file, a missing key or value, vectors that are not one of equal dim per id.
    """
    if not file.is_file():
        raise no_such_file(file)
    readers: dict[str, Any] = {".h5": h5py.File, ".npz": np.load, ".parquet": _lists_of}
    if file.suffix not in readers:
        raise UserError(f"{file}: pretrained vectors are in {', '.join(readers)} files")
    try:
        content = readers[file.suffix](file)
        if missing := {"key", "value"} - set(content):
            raise KeyError(f"no data set '{min(missing)}'; {nearest(min(missing), content)}")
        keys, values = content["key"][:], content["value"]  # those of an .h5 file stay on disk
    except (OSError, KeyError, IndexError, ValueError, BadZipFile, pl.exceptions.PolarsError) as error:
        reason = str(error.args[0] if isinstance(error, KeyError) else error).splitlines()[0]
        raise UserError(f"{file}: no {file.suffix} file with 'key' and 'value' ({reason})") from None
    if len(values.shape) != 2 or keys.shape != values.shape[:1]:
        raise UserError(f"{file}: {len(keys)} keys, values of shape {values.shape}: one vector per key is needed")
    return keys, values


def _opened(file: Path, reader: Any) -> Array:
    try:
        found: Array = reader(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: no {file.suffix} file ({str(error).splitlines()[0]})") from None
    return found


def _lists_of(file: Path) -> dict[str, Any]:
    content = pl.read_parquet(file, columns=["key", "value"])
    values = content["value"]
    if isinstance(values.dtype, pl.List):
        values = values.list.to_array(len(values[0]) if len(values) else 0)  # an error where dims differ
    return {"key": content["key"].to_numpy(), "value": values.to_numpy().astype(np.float32)}
