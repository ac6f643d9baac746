"""Files of the form and size of a published set with drawn content: to run everything at full size without download.

Rows, splits, users, items, categories, columns and lists are as published; what people chose is not: nothing can be
learned of position or taste. In both sets a history is the beginning of one list of its user, so a block of rows is
made by cutting text. In memory: the log that the rows come from, and one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
from tqdm.auto import tqdm

from ctr_pe.data.published.download import md5
from ctr_pe.data.published.sets import AMAZON, KUAI, MANIFEST, MAX_LEN, SETS
from ctr_pe.data.synthetic.common import category_of, popular
from ctr_pe.utils.errors import UserError, nearest
from ctr_pe.utils.files import new_folder, write_json

BLOCK_ROWS = 65_536
LEAST_SHARE = 0.001
Integers = npt.NDArray[np.int64]
Splits = dict[str, tuple[int, Iterator[pl.DataFrame]]]
"""File -> number of its rows, and these in blocks."""


@dataclass(frozen=True)
class UserLists:
    """A list of numbers per user, as text joined by ``^``: its first n are ``ends[starts[u] + n]`` characters."""

    text: pl.Series
    starts: Integers
    ends: Integers

    @classmethod
    def of(cls, values: Integers, counts: Integers) -> UserLists:
        """``counts`` (users,): how many of the flat ``values`` are each user's, one user after the other."""
        texts, first = pl.Series(values).cast(pl.String), np.cumsum(counts) - counts
        lists = pa.LargeListArray.from_arrays(np.append(first, len(values)), texts.to_arrow())
        total = np.concatenate([[0], np.cumsum(texts.str.len_bytes().to_numpy().astype(np.int64) + 1)])
        slot = np.arange(len(values) + len(counts)) - np.repeat(first + np.arange(len(counts)), counts + 1)
        before = np.repeat(first, counts + 1)
        ends = np.maximum(total[before + slot] - total[before] - 1, 0)  # the last number has no ^ behind it
        return cls(pl.Series(lists).list.join("^"), first + np.arange(len(counts)), ends)

    def first(self, user: Integers, count: Integers) -> pl.Series:
        """The first ``count`` numbers of each user's list."""
        return self.text.gather(user).str.head(pl.Series(self.ends[self.starts[user] + count]))


def generate(name: str, out: Path, share: float = 1.0, seed: int = 0, progress: bool = False) -> Path:
    """Write the files of the published set ``name`` with drawn content to the new directory ``out``, all or nothing.

    ``generated.json`` beside them holds their md5 sums and how they were made; ``ctr-pe data fetch NAME --from OUT``
    makes a data set of them. The same arguments give the same bytes.

    Args:
        share: of users, rows, items and vectors, from .001 to 1, which is the published size.

    Raises:
        UserError: no such set, a share outside its range, or ``out`` exists.
    """
    if name not in SETS:
        raise UserError(f"no published data set '{name}'; {nearest(name, SETS)}")
    if not LEAST_SHARE <= share <= 1:
        raise UserError(f"--rows-share {share:g}: from {LEAST_SHARE} to 1")
    if out.exists():
        raise UserError(f"{out} exists already: remove it or choose another --out")
    rng = np.random.default_rng(seed)
    with new_folder(out) as folder:
        for file, (rows, blocks) in DRAWN[name](rng, share).items():
            _write_csv(folder / f"{file}.csv", rows, blocks, progress)
        for field in SETS[name].fields:
            if field.vectors is not None:
                _write_vectors(folder / field.vectors, rng, round(VECTORS * share), progress)
        files = {file.name: md5(file) for file in sorted(folder.iterdir())}
        made = {"like": name, "rows_share": share, "seed": seed, "files": files}
        write_json(folder / MANIFEST, made)
    return out


def _write_csv(file: Path, rows: int, blocks: Iterator[pl.DataFrame], progress: bool) -> None:
    bar = tqdm(total=rows, unit=" rows", desc=f"writing {file.name}", disable=not progress, unit_scale=True)
    with file.open("wb") as stream, bar:
        for number, frame in enumerate(blocks):
            frame.write_csv(stream, include_header=number == 0, quote_style="never")
            bar.update(len(frame))


def _write_vectors(file: Path, rng: np.random.Generator, count: int, progress: bool) -> None:
    """A vector per id from 0 on."""
    bar = tqdm(total=count, unit=" vectors", desc=f"writing {file.name}", disable=not progress, unit_scale=True)
    with h5py.File(file, "w", track_order=True) as content, bar:
        content["key"] = np.arange(count)
        value = content.create_dataset("value", (count, VECTOR_DIM), np.float32)
        for rows in _blocks(count):
            value[rows] = rng.standard_normal((rows.stop - rows.start, VECTOR_DIM), np.float32)
            bar.update(rows.stop - rows.start)


def _blocks(rows: int, first: int = 0) -> Iterator[slice]:
    """``rows`` rows from ``first`` on, some at a time."""
    for start in range(first, first + rows, BLOCK_ROWS):
        yield slice(start, min(start + BLOCK_ROWS, first + rows))


# Amazon: a user's items but the first are targets, each with one sampled item; the last one is test.
USERS, REVIEWS, ITEMS, CATEGORIES = 192_403, 1_689_188, 63_001, 801
CORE = 5  # reviews that every user and every item has at least
ACTIVITY = 1.3  # gives 9 items per row on average, half of the rows up to 4, as in Amazon's logs


def _amazon(rng: np.random.Generator, share: float) -> Splits:
    users, reviews, items = (round(count * share) for count in (USERS, REVIEWS, ITEMS))
    activity = rng.lognormal(0, ACTIVITY, users)
    counts = CORE + rng.multinomial(reviews - CORE * users, activity / activity.sum())
    every = np.repeat(np.arange(items), CORE)
    bought = rng.permutation(np.concatenate([every, popular(rng, reviews - len(every), items)]))
    lists = {"item": UserLists.of(bought, counts), "cate": UserLists.of(category_of(bought, CATEGORIES), counts)}
    owner = np.repeat(np.arange(users), counts)
    place = np.arange(reviews) - (np.cumsum(counts) - counts)[owner]  # 0 is a user's first item
    is_last = place == counts[owner] - 1

    def blocks(targets: Integers, order: Integers) -> Iterator[pl.DataFrame]:
        """Row 2 n is target n, row 2 n + 1 its sampled item."""
        for rows in _blocks(len(order)):
            target, sampled = targets[order[rows] // 2], order[rows] % 2
            item = np.where(sampled, rng.integers(items, size=len(target)), bought[target])
            user, earlier = owner[target], place[target]
            yield pl.DataFrame(
                {
                    "label": 1 - sampled,
                    "user_id": user,
                    "item_id": item,
                    "cate_id": category_of(item, CATEGORIES),
                    "item_history": lists["item"].first(user, earlier),
                    "cate_history": lists["cate"].first(user, earlier),
                }
            )

    train, test = np.flatnonzero((place > 0) & ~is_last), np.flatnonzero(is_last)
    return {
        "train": (2 * len(train), blocks(train, rng.permutation(2 * len(train)))),
        "test": (2 * len(test), blocks(test, np.arange(2 * len(test)))),
    }


# KuaiVideo: every shown video is a row; the lists are the first 100 of the user's clicks, and of the others, before it.
VIEWERS, VIDEOS, VECTORS, VECTOR_DIM = 10_000, 3_239_534, 3_242_315, 64
TRAIN_ROWS, TEST_ROWS = 10_931_092, 2_730_291
POPULAR = 200_000  # videos shown more than once: 632,000 are then known to the reader, as published runs have it
CLICKS = 0.2  # of the rows; a constant's logloss is then .50, those published with an AUC of .745 are .44
LIKES = 0.01


def _kuai(rng: np.random.Generator, share: float) -> Splits:
    users, videos, ids, hot = (round(count * share) for count in (VIEWERS, VIDEOS, VECTORS, POPULAR))
    train, test = round(TRAIN_ROWS * share), round(TEST_ROWS * share)
    rows = train + test
    shown = rng.permutation(np.concatenate([np.arange(videos), popular(rng, rows - videos, hot)]))
    shown = np.sort(rng.permutation(ids)[:videos])[rng.permutation(videos)][shown]  # some ids are of no row
    activity = np.cumsum(rng.lognormal(0, 0.8, users))
    user = np.searchsorted(activity, activity[-1] * rng.random(rows))
    clicked = rng.random(rows) < CLICKS
    lists, before = {}, {}
    for name, listed in {"pos_items": clicked, "neg_items": ~clicked}.items():
        before[name] = np.minimum(_earlier(user, listed), MAX_LEN)
        kept = np.flatnonzero(listed & (before[name] < MAX_LEN))
        kept = kept[np.argsort(user[kept], kind="stable")]
        lists[name] = UserLists.of(shown[kept], np.bincount(user[kept], minlength=users))

    def blocks(count: int, first: int) -> Iterator[pl.DataFrame]:
        for rows in _blocks(count, first):
            scalars = {"timestamp": np.arange(rows.start, rows.stop), "user_id": user[rows], "item_id": shown[rows]}
            scalars["is_click"] = clicked[rows].astype(np.int64)
            for name in ("is_like", "is_follow"):
                scalars[name] = (rng.random(len(user[rows])) < LIKES).astype(np.int64)
            yield pl.DataFrame(scalars | {name: of.first(user[rows], before[name][rows]) for name, of in lists.items()})

    return {"train": (train, blocks(train, 0)), "test": (test, blocks(test, train))}


def _earlier(user: Integers, listed: npt.NDArray[np.bool_]) -> Integers:
    """(rows,) How many earlier rows of the same user are listed."""
    rows, is_listed = pl.DataFrame({"user": user, "listed": listed}), pl.col("listed").cast(pl.Int64)
    return rows.select(is_listed.cum_sum().over("user") - is_listed).to_series().to_numpy()


DRAWN: dict[str, Any] = {AMAZON.name: _amazon, KUAI.name: _kuai}
"""Published set -> the rows of its files, of a generator of random numbers and a share."""
