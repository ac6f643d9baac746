"""The two public benchmark sets in their published form: names, md5 sums, and the columns in use.

``ctr-pe data generate`` makes files of the same form (:mod:`ctr_pe.data.published.generate`). A file ``generated.json``
beside them says so, with their md5 sums, and a data set made of them has a name of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ctr_pe.config.field_groups import Group
from ctr_pe.utils.errors import UserError

MAX_LEN = 100
MANIFEST = "generated.json"
GENERATED = "_generated"
"""Ends the name of a data set that was generated like a published one."""


@dataclass(frozen=True)
class Field:
    """One vocabulary: a feature, the CSV column it is read from, and the histories (name, CSV column) that share it."""

    name: str
    column: str
    histories: tuple[tuple[str, str], ...] = ()
    source: str = "item"
    min_count: int = 1  # an id is known if one of the columns has it this often in the train rows
    not_chosen: tuple[str, ...] = ()  # columns of histories of items that were shown but not clicked
    vectors: str | None = None  # HDF5 file with a pretrained vector per original id

    @property
    def columns(self) -> list[str]:
        """Its CSV columns, lists included."""
        return [self.column, *(column for _, column in self.histories)]


@dataclass(frozen=True)
class Published:
    """A published set. ``files``: name to md5, None where none was published."""

    name: str
    title: str
    repository: str
    files: Mapping[str, str | None]
    label: str
    user: str
    group_id: str
    fields: tuple[Field, ...]
    groups: tuple[Group, ...]
    time: str | None = None  # valid is the last tenth of train by this column, else each user's latest target in train
    notes: tuple[str, ...] = ()


AMAZON = Published(
    name="amazonelectronics_x1",
    title="Amazon electronics reviews: 2,608,764 + 384,806 rows, 192,403 users, 63,001 items",
    repository="reczoo/AmazonElectronics_x1",
    files={"train.csv": "e9bf80b92985e463db18fdc753d347b5", "test.csv": "57a20e82fe736dd495f2eaf0669bf6d0"},
    label="label",
    user="user_id",
    group_id="user_id",
    fields=(
        Field("item_id", "item_id", (("item_history", "item_history"),)),
        Field("cate_id", "cate_id", (("cate_history", "cate_history"),)),
    ),
    groups=(Group(("item_id", "cate_id"), ("item_history", "cate_history")),),
    notes=("valid: each user's latest target among the published train rows, the one with the longest history",),
)

KUAI = Published(
    name="kuaivideo_x1",
    title="KuaiVideo clicks: 10,931,092 + 2,730,291 rows, 10,000 users, 3,239,534 videos",
    repository="reczoo/KuaiVideo_x1",
    files={
        "train.csv": "16f13734411532cc313caf2180bfcd56",
        "test.csv": "ba26c01caaf6c65c272af11aa451fc7a",
        "item_visual_emb_dim64.h5": None,
    },
    label="is_click",
    user="user_id",
    group_id="group_id",  # a copy of user_id for all users; user_id itself is an input with a vocabulary
    fields=(
        Field("user_id", "user_id", source="user", min_count=10),
        Field(
            "item_id",
            "item_id",
            (("pos_items", "pos_items"), ("neg_items", "neg_items")),
            min_count=10,
            not_chosen=("neg_items",),
        ),
        Field(
            "item_emb",
            "item_id",
            (("pos_items_emb", "pos_items"), ("neg_items_emb", "neg_items")),
            not_chosen=("neg_items",),
            vectors="item_visual_emb_dim64.h5",
        ),
    ),
    groups=(
        Group(("item_id", "item_emb"), ("pos_items", "pos_items_emb")),
        Group(("item_id", "item_emb"), ("neg_items", "neg_items_emb")),
    ),
    time="timestamp",
    notes=(
        "the published histories are the first 100 items before a row, not the last: for active users the last item of "
        "a list is not the most recent one, so say so beside every result about position",
        "valid: the last tenth of the published train rows by time",
    ),
)

SETS = {published.name: published for published in (AMAZON, KUAI)}


def original(dataset_id: str) -> str:
    """The published set that a generated one is like; any other name as it is."""
    like = dataset_id.removesuffix(GENERATED)
    return like if like in SETS else dataset_id


def found_in(directory: Path, published: Published) -> Published:
    """The set as the directory has it: with another name, repository and md5 sums if it was generated.

    Raises:
        UserError: files that were generated like another set, or an unreadable ``generated.json``.
    """
    file = directory / MANIFEST
    if not file.is_file():
        return published
    try:
        made = json.loads(file.read_text(encoding="utf-8"))
        like, files, how = made["like"], made["files"], f"rows share {made['rows_share']:g}, seed {made['seed']}"
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: not what `ctr-pe data generate` writes ({type(error).__name__}: {error})") from None
    if like != published.name:
        raise UserError(f"{directory}: generated like {like}, not like {published.name}: `ctr-pe data fetch {like}`")
    return replace(
        published,
        name=published.name + GENERATED,
        repository=f"generated like {published.repository}: {how}",
        files=files,
        notes=(f"generated data, not {published.repository}: {how}", *published.notes),
    )
