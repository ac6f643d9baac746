"""What the training rows of a model had, column by column: a table that its folder keeps.

column   of the data set; ``length of NAME``: how many items the history NAME has, at most as many as the model keeps
kind     ``ids`` of an embedding table, or ``numbers``, lengths too
value    an id, or the upper edge, included, of an interval of numbers; the last is infinite
rows     how often it is in the training rows; a column of several categories counts each
chosen   likewise in rows of label 1

A column has a value for each id that was there, or up to ``INTERVALS`` intervals. Vectors and what is known afterwards
are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import polars as pl

from ctr_pe.data.loader import BatchLoader
from ctr_pe.evaluation.drift import quantile_edges
from ctr_pe.fuxictr.padded import history
from ctr_pe.training import PROTOCOLS

if TYPE_CHECKING:
    from ctr_pe.sequence.batch import JaggedBatch
    from ctr_pe.serving.encoder import Encoder
    from ctr_pe.training.source import DataSource

INTERVALS, BATCH = 100, 2**16
SAMPLE = 2**22  # rows whose numbers are counted, at most, evenly from all over them
Values = npt.NDArray[Any]


def training_profile(encoder: Encoder, feature_map: Any, source: DataSource, protocol: str) -> pl.DataFrame | None:
    """The profile of the rows that ``protocol`` trains on; None without rows, or of files that are no parquet."""
    splits = [split for split in PROTOCOLS[protocol][0] if split in source.files]
    if source.dataset is not None:
        splits = [split for split in splits if source.dataset.rows[split]]
    files = [source.files[split] for split in splits]
    if not files or any(file.endswith(".npz") for file in files):
        return None
    loader = BatchLoader(feature_map, files, "valid", BATCH)
    return profile(encoder, loader, feature_map.labels[0], every=-(-loader.num_samples // SAMPLE))


def profile(
    encoder: Encoder,
    batches: Iterable[JaggedBatch],
    label: str | None,
    known: pl.DataFrame | None = None,
    every: int = 1,
) -> pl.DataFrame:
    """The profile of batches, in the intervals of the profile ``known`` where there is one.

    Args:
        label: a column of the batches; None: all rows count as chosen.
        every: numbers are counted in one of so many rows.
    """
    ids, numbers = list[pl.DataFrame](), dict[str, list[pl.DataFrame]]()
    for batch in batches:
        size = next((len(values) for values in (*batch.rows.values(), *batch.lengths.values())), 0)
        chosen = pl.Series("chosen", np.ones(size, bool) if label is None else batch.rows[label].numpy() > 0)
        for name, table in columns_of(encoder, batch).items():
            of_rows = table.select("value", chosen.gather(table["row"]))
            if kind_of(encoder, name) == "ids":
                ids.append(_counted(of_rows, name, "ids"))
            else:
                numbers.setdefault(name, []).append(of_rows.gather_every(every).cast({"value": pl.Float32}))
    parts = [added(ids)] if ids else []
    for name, several in numbers.items():
        table = pl.concat(several)
        edges = edges_of(known, name)
        edges = quantile_edges(table["value"], INTERVALS) if edges is None else edges
        value = pl.Series("value", edges[np.searchsorted(edges, table["value"])], pl.Float64)
        parts.append(_counted(pl.concat([table.with_columns(value), _none_of(edges)]), name, "numbers"))
    return added(parts)


def _counted(table: pl.DataFrame, name: str, kind: str) -> pl.DataFrame:
    """A profile of the column ``value``, by the column ``chosen``, which is null of values without a row."""
    chosen = pl.col("chosen")
    rows = (
        table.group_by("value")
        .agg(rows=chosen.count(), chosen=chosen.sum())
        .cast({"rows": pl.Int64, "chosen": pl.Int64})
    )
    return rows.select(pl.lit(name).alias("column"), pl.lit(kind).alias("kind"), "value", "rows", "chosen")


def _none_of(edges: Values) -> pl.DataFrame:
    return pl.DataFrame({"value": edges, "chosen": pl.Series([None] * len(edges), dtype=pl.Boolean)})


def added(profiles: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """The profile of all rows, from profiles with the same intervals."""
    rows = pl.concat(profiles).group_by("column", "kind", "value", maintain_order=True)
    return rows.agg(pl.col("rows", "chosen").sum()).sort("column", "value")


def columns_of(encoder: Encoder, batch: JaggedBatch) -> dict[str, pl.DataFrame]:
    """Column -> its values in a batch (``value``, float64) and the row of each in the batch (``row``)."""
    found: dict[str, tuple[Values, Values]] = {}
    for name in (*encoder.item_fields, *encoder.other_fields):
        spec = encoder.features[name]
        if spec["type"] == "embedding" or spec.get("known") == "afterwards":
            continue
        if name in batch.rows:
            values = batch.rows[name].numpy()
            several = values.ndim > 1  # categories, 0 after the last
            found[name] = (values[values > 0], values.nonzero()[0]) if several else (values, np.arange(len(values)))
        else:
            lengths, listed = history(batch, [name])
            found[name] = listed[name].numpy(), np.repeat(np.arange(len(lengths)), lengths.numpy())
    for group in encoder.groups:
        lengths, _ = history(batch, group.history)
        found[length_of(group.history[0])] = np.minimum(lengths.numpy(), group.max_len), np.arange(len(lengths))
    return {
        name: pl.DataFrame({"value": values.astype(np.float64), "row": rows}) for name, (values, rows) in found.items()
    }


def length_of(name: str) -> str:
    """What the column of a history's lengths is called."""
    return f"length of {name}"


def kind_of(encoder: Encoder, name: str) -> str:
    """``numbers`` or ``ids``."""
    spec: Mapping[str, Any] = encoder.features.get(name, {"type": "numeric"})
    return "numbers" if spec["type"] == "numeric" else "ids"


def edges_of(known: pl.DataFrame | None, name: str) -> Values | None:
    """The upper edges of a column's intervals in a profile."""
    found = None if known is None else known.filter(pl.col("column") == name)["value"].to_numpy()
    return found if found is not None and len(found) else None
