"""The columns of a log's roles, whatever a table has them in: ids as int64 or text, times in nanoseconds.

Nothing that order or identity depends on is lost, and what can be read in several ways is an error that asks. It is the
same for a log, a history and requests, in files and in memory.

Whole floats are the integers they stand for below 2⁵³, from where on a float stands for several. Times are numbers in
the unit that was said, dates with or without a zone, or texts in the form of ISO 8601 or of the format that was said.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

import polars as pl

from ctr_pe.data.id_map import EXACT, NO_VALUE, TEXTS
from ctr_pe.data.logs.clock import SECOND, UNITS, WORDS, Unit, calendar_days, implausible, in_words
from ctr_pe.data.logs.tables import decimal_comma
from ctr_pe.utils.errors import UserError, nearest, option

LARGEST = 2**63 - 1
NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")
ZONE, ISO = "zone", "2024-02-01T12:30:00+01:00"
FORM = (
    r"^(?P<date>\d{4}-\d{2}-\d{2})(?:[T ](?P<minute>\d{2}:\d{2})(?::(?P<second>\d{2})(?:[.,](?P<fraction>\d{1,9}))?)?"
    r"\s?(?P<zone>Z|[+-]\d{2}(?::?\d{2})?)?)?$"
)


def id_column(where: object, role: str, name: str, table: pl.LazyFrame) -> pl.Expr:
    """A column of ids, or of an item's attribute, as int64 or string; NaN, and a text that stands for none, is null.

    ``role``: what it is called in an error.

    Raises:
        UserError: no such column, or a value that is neither whole number nor text, with its row.
    """
    column, dtype = pl.col(name), _type_of(where, role, name, table)
    if dtype in TEXTS:
        text = column.cast(pl.String)
        return pl.when(~text.is_in(list(NO_VALUE))).then(text)
    if dtype == pl.Null:
        return column.cast(pl.String)
    if not dtype.is_integer() and not dtype.is_float():
        wanted = "one integer or string per item" if role == "attribute" else "integers or strings"
        raise UserError(f"{where}: {role} column '{name}' holds {dtype}, not {wanted}")
    if dtype in (pl.UInt64, pl.Int128, pl.UInt128):
        _refuse(where, role, name, table, column > LARGEST, "numbers of 2⁶³ or more, which are ids as text only")
    if dtype.is_float():
        number = column.cast(pl.Float64).fill_nan(None)
        _refuse(where, role, name, table, (number % 1).fill_nan(1) != 0, f"{dtype}, not integers or strings")
        _refuse(where, role, name, table, number.abs() >= EXACT, "whole numbers that a float does not tell apart (2⁵³)")
        column = number
    return column.cast(pl.Int64)


def keys(values: pl.Series, what: str) -> pl.Series:
    """Raw ids in memory as int64 or string; every text is an id."""
    if values.dtype == pl.Int64 or values.dtype in TEXTS:
        return values.cast(pl.String) if values.dtype in TEXTS else values
    if not len(values):
        return values.cast(pl.Int64)
    table = values.to_frame().lazy()
    return table.select(id_column(what, "", values.name, table)).collect()[values.name]


def order_column(where: object, name: str, table: pl.LazyFrame) -> pl.Expr:
    """The column that decides what is earlier, int64; raises UserError as :func:`id_column`."""
    dtype = _type_of(where, "order", name, table)
    if not (dtype.is_integer() or dtype.is_float()):
        wrong = pl.col(name).is_not_null() & pl.col(name).cast(pl.Int64, strict=False).is_null()
        _refuse(where, "order", name, table, wrong if dtype == pl.String else pl.lit(True), f"{dtype}, not integers")
    return id_column(where, "order", name, table)


def number_column(where: object, role: str, name: str, table: pl.LazyFrame, wanted: str) -> pl.Expr:
    """A column of labels as it is, or of weights as float64. Raises UserError for one that holds no numbers, but not
    ``wanted``."""
    column, dtype = pl.col(name), _type_of(where, role, name, table)
    if dtype.is_numeric() or dtype == pl.Boolean:
        if role == "weight":
            return column.cast(pl.Float64).fill_nan(None)
        if dtype.is_decimal():
            return column.cast(pl.Float64)
        return column.cast(pl.Int8) if dtype == pl.Boolean else column
    held = f"{dtype}, not {wanted}"
    if dtype == pl.String:
        wrong = column.is_not_null() & column.cast(pl.Float64, strict=False).is_null()
        _refuse(where, role, name, table, wrong, held)
    raise UserError(f"{where}: {role} column '{name}' holds {held}")


@dataclass(frozen=True)
class Moments:
    """A column of times, lazily: ``at`` in nanoseconds since 1970 in UTC, or of a clock of its own, int64; ``stored``:
    the same moments in a type that reads as they do; ``number``: what must be plausible in ``unit``; ``step``: what
    ``unit`` has of nanoseconds; ``words``: how it was read; ``zoned``: whether dates have zones, None of numbers."""

    at: pl.Expr
    stored: pl.Expr
    number: pl.Expr
    unit: Unit
    words: str
    zoned: bool | None = None

    @property
    def step(self) -> int:
        return SECOND // UNITS[self.unit]

    def check(self, where: object, name: str, table: pl.LazyFrame, beside: int | None = None) -> tuple[str, int]:
        """When it was, in words, and of the units the coarsest, in nanoseconds, that all of the times are whole in.

        ``beside``: a time in nanoseconds, of the same clock.

        Raises:
            UserError: a time that is none in this unit, with its row.
        """
        steps = sorted({self.step, *(SECOND // each for each in UNITS.values() if SECOND // each <= self.step)})
        whole = [(self.at % step == 0).all().alias(str(step)) for step in steps[::-1]]
        low, high, *fits = table.select(
            self.number.min().alias("low"), self.number.max().alias("high"), *whole
        ).collect(engine="streaming").row(0)  # fmt: skip
        if low is None:
            return self.words, self.step
        if beside is None and calendar_days(low, high):
            how = f"{option('time_format', '%Y%m%d')} reads them"
            raise UserError(f"{where}: time column '{name}' holds days such as {low}, no {WORDS[self.unit]}: {how}")
        clock = (low, high) if beside is None else (min(low, beside // self.step), max(high, beside // self.step))
        if problem := implausible(low, high, self.unit) or implausible(*clock, self.unit):
            row = first_row(table, self.number == problem[0])
            at = "" if row is None else f", row {row}"
            raise UserError(f"{where}: time column '{name}'{at}: {problem[1]}")
        step = next(step for step, fit in zip(steps[::-1], fits, strict=True) if fit)
        return f"{self.words}, {in_words(low, high, self.unit)}", step


def times(where: object, name: str, table: pl.LazyFrame, unit: Unit, form: str | None = None) -> Moments:
    """A column of times.

    Args:
        unit: of numbers.
        form: of texts, as ``%d/%m/%Y %H:%M:%S%.f``; None for ISO 8601.

    Raises:
        UserError: no such column; values that are no times, or could be several, with the first row that has one.
    """
    column, dtype = pl.col(name), _type_of(where, "time", name, table)
    if form is not None and (dtype in TEXTS or dtype.is_integer()):
        at, words = _of_format(where, name, table, form), f"texts of the form {form}"
        return _of_texts(at, words, re.search(r"%[:#]*[zZ]", form) is not None)
    if dtype in TEXTS:
        return _of_texts(*_of_iso(where, name, table))
    if dtype in (pl.Datetime, pl.Date):
        units: dict[str | None, Unit] = {"ms": "ms", "us": "us", "ns": "ns"}
        kind = units[dtype.time_unit] if isinstance(dtype, pl.Datetime) else "s"
        number, each = column.to_physical().cast(pl.Int64), UNITS[kind]
        if dtype == pl.Date:
            number, each = number * 86_400, 1
        zone = dtype.time_zone if isinstance(dtype, pl.Datetime) else None
        words = "dates" if dtype == pl.Date else f"dates to the {WORDS[kind].removesuffix('s')}"
        words += f" ({zone}, as UTC)" if zone not in (None, "UTC") else ""
        return Moments(_nanoseconds(number, SECOND // each), column, number // each, "s", words, zone is not None)
    step = SECOND // UNITS[unit]
    if dtype.is_integer():
        number = column.cast(pl.Int64)
        return Moments(_nanoseconds(number, step), number, number, unit, WORDS[unit])
    if dtype.is_float() or dtype.is_decimal():
        number = column.cast(pl.Float64)
        number = pl.when(number.is_finite()).then(number)
        whole = number.floor().cast(pl.Int64, strict=False)
        at = _nanoseconds(whole, step) + ((number - number.floor()) * step).round().cast(pl.Int64)
        return Moments(at, at.cast(pl.Datetime("ns")), whole, unit, WORDS[unit])
    raise UserError(f"{where}: time column '{name}' holds {dtype}, not numbers or dates")


def stored_as(zoned: bool | None) -> pl.Datetime:
    """The type of dates in stored tables, which have zones where those of the log had."""
    return pl.Datetime("ns", "UTC" if zoned else None)


def _of_texts(at: pl.Expr, words: str, zoned: bool) -> Moments:
    return Moments(at, at.cast(stored_as(zoned)), at // SECOND, "s", words, zoned)


def label_like(table: pl.LazyFrame, names: Collection[str]) -> list[str]:
    """Those of the columns that look like labels: booleans, or numbers that are all 0 or 1, and both of them."""
    schema = table.collect_schema()
    some = [name for name in names if schema[name].is_numeric()]
    tests = [(pl.col(n).is_in([0, 1]).all() & (pl.col(n).min() != pl.col(n).max())).alias(n) for n in some]
    found = table.select(tests).collect(engine="streaming").row(0, named=True) if tests else {}
    return [name for name in names if schema[name] == pl.Boolean or found.get(name)]


def ask_label(where: object, found: list[str]) -> None:
    """Raises UserError if a log without a label has columns that look like one."""
    if found:
        none = option("label", None)
        raise UserError(f"{where}: label: which of {', '.join(found)}? {option('label', found[0])}, or {none} for none")


def first_row(table: pl.LazyFrame, condition: pl.Expr) -> int | None:
    """The first row for which the condition holds, counted from 1."""
    first: int | None = table.select(condition.arg_true().first()).collect().item()
    return None if first is None else first + 1


def _type_of(where: object, role: str, name: str, table: pl.LazyFrame) -> pl.DataType:
    schema = table.collect_schema()
    if name not in schema:
        numbers = sum(NUMBER.fullmatch(other) is not None for other in schema)
        named = "the first row has numbers in place of names" if 2 * numbers > len(schema) else nearest(name, schema)
        raise UserError(f"{where}: no {role} column '{name}': {named}")
    return schema[name]


def _refuse(where: object, role: str, name: str, table: pl.LazyFrame, wrong: pl.Expr, held: str) -> None:
    """Raises UserError if there is a wrong value."""
    if row := first_row(table, wrong):
        value = table.select(name).slice(row - 1, 1).collect().item()
        column = f"{role} column" if role else "column"
        raise UserError(f"{where}: {column} '{name}' holds {held} ({value!r} in row {row}{decimal_comma(value)})")


def _nanoseconds(number: pl.Expr, step: int) -> pl.Expr:
    """Without overflow; what is cut here is no plausible time."""
    most = LARGEST // step - 1
    return number.clip(-most, most) * step


def _text(name: str) -> pl.Expr:
    text = pl.col(name).cast(pl.String)
    return pl.when(~text.is_in(list(NO_VALUE))).then(text)


def _of_format(where: object, name: str, table: pl.LazyFrame, form: str) -> pl.Expr:
    try:
        at = _text(name).str.to_datetime(form, time_unit="ns", strict=False)
        wrong = at.is_null() & _text(name).is_not_null()
        _refuse(where, "time", name, table, wrong, f"another form than {option('time_format', form)}")
    except pl.exceptions.PolarsError as error:
        raise UserError(f"{option('time_format', form)}: {str(error).splitlines()[0]}") from None
    return at.to_physical()


def _of_iso(where: object, name: str, table: pl.LazyFrame) -> tuple[pl.Expr, str, bool]:
    text = _text(name)
    part = text.str.extract_groups(FORM).struct

    def number(of: pl.Expr) -> pl.Expr:
        return of.cast(pl.Int64).fill_null(0)

    minute = pl.concat_str(part["date"], part["minute"].fill_null("00:00"), separator=" ")
    stamp = pl.concat_str(minute, part["second"].fill_null("00"), separator=":")
    whole = stamp.str.to_datetime("%Y-%m-%d %H:%M:%S", time_unit="ns", strict=False).to_physical()
    zone = part[ZONE].replace("Z", "+00")
    shift = number(zone.str.slice(0, 3)).abs() * 60 + number(zone.str.extract(r"^...:?(\d\d)$"))
    shift = pl.when(zone.str.starts_with("-")).then(-shift).otherwise(shift)
    at = whole + number(part["fraction"].str.pad_end(9, "0")) - shift * 60 * SECOND
    how = f"{option('time_format', '%d/%m/%Y')}, or another format, says how to read it"
    wrong = at.is_null() & text.is_not_null()
    word = wrong & text.cast(pl.Int64, strict=False).is_null()  # among numbers it is what is wrong
    _refuse(where, "time", name, table, word, f"no date of ISO 8601, such as {ISO}: {how}")
    _refuse(where, "time", name, table, wrong, f"no date of ISO 8601, such as {ISO}: {how}")
    zoned, plain = table.select(
        zoned=part[ZONE].is_not_null().sum(), plain=(part[ZONE].is_null() & text.is_not_null()).sum()
    ).collect(engine="streaming").row(0)  # fmt: skip
    if zoned and plain:
        row = first_row(table, part[ZONE].is_null() & text.is_not_null())
        raise UserError(f"{where}: time column '{name}' has zones in {zoned:,} rows and none in {plain:,} (row {row})")
    return at, "ISO 8601, its zones as UTC" if zoned else "ISO 8601 without zones, read as UTC", bool(zoned)
