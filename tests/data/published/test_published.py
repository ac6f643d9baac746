"""The published CSV form, read in blocks, equals a parse written as loops."""

from __future__ import annotations

import csv
import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import polars as pl
import pytest

from ctr_pe.config.yaml import load_yaml, packaged_yaml, parse_yaml
from ctr_pe.data.published import download as source
from ctr_pe.data.published.download import read_published
from ctr_pe.data.published.sets import AMAZON, KUAI, Published
from ctr_pe.serving.model_folder import keep_model, read_model
from ctr_pe.training import Run, train
from ctr_pe.utils.errors import UserError

Row = dict[str, Any]


def joined(values: list[int]) -> str:
    return "^".join(map(str, values))


def write_csv(path: Path, rows: list[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def amazon_files(directory: Path, users: int = 40) -> None:
    """One positive and one negative per target, full lists, the last target of a user in test.csv."""
    rng = np.random.default_rng(1)
    train, test = [], []
    for user in range(0, 3 * users, 3):
        items = rng.integers(0, 120, rng.integers(3, 140 if user % 5 == 0 else 12)).tolist()
        for n in range(1, len(items)):
            for label, item in ((1, items[n]), (0, int(rng.integers(0, 2000)))):
                row = {"label": label, "user_id": user, "item_id": item, "cate_id": item % 7}
                row |= {"item_history": joined(items[:n]), "cate_history": joined([i % 7 for i in items[:n]])}
                (test if n == len(items) - 1 else train).append(row)
    directory.mkdir(exist_ok=True)
    write_csv(directory / "train.csv", [train[i] for i in rng.permutation(len(train))])
    write_csv(directory / "test.csv", test)


def kuai_files(directory: Path, rows: int = 600) -> None:
    rng = np.random.default_rng(2)
    table = []
    for i in range(rows):
        lists = [(1200 * rng.random(rng.integers(0, 101)) ** 3).astype(int).tolist() for _ in range(2)]
        if i % 50 == 0:
            lists[0] = []
        row = {"timestamp": i // 4, "user_id": int(rng.integers(5, 45)), "item_id": int(rng.integers(0, 500)) * 3}
        row |= {"is_click": int(rng.integers(2)), "is_like": 0, "is_follow": 0}
        table.append(row | {"pos_items": joined(lists[0]), "neg_items": joined(lists[1])})
    directory.mkdir(exist_ok=True)
    order = rng.permutation(rows - 100)
    write_csv(directory / "train.csv", [table[i] for i in order])
    write_csv(directory / "test.csv", table[-100:])
    keys = rng.permutation([key for key in range(1300) if key % 9])
    with h5py.File(directory / "item_visual_emb_dim64.h5", "w") as file:
        file["key"] = keys
        file["value"] = np.stack([keys, *rng.normal(size=(63, len(keys)))], axis=1).astype(np.float32)


def split_rows(published: Published, directory: Path) -> dict[str, list[Row]]:
    rows = {name: list(csv.DictReader((directory / f"{name}.csv").open())) for name in ("train", "test")}
    if published is KUAI:
        times = sorted(float(row["timestamp"]) for row in rows["train"])
        cut = times[int(len(times) * 0.9)]
        late = [float(row["timestamp"]) >= cut for row in rows["train"]]
    else:
        longest: Counter[str] = Counter()
        for row in rows["train"]:
            longest[row["user_id"]] = max(longest[row["user_id"]], row["item_history"].count("^"))
        late = [row["item_history"].count("^") == longest[row["user_id"]] for row in rows["train"]]
    train = [row for row, is_late in zip(rows["train"], late, strict=True) if not is_late]
    valid = [row for row, is_late in zip(rows["train"], late, strict=True) if is_late]
    return {"train": train, "valid": valid, "test": rows["test"]}


def numbers(text: str) -> list[int]:
    return [int(item) for item in text.split("^")] if text else []


def loop_vocab(rows: list[Row], columns: list[str], min_count: int, keys: list[int]) -> dict[int, int]:
    counts = {column: Counter[int]() for column in columns}
    for row in rows:
        for column in columns:
            counts[column].update(numbers(row[column])[-100:])
    known = {item for column in columns for item, count in counts[column].items() if count >= min_count}
    order = sorted(known, key=lambda item: (-sum(count[item] for count in counts.values()), item))
    order += sorted(set(keys) - known)
    return {item: number for number, item in enumerate(order, 1)}


COLUMNS = {
    AMAZON.name: {"item_id": (["item_id", "item_history"], 1), "cate_id": (["cate_id", "cate_history"], 1)},
    KUAI.name: {
        "user_id": (["user_id"], 10),
        "item_id": (["item_id", "pos_items", "neg_items"], 10),
        "item_emb": (["item_id", "pos_items", "neg_items"], 1),
    },
}
SOURCE = {"item_emb": "item_id", "pos_items_emb": "pos_items", "neg_items_emb": "neg_items"}


def expected(published: Published, directory: Path) -> tuple[dict[str, list[Row]], dict[str, dict[int, int]]]:
    splits = split_rows(published, directory)
    keys: list[int] = []
    if published is KUAI:
        with h5py.File(directory / "item_visual_emb_dim64.h5") as file:
            keys = file["key"][:].tolist()
    vocabs = {
        name: loop_vocab(splits["train"], columns, least, keys if name == "item_emb" else [])
        for name, (columns, least) in COLUMNS[published.name].items()
    }
    users = sorted({int(row["user_id"]) for rows in splits.values() for row in rows})
    out: dict[str, list[Row]] = {}
    for split, rows in splits.items():
        out[split] = []
        for row in rows:
            made: Row = {"label": int(row[published.label]), published.group_id: users.index(int(row["user_id"]))}
            for field in published.fields:
                vocab = vocabs[field.name]
                unseen = len(vocab) + 1
                made[field.name] = vocab.get(int(row[field.column]), unseen)
                for name, _ in field.histories:
                    made[name] = [vocab.get(item, unseen) for item in numbers(row[SOURCE.get(name, name)])[-100:]]
            out[split].append(made)
    return out, vocabs


@pytest.fixture(params=[AMAZON, KUAI], ids=lambda published: published.name)
def published(request: pytest.FixtureRequest) -> Published:
    return request.param


@pytest.fixture
def files(published: Published, tmp_path: Path) -> Path:
    (amazon_files if published is AMAZON else kuai_files)(tmp_path / "published")
    return tmp_path / "published"


def test_it_equals_a_parse_in_loops(
    published: Published, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "BLOCK_ROWS", 64)
    data = read_published(files, published, tmp_path / published.name)
    rows, vocabs = expected(published, files)
    specs = {
        name: spec
        for column in json.loads((data.path / "feature_map.json").read_text())["features"]
        for name, spec in column.items()
    }
    stored = json.loads((data.path / "feature_vocab.json").read_text())
    for name, vocab in vocabs.items():
        reserved = {"__PAD__": 0, "__OOV__": len(vocab) + 1}
        assert stored[name] == {str(item): number for item, number in vocab.items()} | reserved
        assert specs[name]["vocab_size"] == len(vocab) + 2 == specs[name]["oov_idx"] + 1
    report = json.loads((data.path / "report.json").read_text())
    for split, wanted in rows.items():
        got = pl.read_parquet(data.split(split)).to_dicts()
        assert got == wanted
        counts = report["splits"][split]
        assert counts["rows"] == data.rows[split] == len(wanted) > 0
        assert counts["positives"] == sum(row["label"] for row in wanted)
        for group in published.groups:
            for target, history in zip(group.target, group.history, strict=True):
                unseen = len(vocabs[target]) + 1
                assert counts["unseen"][history] == sum(row[history].count(unseen) for row in wanted)
                assert counts["unseen"][target] == sum(row[target] == unseen for row in wanted)
                assert counts[f"{history}_empty"] == sum(not row[history] for row in wanted)
    assert data.groups == published.groups
    assert (data.label, data.group_id, data.max_len) == ("label", published.group_id, 100)
    assert report["notes"] == list(published.notes)


def test_a_model_folder_scores_the_published_rows(published: Published, files: Path, tmp_path: Path) -> None:
    """Trained, kept, read again, and given rows as they are in test.csv: the scores of the trained model's test."""
    data = read_published(files, published, tmp_path / published.name)
    params = {"epochs": 1, "batch_size": 256, "embedding_dim": 64}
    outcome = train(Run("DIN", data.path, "cape", 0, params=params, keep=partial(keep_model, tmp_path / "model")))
    lists = sorted({column for field in published.fields for _, column in field.histories})
    test = pl.read_csv(files / "test.csv", schema_overrides=dict.fromkeys(lists, pl.String)).with_columns(
        pl.col(name).fill_null("").str.split("^").list.filter(pl.element() != "") for name in lists
    )
    scorer = read_model(tmp_path / "model")
    np.testing.assert_allclose(scorer.score_requests(None, test), outcome.scores, atol=1e-6)
    unseen = test.filter(pl.int_range(pl.len()) == 0).with_columns(item_id=pl.lit(10**9))
    before = scorer.counts["unknown items"]
    assert np.isfinite(scorer.score_requests(None, unseen)).all()
    assert scorer.counts["unknown items"] == before + 1


def test_the_shipped_dataset_config_is_the_one_written_beside_the_data(
    published: Published, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    read_published(files, published, Path("data") / published.name)
    shipped = parse_yaml(packaged_yaml("dataset_config")[published.name], "shipped")
    assert shipped == load_yaml(Path("data") / published.name / "dataset_config.yaml")


def test_the_small_files_have_every_case_that_is_counted(tmp_path: Path) -> None:
    amazon_files(tmp_path / "amazon")
    kuai_files(tmp_path / "kuai")
    amazon = read_published(tmp_path / "amazon", AMAZON, tmp_path / "a")
    report = json.loads((amazon.path / "report.json").read_text())
    assert report["splits"]["test"]["item_history_truncated"] > 0
    assert report["splits"]["test"]["item_history_longest"] > 100
    assert report["splits"]["test"]["unseen"]["item_id"] > 0
    kuai = read_published(tmp_path / "kuai", KUAI, tmp_path / "k")
    report = json.loads((kuai.path / "report.json").read_text())
    assert report["splits"]["train"]["pos_items_empty"] > 0
    assert report["splits"]["test"]["unseen"]["item_id"] > report["splits"]["test"]["unseen"]["item_emb"] > 0
    assert report["known_without_vector"]["item_emb"] > 0
    assert any("first 100" in note for note in report["notes"])


def test_fuxictr_reads_the_pretrained_vectors(tmp_path: Path) -> None:
    from fuxictr.pytorch.layers.embeddings.pretrained_embedding import PretrainedEmbedding

    kuai_files(tmp_path / "kuai")
    data = read_published(tmp_path / "kuai", KUAI, tmp_path / "k")
    features = data.feature_map(64).features
    spec = features["item_emb"]
    assert spec["feature_encoder"] == features["pos_items_emb"]["feature_encoder"] == "nn.Linear(64, 64, bias=False)"
    layer = PretrainedEmbedding(
        "item_emb",
        spec,
        str(data.path / spec["pretrained_emb"]),
        str(data.path / "feature_vocab.json"),
        spec["embedding_dim"],
        spec["pretrain_dim"],
        spec["pretrain_usage"],
    )
    weight = layer.pretrain_embedding.weight
    assert not weight.requires_grad
    vocab = json.loads((data.path / "feature_vocab.json").read_text())["item_emb"]
    for original, number in vocab.items():
        has_vector = not original.startswith("__") and int(original) % 9 and int(original) < 1300
        assert weight[number, 0] == (float(original) if has_vector else 0)


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("cate_id,", "cateid,", "train.csv: no column 'cate_id'; did you mean 'cateid'?"),
        ("item_history", "items", "train.csv: no column 'item_history'"),
        ("\n1,", "\n2,", "train.csv: label column 'label'"),
        ("\n1,", "\n,", "train.csv: column 'label' is empty in 1 of"),
        ("\n1,", "\n1,u", "column 'user_id'"),
        ("^", "^x", "train.csv: column 'item_history' has 1 list items"),
        ("^", "^-", "train.csv: column 'item_history' has 1 list items"),
        ("^", "^^", "train.csv: column 'item_history' has 1 list items"),
        ("^", "^300000000^", "train.csv: column 'item_history' has an id outside"),
    ],
)
def test_a_file_of_another_form_is_one_line(tmp_path: Path, old: str, new: str, words: str) -> None:
    files = tmp_path / "published"
    amazon_files(files)
    edit(files / "train.csv", old, new)
    with pytest.raises(UserError) as caught:
        read_published(files, AMAZON, tmp_path / "out")
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_missing_or_wrong_vectors_are_one_line(tmp_path: Path) -> None:
    files = tmp_path / "published"
    kuai_files(files)
    vectors = files / "item_visual_emb_dim64.h5"
    with h5py.File(vectors, "a") as file:
        file["keys"] = file["key"][:]
        del file["key"]
    with pytest.raises(UserError, match="no data set 'key'; did you mean 'keys'"):
        read_published(files, KUAI, tmp_path / "out")
    vectors.write_bytes(b"not HDF5")
    with pytest.raises(UserError, match=r"no \.h5 file with 'key' and 'value'"):
        read_published(files, KUAI, tmp_path / "out")
    vectors.unlink()
    with pytest.raises(UserError, match=r"item_visual_emb_dim64\.h5: no such file"):
        read_published(files, KUAI, tmp_path / "out")
    kuai_files(files)
    (files / "test.csv").unlink()
    with pytest.raises(UserError, match=r"test\.csv: no such file"):
        read_published(files, KUAI, tmp_path / "out")


def test_the_first_rows_do_not_decide_what_a_column_holds(tmp_path: Path) -> None:
    """In order of time the first rows of all users have lists of one number or none."""
    files = tmp_path / "published"
    kuai_files(files)
    rows = list(csv.DictReader((files / "train.csv").open()))
    first = [row | {"timestamp": 0, "pos_items": "3", "neg_items": "6"} for row in rows[:300]]
    write_csv(files / "train.csv", [*first, *rows])
    data = read_published(files, KUAI, tmp_path / "out")
    lengths = pl.read_parquet(data.split("train"))["neg_items"].list.len()
    assert set(lengths[:300]) == {1}
    assert lengths.max() > 90


@pytest.mark.parametrize("text", ["", "label,user_id,item_id,cate_id,item_history,cate_history\n"])
def test_an_empty_file_is_one_line(tmp_path: Path, text: str) -> None:
    files = tmp_path / "published"
    amazon_files(files)
    (files / "test.csv").write_text(text)
    with pytest.raises(UserError, match=r"test\.csv: (empty CSV|no rows)"):
        read_published(files, AMAZON, tmp_path / "out")


def test_a_train_file_without_earlier_rows_is_one_line(tmp_path: Path) -> None:
    files = tmp_path / "published"
    amazon_files(files)
    rows = list(csv.DictReader((files / "train.csv").open()))
    write_csv(files / "train.csv", [row | {"item_history": "1", "cate_history": "1"} for row in rows])
    with pytest.raises(UserError, match="none is left for training"):
        read_published(files, AMAZON, tmp_path / "out")
