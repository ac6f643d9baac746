"""The batch loader: rows per second and bytes per row, against FuxiCTR's; and a data set larger than memory."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import resource
import statistics
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmark.speed import data, memory
from benchmark.speed.cases import Settings
from benchmark.speed.timing import Figure, alternate, say
from ctr_pe.data.dataset import Dataset
from ctr_pe.data.loader import BatchLoader

BATCH = 1024
GB = 10**9


def rows(settings: Settings) -> Figure:
    """Rows per second of an epoch, shuffled, over those of FuxiCTR's parquet loader.

    FuxiCTR's reads and shuffles everything before its first batch, which belongs to the epoch; ``first_batch_seconds``
    is how long that takes. Ray's start, some seconds once per process, is not counted.
    """
    from fuxictr.pytorch.dataloaders import RankDataLoader

    logging.getLogger("ray").setLevel(logging.ERROR)
    count = settings.size(200_000, 20_000)
    drawn = data.draw(count)
    dataset = data.write(settings.folder / "amazon", drawn)
    feature_map = dataset.feature_map(64)
    padded = {name: _lists(values) for name, values in data.padded_columns(drawn).items()}
    pq.write_table(pa.table(padded), settings.folder / "padded.parquet")
    ours = BatchLoader(feature_map, dataset.split("train"), batch_size=BATCH, shuffle=True, seed=1)
    theirs, _ = RankDataLoader(
        feature_map,
        stage="train",
        train_data=str(settings.folder / "padded.parquet"),
        batch_size=BATCH,
        shuffle=True,
        data_format="parquet",
    )
    first: list[float] = []
    say(f"an epoch of {count:,} rows in batches of {BATCH}")
    timed = alternate(
        lambda _: _read(ours, count), lambda _: first.append(_read(theirs, count)), settings.repeats, warm_up=2
    )
    return Figure(
        timed.speedup("").values,
        count / statistics.median(timed.ours),
        count / statistics.median(timed.baseline),
        of="rows/s",
        against="FuxiCTR's ParquetDataLoader",
        details={"rows": count, "first_batch_seconds": statistics.median(first[-len(timed.baseline) :])},
    )


def _read(batches: Iterable[Mapping[str, Any]], count: int) -> float:
    """Seconds until the first batch."""
    start, first, seen = time.perf_counter(), 0.0, 0
    for batch in batches:
        first = first or time.perf_counter() - start
        seen += len(batch["label"])
    if seen != count:
        raise ValueError(f"{seen} rows were loaded, {count} are there")
    return first


def _lists(values: data.Ints) -> pa.Array:
    if values.ndim == 1:
        return pa.array(values)
    offsets = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
    return pa.ListArray.from_arrays(offsets, values.reshape(-1))


def disk(settings: Settings) -> Figure:
    """Bytes per row of FuxiCTR's float64 matrix over those of our files, the parquet and the columns made from it."""
    count = settings.size(200_000, 20_000)
    dataset = data.write(settings.folder / "amazon", data.draw(count))
    BatchLoader(dataset.feature_map(64), dataset.split("train"))
    files = [dataset.split("train"), *(dataset.path / "columns").rglob("*")]
    sizes = {file: file.stat().st_size for file in files if file.is_file()}
    ours, theirs = sum(sizes.values()) / count, _matrix_bytes(count) / count
    parquet = sizes[dataset.split("train")] / count
    details = {"rows": count, "parquet": parquet, "columns": ours - parquet}
    return Figure([theirs / ours], ours, theirs, of="bytes/row", against="FuxiCTR's float64 matrix", details=details)


def resident(settings: Settings) -> Figure:
    """Bytes per row of the same matrix over what an epoch adds to the resident memory of this process, ours mapped."""
    count = settings.size(1_000_000, 100_000)
    dataset = data.write(settings.folder / "amazon", data.draw(count))
    feature_map = dataset.feature_map(64)
    columns = BatchLoader(feature_map, dataset.split("train"), batch_size=BATCH)  # makes them
    _read(BatchLoader(feature_map, dataset.split("test")), 2)
    del columns
    gc.collect()
    before = memory.status("VmRSS")
    loader = BatchLoader(feature_map, dataset.split("train"), batch_size=BATCH, shuffle=True)
    _read(loader, count)
    gc.collect()
    ours, theirs = (memory.status("VmRSS") - before) / count, _matrix_bytes(count) / count
    return Figure(
        [theirs / ours], ours, theirs, of="bytes/row", against="FuxiCTR's float64 matrix", details={"rows": count}
    )


def _matrix_bytes(count: int) -> int:
    """What NpzDataset, FuxiCTR's other loader, holds in memory: every column as float64, one per slot of a history."""
    columns = data.padded_columns(data.draw(min(count, 1000)))
    slots = sum(1 if values.ndim == 1 else values.shape[1] for values in columns.values())
    return slots * np.dtype(np.float64).itemsize * count


def beyond_memory(settings: Settings) -> Figure:
    """Peak of the memory of its own, in GB, with which this process reads a 5 GB set, under a limit of 2 GB.

    The limit is on what the process allocates (RLIMIT_DATA), not on the mapped columns, which the system can drop. It
    holds from the start: the columns are made, an epoch is read in order, then some hundred shuffled batches.
    """
    size = settings.size(5 * GB, GB // 50)
    block = settings.size(50_000, 2_000)
    per_row = data.MAX_LEN * (2 + 2) + 8  # ids of 63,000 items and 800 categories take two bytes each
    count = -(-size // (per_row * block)) * block
    say(f"writing a set of {count:,} rows")
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # another process, so that its memory is not in this one
        dataset = pool.apply(_write_full, (settings.folder / "large", block, count // block))
    feature_map, train = dataset.feature_map(64), dataset.split("train")
    resource.setrlimit(resource.RLIMIT_DATA, (2 * GB, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    say("making the columns")
    with memory.Peak() as columns:
        loader = BatchLoader(feature_map, train, split="valid", batch_size=BATCH)
    stored = sum(file.stat().st_size for file in (dataset.path / "columns").rglob("*"))
    if stored < size:
        raise ValueError(f"the columns have {stored} bytes, {size} were meant")
    say(f"reading {stored / GB:.2f} GB of columns in order")
    start = time.perf_counter()
    with memory.Peak() as in_order:
        _read(loader, count)
    rate = count / (time.perf_counter() - start)
    say("and shuffled")
    with memory.Peak() as shuffled:
        batches = iter(BatchLoader(feature_map, train, batch_size=BATCH, shuffle=True))
        for _ in range(settings.size(300, 10)):
            next(batches)
    peaks = {"columns": columns.bytes, "in_order": in_order.bytes, "shuffled": shuffled.bytes}
    most = max(peaks.values()) / GB
    details = {"rows": count, "rows_per_second": rate, "with_mapped_files": memory.status("VmHWM") / GB}
    details |= {f"peak_{stage}": peak / GB for stage, peak in peaks.items()}
    return Figure([most], most, stored / GB, of="GB", unit="GB", against="size of the set", details=details)


def _write_full(folder: Path, rows: int, times: int) -> Dataset:
    return data.write(folder, data.draw(rows, full=True), times=times)
