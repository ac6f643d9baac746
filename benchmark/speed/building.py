"""Making data sets: `ctr-pe data build` on a raw log, and FuxiCTR's CSV files against its own preprocessing."""

from __future__ import annotations

import logging
import multiprocessing
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq

from benchmark.speed import data, memory
from benchmark.speed.cases import Settings
from benchmark.speed.timing import Figure, alternate, say
from ctr_pe.config.field_groups import Group
from ctr_pe.data.dataset import open_dataset
from ctr_pe.data.loader import BatchLoader
from ctr_pe.fuxictr.csv import build_csv


def rows(settings: Settings) -> Figure:
    """Rows per second that the command writes, from start to end of its process."""
    rates, seconds = [], []
    users = settings.size(200_000, 5_000)
    say(f"ctr-pe data build, protocol din, {users:,} users")
    for number in range(-1, settings.repeats):
        start = time.perf_counter()
        made, _, _ = _build(settings.folder, users)
        taken = time.perf_counter() - start
        if number >= 0:
            rates.append(made / taken)
            seconds.append(taken)
            say(f"repeat {number + 1} of {settings.repeats}: {made:,} rows in {taken:.2f} s")
    details = {"users": users, "rows": made, "seconds": statistics.median(seconds)}
    return Figure(rates, statistics.median(rates), of="rows/s", unit="rows/s", details=details)


def memory_(settings: Settings) -> Figure:
    """Peak memory of the same command over that with half of the users. Pages of the log are not counted: it is mapped,
    and the system can drop them."""
    users = settings.size(1_600_000, 8_000)
    say(f"ctr-pe data build, protocol din, {users // 2:,} and {users:,} users")
    _, few, _ = _build(settings.folder, users // 2)
    _, many, mapped = _build(settings.folder, users)
    details = {"users": users, "with_mapped_files": mapped / 1e9}
    return Figure([many / few], many / 1e9, few / 1e9, of="GB", against="half of the users", details=details)


def _build(folder: Path, users: int) -> tuple[int, int, int]:
    """Rows written and peak bytes, its own and with mapped files."""
    log, items, out = (folder / name for name in (f"log-{users}.parquet", "items.parquet", "built"))
    if not log.exists():
        # In another process: a command's peak counts the memory of the process that starts it.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            pool.apply(_write_log, (users, log, items))
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "ctr_pe.cli", "data", "build", "--protocol", "din", "--attributes", "cate_id"]
    files = {"--interactions": log, "--items": items, "--out": out}
    code, own, resident = memory.peak_of(command + [str(part) for pair in files.items() for part in pair])
    if code:
        raise ValueError(f"ctr-pe data build ended with code {code}")
    return sum(open_dataset(str(out)).rows.values()), own, resident


def _write_log(users: int, log: Path, items: Path) -> None:
    for table, file in zip(data.interactions(users), (log, items), strict=True):
        pq.write_table(table, file)


def csv(settings: Settings, further: bool = False) -> Figure:
    """FuxiCTR's build_dataset over build_csv and the columns that training maps, on the same files.

    ``further``: the five columns of ``FURTHER`` are beside user, item, category and their histories.
    The start of Ray is not counted, nor what FuxiCTR's loader does before its first batch.
    """
    count = settings.size(200_000, 2_000)
    raw = settings.folder / "raw"
    raw.mkdir()
    columns = data.padded_columns(data.draw(count))
    if further:
        draw = np.random.default_rng(1)
        columns |= {column["name"]: draw.integers(0, 2000, count) for column in FURTHER}
    for split, part in {"train": slice(None), "valid": slice(count // 20), "test": slice(count // 20)}.items():
        _write_csv(raw / f"{split}.csv", {name: values[part] for name, values in columns.items()})
    made = {"ours": settings.folder / "ours", "theirs": settings.folder / "theirs"}

    def params(side: str) -> dict[str, Any]:
        shutil.rmtree(made[side], ignore_errors=True)
        return {
            "data_root": str(made[side]),
            "dataset_id": "amazon",
            "data_format": "csv",
            **{f"{split}_data": str(raw / f"{split}.csv") for split in ("train", "valid", "test")},
            "feature_cols": [dict(column) for column in [*FEATURE_COLS, *(FURTHER if further else [])]],
            "label_col": {"name": "label", "dtype": "float"},
            "group_id": "user_id",
            "min_categr_count": 1,
        }

    def ours(_: int) -> None:
        dataset = build_csv(params("ours"), [Group(data.TARGET, data.HISTORY)])
        feature_map = dataset.feature_map(64)
        for split in ("train", "valid", "test"):
            BatchLoader(feature_map, dataset.split(split))

    def theirs(_: int) -> None:
        _fuxictr_build(params("theirs"))

    logging.getLogger("ray").setLevel(logging.ERROR)
    say(f"CSV files with {count:,} train rows")
    timed = alternate(ours, theirs, settings.repeats)
    built = {split: len(pl.read_parquet(made["theirs"] / "amazon" / f"{split}.parquet")) for split in ("train", "test")}
    if built != {"train": count, "test": count // 20}:
        raise ValueError(f"FuxiCTR built {built}")
    rate = (count + 2 * (count // 20)) / statistics.median(timed.ours)
    return timed.speedup("FuxiCTR's build_dataset", rows=count + 2 * (count // 20), rows_per_second=rate)


HISTORY: dict[str, Any] = {"active": True, "dtype": "str", "type": "sequence", "splitter": "^", "max_len": 100}
FEATURE_COLS: list[dict[str, Any]] = [
    {"name": "user_id", "active": True, "dtype": "str", "type": "meta", "remap": True},
    {"name": ["item_id", "cate_id"], "active": True, "dtype": "str", "type": "categorical"},
    {"name": "item_history", "share_embedding": "item_id", "feature_encoder": None, **HISTORY},
    {"name": "cate_history", "share_embedding": "cate_id", "feature_encoder": None, **HISTORY},
]
OF_REQUEST: dict[str, Any] = {"active": True, "dtype": "str", "type": "categorical"}
OF_NUMBER: dict[str, Any] = {"active": True, "dtype": "float", "type": "numeric", "normalizer": "StandardScaler"}
FURTHER = [
    *({"name": name, **OF_REQUEST} for name in ("hour", "device", "age_group")),
    *({"name": name, **OF_NUMBER} for name in ("price", "discount")),
]


def _write_csv(file: Path, columns: dict[str, data.Ints]) -> None:
    frame = pl.DataFrame({name: values for name, values in columns.items() if values.ndim == 1})
    for name in data.HISTORY:
        lists = pl.Series(name, columns[name]).cast(pl.List(pl.Int64)).list.eval(pl.element().filter(pl.element() > 0))
        frame = frame.with_columns(lists.cast(pl.List(pl.String)).list.join("^"))
    frame.write_csv(file)


def _fuxictr_build(params: dict[str, Any]) -> None:
    from fuxictr.preprocess import FeatureProcessor, build_dataset

    # The one change without which it does not run: polars 2 calls dtypes schema_overrides.
    FeatureProcessor.read_data = lambda self, data_path, **ignored: pl.scan_csv(
        data_path, schema_overrides=self.dtype_dict, low_memory=False
    )
    build_dataset(FeatureProcessor(**params), **params)
