"""Batches from memory-mapped columns, shuffled by a seeded permutation; histories as values and lengths."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ctr_pe.data.columns import Columns, Want
from ctr_pe.data.dataset import shards
from ctr_pe.sequence.batch import JaggedBatch
from ctr_pe.utils.errors import UserError, counted, nearest, no_such_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Integers = npt.NDArray[Any]
KINDS = ("categorical", "sequence", "meta", "numeric", "embedding")
SMALLEST_BATCH = 128
"""Rows that ``min_batches`` does not go below."""


class BatchLoader:
    """Loads the rows of one or several parquet files; fits FuxiCTR's ``RankDataLoader(..., data_loader=BatchLoader)``.

    An iteration is an epoch and yields a :class:`~ctr_pe.sequence.batch.JaggedBatch` of B rows after the other: every
    feature of the feature map (meta too) as (B,) int64, "numeric" ones float32, "embedding" ones (B, dim) float32;
    labels (B,) float32; histories int64, oldest item first; those of several categories have an axis more. As a mapping
    it has them in FuxiCTR's form: (B, L), 0 after the items. The order of an epoch depends on ``seed`` and the epoch's
    number only, not on how the rows are spread over files. In split "train" a last batch of one row joins the batch
    before it: batch norm cannot train on one row.

    Several processes have the same batches: each yields its slice of the rows of each batch of split "train", and else
    its slice of the batches. A last batch of fewer rows than processes joins the one before, too.

    Args:
        feature_map: with FuxiCTR's ``features`` and ``labels``.
        data_path: parquet file, or directory of parquet files, or several of either; their rows follow one another.
        shuffle: a new order in each epoch; never for split "test", as in FuxiCTR.
        like_length: with ``shuffle``, rows of so many batches are sorted by the lengths of their histories, and the
            batches that this makes come in random order: rows of a batch have about as many items. Each row is still
            once in an epoch. 0: rows of any length together.
        min_batches: split "train" has at least so many batches: ``batch_size`` is halved until it has, down to
            ``SMALLEST_BATCH`` rows.
        rank_slice: of one of several processes, ``slice(rank, None, processes)``.
        ignored: FuxiCTR passes all parameters of an experiment.

    Raises:
        UserError: see ``Columns``; also for a missing path, a feature type that is not supported, and fewer rows in a
            batch to train on than processes.
    """

    def __init__(
        self,
        feature_map: Any,
        data_path: str | Path | Sequence[str | Path],
        split: str = "train",
        batch_size: int = 1024,
        shuffle: bool = False,
        seed: int = 0,
        rank_slice: slice = slice(None),
        like_length: int = 0,
        min_batches: int = 0,
        **ignored: Any,
    ) -> None:
        if batch_size < 1:
            raise UserError(f"batch_size {batch_size}: must be at least 1")
        self.seed, self.epoch, self.like_length = seed, 0, like_length
        self.shuffle = shuffle and split != "test"
        wants = _wants(feature_map)
        self.parts = [Columns(file, wants) for file in _parquet_files(data_path)]
        self.num_blocks = len(self.parts)
        self.ends = np.cumsum([part.rows for part in self.parts])
        self.num_samples = int(self.ends[-1])
        while (
            split == "train" and batch_size >= 2 * SMALLEST_BATCH and self.num_samples <= (min_batches - 1) * batch_size
        ):
            batch_size //= 2
        self.batch_size = batch_size
        cuts, processes = [*range(0, self.num_samples, batch_size), self.num_samples], rank_slice.step or 1
        if split == "train" and (most := min(batch_size, self.num_samples)) < processes:
            raise UserError(f"{counted(most, 'row')} in a batch (batch_size) for {processes} processes")
        if split == "train" and len(cuts) > 2 and cuts[-1] - cuts[-2] < max(2, processes) <= batch_size:
            del cuts[-2]
        every = [slice(*span) for span in pairwise(cuts)]
        self.spans, self.own = (every, rank_slice) if split == "train" else (every[rank_slice], slice(None))
        self.is_shared = processes > 1
        self.labels = next(name for name, want in wants.items() if want.kind == "label")
        self.vectors = {name for name, want in wants.items() if want.kind == "embedding"}
        self.several = {name: (want.values,) for name, want in wants.items() if want.values}
        self.padded = frozenset(name for part in self.parts for name in part.padded)
        self.scalars: dict[str, torch.dtype] = {}
        self.histories: dict[tuple[str, ...], list[str]] = {}  # offsets in each part -> the columns that share them
        for name, want in wants.items():
            spans = [part.spans[name] for part in self.parts if name in part.spans]
            if not spans:
                self.scalars[name] = torch.float32 if want.kind in ("label", "numeric", "weight") else torch.int64
            elif len(spans) == len(self.parts):
                self.histories.setdefault(tuple(spans), []).append(name)
            else:
                raise UserError(f"{self.parts[0].parquet}: column '{name}' is a list in some of the files only")

    def __len__(self) -> int:
        """Batches per epoch, of this process."""
        return len(self.spans)

    def __iter__(self) -> Iterator[JaggedBatch]:
        rows = np.arange(self.num_samples, dtype=np.min_scalar_type(self.num_samples))
        spans = self.spans
        if self.shuffle:
            numbers = np.random.default_rng((self.seed, self.epoch))
            numbers.shuffle(rows)
            if self.like_length > 1 and self.histories:
                self._sort(rows)
                spans = [spans[k] for k in numbers.permutation(len(spans))]
        self.epoch += 1
        for span in spans:
            yield self.batch(rows[span][self.own].astype(np.int64))

    @cached_property
    def positives(self) -> float:
        """The share of rows with label 1."""
        return sum(int(part.data[self.labels].sum()) for part in self.parts) / self.num_samples

    def _sort(self, rows: Integers) -> None:
        """By the items of a row's longest history, within ``like_length`` batches; rows of one length stay as drawn."""
        window = self.like_length * self.batch_size
        for start in range(0, len(rows), window):
            some = rows[start : start + window].astype(np.int64)
            items = np.zeros(len(some), np.int64)
            for part, slots, local in self._pieces(some):
                for offsets in self.histories:
                    bounds = self.parts[part].offsets[offsets[part]]
                    length = bounds[local + 1].astype(np.int64) - bounds[local].astype(np.int64)
                    items[slots] = np.maximum(items[slots], length)
            rows[start : start + window] = some[np.argsort(items, kind="stable")]

    def batch(self, rows: Integers) -> JaggedBatch:
        """The rows of these numbers, in this order."""
        batch, pieces = JaggedBatch({}, {}, {}, self.padded), self._pieces(rows)
        for name, dtype in self.scalars.items():
            batch.rows[name] = torch.empty(len(rows), *self.several.get(name, ()), dtype=dtype)
            filled = batch.rows[name].numpy()
            for part, slots, local in pieces:
                filled[slots] = self.parts[part].data[name][local]
        for offsets, names in self.histories.items():
            lengths, starts, owner = np.empty((3, len(rows)), np.int64)
            for part, slots, local in pieces:
                bounds = self.parts[part].offsets[offsets[part]]
                owner[slots], starts[slots] = part, bounds[local]
                lengths[slots] = bounds[local + 1] - starts[slots]
            source = np.arange(lengths.sum()) + np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
            counts, of_item = torch.from_numpy(lengths), np.repeat(owner, lengths) if len(pieces) > 1 else None
            for name in names:
                dtype = torch.float32 if name in self.vectors else torch.int64
                values = torch.empty(len(source), *self.several.get(name, ()), dtype=dtype)
                for part, *_ in pieces:
                    where = slice(None) if of_item is None else of_item == part
                    values.numpy()[where] = self.parts[part].data[name][source[where]]
                if name in self.vectors:
                    batch.rows[name] = values.view(len(rows), -1)
                else:
                    batch.histories[name], batch.lengths[name] = values, counts
        return batch

    def _pieces(self, rows: Integers) -> list[tuple[int, Integers, Integers]]:
        """Per file: its number, the rows of the batch that come from it, their row numbers in the file."""
        if len(self.parts) == 1:
            return [(0, np.arange(len(rows)), rows)]
        owner = np.searchsorted(self.ends, rows, side="right")
        pieces = []
        for part in np.unique(owner).tolist():
            slots = np.flatnonzero(owner == part)
            pieces.append((part, slots, rows[slots] - (self.ends[part] - self.parts[part].rows)))
        return pieces


def _wants(feature_map: Any) -> dict[str, Want]:
    wants = {}
    for name, spec in feature_map.features.items():
        if spec["type"] not in KINDS:
            raise UserError(f"feature '{name}': type '{spec['type']}' is not loaded; {nearest(spec['type'], KINDS)}")
        kind = "weight" if spec.get("weight") else spec["type"]
        wants[name] = Want(kind, spec.get("vocab_size"), spec.get("max_len"), spec.get("values"))
    return wants | {name: Want("label") for name in feature_map.labels}


def _parquet_files(given: str | Path | Sequence[str | Path]) -> list[Path]:
    files: list[Path] = []
    for path in map(Path, [given] if isinstance(given, (str, Path)) else given):
        if not path.exists():
            raise no_such_file(path)
        found = shards(path)
        if not found:
            raise UserError(f"{path}: no parquet files in this directory")
        files += found
    if not files:
        raise UserError("data_path: no file given")
    return files
