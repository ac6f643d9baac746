"""Generated files have the published form, are read by the published sets' own reader, and never pass for the real."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np
import polars as pl
import pytest

from ctr_pe.cli import main
from ctr_pe.config.yaml import model_params
from ctr_pe.data.dataset import open_dataset
from ctr_pe.data.published import generate as generated
from ctr_pe.data.published.download import fetch
from ctr_pe.data.published.generate import DRAWN, UserLists, generate
from ctr_pe.data.published.sets import AMAZON, KUAI, SETS, original
from ctr_pe.study.differences import settings
from ctr_pe.study.rendering import as_markdown
from ctr_pe.study.store import Store
from ctr_pe.study.tables import make_tables, reading_notes
from ctr_pe.study.tables import published as printed
from ctr_pe.utils.errors import UserError
from tests.support.fake_training import fill, jobs_of

SHARE = 0.002


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("files")
    for name in SETS:
        generate(name, root / name, SHARE)
    return root


@pytest.fixture(scope="module")
def built(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    for name in SETS:
        fetch(name, root, files / name)
    return root


def read(file: Path) -> pl.DataFrame:
    lists = [name for name in pl.read_csv(file, n_rows=0).columns if "history" in name or name.endswith("_items")]
    frame = pl.read_csv(file, schema_overrides=dict.fromkeys(lists, pl.String))
    split = pl.col(lists).fill_null("").str.split("^").list.eval(pl.element().filter(pl.element() != ""))
    return frame.with_columns(split.cast(pl.List(pl.Int64)))


def test_every_published_set_can_be_drawn() -> None:
    assert DRAWN.keys() == SETS.keys()


def test_the_first_numbers_of_lists_are_those_of_the_joined_text() -> None:
    lists = UserLists.of(np.array([7, 123, 4, 55, 6]), np.array([3, 0, 2]))
    first = lists.first(np.array([0, 0, 0, 0, 1, 2, 2, 2]), np.array([0, 1, 2, 3, 0, 0, 1, 2]))
    assert first.to_list() == ["", "7", "7^123", "7^123^4", "", "", "55", "55^6"]


def test_the_sizes_at_full_share_are_the_published_ones() -> None:
    """With the next two tests, which find what follows from them in small files."""
    made = generated
    train, test = 2 * (made.REVIEWS - 2 * made.USERS), 2 * made.USERS
    assert f"{train:,} + {test:,} rows, {made.USERS:,} users, {made.ITEMS:,} items" in AMAZON.title
    assert f"{made.TRAIN_ROWS:,} + {made.TEST_ROWS:,} rows, {made.VIEWERS:,} users, {made.VIDEOS:,} " in KUAI.title


def test_amazon_has_the_published_form(files: Path) -> None:
    """One positive and one sampled item per target, full lists oldest first, the last target of each user in test."""
    train, test = read(files / AMAZON.name / "train.csv"), read(files / AMAZON.name / "test.csv")
    assert train.columns == test.columns == "label user_id item_id cate_id item_history cate_history".split()
    users, reviews, items = round(192_403 * SHARE), round(1_689_188 * SHARE), round(63_001 * SHARE)
    assert (len(train), len(test)) == (2 * (reviews - 2 * users), 2 * users)
    rows = pl.concat([train, test])
    assert rows["user_id"].n_unique() == test["user_id"].n_unique() == users
    assert set(rows["item_id"]) | set(rows["item_history"].list.explode(keep_nulls=False, empty_as_null=False)) == set(
        range(items)
    )
    length = pl.col("item_history").list.len()
    pairs = rows.group_by("user_id", length.alias("length")).agg(pl.len(), pl.col("label").sum())
    assert pairs.select((pl.col("len") == 2).all(), (pl.col("label") == 1).all()).row(0) == (True, True)
    assert (test["item_history"].list.len() >= 4).all()
    assert not train["item_history"].list.len().is_sorted()  # the published rows are in no order
    category = dict(zip(rows["item_id"], rows["cate_id"], strict=True))
    of_items = rows.select(pl.col("item_history", "cate_history").explode(empty_as_null=False))
    assert all(category.get(item, cate) == cate for item, cate in of_items.unique().iter_rows())
    longest = test.unique("user_id").select("user_id", whole="item_history")
    positives = rows.filter(label=1).join(longest, on="user_id")
    begins = positives.filter(length > 0, length < pl.col("whole").list.len())
    assert begins.select((pl.col("whole").list.head(length) == pl.col("item_history")).all()).item()
    assert begins.select((pl.col("whole").list.get(length) == pl.col("item_id")).all()).item()


def test_kuaivideo_has_the_published_form(files: Path) -> None:
    """Lists hold the first 100 clicks, and the first 100 other videos, of the user before the row."""
    folder = files / KUAI.name
    train, test = read(folder / "train.csv"), read(folder / "test.csv")
    assert train.columns == "timestamp user_id item_id is_click is_like is_follow pos_items neg_items".split()
    assert (len(train), len(test)) == (round(10_931_092 * SHARE), round(2_730_291 * SHARE))
    rows = pl.concat([train, test])
    assert rows["timestamp"].is_sorted()
    assert rows["item_id"].n_unique() == round(3_239_534 * SHARE)
    assert abs(rows["is_click"].mean() - generated.CLICKS) < 0.02
    with h5py.File(folder / "item_visual_emb_dim64.h5") as vectors:
        assert vectors["value"].shape == (round(3_242_315 * SHARE), 64)
        assert vectors["value"].dtype == np.float32
        assert (vectors["key"][:] == np.arange(len(vectors["key"]))).all()
        assert rows["item_id"].max() < len(vectors["key"])
    some = rows.filter(pl.col("user_id") < 4)
    earlier: dict[tuple[int, int], list[int]] = {}
    for row in some.iter_rows(named=True):
        for name, click in (("pos_items", 1), ("neg_items", 0)):
            assert row[name] == earlier.get((row["user_id"], click), [])[:100]
        earlier.setdefault((row["user_id"], row["is_click"]), []).append(row["item_id"])
    assert max(map(len, earlier.values())) > 100


def test_the_same_arguments_give_the_same_bytes(files: Path, tmp_path: Path) -> None:
    for name in SETS:
        again = generate(name, tmp_path / name, SHARE)
        assert (again / "generated.json").read_text() == (files / name / "generated.json").read_text()
    other = json.loads((generate(AMAZON.name, tmp_path / "other", SHARE, seed=1) / "generated.json").read_text())
    assert other["files"] != json.loads((files / AMAZON.name / "generated.json").read_text())["files"]


def test_blocks_are_no_limit(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated, "BLOCK_ROWS", 1000)
    small = generate(AMAZON.name, tmp_path / "small", SHARE)
    columns = ["label", "user_id", "item_history", "cate_history"]  # sampled items are drawn block by block
    for file in ("train.csv", "test.csv"):
        assert read(small / file)[columns].equals(read(files / AMAZON.name / file)[columns])


def test_the_published_reader_takes_them_and_says_what_they_are(built: Path) -> None:
    amazon = open_dataset("amazonelectronics_x1_generated", built)
    assert sum(amazon.rows.values()) == 2 * (round(1_689_188 * SHARE) - round(192_403 * SHARE))
    assert amazon.groups == AMAZON.groups
    kuai = open_dataset("kuaivideo_x1_generated", built)
    assert kuai.groups == KUAI.groups
    for dataset, published in ((amazon, AMAZON), (kuai, KUAI)):
        report = json.loads((dataset.path / "report.json").read_text())
        assert report["published"].startswith(f"generated like {published.repository}")
        assert report["notes"][0] == f"generated data, not {published.repository}: rows share 0.002, seed 0"
        assert report["notes"][1:] == list(published.notes)
    assert not (built / AMAZON.name).exists()


def test_a_generated_set_has_the_settings_and_figures_of_the_published_one() -> None:
    for name in SETS:
        assert original(name + "_generated") == original(name) == name
        like = model_params("DIN", name)
        assert model_params("DIN", name + "_generated") == {**like, "dataset_id": name + "_generated"}
        assert printed(name + "_generated", "DIN") == printed(name, "DIN") != {}
        (note,) = [note for note in reading_notes(name + "_generated", "paper", True) if "generated data" in note]
        assert f"no figure here is a result on {name}" in note
        assert not any("generated" in note for note in reading_notes(name, "paper", True))
    assert original("mine_generated") == "mine_generated"
    assert not any("generated" in note for note in reading_notes("mine_generated", "heldout", False))


def test_a_table_says_what_they_are_beside_the_published_figures(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store, jobs_of(["none"], dataset="amazonelectronics_x1_generated", protocol="paper"))
    (table,) = make_tables(settings(store)[0])
    assert "amazonelectronics_x1_generated" in table.title
    assert table.cells[0]["CAPE paper†"] == "0.8835 / 0.8860 / 0.4302"
    assert "generated data: drawn from a seed" in as_markdown([table])
    assert all("generated data" in line["notes"] for line in table.lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--like", "amazon_x1", "--out", "new"], "'amazon_x1' is unknown: did you mean 'amazonelectronics_x1'?"),
        (["--like", AMAZON.name, "--rows-share", "0", "--out", "new"], "--rows-share 0: from 0.001 to 1"),
        (["--like", AMAZON.name, "--rows-share", "nan", "--out", "new"], "--rows-share nan: from 0.001 to 1"),
        (["--like", AMAZON.name, "--rows-share", "1.5", "--out", "new"], "--rows-share 1.5: from 0.001 to 1"),
        (["--like", AMAZON.name, "--out", "."], ". exists already: remove it or choose another --out"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with suppress(SystemExit):  # the parser's own
        assert main(["data", "generate", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_an_interrupted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generated, "_write_vectors", stop)
    with pytest.raises(KeyboardInterrupt):
        generate(KUAI.name, tmp_path / "new", 0.001)
    assert list(tmp_path.iterdir()) == []


def test_damaged_or_other_files_are_refused(files: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="generated like kuaivideo_x1, not like amazonelectronics_x1: `ctr-pe data fetch k"
    ):
        fetch(AMAZON.name, tmp_path, files / KUAI.name)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in (files / AMAZON.name).iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "test.csv").write_text((copy / "test.csv").read_text().replace("\n1,", "\n0,", 1))
    with pytest.raises(UserError, match=r"test\.csv: md5"):
        fetch(AMAZON.name, tmp_path, copy)
    (copy / "generated.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"generated\.json: not what `ctr-pe data generate` writes \(KeyError: 'like'\)"
    ):
        fetch(AMAZON.name, tmp_path, copy)
    (copy / "generated.json").unlink()  # then they are taken for the published files
    with pytest.raises(UserError, match=f"published {AMAZON.files['test.csv']}|published {AMAZON.files['train.csv']}"):
        fetch(AMAZON.name, tmp_path, copy)
    assert not (tmp_path / AMAZON.name).exists()


def test_the_error_for_a_missing_set_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="ctr-pe data generate --like kuaivideo_x1 --out FILES` and `ctr-pe data fetch k"
    ):
        open_dataset("kuaivideo_x1_generated", tmp_path)
