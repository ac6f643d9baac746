"""Generated data set "synthetic_context": what counts is how many *unlike* items followed, and little else tells it.

Every request has a history of its own. It holds the target's item once, 20 other items of the target's category (like
items) and 10 of other categories (unlike items). After the target's item, the relevant one, u unlike and l like items
were clicked, drawn independently and uniformly from 0 to 10 and from 0 to 20, in random order; the others before it.
Up to 8 more, also before it, make histories differ in length. The label is 1 with probability .9 if u is at most 3,
else .1.

Which items a history holds, and how many, says nothing about u, nor do ages: all items were clicked in one session,
about a minute apart, one to thirty days before the request. Scores by these reach gAUC .5, a score by plain distance,
u + l, reaches .672, and one by u .889, the best there is.

Users are only groups of requests, for gAUC. The splits have different users.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ctr_pe.data.dataset import Dataset
from ctr_pe.data.synthetic.common import Integers, Rows, item_of, shuffled_within, users_of, write
from ctr_pe.utils.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

CLICKED = 0.9
MINUTE, DAY = 60, 86_400


def generate(
    out: Path,
    *,
    seed: int = 2024,
    users: int = 5000,
    valid_users: int = 750,
    test_users: int = 1500,
    items: int = 100,
    categories: int = 20,
    requests: int = 8,
    like: int = 20,
    unlike: int = 10,
    near: int = 3,
    older: int = 8,
    shuffled: bool = False,
    overwrite: bool = False,
) -> Dataset:
    """Write the set to ``out``; the same arguments give the same ``data_hash``.

    Args:
        users, valid_users, test_users: of the three splits, each user with ``requests`` rows.
        items, categories: item i is of category i mod ``categories``.
        like, unlike: items of the target's and of other categories beside the relevant one.
        near: the largest u with which the target is likely clicked.
        older: at most so many more items; each is like or unlike with the probabilities of the others.
        shuffled: a control: every history's items are permuted at random after the labels are drawn, so that order and
            time carry no information. All else is the same.

    Raises:
        UserError: sizes that do not fit together, or ``out`` exists.
    """
    splits = {"train": users, "valid": valid_users, "test": test_users}
    if (
        min(*splits.values(), requests, like) < 1
        or not 0 <= near < unlike
        or older < 0
        or categories < 2
        or items < 2 * categories
    ):
        raise UserError(
            f"synthetic_context: users {users}, valid_users {valid_users}, test_users {test_users}, requests "
            f"{requests} and like {like} must be at least 1, older {older} at least 0, 0 <= near {near} < unlike "
            f"{unlike}, categories {categories} at least 2 and items {items} at least twice as many"
        )
    rng = np.random.default_rng(seed)
    sizes = {"items": items, "categories": categories}
    drawing = {"like": like, "unlike": unlike, "near": near, "older": older}
    drawn: dict[str, Rows] = {}
    for split, its in users_of(splits).items():
        user = np.repeat(np.arange(its.start, its.stop), requests)
        drawn[split] = _rows(rng, user, **sizes, **drawing)
    if shuffled:
        again = np.random.default_rng(seed)
        drawn = {split: _shuffled(again, rows) for split, rows in drawn.items()}
    train = drawn["train"]
    report = {
        "generator": {"seed": seed, "users": splits, **sizes, "requests": requests, **drawing}
        | ({"shuffled": True} if shuffled else {}),
        "positive_share": round(float(train.label.mean()), 4),
        "mean_history": round(len(train.age) / len(train.label), 2),
    }
    return write(out, "synthetic_context", drawn, items, categories, 1 + like + unlike + older, report, overwrite)


def _rows(
    rng: np.random.Generator,
    user: Integers,
    items: int,
    categories: int,
    like: int,
    unlike: int,
    near: int,
    older: int,
) -> Rows:
    """One per number in ``user``. A history is drawn in slots: the relevant item's, then like, unlike and older items;
    then they are ordered in time."""
    item = rng.integers(items, size=len(user))
    unlike_since = rng.integers(unlike + 1, size=len(user))
    like_since = rng.integers(like + 1, size=len(user))
    label = rng.random(len(user)) < np.where(unlike_since <= near, CLICKED, 1 - CLICKED)
    more = rng.integers(older + 1, size=len(user))

    slot = np.arange(1 + like + unlike + older)
    shape = (len(user), len(slot))
    real = slot <= like + unlike + more[:, None]
    since = (slot > 0) & (slot <= like_since[:, None])
    since |= (slot > like) & (slot <= like + unlike_since[:, None])
    is_like = np.where(slot <= like + unlike, slot <= like, rng.random(shape) < like / (like + unlike))

    target = np.broadcast_to(item[:, None], shape)
    other = (target + rng.integers(1, categories, shape)) % categories
    clicked = np.where(is_like, _another(rng, target, categories, items), item_of(rng, other, categories, items))
    clicked[:, 0] = item

    newness = rng.random(shape) + real + since
    newness[:, 0] = 2  # between those before it and those since
    order = np.argsort(newness, axis=1)
    real, clicked = np.take_along_axis(real, order, axis=1), np.take_along_axis(clicked, order, axis=1)
    gaps = 1 + rng.exponential(MINUTE, shape).astype(np.int64)
    gaps[:, -1] = rng.uniform(DAY, 30 * DAY, len(user))
    age = np.cumsum(gaps[:, ::-1], axis=1)[:, ::-1]
    return Rows(
        label=label,
        user=user,
        item=item,
        category=item % categories,
        starts=np.concatenate([[0], np.cumsum(real.sum(1))]),
        clicked_item=clicked[real],
        clicked_category=clicked[real] % categories,
        age=age[real],
    )


def _another(rng: np.random.Generator, item: Integers, categories: int, items: int) -> Integers:
    """A random other item of the category of each."""
    in_category = (items - 1 - item % categories) // categories + 1
    among_them = (item // categories + rng.integers(1, in_category)) % in_category
    other: Integers = item % categories + categories * among_them
    return other


def _shuffled(rng: np.random.Generator, rows: Rows) -> Rows:
    """The same rows with the items of each history in random order; the ages are not permuted."""
    order = shuffled_within(rng, rows.starts)
    return replace(rows, clicked_item=rows.clicked_item[order], clicked_category=rows.clicked_category[order])
