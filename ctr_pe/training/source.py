"""Where the rows of a run come from: a data set of this package, or files that FuxiCTR has built."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from ctr_pe.data.dataset import Dataset, open_dataset, shards
from ctr_pe.data.loader import BatchLoader
from ctr_pe.fuxictr.feature_specs import FEATURES, read_feature_map
from ctr_pe.fuxictr.library import load_feature_map, npz_loader
from ctr_pe.utils import distributed
from ctr_pe.utils.errors import UserError, counted, hyper_parameter, nearest

log = logging.getLogger(__name__)
RANKED, ITEMS = 2048, 102_400
"""Rows of the next-item task that are ranked together, and items of their histories at most."""


@dataclass(frozen=True)
class DataSource:
    """``folder`` with feature_map.json and ``files``, split to file or directory; ``dataset`` if it is one of ours."""

    folder: Path
    dataset_id: str
    files: Mapping[str, str]
    dataset: Dataset | None = None

    @classmethod
    def of(cls, data: DataSource | Dataset | Path) -> DataSource:
        """A data set of this package, or the directory of one; a source is returned unchanged."""
        if isinstance(data, DataSource):
            return data
        dataset = data if isinstance(data, Dataset) else open_dataset(str(data))
        files = {split: str(dataset.split(split)) for split in dataset.rows}
        return cls(dataset.path, dataset.dataset_id, files, dataset)

    def feature_map(self, params: Mapping[str, Any]) -> Any:
        """FuxiCTR's feature map, with the group id, the ``use_features`` and the ``feature_specs`` of the parameters.

        Raises UserError if one of them names a feature that is not there.
        """
        file = self.folder / FEATURES
        specs = read_feature_map(file)
        names = specs.features
        if specs.dataset_id != self.dataset_id:
            raise UserError(f"{file}: of data set '{specs.dataset_id}', not '{self.dataset_id}'")
        group_id = params.get("group_id") or (self.dataset.group_id if self.dataset else None)
        given = [("group_id", group_id)] if group_id else []
        given += [("use_features", name) for name in params.get("use_features") or []]
        for spec in params.get("feature_specs") or []:
            changed = spec["name"] if isinstance(spec["name"], list) else [spec["name"]]
            given += [("feature_specs", name) for name in changed]
        for key, name in given:
            if name not in names:
                raise UserError(f"{key}: no feature '{name}' in {self.folder}: {nearest(name, names)}")
        return load_feature_map(self.dataset_id, self.folder, {**params, "group_id": group_id})

    def batches(self, feature_map: Any, splits: Sequence[str], params: Mapping[str, Any], train: bool = False) -> Any:
        """Batches of the splits, one after the other, as ``batch_size``, ``num_workers`` and, to train, ``shuffle``,
        ``seed``, ``like_length`` and ``min_batches`` say; it has a length. Of several processes each has its share.
        Rows of the next-item task are ranked ``RANKED`` together, if histories are not too long for it: batches that
        are good to train on are small.

        Raises UserError for a missing split, or what the loader refuses."""
        for split in splits:
            if split not in self.files:
                raise UserError(f"{self.folder}: no split '{split}': {nearest(split, self.files)}")
        paths = [self.files[split] for split in splits]
        size, ahead = int(params.get("batch_size", 1024)), int(params.get("num_workers") or 0)
        if not train and self.dataset is not None and self.dataset.task == "next-item":
            longest = max(int(spec.get("max_len") or 1) for spec in feature_map.features.values())
            longest = min(longest, int(params.get("max_len") or longest))
            size = max(size, min(RANKED, ITEMS // longest))
        shuffle = train and bool(params.get("shuffle", True))
        if self.dataset is None and params.get("data_format") == "npz":
            if distributed.processes() > 1:
                raise UserError("data_format 'npz': FuxiCTR's loader does not share its rows between processes")
            for key in ("like_length", "min_batches"):
                if params.get(key):
                    raise UserError(f"data_format 'npz': FuxiCTR's loader does not know {key}, leave it out")
            return npz_loader(feature_map, paths[0], train, size, shuffle, ahead)
        role = "train" if train else "valid"
        how: dict[str, Any] = {key: int(params.get(key) or 0) for key in ("seed", "like_length", "min_batches")}
        rows = BatchLoader(feature_map, paths, role, size, shuffle, rank_slice=distributed.rank_slice(), **how)
        if rows.batch_size != size:
            log.info("batch_size %d, not %d: min_batches of %d rows", rows.batch_size, size, rows.num_samples)
        return Prefetch(rows, ahead) if ahead > 0 else rows


def not_comparable(file: str, label: str, user: str) -> str | None:
    """Why no AUC within users is defined on the rows of a split: none has rows of both labels; None if one has.

    Raises:
        UserError: there is no column ``user``.
    """
    path = Path(file)
    users = pl.scan_parquet(shards(path))
    if user not in (names := users.collect_schema().names()):
        raise UserError(f"group_id: {file}: no column '{user}': {nearest(user, names)}")
    both = users.group_by(user).agg(pl.col(label).n_unique() > 1).select(pl.len(), pl.col(label).sum()).collect()
    count, several = both.row(0)
    return None if several else f"none of {counted(count, 'user')} has rows of both labels, which gAUC compares"


def check_monitor(file: str, label: str, user: str | None, monitor: str | Mapping[str, float]) -> None:
    """Raises UserError if the rows that select the epoch cannot tell what the monitor asks for, before training."""
    within = {"gAUC", "avgAUC"}.intersection([monitor] if isinstance(monitor, str) else monitor)
    if not within or not user or not (Path(file).is_dir() or file.endswith(".parquet")):
        return
    if problem := not_comparable(file, label, user):
        how = hyper_parameter("monitor", "AUC")
        raise UserError(f"monitor {min(within)}: {file}: {problem}: choose the epoch by AUC, {how}")


def prefetch_plans(model: Any, batches: Any) -> Any:
    """The batches; for a model on an accelerator with its plan of each, prefetched so that no step waits for one."""
    if model.device.type == "cpu" or not hasattr(model, "planned"):
        return batches
    return Prefetch(batches, 2, model.planned)


class Prefetch:
    """The same batches, or what ``make`` makes of them; a thread makes up to ``count`` before they are asked for."""

    def __init__(self, batches: Any, count: int, make: Callable[[Any], Any] = lambda batch: batch) -> None:
        self.batches, self.count, self.make = batches, count, make

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def is_shared(self) -> bool:
        """Whether other processes have the other batches."""
        return bool(self.batches.is_shared)

    @property
    def positives(self) -> float:
        """The share of rows with label 1."""
        return float(self.batches.positives)

    @property
    def epoch(self) -> int:
        """Epochs that have begun, on which the order of the next one depends."""
        return int(self.batches.epoch)

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.batches.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        made: Iterator[Any] = map(self.make, self.batches)
        with ThreadPoolExecutor(1) as thread:
            coming = deque(thread.submit(next, made, None) for _ in range(self.count))
            while (batch := coming.popleft().result()) is not None:
                coming.append(thread.submit(next, made, None))
                yield batch
