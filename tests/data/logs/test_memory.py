"""Files are read a row group at a time, and let go of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ctr_pe.data.columns import batches


def test_only_a_row_group_is_in_memory(tmp_path: Path) -> None:
    groups, rows = 40, 50_000
    table = pa.table({"x": np.random.default_rng(0).integers(0, 2**60, rows), "y": np.arange(rows)})
    with pq.ParquetWriter(tmp_path / "large.parquet", table.schema) as writer:
        for _ in range(groups):
            writer.write_table(table)
    before, most, seen = pa.total_allocated_bytes(), 0, 0
    with pq.ParquetFile(tmp_path / "large.parquet") as file:
        for batch in batches(file, 10_000):
            seen += len(batch)
            most = max(most, pa.total_allocated_bytes() - before)
            assert batch.num_columns == 2
    assert seen == groups * rows
    assert most < 6 * table.nbytes  # of 40 times that
