"""The suite's inputs: as many items and categories as Amazon Electronics has, histories as long as there, from a seed.

R rows, N items of all histories together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from ctr_pe.config.field_groups import Group
from ctr_pe.data.dataset import Dataset
from ctr_pe.data.loader import BatchLoader
from ctr_pe.data.synthetic.common import category_of, popular
from ctr_pe.data.writer import Content, DatasetWriter
from ctr_pe.fuxictr.feature_specs import age_spec, history_spec, target_spec
from ctr_pe.sequence.batch import JaggedBatch

ITEMS, CATEGORIES, MAX_LEN = 63_000, 800, 100  # besides the ids for padding and unseen values
FURTHER = 50  # values of each further field
TARGET, HISTORY, AGE = ("item_id", "cate_id"), ("item_history", "cate_history"), "age_history"
DAY = 86_400
Ints = npt.NDArray[np.int64]
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Rows:
    """Rows of a CTR log; the history of row i is ``offsets[i]:offsets[i + 1]`` of the last three, oldest first."""

    label: Ints  # (R,)
    user: Ints  # (R,)
    item: Ints  # (R,)
    offsets: Ints  # (R + 1,)
    items: Ints  # (N,)
    ages: Ints  # (N,) seconds

    def __len__(self) -> int:
        return len(self.label)


def lengths(random: np.random.Generator, count: int, full: bool = False) -> Ints:
    """Items per history: all ``MAX_LEN``, or skewed as in Amazon's logs: 9 on average, half of them up to 5."""
    if full:
        return np.full(count, MAX_LEN)
    drawn = random.lognormal(np.log(5.1), 1.05, count).round().astype(np.int64)
    return np.clip(drawn, 1, MAX_LEN)


def draw(count: int, full: bool = False, seed: int = 0) -> Rows:
    """``count`` rows, two per user."""
    random = np.random.default_rng(seed)
    length = lengths(random, count, full)
    offsets = np.concatenate([[0], np.cumsum(length)])
    gaps = random.integers(1, DAY, offsets[-1])
    since = np.cumsum(gaps[::-1])[::-1]  # seconds from each item to the end of all histories
    ages = since - np.repeat(np.append(since, 0)[offsets[1:]], length)
    return Rows(random.integers(0, 2, count), np.arange(count) // 2, _items(random, count), offsets,
                _items(random, int(offsets[-1])), ages)  # fmt: skip


def _items(random: np.random.Generator, count: int) -> Ints:
    """Ids from 1 on, the smaller the more popular."""
    return 1 + popular(random, count, ITEMS)


def category(items: Ints) -> Ints:
    """The category of each item, from 1 on."""
    return 1 + category_of(items, CATEGORIES)


def write(
    folder: Path, rows: Rows, ages: bool = False, times: int = 1, items: int = ITEMS, further: int = 0
) -> Dataset:
    """A data set of this package with ``rows``, written ``times`` times over, to train on; ``items``: known ids;
    ``further``: so many fields more, of 8 numbers, in target and history."""
    features: dict[str, dict[str, Any]] = {
        "user_id": {"type": "meta"},
        "item_id": target_spec(items),
        "cate_id": target_spec(CATEGORIES),
        "item_history": history_spec("item_id", items, MAX_LEN),
        "cate_history": history_spec("cate_id", CATEGORIES, MAX_LEN),
    } | ({AGE: age_spec(MAX_LEN)} if ages else {})
    names = {f"field_{k}": f"field_{k}_history" for k in range(further)}
    for name, history in names.items():
        features[name] = target_spec(FURTHER) | {"embedding_dim": 8}
        features[history] = history_spec(name, FURTHER, MAX_LEN) | {"embedding_dim": 8}
    whole = table(rows, ages, further)
    with DatasetWriter(folder) as writer:
        for _ in range(times):
            writer.add("train", whole)
        writer.add("test", whole[:2])
        groups = [Group((*TARGET, *names), (*HISTORY, *names.values()), AGE if ages else None)]
        return writer.finish(Content("label", "user_id", features, groups, vocabs={}, report={}))


def table(rows: Rows, ages: bool = False, further: int = 0) -> pa.Table:
    """The rows as this package stores them: lists as long as the histories."""

    def history(values: Ints) -> pa.Array:
        return pa.ListArray.from_arrays(rows.offsets.astype(np.int32), values.astype(np.int32))

    columns = {
        "label": rows.label.astype(np.uint8),
        "user_id": rows.user.astype(np.int32),
        "item_id": rows.item.astype(np.int32),
        "cate_id": category(rows.item).astype(np.int32),
        "item_history": history(rows.items),
        "cate_history": history(category(rows.items)),
    }
    for k in range(further):
        columns[f"field_{k}"] = (1 + rows.item // (k + 1) % FURTHER).astype(np.int32)
        columns[f"field_{k}_history"] = history(1 + rows.items // (k + 1) % FURTHER)
    return pa.table(columns | ({AGE: history(rows.ages)} if ages else {}))


def padded_columns(rows: Rows) -> dict[str, Ints]:
    """The rows as FuxiCTR stores them: histories (R, MAX_LEN), padded at the end with 0."""
    length = np.diff(rows.offsets)
    slots = np.arange(MAX_LEN) < length[:, None]
    columns = {"label": rows.label, "user_id": rows.user, "item_id": rows.item, "cate_id": category(rows.item)}
    for name, values in (("item_history", rows.items), ("cate_history", category(rows.items))):
        columns[name] = np.zeros(slots.shape, np.int64)
        columns[name][slots] = values
    return columns


def batches(dataset: Dataset, feature_map: Any, size: int, count: int) -> list[tuple[JaggedBatch, Batch]]:
    """``count`` batches of ``size`` rows: as our loader gives them, and with histories padded to ``MAX_LEN``."""
    loader = BatchLoader(feature_map, dataset.split("train"), batch_size=size)
    return [(batch, pad(batch)) for batch in islice(loader, count)]


def pad(batch: Mapping[str, Tensor]) -> Batch:
    """Histories padded to ``MAX_LEN`` slots; without ages, which only our encodings read."""
    padded = {name: values for name, values in batch.items() if name != AGE}
    for name in HISTORY:
        padded[name] = torch.nn.functional.pad(batch[name], (0, MAX_LEN - batch[name].shape[1]))
    return padded


def interactions(users: int, seed: int = 0) -> tuple[pa.Table, pa.Table]:
    """A raw log with a row per event, sorted by time and not by user, and the items' categories."""
    random = np.random.default_rng(seed)
    events = 3 + lengths(random, users)  # Amazon's 5-core logs have 8.8 reviews a user
    user = np.repeat(np.arange(users), events)
    order = random.permutation(len(user))
    log = {
        "user_id": user[order],
        "item_id": _items(random, len(user)),
        "timestamp": 1_300_000_000 + np.arange(len(user)),
    }
    items = np.arange(1, ITEMS + 1)
    return pa.table(log), pa.table({"item_id": items, "cate_id": category(items)})
