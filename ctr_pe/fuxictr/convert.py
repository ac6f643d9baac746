"""Writes a data set in the form of FuxiCTR's own loaders: every history padded to its longest, zeros at the end.

<out>/feature_map.json feature_vocab.json dataset_config.yaml, and train, valid and test as .parquet or .npz. FuxiCTR
has no lists of seconds, so columns of ages are left out.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from ctr_pe.data.dataset import CONFIG, Dataset
from ctr_pe.data.loader import BatchLoader
from ctr_pe.data.writer import written
from ctr_pe.fuxictr.feature_specs import FEATURES, read_feature_map
from ctr_pe.utils.errors import UserError, nearest
from ctr_pe.utils.files import new_folder, write_json

FORMATS = ("parquet", "npz")
BLOCK_ROWS = 65_536


def convert(dataset: Dataset, out: Path, data_format: str = "parquet") -> list[str]:
    """Write ``dataset`` to the new directory ``out``, whose name is the data set's id for FuxiCTR.

    ``data_format``: parquet, which is written block by block, or npz, of which a split is in memory at once.

    Returns:
        The columns that are left out.

    Raises:
        UserError: ``out`` is there already, or another format.
    """
    if data_format not in FORMATS:
        raise UserError(f"format '{data_format}' is unknown: {nearest(data_format, FORMATS)}")
    if os.path.exists(out):
        raise UserError(f"{out} exists already: choose another --out")
    described = read_feature_map(dataset.path / FEATURES)
    specs = described.features
    ages = [name for name, spec in specs.items() if spec["type"] == "meta" and "max_len" in spec]
    kept = {name: spec for name, spec in specs.items() if name not in ages}
    with written(out), new_folder(out) as folder:
        for split in dataset.rows:
            blocks = _blocks(dataset, split, kept)
            if data_format == "npz":
                columns = list(blocks)
                joined: dict[str, Any] = {
                    name: np.concatenate([block[name] for block in columns]) for name in columns[0]
                }
                np.savez_compressed(folder / f"{split}.npz", **joined)
            else:
                _write_parquet(folder / f"{split}.parquet", blocks)
        for file in dataset.path.iterdir():
            if file.name.startswith(("pretrained_", "feature_vocab")):
                shutil.copyfile(file, folder / file.name)
        features = [{name: spec} for name, spec in kept.items()]
        write_json(folder / FEATURES, {**described.content, "dataset_id": out.resolve().name, "features": features})
        config = {
            "data_root": str(out.parent),
            "data_format": data_format,
            **{f"{split}_data": str(out / f"{split}.{data_format}") for split in dataset.rows},
        }
        (folder / CONFIG).write_text(yaml.safe_dump({out.resolve().name: config}, sort_keys=False), encoding="utf-8")
    return ages


def _blocks(dataset: Dataset, split: str, specs: Mapping[str, Any]) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """The rows in file order: scalars (n,), histories (n, max_len)."""
    columns = SimpleNamespace(features=specs, labels=[dataset.label])
    for batch in BatchLoader(columns, dataset.split(split), "test", BLOCK_ROWS):
        block = {}
        for name, values in batch.items():
            found = values.numpy()
            if found.ndim == 2 and specs[name]["type"] == "sequence":
                found = np.pad(found, [(0, 0), (0, specs[name]["max_len"] - found.shape[1])])
            block[name] = found.astype(np.float64) if found.dtype.kind == "f" else found
        yield block


def _arrow(values: npt.NDArray[Any]) -> pa.Array:
    if values.ndim == 1:
        return pa.array(values)
    rows, width = values.shape
    ends = np.arange(0, rows * width + 1, width, dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(values.reshape(-1)))


def _write_parquet(file: Path, blocks: Iterator[dict[str, npt.NDArray[Any]]]) -> None:
    """Histories are lists, as FuxiCTR writes them."""
    writer = None
    for block in blocks:
        table = pa.table({name: _arrow(values) for name, values in block.items()})
        writer = writer or pq.ParquetWriter(file, table.schema, compression="zstd")
        writer.write_table(table)
    if writer is not None:
        writer.close()
