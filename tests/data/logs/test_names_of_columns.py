"""Columns may be called as the package calls its own: they work, or an error names them and what to do."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from ctr_pe import CTRRanker
from ctr_pe.data.logs.log import build
from ctr_pe.data.logs.recipe import load_recipe
from ctr_pe.serving.export import export
from ctr_pe.utils.errors import UserError

ROLES = {
    "user": "user_id", "item": "item_id", "time": "timestamp", "order": "position", "label": "label",
    "attribute": "cate_id", "event": "hour", "of user": "group", "of item": "colour",
}  # fmt: skip
FIELDS = ("attribute", "event", "of user", "of item")
WORK = [
    "tie", "time", "order", "split", "positive", "owner", "timestamp", "position", "column hour", "column x",
    "history", "neg_history", "__OOV__", "__PAD__", "score", "row", "rank", "count", "len", "value", "rows", "code",
    "block", "bin", "index", "a b", "é", "key", "at", "self", "name", "type", "items", "training", "_c0", "_modules",
    "y_pred", "lengths", "features",
]  # fmt: skip
"""Names that any column may have."""
OF_DATA_SET = ["label", "user_id", "item_id", "age_history", "item_history", "item", "x:id", "x.y"]
"""Names that a field may not have."""


def tables() -> dict[str, pl.DataFrame]:
    draw, rows = np.random.default_rng(0), 300
    events = pl.DataFrame({
        "user_id": draw.integers(0, 20, rows), "item_id": draw.integers(0, 12, rows),
        "timestamp": 1_600_000_000 + 60 * np.arange(rows), "position": np.arange(rows),
        "label": draw.integers(0, 2, rows), "hour": draw.integers(0, 24, rows),
    })  # fmt: skip
    items = pl.DataFrame({"item_id": range(12), "cate_id": [item % 3 for item in range(12)]})
    items = items.with_columns(colour=pl.format("c{}", pl.col("item_id") % 4))
    users = pl.DataFrame({"user_id": range(18), "group": [f"g{user % 4}" for user in range(18)]})
    return {"interactions": events, "items": items, "users": users}


def renamed(names: dict[str, str]) -> tuple[dict[str, str], dict[str, pl.DataFrame]]:
    """What columns are called when those of some roles have these names, and the tables with such columns."""
    called = {role: f"my_{name}" if name in names.values() else name for role, name in ROLES.items()} | names
    new = {ROLES[role]: name for role, name in called.items()}
    return called, {file: table.rename(new, strict=False) for file, table in tables().items()}


def read_as(called: dict[str, str]) -> dict[str, Any]:
    """Arguments of a recipe and of ``CTRRanker``."""
    roles = {role: called[role] for role in ("user", "item", "time", "order", "label")}
    columns = {called["event"]: "event", called["of user"]: "user", called["of item"]: "item"}
    return {**roles, "attributes": [called["attribute"]], "columns": columns}


def built(folder: Path, names: dict[str, str]) -> list[list[Any]]:
    """The columns of the training rows, in the order of their roles."""
    called, given = renamed(names)
    files = {}
    for name, table in given.items():
        files[name] = folder / f"{name}.parquet"
        table.write_parquet(files[name])
    recipe = load_recipe(None, {**files, **read_as(called), "protocol": "impressions"})
    dataset = build(recipe, folder / "set", overwrite=True)
    return [column.to_list() for column in pl.read_parquet(dataset.split("train"))]


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_a_name_of_the_package_s_own_works(step: int, tmp_path: Path) -> None:
    """Every name in every role, and as many of them at once; by default every fifth role of a name."""
    wanted = built(tmp_path, {})
    for first in range(0, len(WORK), step):
        names = dict(zip(ROLES, islice(cycle(WORK), first, None), strict=False))
        assert built(tmp_path, names) == wanted, names


@pytest.mark.parametrize("name", OF_DATA_SET)
@pytest.mark.parametrize("role", FIELDS)
def test_a_name_that_a_data_set_needs_is_refused_by_name(role: str, name: str, tmp_path: Path) -> None:
    if role == "of user" and name == "item":
        assert built(tmp_path, {role: name}) == built(tmp_path, {})
        return
    with pytest.raises(UserError) as error:
        built(tmp_path, {role: name})
    assert f"'{name}'" in str(error.value)
    assert "rename " in str(error.value)


@pytest.mark.parametrize("name", ["*", "^x$", "^.*$"])
@pytest.mark.parametrize("role", ROLES)
def test_a_name_for_several_columns_is_refused(role: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="polars takes this name for several columns: rename it"):
        built(tmp_path, {role: name})


def test_the_key_of_the_table_of_users_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'user' is the name of the key of the table of users: rename it"):
        built(tmp_path, {"of user": "user"})


def scores(folder: Path, names: dict[str, str]) -> tuple[list[float], list[list[Any]] | None]:
    """Of a model that was fitted, updated, written, read and exported."""
    called, given = renamed(names)
    events, items, users = given.values()
    ranker = CTRRanker("DIN", "none", epochs=1, embedding_dim=4, protocol="impressions", **read_as(called))
    ranker.fit(events, items=items, users=users)
    later = events.head(20).with_columns(pl.col(called["time"], called["order"]) + 10**6)
    ranker.partial_fit(later, items=items.head(3), users=users.head(3))
    if taken := sorted({"score", "rank"} & {called["user"], called["item"], called["time"], called["order"]}):
        with pytest.raises(UserError, match=f"candidates: a ranking has a column '{taken[0]}' of its own: rename it"):
            ranker.rank(None, events.head(60), k=2)
        ranked = None
    else:
        ranked = [column.to_list() for column in ranker.rank(None, events.head(60), k=2)]
    ranker.save(folder / "model")
    again = CTRRanker.load(folder / "model")
    one = again.scorer_.score_one(
        [1, 2], [3, 4], user=1, context={called["event"]: 3}, history_context={called["event"]: [1, 2]}
    )
    if "type" in called.values():
        export(folder / "model", "torch", folder / "model.pt2")
    return [*again.predict_proba(events.head(60))[:, 1], *one], ranked


@pytest.mark.slow
def test_names_of_the_package_s_own_work_from_fit_to_export(tmp_path: Path) -> None:
    """All roles at once have such names, each name once."""
    wanted, names = scores(tmp_path, {}), iter(dict.fromkeys(["row", "tie", "score", "rank", *WORK]))
    while some := list(islice(names, len(ROLES))):
        found = scores(tmp_path, dict(zip(ROLES, some, strict=False)))
        np.testing.assert_allclose(found[0], wanted[0], atol=1e-6, err_msg=str(some))
        assert found[1] in (wanted[1], None), some
