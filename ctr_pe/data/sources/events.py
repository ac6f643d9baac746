"""Reading a log of interactions: lazily, checked, in blocks of whole users that fit into memory."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import polars as pl

from ctr_pe.data.dataset import SPLITS
from ctr_pe.errors import UserError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ctr_pe.data.recipe import Recipe

ITEM = "item_id"  # the item's column in every data set
BLOCK = 500_000  # events read at once
PART = 4_000_000  # events partitioned into blocks at once; polars may hold all of them
BINS = 1 << 20  # resolution of a split by time, of the log's time span

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Events:
    """E events of the users of one block, sorted by user, then order, time, item."""

    user: Ints  # (E,) 0, 1, …, without gaps
    code: Ints  # (E,) the item's row in the catalogue
    time: Ints | None  # (E,) in the log's unit
    positive: Bools  # (E,)
    split: npt.NDArray[np.uint8]  # (E,) index into SPLITS, if the log determines it
    first: Ints  # (E,) index of the user's first event
    tie: Ints  # (E,) index of the first event that this one is not later than
    tied: int  # events at the same time as the event before
    repeated: int  # events that repeat the key of another
    contradictions: int  # events whose time is before that of an event with a smaller order


class Log:
    """A checked log. Raises UserError, one line with counts, for any mistake in it.

    Attributes: ``catalogue`` one row per item of the log, sorted by ``item_id``, with its attributes; ``items`` the
    same for every item of the file of items, nulls where an attribute is missing; ``rows``
    read, ``dropped`` by rule and ``kept``; ``timed`` and ``ordered`` whether it has the column.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.file = recipe, recipe.interactions
        with _readable(self.file):
            raw = scan(self.file)
            schema = raw.collect_schema()
            if raw.head(1).collect().is_empty():
                raise UserError(f"{self.file}: an empty log: no rows, columns {', '.join(schema)}")
            columns = self._columns(schema)
            self.timed, self.ordered = "time" in columns, "order" in columns
            if not (self.timed or self.ordered):
                raise UserError(
                    f"{self.file}: neither a time nor an order column: --time or --order: {nearest('time', schema)}"
                )
            self._events = self._checked(raw, columns)
            self.catalogue, self.items = self._catalogue()
            if recipe.protocol == "impressions":
                self._events = self._split()

    def blocks(self, folder: Path, size: int = BLOCK) -> list[pl.LazyFrame]:
        """The events in blocks of whole users, about ``size`` events each; several are files below ``folder``."""
        codes = self.catalogue.lazy().select(item=ITEM, code=pl.int_range(pl.len(), dtype=pl.Int64))

        def coded(events: pl.LazyFrame) -> pl.LazyFrame:
            return events.join(codes, on="item", how="left").drop("item")

        count = -(-self.kept // size)
        with _readable(self.file):
            if count == 1:
                return [coded(self._events).collect(engine="streaming").lazy()]
            block = pl.col("user").hash(seed=0) % count
            for start in range(0, self.kept, PART):
                into = pl.PartitionBy(folder / str(start), key={"block": block}, include_key=False)
                coded(self._events.slice(start, PART)).sink_parquet(into, mkdir=True)
        names = sorted({path.name for path in folder.glob("*/*")})
        return [pl.scan_parquet(sorted(folder.glob(f"*/{name}"))) for name in names]

    def events(self, block: pl.LazyFrame) -> Events:
        """One block, sorted, whatever the order of the rows in the log."""
        din = self.recipe.protocol == "din"
        keys = [key for key in ("order", "time") if key in block.collect_schema()]
        frame = block.sort("user", *keys, "code").with_columns(user=pl.col("user").rle_id()).collect()
        user, code = (frame[name].to_numpy().astype(np.int64) for name in ("user", "code"))
        time = frame["time"].to_numpy() if self.timed else None
        new_user = _changes(user)
        later = new_user | _changes(frame[keys[0]].to_numpy())
        same_time = np.zeros(len(user), bool) if time is None else ~(new_user | _changes(time))
        repeated = ~later
        if not (din and self.ordered):  # else a user cannot have clicked two items at the same order
            repeated &= ~_changes(code) & (same_time | (not self.timed))
        return Events(
            user=user,
            code=code,
            time=time,
            positive=np.ones(len(user), bool) if din else frame["label"].to_numpy() == 1,
            split=np.zeros(len(user), np.uint8) if din else frame["split"].to_numpy(),
            first=_last_true(new_user),
            tie=_last_true(later),
            tied=int(same_time.sum()),
            repeated=int(repeated.sum()),
            contradictions=0 if time is None else int((~new_user[1:] & (time[1:] < time[:-1])).sum()),
        )

    def _columns(self, schema: pl.Schema) -> dict[str, pl.Expr]:
        """The columns of the log that are used, by role, cast to their types."""
        recipe, columns = self.recipe, {}
        needed = {"user", "item"} if recipe.protocol == "din" else {"user", "item", "label"}
        if "label" in needed and recipe.label is None:
            raise UserError(
                f"{self.file}: protocol impressions needs a label column: --label: {nearest('label', schema)}"
            )
        for role in ("user", "item", "time", "order", "label"):
            name = getattr(recipe, role)
            if name is not None and (name in schema or role in needed or recipe.demanded(role)):
                columns[role] = _typed(self.file, role, name, schema, recipe.time_unit)
        if recipe.split:
            columns["split"] = pl.col(recipe.split.column)
        used = [("drop", name) for name in recipe.drop] + ([("split", recipe.split.column)] if recipe.split else [])
        for key, name in used:
            if name not in schema:
                raise UserError(f"{self.file}: no column '{name}' for '{key}': {nearest(name, schema)}")
        return columns

    def _checked(self, raw: pl.LazyFrame, columns: dict[str, pl.Expr]) -> pl.LazyFrame:
        """The kept events; counts what is dropped and raises errors for nulls and bad labels."""
        rules = {
            f"{name} = {value}": pl.col(name).is_in(value if isinstance(value, list) else [value])
            for name, value in self.recipe.drop.items()
        }
        din = self.recipe.protocol == "din"
        if din and "label" in columns:
            rules[f"{self.recipe.label} = 0"] = columns["label"] == 0  # a log of impressions: positives only
        keep, hits = pl.lit(True), {}
        for rule, expression in rules.items():
            hit = expression.fill_null(False)
            hits[rule] = (keep & hit).sum()  # a row counts for the first rule that matches it
            keep = keep & ~hit
        counts = raw.select(pl.len().alias("rows"), **hits).collect(engine="streaming").row(0, named=True)
        self.rows = counts.pop("rows")
        self.dropped: dict[str, int] = counts
        self.kept = self.rows - sum(counts.values())
        if not self.kept:
            dropped = ", ".join(f"{count:,} with {rule}" for rule, count in counts.items() if count) or "none"
            raise UserError(f"{self.file}: no rows to build from: {self.rows:,} read; dropped: {dropped}")
        events = raw.filter(keep).select(**columns)
        nulls = events.null_count().collect(engine="streaming").row(0, named=True)
        names = {role: column.meta.root_names()[0] for role, column in columns.items()}
        if found := ", ".join(f"{names[role]}: {count:,}" for role, count in nulls.items() if count):
            raise UserError(
                f"{self.file}: null values: {found} of {self.rows:,} rows; drop them or name another column"
            )
        if "label" in columns:
            self._check_labels(events)
        return events.drop("label", strict=False) if din else events

    def _check_labels(self, events: pl.LazyFrame) -> None:
        values = events.group_by("label").len().sort("len", descending=True).head(5).collect(engine="streaming")
        found = dict(values.iter_rows())
        counts = ", ".join(f"{value}: {count:,}" for value, count in found.items())
        where = f"{self.file}: label column '{self.recipe.label}'"
        if strange := [value for value in found if value not in (0, 1)]:
            raise UserError(f"{where} holds {strange[0]}, not only 0 and 1 ({counts})")
        if self.recipe.protocol == "impressions" and len(found) == 1:
            raise UserError(f"{where} is of one class only ({counts})")

    def _catalogue(self) -> tuple[pl.DataFrame, pl.DataFrame]:
        """The items of the log with their attributes, and all that the file of items has."""
        catalogue = self._events.select(pl.col("item").alias(ITEM)).unique().sort(ITEM).collect(engine="streaming")
        recipe, file = self.recipe, self.recipe.items
        demanded = recipe.demanded("attributes")
        if file is None:
            if demanded and recipe.attributes:
                raise UserError(f"attributes {', '.join(recipe.attributes)}: need a file of items: --items")
            return catalogue, catalogue
        with _readable(file):
            frame = scan(file)
            schema = frame.collect_schema()
            columns = {ITEM: _typed(file, "item", recipe.item, schema)}
            names = [name for name in recipe.attributes or () if name in schema or demanded]
            if ITEM in names:
                raise UserError(f"{file}: attribute '{ITEM}' would take the name of the item's own column: rename it")
            items = frame.select(
                **columns, **{name: _typed(file, "attribute", name, schema) for name in names}
            ).collect()
        if items[ITEM].dtype != catalogue[ITEM].dtype:
            types = f"{items[ITEM].dtype} in {file}, {catalogue[ITEM].dtype} in {self.file}"
            raise UserError(f"item column '{recipe.item}': different types: {types}")
        if nulls := items[ITEM].null_count():
            raise UserError(f"{file}: null values: {recipe.item}: {nulls:,} of {items.height:,} rows")
        if repeated := items.height - items[ITEM].n_unique():
            raise UserError(f"{file}: {repeated:,} of {items.height:,} rows repeat another row's {recipe.item}")
        whole = catalogue.join(items, on=ITEM, how="left", maintain_order="left")
        lacking = {"row here": catalogue.join(items, on=ITEM, how="anti")}
        lacking |= {f"'{name}'": whole.filter(pl.col(name).is_null()) for name in names}
        for what, without in lacking.items():
            if without.height:
                some = ", ".join(map(str, without[ITEM].head(3))) + (", …" if without.height > 3 else "")
                raise UserError(
                    f"{file}: {without.height:,} ({some}) of {whole.height:,} items of the log have no {what}"
                )
        return whole, items.sort(ITEM)

    def _split(self) -> pl.LazyFrame:
        """The events with their column ``split``, index into SPLITS, by the recipe's column or by time."""
        if split := self.recipe.split:
            is_test, is_valid = pl.col("split") == split.test, pl.col("split") == split.valid
        elif self.timed:
            valid, test = self._cut_times()
            is_test, is_valid = pl.col("time") >= test, pl.col("time") >= valid
        else:
            raise UserError(f"{self.file}: no time column to split by: --time, or 'split' in a recipe")
        index = pl.when(is_test).then(2).when(is_valid).then(1).otherwise(0).cast(pl.UInt8)
        events = self._events.with_columns(split=index)
        classes = events.group_by("split").agg(rows=pl.len(), ones=(pl.col("label") == 1).sum()).collect()
        counts = {number: (rows, ones) for number, rows, ones in classes.iter_rows()}
        for number, name in enumerate(SPLITS):
            rows, ones = counts.get(number, (0, 0))
            if ones in (0, rows):
                raise UserError(
                    f"{self.file}: split '{name}' needs labels of both classes: {ones:,} of {rows:,} rows are 1"
                )
        return events

    def _cut_times(self) -> tuple[int, int]:
        """The times at which valid and test begin: fractions of the rows, to within one bin; no time is split."""
        low, high = self._events.select(low=pl.col("time").min(), high=pl.col("time").max()).collect().row(0)
        width = (high - low) // BINS + 1
        bins = self._events.group_by(bin=(pl.col("time") - low) // width).agg(rows=pl.len()).sort("bin").collect()
        starts, rows = bins["bin"].to_numpy() * width + low, bins["rows"].to_numpy()
        if len(starts) < len(SPLITS):
            raise UserError(f"{self.file}: {len(starts)} distinct times, too few for train, valid and test")
        newest = np.cumsum(rows[::-1])[::-1] / rows.sum()  # fraction of the rows from each bin on
        test = 2 + int(np.abs(newest[2:] - self.recipe.test_fraction).argmin())
        wanted = self.recipe.test_fraction + self.recipe.valid_fraction
        valid = 1 + int(np.abs(newest[1:test] - wanted).argmin())
        return int(starts[valid]), int(starts[test])


def scan(file: Path) -> pl.LazyFrame:
    """A table's file, or a directory of parquet files, lazily."""
    if not file.exists():
        raise UserError(f"{file}: no such file")
    name = file.name.removesuffix(".gz")
    if name.endswith((".csv", ".tsv")):
        separator = "\t" if name.endswith(".tsv") else ","
        return pl.scan_csv(file, separator=separator, infer_schema_length=10_000, try_parse_dates=True)
    if file.is_dir() or name.endswith((".parquet", ".pq")):
        return pl.scan_parquet(file)
    raise UserError(f"{file}: a log is .parquet, .csv or .tsv (or .csv.gz, .tsv.gz)")


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (pl.exceptions.PolarsError, OSError) as error:
        raise UserError(f"{file}: cannot be read: {(str(error).splitlines() or [type(error).__name__])[0]}") from None


def _typed(file: Path, role: str, name: str, schema: pl.Schema, unit: Literal["s", "ms"] = "s") -> pl.Expr:
    """The column of a role as int64 (ids, order, times in ``unit``), string (ids) or 0 and 1 (labels)."""
    if name not in schema:
        raise UserError(f"{file}: no {role} column '{name}': {nearest(name, schema)}")
    column, dtype = pl.col(name), schema[name]
    if role == "label" and (dtype.is_numeric() or dtype == pl.Boolean):
        return column.cast(pl.Int8) if dtype == pl.Boolean else column
    if role == "time" and dtype in (pl.Datetime, pl.Date):
        return column.cast(pl.Datetime("ms")).dt.epoch(unit)
    if role != "label" and dtype.is_integer():
        return column.cast(pl.Int64)
    if role in ("user", "item", "attribute") and dtype in (pl.String, pl.Categorical, pl.Enum):
        return column.cast(pl.String)
    wanted = {"time": "integers or dates", "order": "integers", "label": "0 and 1"}
    wanted["attribute"] = "one integer or string per item"
    raise UserError(f"{file}: {role} column '{name}' holds {dtype}, not {wanted.get(role, 'integers or strings')}")


def _changes(values: npt.NDArray[Any]) -> Bools:
    """(E,) True where a value differs from the one before it, and at the first."""
    return np.concatenate([[True], values[1:] != values[:-1]])


def _last_true(starts: Bools) -> Ints:
    """(E,) index of the nearest True at or before each event."""
    return np.maximum.accumulate(np.where(starts, np.arange(len(starts)), 0))
