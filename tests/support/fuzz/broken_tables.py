"""Broken tables for the estimator and ``ctr-pe predict``: of another type, without columns, with values that cannot be.

One fault each, in one of the tables that a method takes. What is refused is refused in one line.
"""

from __future__ import annotations

import contextlib
import datetime
import io
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from ctr_pe import CTRRanker
from ctr_pe.utils.errors import UserError
from tests.support.fuzz.attempts import answer, files
from tests.support.fuzz.small_log import SMALL, random_log

REFUSED, LONGEST = "refused in one line", 300
NO_TABLES: list[Any] = [5, 1.5, True, [], {}, [[1]], {"user_id": [1]}, np.zeros((2, 2)), object(), "", "\0", "x" * 5000]
NO_TABLES += ["nowhere.parquet", b"bytes", pl.Series([1]), pd.Series([1]), pa.array([1]), pl.col("x"), Path("/"), len]

LOG = random_log()
CLICKS = LOG.drop("label")
ITEMS = pl.DataFrame({"item_id": [f"item {i}" for i in range(45)], "cate_id": [f"c{i % 6}" for i in range(45)]})
HISTORY = CLICKS.head(200)
ASKED = pl.DataFrame({"user_id": [100, 101, 7], "item_id": ["item 1", "item 2", "x"], "timestamp": [2_500_000] * 3})
LABELLED = ASKED.with_columns(label=pl.Series([1, 0, 1]))

Call = Callable[[CTRRanker, Any], Any]


class Table(NamedTuple):
    """A table of a method: ``call`` hands it over, ``sound`` is a right one; ``needed`` columns."""

    name: str
    call: Call
    sound: pl.DataFrame
    needed: tuple[str, ...]


TABLES = [
    Table("fit: events", lambda _, t: _new().fit(t, items=ITEMS), CLICKS, ("user_id", "item_id", "timestamp")),
    Table("fit: events with labels", lambda _, t: _new().fit(t, items=ITEMS), LOG, ("user_id", "item_id", "label")),
    Table("fit: items", lambda _, t: _new().fit(CLICKS, items=t), ITEMS, ("item_id", "cate_id")),
    Table("partial_fit: new_events", lambda _, t: _new().partial_fit(t, items=ITEMS), CLICKS, ("user_id", "item_id")),
    Table("partial_fit: items", lambda _, t: _new().partial_fit(CLICKS, items=t), ITEMS, ("item_id",)),
    Table("predict_proba: requests", lambda r, t: r.predict_proba(t), ASKED, ("user_id", "item_id")),
    Table("predict_proba: history", lambda r, t: r.predict_proba(ASKED, t), HISTORY, ("user_id", "item_id")),
    Table("rank: candidates", lambda r, t: r.rank(None, t), ASKED, ("user_id", "item_id")),
    Table("rank: history", lambda r, t: r.rank(t, ASKED), HISTORY, ("user_id", "item_id")),
    Table("evaluate: requests", lambda r, t: r.evaluate(t), LABELLED, ("user_id", "item_id", "label")),
]


class Fault(NamedTuple):
    """``told``: whether it has to be refused; else it may be scored, as what is unknown is."""

    kind: str
    table: Any
    told: bool = True


def faults(of: Table) -> Iterator[Fault]:
    """Every one in a table."""
    sound = of.sound
    yield from (Fault("no table", thing) for thing in NO_TABLES)
    for name in of.needed:
        if not (of.name.startswith("fit") and name in ("timestamp", "cate_id", "label")):  # which decide what is built
            yield Fault("a missing column", sound.drop(name))
        yield Fault("another name", sound.rename({name: f"{name}z"}), name != "label" and name != "cate_id")
        yield Fault("a null", _one(sound, name, None), name != "cate_id")
    for name in [name for name in sound.columns if name != "cate_id"]:
        for kind, values in _columns(sound.height).items():
            told = (kind, name) != ("fractions", "timestamp")  # times may have fractions
            yield Fault(kind, sound.with_columns(pl.Series(name, values, strict=False)), told)
    clock, number = "timestamp", sound.schema.get("timestamp")
    if number is not None:
        for kind, factor in {"milliseconds": 1000, "times below zero": -1, "the far future": 10**5}.items():
            yield Fault(kind, sound.with_columns(pl.col(clock) * factor), told=False)
        yield Fault("one time that cannot be", _one(sound, clock, 2**62))
        yield Fault("seconds and milliseconds", _one(sound, clock, 1_700_000_000_000))
    if "label" in sound.columns:
        for value in (2, -1, 0.5, "yes"):
            yield Fault("a label other than 0 and 1", _one(sound, "label", value))
    if sound["user_id" if "user_id" in sound.columns else "item_id"].dtype.is_integer():
        yield Fault("negative ids", sound.with_columns(-pl.col("user_id")), told=False)
        yield Fault("ids above 2⁶³", sound.with_columns(pl.Series("user_id", [2**64 - 1] * sound.height, pl.UInt64)))
    yield Fault("no rows", sound.head(0), of.name.startswith(("fit: events", "partial_fit: new")))
    yield Fault("no columns", pl.DataFrame())
    pandas = sound.to_pandas()
    yield Fault("a pandas column twice", pd.concat([pandas, pandas[["item_id"]]], axis=1))
    mixed = pandas.astype(object)
    mixed.loc[0, "item_id"] = 5.5
    mixed.loc[1, "item_id"] = None
    yield Fault("a pandas column of several types", mixed)
    yield Fault("a pandas index in place of columns", pandas.set_index("item_id"))
    yield Fault("an arrow column twice", pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["item_id", "item_id"]))


def _columns(rows: int) -> dict[str, list[Any]]:
    """Values that no column of a log has."""
    return {
        "fractions": [0.5] * rows,
        "NaN": [float("nan")] * rows,
        "lists": [[1, 2]] * rows,
        "mappings": [{"a": 1}] * rows,
        "bytes": [b"x"] * rows,
        "nothing but nulls": [None] * rows,
        "durations": [datetime.timedelta(1)] * rows,
        "times of day": [datetime.time(1)] * rows,
    }


def _one(table: pl.DataFrame, name: str, value: Any) -> pl.DataFrame:
    values = table[name].to_list()
    values[1] = value
    return table.with_columns(pl.Series(name, values, strict=False))


def _new() -> CTRRanker:
    return CTRRanker("DIN", "cape", **SMALL)


def outcomes(ranker: CTRRanker, folder: Path) -> tuple[dict[str, Counter[str]], list[str]]:
    """Per method and table how many were ``refused in one line`` or ``read``, and what went wrong; ``folder``: a model
    folder of the ranker, for ``ctr-pe predict`` in the working directory."""
    found: dict[str, Counter[str]] = {}
    wrong = []
    for of in TABLES:
        for fault in faults(of):
            outcome = _outcome(of, fault, ranker)
            found.setdefault(of.name, Counter())[outcome] += 1
            if outcome not in (REFUSED, "read") or (fault.told and outcome == "read"):
                wrong.append(f"{of.name}, {fault.kind}, {str(fault.table)[:60]}: {outcome}")
    for option, sound in {"input": ASKED, "events": HISTORY}.items():
        for kind, content, told in _files(sound):
            Path("broken.parquet").write_bytes(content)
            asked = {"input": "asked.parquet", "events": "events.parquet", option: "broken.parquet"}
            ASKED.write_parquet("asked.parquet")
            HISTORY.write_parquet("events.parquet")
            before = files(Path.cwd())
            command = [part for name, file in asked.items() for part in (f"--{name}", file)]
            try:
                code, shown = answer(["predict", "--model", str(folder), *command, "--output", "scored.parquet"])
            except Exception as error:
                code, shown = -1, f"{type(error).__name__}: {error}"
            lines = [line for line in shown.splitlines() if line.strip() and not line.startswith("scoring: ")]
            fits = code == 2 and len(lines) == 1 and len(lines[0]) <= LONGEST and files(Path.cwd()) == before
            outcome = REFUSED if fits else "read" if code == 0 else f"{code}: {shown[:200]}"
            found.setdefault(f"ctr-pe predict: --{option}", Counter())[outcome] += 1
            if outcome not in (REFUSED, "read") or (told and outcome == "read"):
                wrong.append(f"predict --{option}, {kind}: {outcome}")
            Path("scored.parquet").unlink(missing_ok=True)
    return found, wrong


def _outcome(of: Table, fault: Fault, ranker: CTRRanker) -> str:
    try:
        result = of.call(ranker, fault.table)
    except UserError as error:
        return REFUSED if "\n" not in str(error) and len(str(error)) <= LONGEST else f"too long: {str(error)[:600]}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    scores: Any = result if isinstance(result, np.ndarray) else []
    scores = result["score"] if isinstance(result, pl.DataFrame) else scores
    return "read" if np.isfinite(np.asarray(scores, np.float64)).all() else "scores that are not finite"


def _files(sound: pl.DataFrame) -> Iterator[tuple[str, bytes, bool]]:
    """Parquet files with the faults of a table, as far as they can be written, and files that are none."""
    of = Table("", lambda *_: None, sound, ("user_id", "item_id"))
    for fault in faults(of):
        if isinstance(fault.table, pl.DataFrame | pa.Table) and fault.kind != "no columns":
            with contextlib.suppress(pl.exceptions.PolarsError, pa.ArrowException):
                yield fault.kind, _parquet(fault.table), fault.told and fault.kind != "no rows"
    whole = _parquet(sound)
    for kind, content in {
        "an empty file": b"",
        "a text": b"user_id,item_id\n1,2\n",
        "a cut file": whole[: len(whole) // 2],
        "a damaged file": whole[:40] + b"\xff" * 40 + whole[80:],
        "a damaged footer": whole[:-60] + b"\xff" * 50 + whole[-10:],
        "zeros": bytes(1000),
    }.items():
        yield kind, content, True


def _parquet(table: pl.DataFrame | pa.Table) -> bytes:
    stream = io.BytesIO()
    if isinstance(table, pl.DataFrame):
        table.write_parquet(stream)
    else:
        pq.write_table(table, stream)
    return stream.getvalue()
