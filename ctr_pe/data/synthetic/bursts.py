"""Generated data sets: in one the relevant position depends on the target, in the other elapsed time is relevant.

Users have a few favourite categories and click in bursts: most items are of the category of the item before, some start
a burst in another favourite category. The target of a request is usually of a favourite category, else of any.

The effect in "synthetic": an item of the target's category has weight 0.6 to the power of the number of *unlike* items
clicked after it (items of other categories than the target's; like items add no distance). With s the sum over the like
items, at most 3, the label is 1 with probability sigmoid(2.2 s - 1.6). A plain distance is only correlated with that
number, and without an encoding attention sees only how many like items there are, so here ``cape`` must beat ``none``.

Ages are plausible and have no effect: events of a burst are minutes apart, bursts more than a day, and the requests
follow the last event after about an hour. All requests of a user share the history; the splits have different users.

In "synthetic_time" elapsed time has the effect: an item of the target's category has weight 0.5 to the power of its age
in half days, and s and the label follow from it as above. Pauses there are independent of bursts: after each click the
user pauses for more than a day with a probability of their own, between .05 and .5, or continues within minutes. The
number of items since a click says little about its age, so encodings that read ages must beat those that count items.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ctr_pe.data.dataset import Dataset
from ctr_pe.data.synthetic.common import Integers, Rows, item_of, shuffled_within, small, users_of, write
from ctr_pe.utils.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

DECAY, CAP, SLOPE, SHIFT = 0.6, 3.0, 2.2, -1.6
MINUTE, HOUR, DAY = 60, 3600, 86_400
HALF_LIFE, PAUSES = DAY / 2, (0.05, 0.5)


@dataclass(frozen=True)
class Clicks:
    """All users' clicks in flat arrays, oldest first: user u's are ``starts[u]:starts[u + 1]``; ``at`` in seconds."""

    starts: Integers
    category: Integers
    item: Integers
    at: Integers


@dataclass(frozen=True)
class Requests:
    """(users, requests per user) each; ``at`` in seconds, on the clock of the clicks."""

    category: Integers
    item: Integers
    at: Integers
    label: Integers


def generate(
    out: Path,
    *,
    seed: int = 2024,
    users: int = 6000,
    valid_users: int = 750,
    test_users: int = 1500,
    items: int = 2000,
    categories: int = 40,
    requests: int = 8,
    history_mean: float = 14,
    max_len: int = 50,
    favourites: int = 4,
    switch: float = 0.35,
    from_favourites: float = 0.85,
    timed: bool = False,
    shuffled: bool = False,
    overwrite: bool = False,
) -> Dataset:
    """Write the set "synthetic" to ``out``, or a variant; the same arguments give the same ``data_hash``.

    Args:
        users, valid_users, test_users: of the three splits, each user with ``requests`` rows.
        history_mean: items in a history before the cut at ``max_len``: 2 + geometric.
        favourites: categories in which a user clicks.
        switch: probability that an item starts a burst in another favourite category.
        from_favourites: probability that a target is of a favourite category.
        timed: "synthetic_time": elapsed time has the effect, and pauses do not depend on bursts.
        shuffled: "synthetic_shuffled", a control: every history's items are permuted at random after the labels are
            drawn, so that order and time carry no information. All else is the same.

    Raises:
        UserError: sizes that do not fit together, or ``out`` exists.
    """
    splits = {"train": users, "valid": valid_users, "test": test_users}
    if min(*splits.values(), requests, max_len) < 1 or not 2 <= favourites <= categories <= items or history_mean < 3:
        raise UserError(
            f"synthetic: users {users}, valid_users {valid_users}, test_users {test_users}, requests {requests} and "
            f"max_len {max_len} must be at least 1, history_mean {history_mean} at least 3, and "
            f"2 <= favourites {favourites} <= categories {categories} <= items {items}"
        )
    rng = np.random.default_rng(seed)
    liked = _distinct(rng, sum(splits.values()), favourites, categories)
    lengths = np.minimum(2 + rng.geometric(1 / (history_mean - 2), len(liked)), max_len)
    sizes = {"items": items, "categories": categories}
    clicks = _clicks(rng, liked, lengths, switch, timed, **sizes)
    drawn = _requests(rng, liked, clicks, requests, from_favourites, timed, **sizes)

    if shuffled:
        order = shuffled_within(np.random.default_rng(seed), clicks.starts)  # the times are not permuted
        clicks = replace(clicks, category=clicks.category[order], item=clicks.item[order])
    report = {
        "generator": {"seed": seed, "users": splits, **sizes, "requests": requests, "history_mean": history_mean}
        | {"favourites": favourites, "switch": switch, "from_favourites": from_favourites}
        | {name: True for name, on in (("timed", timed), ("shuffled", shuffled)) if on},
        "positive_share": round(float(drawn.label.mean()), 4),
        "mean_history": round(float(lengths.mean()), 2),
    }

    rows = {split: _rows(its, clicks, drawn) for split, its in users_of(splits).items()}
    name = "synthetic" + "_time" * timed + "_shuffled" * shuffled
    return write(out, name, rows, items, categories, max_len, report, overwrite)


def click_probability(target_category: Integers, clicks: Clicks, at: Integers | None = None) -> npt.NDArray[np.float64]:
    """(users, requests): click probability of each user's requested categories, given the user's clicks.

    By elapsed time if the times ``at`` of the requests are given.
    """
    first, end = clicks.starts[:-1], clicks.starts[1:]
    lengths = end - first
    later = np.repeat(end, lengths) - 1 - np.arange(len(clicks.category))  # clicks after each click
    nearness = np.empty(target_category.shape)
    for request in range(target_category.shape[1]):
        like = clicks.category == np.repeat(target_category[:, request], lengths)
        if at is None:
            so_far = np.cumsum(like)
            counts = DECAY ** (later - (np.repeat(so_far[end - 1], lengths) - so_far))  # unlike clicks after each
        else:
            counts = 0.5 ** ((np.repeat(at[:, request], lengths) - clicks.at) / HALF_LIFE)
        nearness[:, request] = np.add.reduceat(np.where(like, counts, 0.0), first)
    return 1 / (1 + np.exp(-(SLOPE * np.minimum(nearness, CAP) + SHIFT)))


def _distinct(rng: np.random.Generator, rows: int, count: int, choices: int) -> Integers:
    """(rows, count) different numbers below ``choices`` in each row, every set and order equally likely."""
    drawn = np.empty((rows, count), np.int64)
    for i in range(count):
        number = rng.integers(choices - i, size=rows)
        for earlier in np.sort(drawn[:, :i], axis=1).T:  # skip the numbers that are drawn already
            number += number >= earlier
        drawn[:, i] = number
    return drawn


def _clicks(
    rng: np.random.Generator,
    liked: Integers,
    lengths: Integers,
    switch: float,
    timed: bool,
    items: int,
    categories: int,
) -> Clicks:
    starts = np.concatenate([[0], np.cumsum(lengths)])
    total, favourites = int(starts[-1]), liked.shape[1]
    owner = np.repeat(np.arange(len(liked)), lengths)
    new_burst = rng.random(total) < switch
    steps = np.cumsum(new_burst * rng.integers(1, favourites, total))  # 0 stays, 1 … favourites - 1 never come back
    which = steps - steps[starts[:-1]][owner] + rng.integers(favourites, size=len(liked))[owner]
    category = liked[owner, which % favourites]
    paused = rng.random(total) < rng.uniform(*PAUSES, len(liked))[owner] if timed else new_burst
    pause = np.where(paused, DAY + rng.exponential(DAY, total), rng.exponential(10 * MINUTE, total))
    at = np.cumsum(1 + pause.astype(np.int64))
    return Clicks(starts, category, item_of(rng, category, categories, items), at)


def _requests(
    rng: np.random.Generator,
    liked: Integers,
    clicks: Clicks,
    requests: int,
    from_favourites: float,
    timed: bool,
    items: int,
    categories: int,
) -> Requests:
    shape = (len(liked), requests)
    favourite = np.take_along_axis(liked, rng.integers(liked.shape[1], size=shape), axis=1)
    category = np.where(rng.random(shape) < from_favourites, favourite, rng.integers(categories, size=shape))
    waits = 1 + rng.exponential(MINUTE, shape)
    waits[:, 0] += rng.exponential(HOUR, len(liked))
    at = clicks.at[clicks.starts[1:] - 1][:, None] + np.cumsum(waits.astype(np.int64), axis=1)
    label = rng.random(shape) < click_probability(category, clicks, at if timed else None)
    return Requests(category, item_of(rng, category, categories, items), at, label)


def _rows(users: slice, clicks: Clicks, drawn: Requests) -> Rows:
    """One per request of some users, each with the user's whole history."""
    requests = drawn.item.shape[1]
    starts = clicks.starts[users.start : users.stop + 1]
    lengths = np.repeat(np.diff(starts), requests)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    click = np.arange(offsets[-1]) + np.repeat(np.repeat(starts[:-1], requests) - offsets[:-1], lengths)
    return Rows(
        label=drawn.label[users].reshape(-1),
        user=np.repeat(np.arange(users.start, users.stop), requests),
        item=drawn.item[users].reshape(-1),
        category=drawn.category[users].reshape(-1),
        starts=offsets,
        clicked_item=small(clicks.item)[click],
        clicked_category=small(clicks.category)[click],
        age=np.repeat(drawn.at[users].reshape(-1), lengths) - clicks.at[click],
    )
