"""A log in blocks of whole users on a cluster: its engine brings the events of each block together.

The cluster's machines see the log and the folder of the data set's temporary files under the names they have here.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import polars as pl
import pyarrow as pa

from ctr_pe.utils.engines import Engine

if TYPE_CHECKING:
    from ctr_pe.data.logs.events import Log


def shuffled(engine: Engine, log: Log, folder: Path, size: int) -> list[Path]:
    """Files below ``folder`` with the blocks that :meth:`Log.blocks` makes of about ``size`` events, in its order."""
    folder.mkdir()
    split = partial(_split, log.for_workers(reading=True), size)
    engine.shuffle(split, -(-log.rows // size), partial(_gather, folder))
    return sorted(folder.glob("*.parquet"))


def _split(log: Log, size: int, part: int) -> Iterator[tuple[int, bytes]]:
    """The events of ``size`` rows of the log, by their blocks."""
    block = pl.col("user").hash(seed=0) % log.count(size) if log.count(size) > 1 else pl.lit(0)
    events = log.part(part * size, size).with_columns(block=block.cast(pl.Int64)).collect()
    for (number,), some in events.partition_by("block", as_dict=True, include_key=False).items():
        piece = io.BytesIO()
        some.write_ipc(piece, compression="zstd")
        yield int(number), piece.getvalue()


def _gather(folder: Path, number: int, pieces: list[bytes]) -> None:
    made = folder / f"{uuid4().hex}.tmp"
    pl.concat([pl.read_ipc(piece) for piece in pieces]).write_parquet(made)
    made.replace(folder / f"block={number}.parquet")


@dataclass
class BlockFiles:
    """The rows of a block, a file per split; takes the place of a DatasetWriter on another machine. They are there
    together or, before ``finish``, not at all."""

    folder: Path
    number: int

    def __post_init__(self) -> None:
        self._made = self.folder / f"{uuid4().hex}.tmp"
        self._made.mkdir(parents=True)
        self._files: dict[str, pa.ipc.RecordBatchFileWriter] = {}

    def add(self, split: str, rows: pa.Table, **options: Any) -> None:
        """Append rows, maybe none; ``options``: of the writer of the data set."""
        if split not in self._files:
            how = pa.ipc.IpcWriteOptions(compression="zstd")
            self._files[split] = pa.ipc.new_file(self._made / split, rows.schema, options=how)
        self._files[split].write_table(rows)

    def finish(self) -> None:
        for file in self._files.values():
            file.close()
        try:
            self._made.rename(self.folder / str(self.number))
        except OSError:  # an earlier worker, of which nothing more was heard, has finished
            if not (self.folder / str(self.number)).is_dir():
                raise

    @staticmethod
    def read(folder: Path, number: int) -> Iterator[tuple[str, pa.Table]]:
        """The rows of a block as they were added, split by split."""
        for file in sorted((folder / str(number)).iterdir()):
            with pa.memory_map(str(file)) as source, pa.ipc.open_file(source) as batches:
                if not batches.num_record_batches:
                    yield file.name, batches.schema.empty_table()
                for place in range(batches.num_record_batches):
                    yield file.name, pa.Table.from_batches([batches.get_batch(place)])
