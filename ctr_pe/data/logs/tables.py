"""Tables in files: parquet, or text with a header (CSV), which is looked at before polars reads it."""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import os
import re
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, cast

import polars as pl

from ctr_pe.utils.errors import UserError, counted, no_such_file, option, reason

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

START = 2**16  # bytes of a text file that are looked at first
PIECES = 8  # of a sample of a parquet file
INFERRED = 10_000  # rows by which polars guesses the types of a text file's columns


SEPARATORS = {",": "','", ";": "';'", "|": "'|'", "\t": "tab"}
"""What may stand between the columns of a text file -> how an error names it, and the option takes it."""


def scan(file: Path, separator: str | None = None, rows: int | None = None) -> pl.LazyFrame:
    """A table's file, or a directory of parquet files, lazily.

    ``separator``: of the columns of a text file; None for a tab in .tsv and a comma in .csv. A column of a text file
    holds numbers only if all of its values, in all rows, are written as such: ``007`` is no whole number, because it
    would become 7. Dates are text. ``rows``: as many at most, of a text file the first ones, of parquet files pieces
    from all over it.

    Raises:
        UserError: no such file, one of another kind, or a text that cannot be read or has another separator.
    """
    if not os.path.exists(file):
        raise no_such_file(file)
    if is_text(file):
        return _scan_text(file, separator or _separator(file), rows)
    if file.is_dir() and not any(path.is_file() for path in file.rglob("*")):
        raise UserError(f"{file}: an empty folder: it needs parquet files")
    if file.is_dir() or file.name.endswith((".parquet", ".pq")):
        return _pieces(pl.scan_parquet(file), rows)
    raise UserError(f"{file}: a log is .parquet, .csv or .tsv (or .csv.gz, .tsv.gz)")


def is_text(file: Path) -> bool:
    """Whether the name is that of a text file."""
    return file.name.removesuffix(".gz").endswith((".csv", ".tsv")) and not file.is_dir()


@contextmanager
def readable(file: Path, separator: str | None = None) -> Iterator[None]:
    """What polars and the system say about a file that cannot be read, in one line."""
    try:
        yield
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise UserError(broken_line(file, separator) or f"{file}: cannot be read: {reason(error)}") from None


def broken_line(file: Path, separator: str | None = None) -> str | None:
    """Which line of a text file has other fields than the header; None if all have the same, or it is no text."""
    if not is_text(file):
        return None
    begin = 1
    try:
        with _opened(file) as stream:
            rows = csv.reader((line.decode() for line in stream), delimiter=separator or _separator(file))
            width = len(next(rows, []))
            begin = rows.line_num + 1
            for fields in rows:
                if fields and len(fields) != width:
                    held = f"{counted(len(fields), 'field')}, but the header has {width}"
                    open_quote = " (a quote that is not closed?)" if rows.line_num > begin else ""
                    return f"{file}: line {begin}: {held}{open_quote}"
                begin = rows.line_num + 1
    except UnicodeDecodeError:
        return f"{file}: line {begin}: not a text in UTF-8"
    except csv.Error as error:
        return f"{file}: line {begin}: {error} (a quote that is not closed?)"
    except (OSError, EOFError):
        return None  # which polars has said, too
    return None


def _pieces(table: pl.LazyFrame, rows: int | None) -> pl.LazyFrame:
    """``PIECES`` runs of rows from all over a table that has more than ``rows``."""
    whole = 0 if rows is None else int(table.select(pl.len()).collect().item())
    if rows is None or whole <= rows:
        return table
    each = max(1, rows // PIECES)
    return pl.concat([table.slice(whole * piece // PIECES, each) for piece in range(min(PIECES, rows))])


def _scan_text(file: Path, separator: str, rows: int | None) -> pl.LazyFrame:
    check_start(file, separator)
    with readable(file, separator):
        how: dict[str, Any] = {"n_rows": rows, "separator": separator, "infer_schema_length": INFERRED}
        guessed = pl.scan_csv(file, **how).collect_schema()
        numbers = {
            name: pl.Int64 if kind.is_integer() else pl.Float64 for name, kind in guessed.items() if kind.is_numeric()
        }
        texts = pl.scan_csv(file, **how, schema_overrides=dict.fromkeys(numbers, pl.String))
        tests = []
        for name, kind in numbers.items():
            text, value = pl.col(name), pl.col(name).cast(kind, strict=False)
            same = value.cast(pl.String).eq_missing(text) if kind == pl.Int64 else value.is_null() == text.is_null()
            tests.append(same.all())
        fit = texts.select(tests).collect(engine="streaming").row(0, named=True) if tests else {}
        return texts.with_columns(pl.col(name).cast(numbers[name]) for name, same in fit.items() if same)


def check_start(file: Path, separator: str, key: str | None = None) -> None:
    """Raises UserError for another encoding, other line ends, another separator, or a column that is there twice.

    ``key``: of a config that has the separator; None where it is an option of a build."""
    try:
        with _opened(file) as stream:
            start = stream.read(START)
    except (OSError, EOFError) as error:
        raise UserError(f"{file}: cannot be read: {reason(error)}") from None
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in start:
        raise UserError(f"{file}: not a text in UTF-8 (UTF-16?): save it as UTF-8")
    if b"\r" in start and b"\n" not in start:
        raise UserError(f"{file}: its lines end with CR alone: save it with LF or CRLF")
    text = start.decode("utf-8-sig", errors="replace").splitlines(keepends=True)
    if text and text[0].lower().startswith("sep="):
        raise UserError(f"{file}: line 1: '{text[0].strip()}' is no header: remove this line")
    if (fits := _fitting(text, separator)) != separator:
        found, wanted = (SEPARATORS.get(one, repr(one)) for one in (fits, separator))
        sign = "tab" if fits == "\t" else fits
        how = f"{key}: {json.dumps(fits)}" if key else f"{option('separator', sign)} in a build"
        raise UserError(f"{file}: line 1: {found} is between columns, not {wanted}: {how}, or save it with {wanted}")
    names = next(csv.reader(text, delimiter=separator), [])
    for name in names:
        if name and names.count(name) > 1:
            raise UserError(f"{file}: line 1: column '{name}' is there {names.count(name)} times")


def _fitting(lines: list[str], separator: str) -> str:
    """``separator``, unless it gives the header one column and another gives it several, the most of all."""

    def width(between: str) -> int:
        try:
            return len(next(csv.reader(lines, delimiter=between), []))
        except csv.Error:
            return 0

    widths = {between: width(between) for between in SEPARATORS if width(separator) <= 1}
    return max(widths, key=lambda between: widths[between]) if max(widths.values(), default=0) > 1 else separator


def decimal_comma(text: object) -> str:
    """What an error about ``text`` adds where a comma was meant as a decimal point."""
    return f": write {str(text).replace(',', '.')}" if re.fullmatch(r"\s*[+-]?\d+,\d+\s*", str(text)) else ""


def _separator(file: Path) -> str:
    return "\t" if file.name.removesuffix(".gz").endswith(".tsv") else ","


def _opened(file: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(file)) if file.suffix == ".gz" else file.open("rb")
