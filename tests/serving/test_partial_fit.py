"""A model goes on with new events: ids and scores stay until it is trained, and it is trained on the right rows."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from ctr_pe import CTRRanker, load
from ctr_pe.data.dataset import Dataset
from ctr_pe.data.id_map import UNSEEN, check_growth
from ctr_pe.data.logs.log import build
from ctr_pe.data.logs.recipe import load_recipe
from ctr_pe.model_zoo import MODELS
from ctr_pe.serving.model_folder import keep_model, read_model, vocabulary_hash, write_model
from ctr_pe.serving.scorer import Scorer
from ctr_pe.serving.update import carry_over, load_onto, start_from, with_new_items
from ctr_pe.training import Run, build_model, train
from ctr_pe.training.source import DataSource
from ctr_pe.utils.errors import UserError
from tests.support.fuzz.small_log import SMALL, random_log

DAY = 1_000_000 + 3600 * 300  # when the new events begin; items 36 … 39 occur for the first time about then


def split(events: pl.DataFrame, at: int = DAY) -> tuple[pl.DataFrame, pl.DataFrame]:
    return events.filter(pl.col("timestamp") < at), events.filter(pl.col("timestamp") >= at)


def fitted(events: pl.DataFrame, items: pl.DataFrame | None, **given: Any) -> CTRRanker:
    return CTRRanker("DIN", "cape", max_len=6, **{**SMALL, **given}).fit(events, items=items)


@pytest.fixture(scope="module")
def yesterday(impressions: pl.DataFrame, items: pl.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of the old events."""
    folder = tmp_path_factory.mktemp("yesterday") / "model"
    fitted(split(impressions)[0], items).save(folder)
    return folder


def today(impressions: pl.DataFrame) -> pl.DataFrame:
    """New events; a user and an item among them are all new."""
    new = split(impressions)[1]
    more = pl.DataFrame({"user_id": [7] * 4, "item_id": ["item 1", "novel", "item 2", "novel"], "label": [1, 1, 0, 1]})
    return pl.concat([new, more.with_columns(timestamp=DAY + pl.int_range(4)).cast(new.schema).select(new.columns)])


# --- which rows ---


def rows_trained_on(monkeypatch: pytest.MonkeyPatch, ranker: CTRRanker, *given: Any, **options: Any) -> Counter[Any]:
    """(label, item, history) of every row that ``partial_fit`` trains on, by name; '?' for reserved ids."""
    found: list[tuple[Any, ...]] = []

    def record(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found.extend(
            (int(label), int(item), tuple(history[history > 0].tolist()))
            for label, item, history in zip(batch["label"], batch["item_id"], batch["item_history"], strict=True)
        )
        assert batch["label"].dtype == torch.float32
        return torch.zeros(())

    with monkeypatch.context() as patched:  # a fit after it trains for real
        patched.setattr("ctr_pe.models.rank_model.RankModel.train_step", record)
        ranker.partial_fit(*given, **options)
    names = {number: text for text, number in ranker.scorer_.encoder.vocabularies["item_id"].items()} | {0: "pad"}
    return Counter((label, names[item], tuple(names[one] for one in history)) for label, item, history in found)


def expected(old: pl.DataFrame, new: pl.DataFrame, max_len: int, first_too: bool = True) -> Counter[Any]:
    """The rows of the new events by the definition: histories strictly before, newest last, ties by item."""
    rows: Counter[Any] = Counter()
    events = sorted(pl.concat([old, new]).iter_rows(named=True), key=lambda e: (e["timestamp"], e["item_id"]))
    for row in new.iter_rows(named=True):
        mine = [e for e in events if e["user_id"] == row["user_id"]]
        past = [e["item_id"] for e in mine if e["timestamp"] < row["timestamp"] and e.get("label", 1) == 1]
        if first_too or (mine[0]["timestamp"], mine[0]["item_id"]) != (row["timestamp"], row["item_id"]):
            rows[row.get("label", 1), row["item_id"], tuple(past[-max_len:])] += 1
    return rows


def test_rows_have_the_histories_of_the_whole_log(
    impressions: pl.DataFrame, yesterday: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = split(impressions)[0], today(impressions)
    found = rows_trained_on(monkeypatch, load(yesterday), new)
    assert found == expected(old, new, max_len=6)
    twice = rows_trained_on(monkeypatch, load(yesterday), new.sample(fraction=1, shuffle=True, seed=0), epochs=2)
    assert twice == Counter({row: 2 * count for row, count in found.items()})


def test_histories_are_stored_for_the_next_day(
    impressions: pl.DataFrame, yesterday: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three updates, the model saved in between, train on the same rows as if all had come at once."""
    old, new = split(impressions)[0], today(impressions)
    days = [new.filter(pl.col("timestamp") % 3 == day % 3) for day in range(3)]  # late events among them
    for number, day in enumerate(days):
        ranker = load(tmp_path / "model") if number else load(yesterday)
        before = pl.concat([old, *days[:number]])
        chosen = before.filter(pl.col("label") == 1).sort("timestamp", "item_id")
        kept = chosen.group_by("user_id", maintain_order=True).tail(6)  # what a folder has of them
        assert rows_trained_on(monkeypatch, ranker, day) == expected(kept, day, max_len=6)
        ranker.save(tmp_path / "model")
    stored = load(tmp_path / "model").scorer_.histories
    whole = pl.concat([old, new]).filter(pl.col("label") == 1).sort("timestamp", "item_id")
    newest = whole.group_by("user_id", maintain_order=True).tail(6).select("user_id", "item_id", "timestamp")
    order = ["user_id", "timestamp", "item_id"]
    assert stored is not None
    assert stored.sort(order).equals(newest.sort(order))


def test_an_update_that_is_repeated_counts_its_events_once(
    impressions: pl.DataFrame, yesterday: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = split(impressions)[0], today(impressions)
    ranker = load(yesterday)
    once = rows_trained_on(monkeypatch, ranker, new)
    stored = ranker.scorer_.histories
    assert "stored histories are among" not in caplog.text
    assert stored is not None
    again = rows_trained_on(monkeypatch, ranker, new)
    assert stored.equals(ranker.scorer_.histories)
    assert sum(again.values()) == sum(once.values())
    kept = stored.with_columns(label=pl.lit(1, pl.Int8)).select(new.columns)
    apart = kept.join(new, on=["user_id", "item_id", "timestamp"], how="anti")
    assert again == expected(apart, new, max_len=6)
    assert f"{kept.height - apart.height} events of the stored histories are among the new ones" in caplog.text
    assert apart.height < old.height


def test_clicks_come_with_sampled_items(
    clicks: pl.DataFrame, items: pl.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = split(clicks)
    new = pl.concat([new, pl.DataFrame({"user_id": [7], "item_id": ["novel"], "timestamp": [DAY]})])
    found = rows_trained_on(monkeypatch, fitted(old, items), new)
    clicked = expected(old, new, max_len=6, first_too=False)
    assert sum(clicked.values()) == new.height - 1  # user 7 has no earlier event
    assert Counter({row: count for row, count in found.items() if row[0] == 1}) == clicked
    sampled = Counter({row: count for row, count in found.items() if row[0] == 0})
    assert Counter({row[2]: 0 for row in sampled}).keys() <= {row[2] for row in clicked}
    assert sum(sampled.values()) == sum(clicked.values())
    assert len({row[1] for row in sampled}) > 20
    assert UNSEEN not in {row[1] for row in found}
    labelled = pl.concat([new.with_columns(label=1), new.head(5).with_columns(label=0)])
    again = rows_trained_on(monkeypatch, fitted(old, items, protocol="din"), labelled)
    assert Counter({row: count for row, count in again.items() if row[0] == 1}) == clicked


# --- ids and scores ---


@pytest.mark.parametrize(
    ("model", "pe", "options"),
    [(model, "cape", {}) for model in MODELS]
    + [("DIN", "dif", {"dif_predict": 0.1}), ("DIN", "none", {"table_optimizer": "lazy_adam"})],
)
def test_growth_changes_no_score(
    impressions: pl.DataFrame, items: pl.DataFrame, model: str, pe: str, options: dict[str, Any]
) -> None:
    old, new = split(impressions)
    scorer = CTRRanker(model, pe, max_len=6, **SMALL, **options).fit(old, items=items).scorer_
    grown = with_new_items(scorer, pl.concat([new, today(impressions)]), items)
    check_growth(scorer.encoder.vocabularies, grown.encoder.vocabularies, "the old", "the new")
    assert vocabulary_hash(grown.encoder.vocabularies) == grown.config["vocabulary"] != scorer.config["vocabulary"]
    requests = today(impressions)
    assert np.array_equal(scorer.score_requests(None, requests), grown.score_requests(None, requests))
    assert scorer.counts["unknown items"] > grown.counts["unknown items"] == 0
    table = "embedding_layer.embedding_layers.item_id.weight"
    before, after = scorer.model.state_dict()[table], grown.model.state_dict()[table]
    unseen = scorer.encoder.vocabularies["item_id"][UNSEEN]
    assert torch.equal(after[: len(before)], before)
    assert len(after) > len(before)
    assert (after[len(before) :] == before[unseen]).all()
    grown.model.train_step(
        {**grown.encoder.requests(requests, grown.stored).batch(np.arange(9)), "label": torch.ones(9)}
    )


def test_partial_fit_learns_new_items(impressions: pl.DataFrame, items: pl.DataFrame, yesterday: Path) -> None:
    """What comes today is chosen where the new item is; the model of yesterday cannot know."""
    ranker, new = load(yesterday), today(impressions)
    old = ranker.scorer_
    late = pl.lit(DAY + 10**6, pl.Int64)
    many = pl.DataFrame({"user_id": range(100, 160)}).with_columns(item_id=pl.lit("novel"), timestamp=late)
    other = many.with_columns(item_id=pl.lit("item 3"))
    shown = [many.with_columns(label=pl.lit(1, pl.Int8)), other.with_columns(label=pl.lit(0, pl.Int8))]
    lesson = pl.concat([new, *shown])
    before, weights = ranker.predict_proba(many), {k: v.clone() for k, v in old.model.state_dict().items()}
    attributes = pl.DataFrame({"item_id": ["novel"], "cate_id": ["c novel"]})
    ranker.partial_fit(lesson, items=attributes, epochs=20)
    assert ranker.predict_proba(many)[:, 1].mean() > before[:, 1].mean() + 0.1
    assert ranker.predict_proba(other)[:, 1].mean() < ranker.predict_proba(many)[:, 1].mean()
    assert all(torch.equal(value, weights[name]) for name, value in old.model.state_dict().items())  # as it was
    done = ranker.updates_[-1]
    assert (done["events"], done["rows"], done["epochs"], done["loss"] > 0) == (lesson.height, lesson.height, 20, True)
    assert done["new_ids"]["cate_id"] == 1
    assert ranker.scorer_.encoder.vocabularies["cate_id"]["c novel"] == len(old.encoder.vocabularies["cate_id"])
    catalogue = ranker.scorer_.encoder.items
    assert catalogue is not None
    assert catalogue.filter(pl.col("item_id") == "novel")["cate_id"].to_list() == ["c novel"]
    assert set(items["item_id"]) < set(catalogue["item_id"])


def test_rows_that_today_does_not_have_stay(impressions: pl.DataFrame, items: pl.DataFrame) -> None:
    """Regularisation and a new optimiser wear away nothing."""
    ranker = fitted(split(impressions)[0], items, embedding_regularizer=0.1)
    table, stored = "embedding_layer.embedding_layers.item_id.weight", ranker.scorer_.encoder.vocabularies["item_id"]
    before = ranker.scorer_.model.state_dict()[table]
    ranker.partial_fit(pl.DataFrame({"user_id": [7], "item_id": ["item 3"], "timestamp": [3 * DAY], "label": [1]}))
    after = ranker.scorer_.model.state_dict()[table]
    assert (after != before).any(1).nonzero().flatten().tolist() == [stored["item 3"]]


def test_items_that_change_and_items_without_attributes(
    impressions: pl.DataFrame, yesterday: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ranker = load(yesterday)
    changed = pl.DataFrame({"item_id": ["item 1", "never seen"], "cate_id": ["c other", None]})
    ranker.partial_fit(today(impressions), items=changed)
    catalogue, stored = ranker.scorer_.encoder.items, ranker.scorer_.encoder.vocabularies
    assert catalogue is not None
    rows = {row["item_id"]: row for row in catalogue.iter_rows(named=True)}
    assert rows["item 1"]["cate_id:id"] == stored["cate_id"]["c other"]
    assert rows["never seen"]["item_id:id"] == stored["item_id"][UNSEEN]
    assert rows["novel"]["cate_id:id"] == stored["cate_id"][UNSEEN]
    assert "1 new item without attributes" in caplog.text


def test_the_same_in_another_process(impressions: pl.DataFrame, items: pl.DataFrame, tmp_path: Path) -> None:
    """Fit, partial_fit, partial_fit give the same model however often it is saved and read between."""
    old, new = split(impressions)
    days = split(new, DAY + 3600 * 50)
    one = fitted(old, items)
    one.save(tmp_path / "one")
    other = load(tmp_path / "one")
    for day in days:
        one.partial_fit(day)
        other.partial_fit(day)
        other.save(tmp_path / "other")
        other = load(tmp_path / "other")
    assert np.array_equal(one.predict_proba(new), other.predict_proba(new))
    assert [done["events"] for done in other.updates_] == [day.height for day in days]
    check_growth(read_model(tmp_path / "one").encoder.vocabularies, other.scorer_.encoder.vocabularies, "one", "other")


def test_before_fit_it_trains_on_everything(
    impressions: pl.DataFrame, items: pl.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranker = CTRRanker("DIN", "cape", max_len=6, **SMALL)
    assert rows_trained_on(monkeypatch, ranker, impressions, items=items) == expected(
        impressions.clear(), impressions, 6
    )
    monkeypatch.undo()
    ranker = CTRRanker("DIN", "cape", max_len=6, **SMALL).partial_fit(impressions, items=items, epochs=3)
    assert ranker.evaluate(impressions.drop("timestamp").with_columns(timestamp=pl.lit(2 * DAY)))["AUC"] > 0.5
    assert ranker.metrics_ == {}
    stored = ranker.scorer_.encoder.vocabularies["item_id"]
    assert stored[UNSEEN] == 1
    table = "embedding_layer.embedding_layers.item_id.weight"
    before = ranker.scorer_.model.state_dict()[table]
    assert len(before.unique(dim=0)) == len(stored) == impressions["item_id"].n_unique() + 2  # no two rows begin alike
    ranker.set_params(learning_rate=1e-4).partial_fit(
        pl.DataFrame({"user_id": [7], "item_id": ["item 3"], "timestamp": [3 * DAY], "label": [0]})
    )
    after = ranker.scorer_.model.state_dict()[table]
    assert 0 < (after[: len(before)] - before).abs().max() < 2e-4  # a step of Adam
    assert ranker.scorer_.config["params"]["learning_rate"] == 1e-4
    assert len(ranker.updates_) == 2


def test_before_fit_an_order_is_enough(impressions: pl.DataFrame, items: pl.DataFrame) -> None:
    """And rows of one class, or a single one: nothing is split off."""
    ordered = impressions.rename({"timestamp": "place"}).filter(pl.col("label") == 1)
    given = {"time": None, "order": "place", "max_len": 6, **SMALL}
    ranker = CTRRanker("SASRec", "none", **given).partial_fit(ordered, items=items)
    assert np.isfinite(ranker.predict_proba(ordered)).all()
    CTRRanker("DIN", "none", **given).partial_fit(ordered.head(1))
    for without in ("place", "user_id", "item_id"):
        with pytest.raises(UserError, match=f"new_events: no column '{without}'"):
            CTRRanker("DIN", "none", **given).partial_fit(ordered.drop(without))


def test_times_and_tables_of_other_kinds(impressions: pl.DataFrame, items: pl.DataFrame, tmp_path: Path) -> None:
    """Dates, pandas and files, as in ``fit``."""
    dated = impressions.with_columns(timestamp=pl.from_epoch("timestamp"))
    old, new = (part.join(dated, on=["user_id", "item_id"], how="semi") for part in split(impressions))
    as_dates = [part.with_columns(timestamp=pl.from_epoch("timestamp")) for part in (old, new)]
    plain = fitted(old, items).partial_fit(new)
    for table in (as_dates[1], as_dates[1].to_pandas(), as_dates[1].to_arrow()):
        ranker = fitted(as_dates[0], items).partial_fit(table)
        assert np.array_equal(plain.predict_proba(new), ranker.predict_proba(as_dates[1]))
    new.write_csv(tmp_path / "new.csv")
    assert np.array_equal(
        fitted(old, items).partial_fit(tmp_path / "new.csv").predict_proba(new), plain.predict_proba(new)
    )


# --- a model folder and a data set ---


def dataset(folder: Path, name: str, events: pl.DataFrame, items: pl.DataFrame, **given: Any) -> Dataset:
    events.write_parquet(folder / "log.parquet")
    items.write_parquet(folder / "items.parquet")
    files = {"interactions": folder / "log.parquet", "items": folder / "items.parquet"}
    rules = {} if "append_to" in given else {"protocol": "impressions", "order": None, "max_len": 6}
    return build(load_recipe(None, {**files, **rules, **given}), folder / name)


def model_of(data: Dataset, folder: Path, **params: Any) -> Path:
    train(Run("DIN", data.path, "cape", 0, params={**SMALL, **params}, keep=partial(keep_model, folder)))
    return folder


def test_a_model_goes_on_with_an_appended_data_set(
    impressions: pl.DataFrame, items: pl.DataFrame, tmp_path: Path
) -> None:
    old = split(impressions)[0]
    before = dataset(tmp_path, "before", old, items)
    now = dataset(tmp_path, "now", impressions, items, append_to=before.path)
    folder = model_of(before, tmp_path / "model")
    scorer, grown = read_model(folder), load_onto(folder, now)
    assert np.array_equal(scorer.score_requests(old, impressions), grown.score_requests(old, impressions))
    assert grown.counts["unknown items"] < scorer.counts["unknown items"]
    write_model(tmp_path / "grown", grown)
    again = read_model(tmp_path / "grown")
    assert np.array_equal(again.score_requests(old, impressions), grown.score_requests(old, impressions))
    same = load_onto(folder, before)
    assert np.array_equal(scorer.score_requests(old, impressions), same.score_requests(old, impressions))

    still = {**SMALL, "learning_rate": 1e-30, "optimizer": "sgd"}
    kept: list[Any] = []
    train(Run("DIN", now.path, "cape", 5, params=still, start=start_from(folder), keep=lambda *a: kept.append(a)))
    started = dict(kept[0][0].named_parameters())
    assert all(torch.equal(value, started[name]) for name, value in grown.model.named_parameters())


def test_other_vocabularies_are_refused(impressions: pl.DataFrame, items: pl.DataFrame, tmp_path: Path) -> None:
    """As many ids as before, but others: a model would read other rows without a word."""
    before = dataset(tmp_path, "before", split(impressions)[0], items)
    folder = model_of(before, tmp_path / "model")
    renumbered = dataset(tmp_path, "renumbered", impressions, items)
    smaller = dataset(
        tmp_path, "smaller", impressions.filter(pl.col("item_id") != "item 1"), items, append_to=before.path
    )
    load_onto(folder, smaller)  # a log that lacks an item keeps its id
    for action in (lambda: load_onto(folder, renumbered), lambda: start_from(folder)(None, DataSource.of(renumbered))):
        with pytest.raises(UserError, match=r"no growth of the vocabulary of model .*: build it with append_to="):
            action()
    grown = dataset(tmp_path, "grown", impressions, items, append_to=before.path)
    newer = model_of(grown, tmp_path / "newer")
    with pytest.raises(UserError, match="no growth"):
        load_onto(newer, before)  # a model of today on the data of yesterday
    other = build_like(folder, grown, "none")
    with pytest.raises(UserError, match=r"a DIN with other parameters: attentions\.0\.pe\..* is not in both"):
        carry_over(read_model(folder).model, other)
    manifest = json.loads((folder / "feature_vocab.json").read_text())
    manifest["item_id"]["item 1"], manifest["item_id"]["item 2"] = 2, 1
    (folder / "feature_vocab.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="damaged"):
        read_model(folder)


def build_like(folder: Path, data: Dataset, pe: str) -> Any:
    return build_model(Run("DIN", data.path, pe, 0, params=SMALL), data, str(folder.parent / "checkpoints"))


def test_refusals(impressions: pl.DataFrame, yesterday: Path, tmp_path: Path) -> None:
    new = today(impressions)

    def refused(match: str, ranker: CTRRanker, *given: Any, **options: Any) -> None:
        scorer = ranker.scorer_
        with pytest.raises(UserError, match=match):
            ranker.partial_fit(*given, **options)
        assert ranker.scorer_ is scorer

    ranker = load(yesterday)
    refused("epochs=0", ranker, new, epochs=0)
    refused("new_events: no rows", ranker, new.clear())
    refused("new_events: no column 'timestamp'", ranker, new.drop("timestamp"))
    refused("new_events: column 'item_id' holds", ranker, new.with_columns(item_id=pl.lit(3)))
    refused("new_events: column 'user_id' holds", ranker, new.with_columns(pl.col("user_id").cast(pl.String)))
    refused("label column 'label' holds", ranker, new.with_columns(label=pl.lit(3)))
    refused("items: no column 'cate_id'", ranker, new, items=pl.DataFrame({"item_id": ["novel"]}))
    refused("items: column 'cate_id' holds", ranker, new, items=pl.DataFrame({"item_id": ["novel"], "cate_id": [3]}))
    twice = pl.DataFrame({"item_id": ["novel"] * 2, "cate_id": ["a", "b"]})
    refused("items: 1 of 2 rows repeat", ranker, new, items=twice)
    refused("y: not a label per event", ranker, new, twice)
    ranker.save(tmp_path / "bare", histories=False)
    refused("saved without histories", load(tmp_path / "bare"), new)
    scorer = ranker.scorer_
    scorer.encoder.items = None
    with pytest.raises(UserError, match="no catalogue of items"):
        with_new_items(Scorer(scorer.model, scorer.encoder, scorer.config), new)


def test_one_event(impressions: pl.DataFrame, yesterday: Path) -> None:
    """A single new row has no variance, and a user's only click makes none."""
    ranker = load(yesterday)
    ranker.partial_fit(today(impressions).head(1))
    assert np.isfinite(ranker.predict_proba(impressions)).all()
    clicks = random_log().drop("label")
    only = pl.DataFrame({"user_id": [7], "item_id": ["novel"], "timestamp": [DAY]})
    ranker = fitted(clicks, None).partial_fit(only)
    assert ranker.updates_[-1]["loss"] is None
    assert ranker.scorer_.encoder.vocabularies["item_id"]["novel"]
