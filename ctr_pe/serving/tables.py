"""Tables as people have them: polars, pandas or pyarrow in memory, or in files; and their columns as keys and times."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from ctr_pe.config.columns import Behaviours
from ctr_pe.data.id_map import TEXTS, categories
from ctr_pe.data.logs.labels import threshold
from ctr_pe.data.logs.places import place
from ctr_pe.data.logs.roles import keys
from ctr_pe.data.logs.tables import Place, readable, scan
from ctr_pe.utils.errors import UserError, nearest, reason

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

AnyTable: TypeAlias = "pl.DataFrame | pl.LazyFrame | pd.DataFrame | pa.Table | str | Path"


def lazy(table: AnyTable, what: str) -> pl.LazyFrame:
    """A table of any kind as a polars LazyFrame; a file is not read yet.

    Raises:
        UserError: no table, or a file that is not there or of another kind.
    """
    if isinstance(table, pl.LazyFrame):
        return table
    if isinstance(table, pl.DataFrame):
        return table.lazy()
    if isinstance(table, (str, Path)):
        return scan(place(table))
    try:
        if type(table).__module__.partition(".")[0] in ("pandas", "pyarrow") and hasattr(table, "columns"):
            return pl.DataFrame(table, nan_to_null=True).lazy()
    except (TypeError, ValueError, pl.exceptions.PolarsError) as error:
        raise UserError(f"{what}: {str(error).splitlines()[0]}") from None
    found = f"{type(table).__module__}.{type(table).__qualname__}".removeprefix("builtins.")
    raise UserError(f"{what}: a polars, pandas or pyarrow table, or the path of one, not {found}")


def frame(table: AnyTable, what: str) -> pl.DataFrame:
    """The same in memory."""
    with _readable(table, what):
        return lazy(table, what).collect()


def _readable(table: AnyTable, what: str) -> AbstractContextManager[None]:
    return readable(place(table) if isinstance(table, (str, Path)) else Path(what))


def schema(table: AnyTable, what: str) -> pl.Schema:
    """The columns of a table and their types; raises UserError as :func:`frame`."""
    with _readable(table, what):
        return lazy(table, what).collect_schema()


def as_file(table: AnyTable, folder: Path, name: str) -> Place:
    """The place of a table: its own, or that of a parquet file written into ``folder``."""
    if isinstance(table, (str, Path)):
        return place(table)
    file = folder / f"{name}.parquet"
    lazy(table, name).sink_parquet(file)
    return file


def series(given: Any, name: str, what: str) -> pl.Series:
    """Raw ids in memory, such as a list, as a column. Raises UserError for values that are not of one type."""
    try:
        return pl.Series(name, given)
    except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError) as error:
        raise UserError(f"{what}: no raw ids of one type: {reason(error)}") from None


def check_there(name: str, names: Collection[str], what: str) -> None:
    """Raises UserError if ``names``, all columns of a table, lack one."""
    if name not in names:
        raise UserError(f"{what}: no column '{name}': {nearest(name, names)}")


def several_names(given: Any) -> Any:
    """Several names, in whatever holds them, as a tuple. A single text stays one, which checks refuse: its letters are
    no names."""
    return given if given is None or isinstance(given, str) else tuple(given)


def column(table: pl.DataFrame, name: str, what: str) -> pl.Series:
    """A column without null values.

    Raises:
        UserError: there is none of this name, or it has nulls.
    """
    check_there(name, table.columns, what)
    if nulls := table[name].null_count():
        raise UserError(f"{what}: column '{name}' has null values: {nulls:,} of {table.height:,} rows")
    return table[name]


def of_log(table: pl.DataFrame, name: str, what: str) -> pl.Series:
    """A declared column, whose missing values are values. Raises UserError if there is none of this name."""
    check_there(name, table.columns, what)
    return table[name]


def key_columns(table: AnyTable, names: Sequence[str], what: str) -> list[str]:
    """Those of the columns that can hold raw ids: integers, texts, floats that are whole, or no value at all."""
    with _readable(table, what):
        frame = lazy(table, what)
        kinds = frame.collect_schema()
        floats = [name for name in names if kinds[name].is_float()]
        whole = [((pl.col(name).fill_nan(None) % 1).fill_nan(1) == 0).all().alias(name) for name in floats]
        found = frame.select(whole).collect().row(0, named=True) if whole else {}
    return [name for name in names if kinds[name].is_integer() or kinds[name] in (*TEXTS, pl.Null) or found.get(name)]


def ids(table: pl.DataFrame, name: str, what: str, kind: pl.DataType | None = None, of: str = "") -> pl.Series:
    """A column of raw ids, as :func:`keys`; if it has rows of the type ``kind``, which that of ``of`` has."""
    values = keys(column(table, name, what), what)
    if nulls := values.null_count():  # NaN
        raise UserError(f"{what}: column '{name}' has null values: {nulls:,} of {table.height:,} rows")
    if kind is not None and len(values) and values.dtype != kind:
        raise UserError(f"{what}: column '{name}' holds {values.dtype}, {of} {kind}")
    return values


def labels(table: pl.DataFrame, name: str, what: str) -> npt.NDArray[np.bool_]:
    """(n,) a label column of 0 and 1, or booleans; or of numbers with a threshold."""
    limit = threshold(name, table.columns)
    values = column(table, limit.column if limit else name, what)
    if limit and values.dtype.is_numeric():
        values = limit.holds(values.cast(pl.Float64) if values.dtype.is_decimal() else values).alias(name)
        if nulls := values.null_count():
            raise UserError(f"{what}: column '{limit.column}' has missing values: {nulls:,} of {table.height:,} rows")
    if not (values.dtype.is_numeric() or values.dtype == pl.Boolean) or not values.cast(pl.Float64).is_in([0, 1]).all():
        raise UserError(f"{what}: label column '{values.name}' holds {values.dtype}, not only 0 and 1")
    return values.cast(pl.Boolean).to_numpy()


def weights(table: pl.DataFrame, name: str, what: str) -> npt.NDArray[np.float32]:
    """(n,) a column of weights of 0 or more."""
    values = column(table, name, what)
    if not (values.dtype.is_numeric() or values.dtype == pl.Boolean):
        raise UserError(f"{what}: weight column '{name}' holds {values.dtype}, not numbers")
    found = values.cast(pl.Float64).to_numpy()
    if len(strange := np.flatnonzero(~((found >= 0) & np.isfinite(found)))):
        row = strange[0]
        raise UserError(f"{what}: weight column '{name}' holds {found[row]:g} in row {row + 1}: a weight is 0 or more")
    return found.astype(np.float32)


def newest(
    events: pl.LazyFrame,
    user: str,
    item: str,
    clock: Sequence[str],
    count: int,
    fields: Sequence[str] = (),
    behaviours: Behaviours | None = None,
) -> pl.DataFrame:
    """The last ``count`` events of every user, of each of its listed behaviours, by ``clock``, then by item: columns
    user, item, those of the clock and ``fields``."""
    kept = [item, *clock, *fields]
    owner = [user]
    if behaviours:
        name, owner = behaviours.column, [user, behaviours.column]
        events = events.with_columns(pl.col(name).map_batches(categories, return_dtype=pl.String, is_elementwise=True))
        events = events.filter(pl.col(name).is_in(behaviours.texts))
    last = events.group_by(owner).agg(pl.col(kept).top_k_by([*clock, item], count))
    return last.explode(kept, empty_as_null=False).sort(user, *clock, item).collect(engine="streaming")
