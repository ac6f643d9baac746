"""NextItemRanker: fit on a log, recommend, save and load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from ctr_pe import CTRRanker, NextItemRanker
from ctr_pe.model_zoo.next_item import NEXT_ITEM_MODELS
from ctr_pe.utils.errors import UserError
from tests.support.next_item import categories, events, random_histories

FAST: dict[str, Any] = {
    "epochs": 3,
    "embedding_dim": 8,
    "batch_size": 16,
    "ffn_dim": 8,
    "max_len": 6,
    "learning_rate": 0.02,
}


@pytest.fixture(scope="module")
def histories() -> dict[int, list[int]]:
    return random_histories()


@pytest.fixture(scope="module")
def fitted(histories: dict[int, list[int]]) -> NextItemRanker:
    names = {"user_id": "who", "item_id": "what"}
    items = categories().rename({"item_id": "what"})
    given: dict[str, Any] = {"item_fields": ["what", "cate_id"], "protocol": "temporal"}
    ranker = NextItemRanker("SASRec", "cape", user="who", item="what", **given, **FAST)
    return ranker.fit(events(histories).rename(names), items=items)


def test_recommend_every_user(fitted: NextItemRanker, histories: dict[int, list[int]]) -> None:
    found = fitted.recommend(k=4)
    assert found.columns == ["who", "what", "score", "rank"]
    assert set(found["who"]) == set(histories)
    for user, rows in found.group_by("who"):
        assert rows.sort("rank")["score"].is_sorted(descending=True)
        seen = set(histories[int(str(user[0]))][-6:])
        assert not seen & set(rows["what"])
        assert rows["rank"].to_list() == [*range(1, rows.height + 1)]
    assert fitted.metrics_.keys() >= {"Recall@10", "NDCG@10", "MRR@10", "COV@10"}


def test_recommend_some_users_with_what_they_have_seen(fitted: NextItemRanker) -> None:
    found = fitted.recommend([3, 99, 1], k=12, filter_seen=False)
    assert found["who"].unique(maintain_order=True).to_list() == [3, 99, 1]
    assert found.group_by("who").len()["len"].to_list() == [12] * 3
    assert fitted.unknown_["unknown users"] == 1
    other = pl.DataFrame({"who": [99, 99], "what": [1, 2], "timestamp": [1_600_000_000, 1_600_000_100]})
    known = fitted.recommend(k=3, history=other)
    assert not {1, 2} & set(known["what"])
    assert fitted.recommend(pl.DataFrame({"who": [99]}), k=3, history=other).equals(known)


def test_a_saved_model_recommends_the_same(fitted: NextItemRanker, tmp_path: Path) -> None:
    fitted.save(tmp_path / "model")
    again = NextItemRanker.load(tmp_path / "model")
    assert again.recommend(k=5).equals(fitted.recommend(k=5))
    assert again.metrics_ == fitted.metrics_
    params = again.get_params()
    assert params["item_fields"] == ["item_id", "cate_id"]
    assert (params["protocol"], params["attributes"]) == ("temporal", ["cate_id"])
    for no in ("no", 2, None):
        with pytest.raises(UserError, match="is not True or False"):
            again.recommend(k=5, filter_seen=no)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"a model of task next-item, not click: ctr_pe.NextItemRanker.load reads it"):
        CTRRanker.load(tmp_path / "model")
    fitted.save(tmp_path / "model", histories=False)
    with pytest.raises(UserError, match="no history: give one, or save the model with the histories"):
        NextItemRanker.load(tmp_path / "model").recommend()


def test_text_ids_and_popularity(histories: dict[int, list[int]]) -> None:
    log = events({f"u{user}": [f"i{item}" for item in items] for user, items in histories.items()})
    ranker = NextItemRanker("Popularity", "none", max_len=6).fit(log)
    found = ranker.recommend(["u1", "nobody"], k=3, filter_seen=False)
    assert found["item_id"].to_list()[:3] == found["item_id"].to_list()[3:]
    assert found.schema["item_id"] == pl.String


def test_page_and_docstring_have_every_model(checkout: Path) -> None:
    page = (checkout / "docs/next_item.md").read_text(encoding="utf-8")
    assert [name for name in NEXT_ITEM_MODELS if f"| `{name}` | " not in page] == []
    assert [name for name in NEXT_ITEM_MODELS if f"- {name}: " not in (NextItemRanker.__doc__ or "")] == []


CHEAP = ("SASRec", "SASRecF")


@pytest.mark.parametrize(
    "model", [*CHEAP, *(pytest.param(m, marks=pytest.mark.slow) for m in NEXT_ITEM_MODELS if m not in CHEAP)]
)
def test_every_model_knows_what_its_default_says_whatever_the_item_column_is_called(
    histories: dict[int, list[int]], model: str
) -> None:
    log, items = events(histories).rename({"item_id": "what"}), categories().rename({"item_id": "what"})
    given: dict[str, Any] = {"max_len": 6, "epochs": 1, "batch_size": 512}
    pe = "none" if model in ("GRU4Rec", "Popularity") else "native"
    ranker = NextItemRanker(model, pe, item="what", **given).fit(log, items=items)
    (group,) = ranker.scorer_.config["groups"]
    assert len(group["target"]) == (2 if model in ("SASRecF", "DIFSR", "FDSA") else 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "SASrec"}, "model 'SASrec' is unknown: .*SASRec"),
        ({"position_encoding": "ropes"}, "position encoding 'ropes' is unknown"),
        ({"protocol": "din"}, "protocol 'din': .*leave-one-out"),
        ({"learning_rat": 0.1}, "learning_rat"),
        ({"item_fields": "item_id"}, "item_fields must be a valid list, got 'item_id'"),
        ({"attributes": "cate_id"}, "'attributes': input should be a valid tuple"),
        ({"dataset_id": "x"}, "'dataset_id' is not a parameter"),
    ],
)
def test_bad_values(histories: dict[int, list[int]], given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        NextItemRanker(**{**FAST, **given}).fit(events(histories))


def test_one_text_is_no_list_of_attributes(histories: dict[int, list[int]]) -> None:
    with pytest.raises(UserError, match="'attributes': input should be a valid tuple"):
        CTRRanker("DIN", "none", attributes="cate_id").fit(events(histories), items=categories())


def test_users_come_in_any_kind_of_list_and_what_is_none_is_named(fitted: NextItemRanker) -> None:
    import pandas as pd

    wanted = fitted.recommend([1, 2], k=2)
    for users in ((1, 2), range(1, 3), np.array([1, 2]), pl.Series([1, 2]), pd.Series([1, 2]), pd.Index([1, 2])):
        assert fitted.recommend(users, k=2).equals(wanted)
    other = pl.DataFrame({"whom": [1], "what": [1], "timestamp": [1_600_000_000]})
    for given, message in (
        ({"users": [1, "a"]}, "^users: no raw ids of one type: "),
        ({"users": [2**80]}, "^users: "),
        ({"users": other}, r"^users: no column 'who': did you mean 'whom'\?"),
        ({"history": other}, r"^history: no column 'who': did you mean 'whom'\?"),
        ({"history": other.rename({"whom": "who", "what": "whats"})}, r"no column 'what': did you mean 'whats'\?"),
    ):
        with pytest.raises(UserError, match=message) as error:
            fitted.recommend(**given)
        assert "\n" not in str(error.value)


def test_before_fit_and_wrong_numbers(fitted: NextItemRanker) -> None:
    from sklearn.exceptions import NotFittedError

    with pytest.raises(NotFittedError, match="NextItemRanker is not fitted"):
        NextItemRanker().recommend()
    with pytest.raises(UserError, match="k=0: the number of items to recommend"):
        fitted.recommend(k=0)
    with pytest.raises(UserError, match="users"):
        fitted.recommend(pl.DataFrame({"customer": [1]}))
