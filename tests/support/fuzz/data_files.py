"""Broken logs for ``ctr-pe data build``, from a seed: what is wrong with each, and what the one line must name.

``cases`` makes them, ``run`` tries them and counts what happened. A log is drawn at random and then broken in one way;
``sound`` gives the same logs unbroken.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from ctr_pe.cli import main

REFUSED = "refused in one line"
LONGEST = 200  # characters of the line


class Case(NamedTuple):
    """``files``: path -> content, None for a folder. The line has to have all of ``named``."""

    kind: str
    files: Mapping[str, bytes | None]
    command: list[str]
    named: tuple[str, ...]

    def write(self, place: Path) -> None:
        """The files, in the new folder ``place``."""
        place.mkdir()
        for name, content in self.files.items():
            if content is None:
                (place / name).mkdir()
            else:
                (place / name).write_bytes(content)


class Log:
    """A sound log, as tables; ``text`` and ``parquet`` make files of them."""

    def __init__(self, draw: np.random.Generator) -> None:
        self.draw = draw
        users, items = int(draw.integers(12, 25)), int(draw.integers(15, 30))
        rows = [
            (user * 3, int(item) * 7, 1_600_000_000 + 86_400 * user + 3_600 * place, place, (place + user) % 2)
            for user in range(users)
            for place, item in enumerate(draw.permutation(items)[: int(draw.integers(6, 11))])
        ]
        self.log = pl.DataFrame(rows, ["user_id", "item_id", "timestamp", "position", "label"], orient="row")
        self.items = pl.DataFrame({"item_id": [7 * item for item in range(items)]})
        self.items = self.items.with_columns(cate_id=pl.format("c{}", pl.col("item_id") % 4))
        self.protocol = str(draw.choice(["din", "impressions"]))
        if self.protocol == "din":
            self.log = self.log.drop("label")

    @property
    def row(self) -> int:
        return int(self.draw.integers(self.log.height))

    def put(self, column: str, value: Any, row: int | None = None) -> int:
        """Put a value into a row of the log, a random one; the column takes its type. Returns the row."""
        row = self.row if row is None else row
        values = self.log[column].to_list()
        values[row] = value
        self.log = self.log.with_columns(pl.Series(column, values, strict=False))
        return row

    def lines(self) -> list[str]:
        return self.log.write_csv().splitlines()

    def text(self, lines: list[str] | None = None, kind: str = "", *named: str, name: str = "log.csv") -> Case:
        return self.case("\n".join(lines or self.lines()).encode() + b"\n", kind, *named, name=name)

    def case(self, content: bytes | None, kind: str, *named: str, name: str = "log.csv", options: str = "") -> Case:
        files: dict[str, bytes | None] = {name: content, "items.csv": self.items.write_csv().encode()}
        command = f"--interactions {name} --items items.csv --protocol {self.protocol} --out set {options}"
        return Case(kind, files, command.split(), named or (name,))

    def parquet(self, kind: str, *named: str, options: str = "") -> Case:
        return self.case(_parquet(self.log), kind, *named, name="log.parquet", options=options)

    def either(self, kind: str, *named: str, options: str = "") -> Case:
        if self.draw.integers(2):
            return self.parquet(kind, "log.parquet", *named, options=options)
        return self.case(self.log.write_csv().encode(), kind, "log.csv", *named, options=options)


def _parquet(table: pl.DataFrame) -> bytes:
    stream = io.BytesIO()
    table.write_parquet(stream)
    return stream.getvalue()


FAULTS: list[Callable[[Log], Case]] = []


def fault(make: Callable[[Log], Case]) -> Callable[[Log], Case]:
    FAULTS.append(make)
    return make


# --- text ---


@fault
def too_many_fields(log: Log) -> Case:
    lines, row = log.lines(), log.row
    lines[row + 1] += ",9" * int(log.draw.integers(1, 4))
    return log.text(lines, "too many fields", "log.csv", f"line {row + 2}:")


@fault
def too_few_fields(log: Log) -> Case:
    lines, row = log.lines(), log.row
    lines[row + 1] = lines[row + 1].rsplit(",", int(log.draw.integers(1, 3)))[0]
    return log.text(lines, "too few fields", "log.csv", f"line {row + 2}:")


@fault
def a_cut_line(log: Log) -> Case:
    lines = log.lines()
    lines[-1] = lines[-1].split(",")[0]
    return log.text(lines, "a line that is cut off", "log.csv", f"line {len(lines)}:")


@fault
def old_line_ends(log: Log) -> Case:
    return log.case("\r".join(log.lines()).encode(), "CR line ends", "log.csv", "CR")


@fault
def utf_16(log: Log) -> Case:
    encoding = str(log.draw.choice(["utf-16", "utf-16-le", "utf-16-be"]))
    return log.case(log.log.write_csv().encode(encoding), "UTF-16", "log.csv", "UTF-8")


@fault
def latin_1(log: Log) -> Case:
    lines, row = log.lines(), log.row
    lines[row + 1] = "café" + lines[row + 1]
    return log.case("\n".join(lines).encode("latin-1"), "Latin-1", "log.csv", f"line {row + 2}:", "UTF-8")


@fault
def a_zero_byte(log: Log) -> Case:
    lines, row = log.lines(), log.row
    lines[row + 1] = "\0" + lines[row + 1]
    return log.text(lines, "a zero byte")


@fault
def a_column_twice(log: Log) -> Case:
    lines = log.lines()
    column = str(log.draw.choice(log.log.columns))
    return log.text(
        [f"{lines[0]},{column}", *(f"{line},1" for line in lines[1:])], "a column twice", "log.csv", f"'{column}'"
    )


@fault
def an_open_quote(log: Log) -> Case:
    lines, row = log.lines(), log.row
    lines[row + 1] = '"' + lines[row + 1]
    return log.text(lines, "a quote that is not closed", "log.csv", f"line {row + 2}:")


@fault
def nothing(log: Log) -> Case:
    name = str(log.draw.choice(["log.csv", "log.tsv", "log.parquet"]))
    return log.case(b"", "an empty file", name, name=name)


@fault
def a_header_alone(log: Log) -> Case:
    return log.text(log.lines()[:1], "a header alone", "log.csv", "no rows")


@fault
def no_header(log: Log) -> Case:
    return log.text(log.lines()[1:], "no header")


@fault
def another_separator(log: Log) -> Case:
    between = str(log.draw.choice([";", "\t", "|"]))
    return log.text([line.replace(",", between) for line in log.lines()], "another separator", "log.csv", "--separator")


@fault
def a_cut_gzip(log: Log) -> Case:
    whole = gzip.compress(log.log.write_csv().encode())
    return log.case(whole[: int(len(whole) * log.draw.uniform(0.1, 0.9))], "a cut gzip file", name="log.csv.gz")


@fault
def no_gzip(log: Log) -> Case:
    return log.case(log.draw.bytes(300), "no gzip file", name="log.csv.gz")


@fault
def words_for_numbers(log: Log) -> Case:
    column = str(log.draw.choice(["timestamp", "position"]))
    word = str(log.draw.choice(["yesterday", "12:30", "1e", "1_000", "0x1F", "one", "3 pm"]))
    lines, row = log.lines(), log.row
    fields = lines[row + 1].split(",")
    fields[log.log.columns.index(column)] = word
    lines[row + 1] = ",".join(fields)
    return log.text(lines, "a word among numbers", "log.csv", f"'{column}'", f"row {row + 1}")


@fault
def no_id(log: Log) -> Case:
    column, word = log.draw.choice(["user_id", "item_id"]), log.draw.choice(["NULL", "null", "NaN", "\\N", "NA", '""'])
    lines, row = log.lines(), log.row
    fields = lines[row + 1].split(",")
    fields[log.log.columns.index(column)] = str(word)
    lines[row + 1] = ",".join(fields)
    return log.text(lines, "NULL for an id", "log.csv", column, f"row {row + 1}")


# --- times ---


@fault
def mixed_units(log: Log) -> Case:
    row = log.row
    log.put("timestamp", log.log["timestamp"][row] * 1000, row)
    return log.either("seconds and milliseconds", "'timestamp'", f"row {row + 1}:", "seconds")


@fault
def a_finer_unit(log: Log) -> Case:
    factor = int(log.draw.choice([10**3, 10**6, 10**9]))
    log.log = log.log.with_columns(pl.col("timestamp") * factor)
    return log.either("a finer unit of time", "'timestamp'", "--time-unit")


@fault
def another_age(log: Log) -> Case:
    time = int(log.draw.choice([99_999_999_999, 10_000_000_000, -62_000_000_000, 2**62, -(2**62), 0, -1]))
    row = log.put("timestamp", time)
    return log.either("a year that cannot be", "'timestamp'", f"row {row + 1}:", "year")


@fault
def a_date_that_cannot_be(log: Log) -> Case:
    log.log = log.log.with_columns(pl.from_epoch("timestamp") + pl.duration(days=365 * 3000))
    return log.parquet("a date that cannot be", "'timestamp'", "year")


@fault
def times_against_the_order(log: Log) -> Case:
    log.log = log.log.with_columns(timestamp=1_600_000_000 - pl.col("position") * 60)
    return log.either("times against the order", "'timestamp'", "'position'")


# --- tables ---


@fault
def a_column_of_another_name(log: Log) -> Case:
    column = str(log.draw.choice(["user_id", "item_id"]))
    log.log = log.log.rename({column: column.replace("_", "")})
    return log.either("a missing column", f"'{column}'", f"did you mean '{column.replace('_', '')}'")


@fault
def no_value(log: Log) -> Case:
    column = str(log.draw.choice(log.log.columns))
    row = log.put(column, None)
    return log.either("a missing value", f"{column}: 1 ", f"row {row + 1}")


@fault
def labels_of_another_kind(log: Log) -> Case:
    log.protocol = "impressions"
    value = log.draw.choice([2.0, -1.0, 0.5, 5.0])
    log.log = log.log.with_columns(label=pl.col("position") % 2)
    row = log.put("label", float(value))
    return log.either("a label other than 0 and 1", "'label'", f"row {row + 1}")


@fault
def one_class(log: Log) -> Case:
    log.protocol = "impressions"
    log.log = log.log.with_columns(label=pl.lit(int(log.draw.integers(2))))
    return log.either("labels of one class", "'label'", "one class")


@fault
def a_row_twice(log: Log) -> Case:
    log.log = pl.concat([log.log, log.log.sample(int(log.draw.integers(1, 5)), seed=1)])
    return log.either("a row twice", "repeat")


@fault
def ids_of_another_kind(log: Log) -> Case:
    column = str(log.draw.choice(["user_id", "item_id"]))
    kinds = [pl.col(column) + 0.5, pl.concat_list(column), pl.struct(column), pl.col(column) > 50, pl.lit(b"x")]
    log.log = log.log.with_columns(kinds[int(log.draw.integers(len(kinds)))].alias(column))
    return log.parquet("ids of another kind", "log.parquet", f"'{column}'")


@fault
def huge_ids(log: Log) -> Case:
    column = str(log.draw.choice(["user_id", "item_id"]))
    log.log = log.log.with_columns(pl.col(column).cast(pl.UInt64) + 2**63)
    return log.parquet("ids above 2⁶³", "log.parquet", column)


@fault
def short_users(log: Log) -> Case:
    log.log, log.protocol = log.log.filter(pl.col("position") < 3).drop("label", strict=False), "din"
    return log.either("users with too few items", "none of them for training")


@fault
def items_that_do_not_fit(log: Log) -> Case:
    lost = log.log["item_id"][log.row]
    twice = log.items.filter(pl.col("item_id") == lost)
    ways: list[tuple[str, pl.DataFrame, str]] = [
        ("an item with two rows", pl.concat([log.items, twice]), "repeat"),
        ("items of another kind", log.items.with_columns(pl.format("i{}", "item_id").alias("item_id")), "item_id"),
        ("items without their id", log.items.rename({"item_id": "item"}), "'item_id'"),
        ("no items", log.items.clear(), "item"),
    ]
    kind, log.items, named = ways[int(log.draw.integers(len(ways)))]
    return log.either(kind)._replace(named=("items.csv", named))


# --- parquet ---


@fault
def a_cut_parquet(log: Log) -> Case:
    whole = _parquet(log.log)
    return log.case(whole[: int(len(whole) * log.draw.uniform(0.01, 0.99))], "a cut parquet file", name="log.parquet")


@fault
def a_damaged_footer(log: Log) -> Case:
    whole = bytearray(_parquet(log.log))
    begin = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    for _ in range(40):
        whole[int(log.draw.integers(begin, len(whole) - 8))] = int(log.draw.integers(256))
    return log.case(bytes(whole), "a damaged footer", name="log.parquet")


@fault
def no_parquet(log: Log) -> Case:
    content = log.log.write_csv().encode() if log.draw.integers(2) else log.draw.bytes(500)
    return log.case(content, "no parquet file", name="log.parquet")


@fault
def names_twice(log: Log) -> Case:
    stream, table = io.BytesIO(), log.log.to_arrow()
    pq.write_table(pa.Table.from_arrays(table.columns, ["user_id", "user_id", *table.column_names[2:]]), stream)
    return log.case(stream.getvalue(), "a parquet column twice", "log.parquet", "user_id", name="log.parquet")


@fault
def an_empty_folder(log: Log) -> Case:
    return log.case(None, "an empty folder", "logs", name="logs")


@fault
def a_mixed_folder(log: Log) -> Case:
    case = log.case(None, "a folder of several kinds", "logs", name="logs")
    return case._replace(files={**case.files, "logs/a.parquet": _parquet(log.log), "logs/b.txt": b"notes"})


@fault
def a_folder_of_two_tables(log: Log) -> Case:
    case = log.case(None, "a folder of two tables", "logs", name="logs")
    other = _parquet(log.log.rename({"user_id": "who"}))
    return case._replace(files={**case.files, "logs/a.parquet": _parquet(log.log), "logs/b.parquet": other})


@fault
def another_kind_of_file(log: Log) -> Case:
    name = str(log.draw.choice(["log.json", "log.xlsx", "log", "log.csv.bz2"]))
    return log.case(b"{}", "another kind of file", name, name=name)


# --- options ---


@fault
def two_roles(log: Log) -> Case:
    option, column = [("--user", "item_id"), ("--item", "user_id"), ("--order", "timestamp"), ("--time", "position")][
        int(log.draw.integers(4))
    ]
    return log.either("a column in two roles", f"'{column}'", options=f"{option} {column}")._replace(
        named=(f"'{column}'",)
    )


@fault
def values_of_options(log: Log) -> Case:
    option, value = [
        ("--max-len", "99999999999999999999"), ("--max-len", "0"), ("--max-len", "ten"), ("--seed", "-1"),
        ("--seed", "1.5"), ("--protocol", "dim"), ("--time-unit", "h"), ("--test-fraction", "nan"),
        ("--valid-fraction", "2"), ("--test-fraction", "0"), ("--attributes", "cate"), ("--time", "when"),
        ("--label", "bought"), ("--recipe", "amazon"), ("--recipe", "none.yaml"), ("--append-to", "nowhere"),
    ][int(log.draw.integers(16))]  # fmt: skip
    log.protocol = "impressions"
    log.log = log.log.with_columns(label=pl.col("position") % 2)
    key = option.removeprefix("--").replace("-", "_")
    return log.either("a value of an option", options=f"{option} {value}")._replace(
        named=(value if option in ("--recipe", "--append-to", "--attributes", "--time", "--label") else key[:3],)
    )


@fault
def places_to_write_to(log: Log) -> Case:
    out = str(
        log.draw.choice([".", "..", "/", "log.csv", "log.csv/set", "full", "x" * 300, "/proc/set", "full/../full"])
    )
    case = log.case(log.log.write_csv().encode(), "a place that cannot be written to", options=f"--out {out}")
    named = "x" * 50 if len(out) > 100 else "" if out == "." else out
    return case._replace(files={**case.files, "full": None, "full/thesis.txt": b"mine"}, named=(named,))


def cases(count: int, seed: int = 0) -> Iterator[Case]:
    """``count`` broken logs, every fault as often as the others."""
    for number in range(count):
        yield FAULTS[number % len(FAULTS)](Log(np.random.default_rng([seed, number])))


def sound(count: int, seed: int = 0) -> Iterator[Case]:
    """The logs of :func:`cases` before they are broken."""
    for number in range(count):
        yield Log(np.random.default_rng([seed, number])).either("sound")


def run(made: Iterable[Case], folder: Path) -> dict[str, Counter[str]]:
    """Try every case in a new folder below ``folder``: kind -> outcome -> how many.

    The outcome of a case is ``REFUSED`` or what else happened, with the line or the error.
    """
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for number, case in enumerate(made):
        place = folder / f"{number}"
        case.write(place)
        found[case.kind][outcome(case, place)] += 1
    return dict(found)


def outcome(case: Case, place: Path) -> str:
    """What ``ctr-pe data build`` does with the files of one case."""
    before, said, back = _content(place), io.StringIO(), Path.cwd()
    os.chdir(place)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            code: object = main(["data", "build", *case.command])
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        return f"traceback: {type(error).__name__}: {error}"[:300]
    finally:
        os.chdir(back)
    if code == 0:
        return "accepted"
    text = said.getvalue().replace("\r", "\n")
    lines = [line for line in text.splitlines() if line.startswith("ctr-pe") or "error" in line]
    if code != 2 or len(lines) != 1:
        return f"exit code {code}, {len(lines)} lines: {text[-200:]}"
    line = lines[0]
    if len(line.replace(str(place), "")) > LONGEST and "x" * 300 not in line:
        return f"{len(line)} characters: {line}"
    if missing := [word for word in case.named if word not in line]:
        return f"does not name {', '.join(missing)}: {line}"
    if _content(place) != before:
        return f"left {sorted(_content(place).keys() - before.keys())}"
    return REFUSED


def _content(place: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(place)): path.read_bytes() if path.is_file() else None for path in place.rglob("*")}
