"""Writes a data set in the form of FuxiCTR's own loaders: every history padded to its ``max_len``, zeros at the end.

<out>/feature_map.json feature_vocab.json dataset_config.yaml, and train, valid and test as .parquet or .npz. FuxiCTR
has no lists of seconds, so columns of ages are left out.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from ctr_pe.data.dataset import Dataset
from ctr_pe.data.writer import write_config, written
from ctr_pe.fuxictr.feature_specs import FEATURES, read_feature_map
from ctr_pe.utils.errors import UserError, nearest
from ctr_pe.utils.files import new_folder, write_json

FORMATS = ("parquet", "npz")


def convert(dataset: Dataset, out: Path, data_format: str = "parquet") -> list[str]:
    """Write ``dataset`` to the new directory ``out``, whose name is the data set's id for FuxiCTR.

    ``data_format``: parquet, which is written block by block, or npz, of which a split is in memory at once.

    Returns:
        The columns that are left out.

    Raises:
        UserError: ``out`` is there already, another format, or a field of several categories.
    """
    if data_format not in FORMATS:
        raise UserError(f"format '{data_format}' is unknown: {nearest(data_format, FORMATS)}")
    if os.path.exists(out):
        raise UserError(f"{out} exists already: choose another --out")
    described = read_feature_map(dataset.path / FEATURES)
    specs = described.features
    for name, spec in specs.items():
        if "values" in spec:
            raise UserError(f"'{name}' has several categories per value, which FuxiCTR's loaders do not take")
    ages = [name for name, spec in specs.items() if spec["type"] == "meta" and "max_len" in spec]
    kept = {name: spec for name, spec in specs.items() if name not in ages}
    with written(out), new_folder(out) as folder:
        for split, file in ((split, folder / f"{split}.{data_format}") for split in dataset.rows):
            columns = [*(_padded(name, spec) for name, spec in kept.items()), pl.col(dataset.label).cast(pl.Float64)]
            rows = dataset.scan(split).select(columns)
            if data_format == "parquet":
                rows.sink_parquet(file)
            else:
                made = [one.list.to_array(len(one[0])) if one.dtype == pl.List else one for one in rows.collect()]
                arrays: dict[str, Any] = {one.name: one.to_numpy() for one in made}
                np.savez_compressed(file, **arrays)
        for file in dataset.path.iterdir():
            if file.name.startswith(("pretrained_", "feature_vocab")):
                shutil.copyfile(file, folder / file.name)
        features = [{name: spec} for name, spec in kept.items()]
        write_json(folder / FEATURES, {**described.content, "dataset_id": out.resolve().name, "features": features})
        write_config(
            folder, out, out.resolve().name, {split: f"{split}.{data_format}" for split in dataset.rows}, data_format
        )
    return ages


def _padded(name: str, spec: Mapping[str, Any]) -> pl.Expr:
    """A column in FuxiCTR's types; a history has zeros behind its newest ``max_len`` items."""
    column, width = pl.col(name), spec.get("max_len", 1)
    if spec["type"] == "sequence":
        zeros = pl.lit([0] * width, pl.List(pl.Int64))
        return column.cast(pl.List(pl.Int64)).list.tail(width).list.concat(zeros).list.head(width)
    if spec["type"] == "embedding":
        return column.cast(pl.List(pl.Float32)).cast(pl.List(pl.Float64))
    return column.cast(pl.Float32).cast(pl.Float64) if spec["type"] == "numeric" else column.cast(pl.Int64)
