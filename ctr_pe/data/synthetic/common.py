"""What generated sets have in common: items that belong to categories, and rows with their ids, features, catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from ctr_pe.config.field_groups import log_group
from ctr_pe.data.dataset import LABEL, USER, Dataset
from ctr_pe.data.id_map import IdMap, with_ids
from ctr_pe.data.writer import Content, DatasetWriter, item_specs, make_dataset

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

        group = log_group(["item_id", "cate_id"], timed=True)
        scalars = [self.label.astype(np.uint8), small(self.user)]
        scalars += [small(item_ids[self.item]), small(cate_ids[self.category])]
        lists = [item_ids[self.clicked_item], cate_ids[self.clicked_category], self.age]
        names = [LABEL, USER, *group.target, *group.history, group.age]
        return pa.table([*scalars, *map(history, lists)], names)


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


def users_of(splits: Mapping[str, int]) -> dict[str, slice]:
    """The users of each split, numbered through, of how many it has."""
    ends = np.cumsum(list(splits.values())).tolist()
    return {split: slice(end - size, end) for (split, size), end in zip(splits.items(), ends, strict=True)}


def shuffled_within(rng: np.random.Generator, starts: Integers) -> Integers:
    """A random order of flat clicks in which every history keeps its own."""
    owner = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return np.lexsort((rng.random(len(owner)), owner))


def write(
    out: Path,
    dataset_id: str,
    splits: Mapping[str, Rows],
    items: int,
    categories: int,
    max_len: int,
    report: Mapping[str, Any],
    overwrite: bool,
) -> Dataset:
    """Write a generated set; ids are by falling frequency in the train rows.

    Args:
        splits: name and rows.
        items, categories: how many there are.

    Raises:
        UserError: ``out`` exists.
    """
    train, sizes = splits["train"], {"item_id": items, "cate_id": categories}
    numbers = [train.item, train.clicked_item], [train.category, train.clicked_category]
    counts = (np.bincount(np.concatenate(of), minlength=n) for of, n in zip(numbers, sizes.values(), strict=True))
    maps = {name: IdMap.by_frequency(pl.Series(np.arange(len(of))), of) for name, of in zip(sizes, counts, strict=True)}
    group = log_group(list(maps), timed=True)

    def source(writer: DatasetWriter) -> Content:
        ids = [maps[name].table(size) for name, size in sizes.items()]
        for split, rows in splits.items():
            writer.add(split, rows.table(*ids))
        every = np.arange(items)
        catalogue = with_ids(pl.DataFrame({"item_id": every, "cate_id": every % categories}), maps)
        vocabs = {name: of.stored for name, of in maps.items()}
        return Content(LABEL, USER, item_specs(maps, [group], max_len), [group], vocabs, report, catalogue)

    return make_dataset(source, out, dataset_id, overwrite)


def small(values: Integers) -> Integers:
    """Whole numbers from 0 on in the smallest type that holds them."""
    return values.astype(np.min_scalar_type(int(values.max())))
