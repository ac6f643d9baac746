"""A data set that goes on with an earlier one: ids stay, new values come after all of them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from fuxictr.features import FeatureMap

from ctr_pe.cli import main
from ctr_pe.data.dataset import SPLITS, Dataset, open_dataset
from ctr_pe.data.id_map import PAD, UNSEEN, IdMap, check_growth
from ctr_pe.data.loader import BatchLoader
from ctr_pe.data.logs.log import build, summary
from ctr_pe.data.logs.recipe import load_recipe
from ctr_pe.utils.errors import UserError

FEATURES = ("item_id", "cate_id")


def log(first: int, last: int) -> pl.DataFrame:
    """Events at times first … last - 1; the later, the larger the item numbers that are used."""
    time = range(first, last)
    events = [(t % 7, (t * t * 31 + t // 9) % (10 + t // 9) * 3, 1000 + t, t % 5 % 2) for t in time]
    return pl.DataFrame(events, ["user_id", "item_id", "timestamp", "label"], orient="row").unique(
        ["user_id", "item_id", "timestamp"], maintain_order=True
    )


def items_of(events: pl.DataFrame) -> pl.DataFrame:
    """Each item has one of as many categories as there are items by then, the larger the rarer."""
    ids = events["item_id"].unique().sort()
    return pl.DataFrame({"item_id": ids, "cate_id": [f"c{item % 11}" if item < 60 else f"new {item}" for item in ids]})


def built(folder: Path, name: str, events: pl.DataFrame, **given: Any) -> Dataset:
    folder.mkdir(exist_ok=True)
    events.write_parquet(folder / f"{name}.log.parquet")
    files = {"interactions": folder / f"{name}.log.parquet"}
    if "items" not in given:
        items_of(events).write_parquet(folder / f"{name}.items.parquet")
        files["items"] = folder / f"{name}.items.parquet"
    return build(load_recipe(None, {**files, **given}), folder / name, overwrite=True)


def vocabularies(dataset: Dataset) -> dict[str, dict[str, int]]:
    return dict(json.loads((dataset.path / "feature_vocab.json").read_text()))


def report(dataset: Dataset) -> dict[str, Any]:
    return dict(json.loads((dataset.path / "report.json").read_text()))


def raw_rows(dataset: Dataset, split: str) -> pl.DataFrame:
    """Rows with the original values in place of the ids, '?' for those without."""
    rows = pl.read_parquet(dataset.split(split))
    for feature, stored in vocabularies(dataset).items():
        names = {number: "?" if text == UNSEEN else text for text, number in stored.items()}
        history = feature.replace("_id", "_history")
        back = pl.element().replace_strict(names, return_dtype=pl.String)
        rows = rows.with_columns(
            pl.col(feature).replace_strict(names, return_dtype=pl.String), pl.col(history).list.eval(back)
        )
    return rows


@pytest.mark.parametrize("protocol", ["din", "impressions"])
def test_ids_stay_however_the_log_grows(tmp_path: Path, protocol: str) -> None:
    label = {"label": None} if protocol == "din" else {}
    sets = [built(tmp_path, "day 0", log(0, 200), protocol=protocol, **label)]
    for day, end in enumerate((300, 310, 500), start=1):
        sets.append(built(tmp_path, f"day {day}", log(0, end), append_to=sets[-1].path))
    for before, now in pairwise(sets):
        old, new = vocabularies(before), vocabularies(now)
        check_growth(old, new, "before", "now")
        assert report(now)["recipe"]["protocol"] == protocol  # rules that are not given are those of before
        for feature in FEATURES:
            added = len(new[feature]) - len(old[feature])
            assert report(now)["append_to"]["new_ids"][feature] == added
            assert sorted(new[feature].values()) == list(range(len(new[feature])))
            assert {new[feature][text] for text in new[feature].keys() - old[feature].keys()} == set(
                range(len(old[feature]), len(new[feature]))
            )
    assert len(vocabularies(sets[-1])["item_id"]) > len(vocabularies(sets[0])["item_id"])
    assert len({vocabularies(found)["item_id"][UNSEEN] for found in sets}) == 1


def test_rows_are_those_of_a_new_data_set(tmp_path: Path) -> None:
    """Appending changes numbers, never what they stand for."""
    before = built(tmp_path, "before", log(0, 200), protocol="impressions")
    appended = built(tmp_path, "appended", log(0, 400), append_to=before.path)
    alone = built(tmp_path, "alone", log(0, 400), protocol="impressions")
    known = vocabularies(before)
    for split in SPLITS:
        one, other = raw_rows(appended, split), raw_rows(alone, split)
        columns = [name for name in one.columns if "item" not in name and "cate" not in name]
        assert one.select(columns).equals(other.select(columns))
        for feature in FEATURES:  # what only the earlier log has in its training rows is known here
            same = (one[feature] == other[feature]) | (other[feature] == "?") & one[feature].is_in(list(known[feature]))
            assert same.all()


def test_without_growth_nothing_moves(tmp_path: Path) -> None:
    """The same log again: the same files, the reserved id where it was."""
    before = built(tmp_path, "before", log(0, 300), protocol="impressions")
    again = built(tmp_path, "again", log(0, 300), append_to=before.path)
    for file in ("feature_vocab.json", "train.parquet", "valid.parquet", "test.parquet", "items.parquet"):
        assert (before.path / file).read_bytes() == (again.path / file).read_bytes()
    assert [*vocabularies(before)["item_id"]][-1] == UNSEEN


def test_fuxictr_and_the_loader_read_a_grown_set(tmp_path: Path) -> None:
    before = built(tmp_path, "before", log(0, 200), protocol="impressions")
    now = built(tmp_path, "now", log(0, 400), append_to=before.path)
    feature_map: FeatureMap = now.feature_map(8)
    for feature in FEATURES:
        stored = vocabularies(now)[feature]
        for name in (feature, feature.replace("_id", "_history")):
            spec = feature_map.features[name]
            assert (spec["padding_idx"], spec["oov_idx"]) == (stored[PAD], stored[UNSEEN]) == (0, spec["oov_idx"])
            assert spec["vocab_size"] == max(stored.values()) + 1 > spec["oov_idx"] + 1
    largest = max(int(batch["item_id"].max()) for batch in BatchLoader(feature_map, now.split("train"), "train"))
    assert vocabularies(before)["item_id"][UNSEEN] < largest < feature_map.features["item_id"]["vocab_size"]


def test_earlier_items_need_no_file(tmp_path: Path) -> None:
    """The catalogue goes on too: a file of items with the new ones alone, or none at all."""
    before = built(tmp_path, "before", log(0, 200), protocol="impressions")
    same_items = log(0, 400).join(log(0, 200), on="item_id", how="semi")
    now = built(tmp_path, "now", same_items, append_to=before.path, items=None)
    assert vocabularies(now).keys() == set(FEATURES)
    new = items_of(log(0, 400)).join(items_of(log(0, 200)), on="item_id", how="anti")
    new.write_parquet(tmp_path / "new.parquet")
    now = built(tmp_path, "now", log(150, 400), append_to=before.path, items=tmp_path / "new.parquet")
    catalogue = pl.read_parquet(now.path / "items.parquet")
    assert set(catalogue["item_id"]) == set(items_of(log(0, 400))["item_id"])  # those of before that the log lacks too
    for row in catalogue.iter_rows(named=True):
        for feature in FEATURES:
            stored = vocabularies(now)[feature]
            assert row[f"{feature}:id"] == stored.get(str(row[feature]), stored[UNSEEN])


def test_a_known_value_of_the_reserved_id_gets_one_when_it_is_trained(tmp_path: Path) -> None:
    """Items of test rows alone are unseen; the next log has them in training rows."""
    before = built(tmp_path, "before", log(0, 300), protocol="impressions")
    unseen = pl.read_parquet(before.path / "items.parquet").filter(
        pl.col("item_id:id") == vocabularies(before)["item_id"][UNSEEN]
    )
    assert unseen.height
    now = vocabularies(built(tmp_path, "now", log(0, 500), append_to=before.path))["item_id"]
    assert all(now[str(item)] >= len(vocabularies(before)["item_id"]) for item in unseen["item_id"])


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --out the data set gets a new version; it stays as it is when that fails."""
    before = built(tmp_path, "set", log(0, 200), protocol="impressions", max_len=9)
    old = vocabularies(before)
    log(0, 400).write_parquet(tmp_path / "more.parquet")
    items_of(log(0, 400)).write_parquet(tmp_path / "items.parquet")
    files = ["--interactions", str(tmp_path / "more.parquet"), "--items", str(tmp_path / "items.parquet")]
    assert main(["data", "build", "--append-to", str(before.path), *files]) == 0
    now = open_dataset(str(before.path))
    check_growth(old, vocabularies(now), "before", "now")
    assert now.max_len == 9
    assert now.data_hash != before.data_hash
    added = len(vocabularies(now)["item_id"]) - len(old["item_id"])
    assert f"new ids: item_id {added}, cate_id " in capsys.readouterr().out
    assert summary(now)
    assert main(["data", "build", "--append-to", str(before.path), *files[:2], "--attributes", "none"]) == 2
    assert open_dataset(str(before.path)).data_hash == now.data_hash


def test_refusals(tmp_path: Path) -> None:
    before = built(tmp_path, "before", log(0, 200), protocol="impressions")
    with pytest.raises(UserError, match="no data set"):
        built(tmp_path, "now", log(0, 300), append_to=tmp_path / "nothing")
    text = pl.col("item_id").cast(pl.String)
    with pytest.raises(UserError, match=r"item column 'item_id': different types: Int64 in .*, String in"):
        built(tmp_path, "now", log(0, 300).with_columns(text), append_to=before.path, items=None)
    items_of(log(0, 300)).with_columns(text).write_parquet(tmp_path / "text.parquet")
    with pytest.raises(UserError, match=r"column 'item_id': String in .*, Int64 in"):
        built(tmp_path, "now", log(0, 300), append_to=before.path, items=tmp_path / "text.parquet")
    with pytest.raises(UserError, match="its features are item_id, cate_id, not item_id: cate_id differs"):
        built(tmp_path, "now", log(0, 200), append_to=before.path, items=None, attributes=None)
    plain = built(tmp_path, "plain", log(0, 200), protocol="impressions", items=None)
    with pytest.raises(UserError, match=r"column 'cate_id': String in .*, no such column in"):
        built(tmp_path, "now", log(0, 300), append_to=plain.path, attributes=("cate_id",))
    (before.path / "feature_vocab.json").write_text("{}")
    with pytest.raises(UserError, match="changed since it was built"):
        built(tmp_path, "now", log(0, 300), append_to=before.path)


def test_grown_vocabulary() -> None:
    stored = {PAD: 0, "b": 1, "a": 2, UNSEEN: 3}
    ids = IdMap(stored, 3)
    assert ids.grow(["c", "a", UNSEEN, "d", "c", PAD]).stored == {**stored, "c": 4, "d": 5}
    assert ids.grow(["c"]).grow(["d"]).stored == ids.grow(["c", "d"]).stored
    assert ids.grow(["c"]).ids(pl.Series(["a", "x", None, "c"])).tolist() == [2, 3, 3, 4]
    assert IdMap({PAD: 0, "8": 1, UNSEEN: 2}, 2).ids(pl.Series([7, 8])).tolist() == [2, 1]
    assert IdMap.of(()).ids(pl.Series([7, 8])).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("now", "problem"),
    [
        ({"f": {PAD: 0, "b": 1, "a": 2, UNSEEN: 3}}, "2 values of 'f' moved or gone, 'a' has id 2 instead of 1"),
        ({"f": {PAD: 0, "a": 1, UNSEEN: 2}}, "'b' has no id instead of 2"),
        ({"f": {PAD: 0, "a": 1, "b": 2, "c": 3, UNSEEN: 4}}, "'__OOV__' has id 4 instead of 3"),
        ({"g": {}}, "no feature 'f', which the model has"),
    ],
)
def test_what_is_no_growth_is_refused(now: dict[str, dict[str, int]], problem: str) -> None:
    before = {"f": {PAD: 0, "a": 1, "b": 2, UNSEEN: 3}}
    with pytest.raises(UserError, match=problem):
        check_growth(before, now, "the model", "data/x")
    check_growth(before, {"f": IdMap(before["f"], 3).grow(["c"]).stored}, "the model", "data/x")
