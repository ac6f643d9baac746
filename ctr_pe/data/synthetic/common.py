"""What generated sets have in common: items that belong to categories, and rows with their ids, features, catalogue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from ctr_pe.config.field_groups import Group
from ctr_pe.data.dataset import Dataset
from ctr_pe.data.id_map import Vocabulary
from ctr_pe.data.writer import Content, DatasetWriter, make_dataset
from ctr_pe.fuxictr.feature_specs import age_spec, history_spec, target_spec

if TYPE_CHECKING:
    from pathlib import Path

Integers = npt.NDArray[Any]


@dataclass(frozen=True)
class Rows:
    """(rows,) each; the clicks of all histories in flat arrays, oldest first: row r has ``starts[r]:starts[r + 1]``.

    Items and categories are numbers, not yet ids; ``age`` is in seconds at the time of the request.
    """

    label: Integers
    user: Integers
    item: Integers
    category: Integers
    starts: Integers
    clicked_item: Integers
    clicked_category: Integers
    age: Integers

    def table(self, item_ids: Integers, cate_ids: Integers) -> pa.Table:
        """The columns of a data set, given the id of each number."""

        def history(values: Integers) -> pa.Array:
            return pa.ListArray.from_arrays(self.starts.astype(np.int32), small(values))

        return pa.table(
            {
                "label": self.label.astype(np.uint8),
                "user_id": small(self.user),
                "item_id": small(item_ids[self.item]),
                "cate_id": small(cate_ids[self.category]),
                "item_history": history(item_ids[self.clicked_item]),
                "cate_history": history(cate_ids[self.clicked_category]),
                "age_history": history(self.age),
            }
        )


def item_of(rng: np.random.Generator, category: Integers, categories: int, items: int) -> Integers:
    """A random item of each category; item i is of category i mod ``categories``."""
    return category + categories * rng.integers((items - 1 - category) // categories + 1)


def popular(rng: np.random.Generator, count: int, items: int) -> Integers:
    """``count`` random items, the smaller their number the more popular."""
    drawn: Integers = (items * rng.random(count) ** 2).astype(np.int64)
    return drawn


def category_of(items: Integers, categories: int) -> Integers:
    """A category for each item, such that popular ones are spread over all."""
    return items * 7919 % categories


def shuffled_within(rng: np.random.Generator, starts: Integers) -> Integers:
    """A random order of flat clicks in which every history keeps its own."""
    owner = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return np.lexsort((rng.random(len(owner)), owner))


def write(
    out: Path,
    dataset_id: str,
    splits: Iterable[tuple[str, Rows]],
    item_counts: Integers,
    cate_counts: Integers,
    max_len: int,
    report: Mapping[str, Any],
    overwrite: bool,
) -> Dataset:
    """Write a generated set; ids are by falling frequency in the train rows.

    Args:
        splits: name and rows, each asked for when it is written.
        item_counts, cate_counts: how often each item and each category is in the train rows.

    Raises:
        UserError: ``out`` exists.
    """
    known = {"item_id": Vocabulary.by_frequency(item_counts), "cate_id": Vocabulary.by_frequency(cate_counts)}

    def source(writer: DatasetWriter) -> Content:
        ids = known["item_id"].table(len(item_counts)), known["cate_id"].table(len(cate_counts))
        for split, rows in splits:
            writer.add(split, rows.table(*ids))
        features: dict[str, dict[str, Any]] = {"user_id": {"type": "meta"}}
        features |= {name: target_spec(len(vocabulary)) for name, vocabulary in known.items()}
        for name, vocabulary in known.items():
            features[name.replace("_id", "_history")] = history_spec(name, len(vocabulary), max_len)
        features["age_history"] = age_spec(max_len)
        groups = [Group(("item_id", "cate_id"), ("item_history", "cate_history"), "age_history")]
        vocabs = {name: vocabulary.stored() for name, vocabulary in known.items()}
        numbers = np.arange(len(item_counts))
        category = numbers % len(cate_counts)
        catalogue = {"item_id": numbers, "cate_id": category}  # raw, then the ids of both
        catalogue |= {"item_id:id": ids[0], "cate_id:id": ids[1][category]}
        return Content("label", "user_id", features, groups, vocabs, report, pl.DataFrame(catalogue))

    return make_dataset(source, out, dataset_id, overwrite)


def small(values: Integers) -> Integers:
    """Whole numbers from 0 on in the smallest type that holds them."""
    return values.astype(np.min_scalar_type(int(values.max())))
