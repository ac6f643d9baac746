"""Tables in files: parquet, or text with a header (CSV), which is looked at before polars reads it.

A table is a file, a folder or a glob, on this machine or at an address (:mod:`ctr_pe.data.logs.places`).
"""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import re
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias, cast

import polars as pl

from ctr_pe.data.logs.places import (
    HIDDEN,
    Address,
    file_system,
    files_of,
    is_folder,
    is_glob,
    is_parquet_name,
    is_text_name,
    opened,
    place,
)  # fmt: skip
from ctr_pe.utils.errors import UserError, counted, option, reason

if TYPE_CHECKING:
    from collections.abc import Iterator

Place: TypeAlias = Path | Address
OF_POLARS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")  # addresses that polars reads itself

START = 2**16  # bytes of a text file that are looked at first, and more where the header is longer
SIGNS = {
    b"\x1f\x8b": "compressed by gzip: its name ends in .gz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it, or compress it by gzip",
    b"BZh": "compressed by bzip2: unpack it, or compress it by gzip",
    b"PK\x03\x04": "a zip file or a spreadsheet: unpack it, or save it as CSV",
    b"PAR1": "a parquet file: its name ends in .parquet",
}
"""What files that are no text begin with -> what they are, and what to do."""
PIECES = 8  # of a sample of a parquet file
INFERRED = 10_000  # rows by which polars guesses the types of a text file's columns


SEPARATORS = {",": "','", ";": "';'", "|": "'|'", "\t": "tab"}
"""What may stand between the columns of a text file -> how an error names it, and the option takes it."""


def scan(file: Place, separator: str | None = None, rows: int | None = None) -> pl.LazyFrame:
    """The table at a place, lazily: a file, or all files of a folder or glob, in the order of their names.

    ``separator``: of the columns of a text file; None for a tab in .tsv and a comma in .csv. A column of a text file
    holds numbers only if all of its values, in all rows, are written as such: ``007`` is no whole number, because it
    would become 7. Dates are text. ``rows``: as many at most, of a text file the first ones, of parquet files pieces
    from all over it. Parquet files in folders ``day=2024-02-01`` have a column ``day``.

    Raises:
        UserError: no such file, one of another kind, or a text that cannot be read or has another separator.
    """
    files = files_of(file)
    for one in files:
        if is_parquet_name(one) != is_parquet_name(files[0]):
            raise UserError(f"{file}: holds {files[0]} and {one}: a table has files of one kind")
    if not is_parquet_name(files[0]):
        return _scan_text(file, [place(one) for one in files], separator or _separator(files[0]), rows)
    with readable(file):
        return _pieces(_scan_parquet(file, files), rows)


def is_text(file: Place) -> bool:
    """Whether it is text, or a folder or glob of texts. Raises UserError if there is no such file."""
    if isinstance(file, Path) and not is_folder(file) and not is_glob(file):
        return is_text_name(file.name)
    return is_text_name(files_of(file)[0])


def _scan_parquet(file: Place, files: list[str]) -> pl.LazyFrame:
    if isinstance(file, Path) or file.scheme in OF_POLARS:
        if is_folder(file):
            return pl.scan_parquet(str(file).rstrip("/") + "/", hidden_file_prefix=HIDDEN)
        return pl.scan_parquet(files, glob=False, hive_partitioning=True if is_glob(file) else None)
    from pyarrow.dataset import dataset, partitioning

    system, path = file_system(file)
    names = path if is_folder(file) else [one.partition("://")[2] for one in files]
    hive = partitioning(flavor="hive")
    return pl.scan_pyarrow_dataset(
        dataset(names, filesystem=getattr(system, "fs", system), format="parquet", partitioning=hive)
    )


@contextmanager
def readable(file: Place, separator: str | None = None) -> Iterator[None]:
    """What polars and the system say about a file that cannot be read, in one line."""
    try:
        yield
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        found = broken_line(file, separator) or _other_columns(file)
        raise UserError(found or f"{file}: cannot be read: {reason(error)}") from None


def _other_columns(file: Place) -> str | None:
    """Which of several parquet files has other columns than the first; None if none, or it cannot be said."""
    try:
        files = [one for one in files_of(file) if is_parquet_name(one)]
        first, *others = (pl.scan_parquet(one, glob=False, hive_partitioning=False) for one in files)
        there = first.collect_schema()
        for name, table in zip(files[1:], others, strict=True):
            here = table.collect_schema()
            for column in {**there, **here}:
                kinds = here.get(column), there.get(column)
                if kinds[0] != kinds[1]:
                    said, beside = ("is not there" if kind is None else f"holds {kind}" for kind in kinds)
                    other = files[0].removeprefix(f"{name.rpartition('/')[0]}/")
                    return f"{name}: column '{column}' {said}, in {other} it {beside}: write both alike"
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, UserError, ValueError):
        pass
    return None


def broken_line(file: Place, separator: str | None = None) -> str | None:
    """Which line of a text file has other fields than the header; None if all have the same, or it is no text."""
    try:
        found = map(place, files_of(file)) if is_text(file) else ()
    except UserError:
        return None
    return next(filter(None, (_broken_line(one, separator or _separator(str(one))) for one in found)), None)


def _broken_line(file: Place, separator: str) -> str | None:
    begin = 1
    try:
        with _opened(file) as stream:
            rows = csv.reader((line.decode() for line in stream), delimiter=separator)
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


def _scan_text(file: Place, files: list[Place], separator: str, rows: int | None) -> pl.LazyFrame:
    if isinstance(file, Address) and file.scheme not in OF_POLARS:
        own = ", ".join(OF_POLARS)
        raise UserError(f"{file}: text is read from this machine and from {own}, all else is parquet")
    header = check_start(files[0], separator)
    for one in files[1:]:
        if (names := check_start(one, separator)) != header:
            raise UserError(f"{one}: its columns are {', '.join(names)}, those of {files[0]} {', '.join(header)}")
    with readable(file, separator):
        how: dict[str, Any] = {"n_rows": rows, "separator": separator, "infer_schema_length": INFERRED, "glob": False}
        table: Any = [str(one) for one in files]
        guessed = pl.scan_csv(table, **how).collect_schema()
        numbers = {
            name: pl.Int64 if kind.is_integer() else pl.Float64 for name, kind in guessed.items() if kind.is_numeric()
        }
        texts = pl.scan_csv(table, **how, schema_overrides=dict.fromkeys(numbers, pl.String))
        tests = []
        for name, kind in numbers.items():
            text, value = pl.col(name), pl.col(name).cast(kind, strict=False)
            same = value.cast(pl.String).eq_missing(text) if kind == pl.Int64 else value.is_null() == text.is_null()
            tests.append(same.all())
        fit = texts.select(tests).collect(engine="streaming").row(0, named=True) if tests else {}
        return texts.with_columns(pl.col(name).cast(numbers[name]) for name, same in fit.items() if same)


def check_start(file: Place, separator: str, key: str | None = None) -> list[str]:
    """The columns of a text file's header.

    Raises UserError for another encoding, other line ends, another separator, or a column that is there twice.

    ``key``: of a config that has the separator; None where it is an option of a build."""
    try:
        with _opened(file) as stream:
            start = more = stream.read(START)
            while more and b"\n" not in more:  # to the end of the header
                more = stream.read(START)
                start += more
    except (OSError, EOFError) as error:
        raise UserError(f"{file}: cannot be read: {reason(error)}") from None
    for magic, said in SIGNS.items():
        if start.startswith(magic):
            raise UserError(f"{file}: not a text but {said}")
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
    for name, count in Counter(names).items():
        if name and count > 1:
            raise UserError(f"{file}: line 1: column '{name}' is there {count} times")
        if "\ufffd" in name:
            raise UserError(f"{file}: line 1: not a text in UTF-8 ('{name}'): save it as UTF-8")
    return names


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


def _separator(name: str) -> str:
    return "\t" if name.lower().removesuffix(".gz").endswith(".tsv") else ","


def _opened(file: Place) -> IO[bytes]:
    stream = opened(file)
    return cast("IO[bytes]", gzip.open(stream)) if file.name.lower().endswith(".gz") else stream
