"""Batches equal a row-by-row reading of the parquet file, in every order and from every cache state."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from ctr_pe.data.loader import BatchLoader
from ctr_pe.fuxictr.padded import history
from ctr_pe.utils.errors import UserError
from tests.support.processes import PATIENCE

if TYPE_CHECKING:
    from pathlib import Path


ITEMS, CATEGORIES, MAX_LEN = 1000, 40, 12
SPECS: dict[str, dict[str, Any]] = {
    "user_id": {"type": "meta"},
    "item_id": {"type": "categorical", "vocab_size": ITEMS},
    "cate_id": {"type": "categorical", "vocab_size": CATEGORIES},
    "price": {"type": "numeric"},
    "item_history": {"type": "sequence", "vocab_size": ITEMS, "max_len": MAX_LEN},
    "cate_history": {"type": "sequence", "vocab_size": CATEGORIES, "max_len": MAX_LEN},
    "age_history": {"type": "meta", "max_len": MAX_LEN},
}


def feature_map(**changes: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(features=SPECS | changes, labels=["label"], data_dir="")


def table(rows: int, seed: int = 0, longest: int = MAX_LEN) -> dict[str, list[Any]]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, longest + 1, rows)
    return {
        "label": rng.integers(0, 2, rows).tolist(),
        "user_id": rng.integers(0, 70_000, rows).tolist(),
        "item_id": rng.integers(1, ITEMS, rows).tolist(),
        "cate_id": rng.integers(1, CATEGORIES, rows).tolist(),
        "price": rng.normal(size=rows).tolist(),
        "item_history": [rng.integers(1, ITEMS, n).tolist() for n in lengths],
        "cate_history": [rng.integers(1, CATEGORIES, n).tolist() for n in lengths],
        "age_history": [np.sort(rng.integers(0, 2**33, n))[::-1].tolist() for n in lengths],
    }


def write(path: Path, columns: dict[str, Any]) -> Path:
    lists = ("item_history", "cate_history", "age_history")
    typed = {
        k: pa.array(v, pa.list_(pa.int64())) if k in lists and isinstance(v, list) else v for k, v in columns.items()
    }
    pq.write_table(pa.table(typed), path, row_group_size=17)
    return path


def rows_of(batch: dict[str, torch.Tensor], lengths: dict[int, int]) -> list[dict[str, Any]]:
    """A batch as rows; a row is cut to its own length by its unique price, and everything behind must be 0."""
    rows = []
    for i, price in enumerate(batch["price"].tolist()):
        row = {name: column[i].tolist() for name, column in batch.items()}
        n = lengths[round(price * 1e4)]
        for name in ("item_history", "cate_history", "age_history"):
            assert not any(row[name][n:])
            row[name] = row[name][:n]
        rows.append(row)
    return rows


def naive(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    for row in rows:
        row["label"] = float(row["label"])
        row["price"] = float(np.float32(row["price"]))
    return rows


def lengths_of(columns: dict[str, list[Any]]) -> dict[int, int]:
    keys = [round(float(np.float32(price)) * 1e4) for price in columns["price"]]
    assert len(set(keys)) == len(keys)
    return dict(zip(keys, map(len, columns["item_history"]), strict=True))


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, dict[str, list[Any]]]:
    columns = table(50, seed=3)
    return write(tmp_path / "train.parquet", columns), columns


def test_batches_equal_the_rows_read_one_by_one(small: tuple[Path, dict[str, list[Any]]]) -> None:
    path, columns = small
    loader = BatchLoader(feature_map(), path, batch_size=8)
    assert (loader.num_samples, loader.num_blocks, len(loader)) == (50, 1, 7)
    batches = list(loader)
    assert len(batches) == len(loader)
    assert [row for batch in batches for row in rows_of(batch, lengths_of(columns))] == naive(columns)
    for i, batch in enumerate(batches):
        longest = max(1, *map(len, columns["item_history"][8 * i : 8 * i + 8]))
        assert (
            batch["item_history"].shape
            == batch["cate_history"].shape
            == batch["age_history"].shape
            == (len(batch["label"]), longest)
        )
        kinds = {name: column.dtype for name, column in batch.items()}
        assert {name for name, kind in kinds.items() if kind == torch.float32} == {"label", "price"}
        assert {kind for name, kind in kinds.items() if name not in ("label", "price")} == {torch.int64}
        assert set(batch) == {*SPECS, "label"}


def test_a_batch_of_empty_histories_has_one_empty_slot(tmp_path: Path) -> None:
    path = write(tmp_path / "train.parquet", table(6, longest=0))
    (batch,) = BatchLoader(feature_map(), path, batch_size=10)
    assert batch["item_history"].tolist() == [[0]] * 6 == batch["age_history"].tolist()


def order(loader: BatchLoader) -> list[float]:
    return [price for batch in loader for price in batch["price"].tolist()]


def test_each_epoch_is_a_new_order_that_depends_on_seed_and_epoch_only(
    small: tuple[Path, dict[str, list[Any]]],
) -> None:
    path, columns = small
    loader = BatchLoader(feature_map(), path, batch_size=8, shuffle=True, seed=1)
    first, second = order(loader), order(loader)
    in_file = [row["price"] for row in naive(columns)]
    assert sorted(first) == sorted(second) == sorted(in_file)
    assert len({tuple(first), tuple(second), tuple(in_file)}) == 3
    torch.manual_seed(9)
    again = BatchLoader(feature_map(), path, batch_size=20, shuffle=True, seed=1)
    assert [order(again), order(again)] == [first, second]
    assert order(BatchLoader(feature_map(), path, batch_size=8, shuffle=True, seed=2)) != first
    (shuffled,) = BatchLoader(feature_map(), path, batch_size=50, shuffle=True)
    shuffled_rows = {row["price"]: row for row in rows_of(shuffled, lengths_of(columns))}
    assert [shuffled_rows[price] for price in in_file] == naive(columns)
    assert order(BatchLoader(feature_map(), path, split="test", shuffle=True)) == in_file


@pytest.mark.parametrize(
    ("rows", "size", "wanted", "batches"),
    [(3300, 1024, 5, 7), (3300, 1024, 4, 4), (3300, 1024, 0, 4), (3300, 1024, 100, 26), (90, 200, 9, 1), (10, 4, 9, 3)],
)  # the last batch has fewer rows; no batch goes below 128, but where fewer were asked for
def test_few_rows_have_smaller_batches(rows: int, size: int, wanted: int, batches: int, tmp_path: Path) -> None:
    path = write(tmp_path / "train.parquet", table(rows))
    assert len(BatchLoader(feature_map(), path, batch_size=size, min_batches=wanted)) == batches
    assert len(BatchLoader(feature_map(), path, "valid", size, min_batches=wanted)) == -(-rows // size)


class TestLikeLength:
    @pytest.fixture
    def batches(self, tmp_path: Path) -> Any:
        columns = table(330)
        files = [write(tmp_path / f"{k}.parquet", {n: c[part] for n, c in columns.items()})
                 for k, part in enumerate((slice(200), slice(200, None)))]  # fmt: skip

        def read(epochs: int = 1, split: str = "train", **given: Any) -> list[list[dict[str, Any]]]:
            loader = BatchLoader(feature_map(), files, split, 10, **{"shuffle": True, "seed": 3, **given})
            return [list(loader) for _ in range(epochs)]

        return read

    @staticmethod
    def spread(batches: list[dict[str, Any]]) -> float:
        """Slots per item."""
        return sum(b["item_history"].numel() for b in batches) / sum(
            int((b["item_history"] > 0).sum()) for b in batches
        )

    def test_every_row_is_once_in_an_epoch_and_batches_waste_few_slots(self, batches: Any) -> None:
        (plain,), (sorted_,) = batches(), batches(like_length=11)
        rows = [sorted(price for batch in epoch for price in batch["price"].tolist()) for epoch in (plain, sorted_)]
        assert rows[0] == rows[1]
        assert len(set(rows[0])) == 330
        assert self.spread(sorted_) < 1.15 < 1.7 < self.spread(plain)

    def test_batches_come_in_random_order_and_hold_other_rows_in_each_epoch(self, batches: Any) -> None:
        epochs = batches(8, like_length=11)
        widths = [[batch["item_history"].shape[1] for batch in epoch] for epoch in epochs]
        assert all(own not in (sorted(own), sorted(own, reverse=True)) for own in widths)
        assert len({tuple(own) for own in widths}) == 8
        together = [{frozenset(batch["price"].tolist()) for batch in epoch} for epoch in epochs]
        assert not set.intersection(*together)
        # Early and late in an epoch rows are as long: 8 epochs of 33 batches, lengths from 0 to 12.
        first, last = (np.mean([own[part] for own in widths]) for part in (slice(16), slice(16, None)))
        assert abs(first - last) < 1.5
        assert [[b["price"].tolist() for b in one] for one in batches(2, like_length=11)] == [
            [b["price"].tolist() for b in one] for one in epochs[:2]
        ]

    @pytest.mark.parametrize("given", [{"shuffle": False}, {"split": "test"}, {"like_length": 1}])
    def test_changes_nothing_where_rows_keep_their_order(self, batches: Any, given: dict[str, Any]) -> None:
        (plain,), (found,) = batches(**{**given, "like_length": 0}), batches(**{"like_length": 11, **given})
        assert all(torch.equal(a["price"], b["price"]) for a, b in zip(plain, found, strict=True))

    def test_processes_share_each_batch(self, batches: Any) -> None:
        (whole,) = batches(like_length=11)
        shares = [batches(like_length=11, rank_slice=slice(rank, None, 2))[0] for rank in range(2)]
        for batch, *own in zip(whole, *shares, strict=True):
            assert sorted(batch["price"].tolist()) == sorted(p for one in own for p in one["price"].tolist())


@pytest.mark.parametrize(
    ("rows", "batch_size", "split", "sizes"),
    [
        (17, 8, "train", [8, 9]),
        (17, 8, "valid", [8, 8, 1]),
        (18, 8, "train", [8, 8, 2]),
        (16, 8, "train", [8, 8]),
        (1, 8, "train", [1]),
        (3, 1, "train", [1, 1, 1]),
    ],
)
def test_a_last_batch_of_one_row_joins_the_one_before_in_training(
    tmp_path: Path, rows: int, batch_size: int, split: str, sizes: list[int]
) -> None:
    loader = BatchLoader(feature_map(), write(tmp_path / "x.parquet", table(rows)), split, batch_size)
    assert [len(batch["label"]) for batch in loader] == sizes
    assert len(loader) == len(sizes)


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_share_each_batch_to_train_on_and_else_all_batches(tmp_path: Path, processes: int) -> None:
    file = write(tmp_path / "a.parquet", table(50))

    def ids(split: str, rank: slice = slice(None)) -> list[list[int]]:
        given = {"batch_size": 12, "shuffle": True, "seed": 3}
        return [
            batch["item_id"].tolist() for batch in BatchLoader(feature_map(), file, split, **given, rank_slice=rank)
        ]

    own = [slice(rank, None, processes) for rank in range(processes)]
    whole, train = ids("train"), [ids("train", share) for share in own]
    if processes == 3:  # of the last two rows none would be the third's
        whole[-2:] = [whole[-2] + whole[-1]]
    for batch, *shares in zip(whole, *train, strict=True):
        assert [batch[share] for share in own] == shares
        assert all(shares)
    assert [ids("valid", share) for share in own] == [ids("valid")[share] for share in own]


def test_a_batch_has_a_row_for_each_process(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", table(5))
    for size, rows in ((2, "2 rows"), (9, "5 rows")):
        with pytest.raises(UserError, match=rf"^{rows} in a batch \(batch_size\) for 6 processes$"):
            BatchLoader(feature_map(), file, "train", size, rank_slice=slice(1, None, 6))


@pytest.mark.parametrize("shuffle", [False, True])
def test_several_files_are_one_set(tmp_path: Path, shuffle: bool) -> None:
    one, two = table(30, seed=1, longest=4), table(21, seed=2)
    whole = {name: one[name] + two[name] for name in one}
    paths = [write(tmp_path / "train.parquet", one), write(tmp_path / "valid.parquet", two)]
    (tmp_path / "both").mkdir()
    expected = [
        {name: column.tolist() for name, column in batch.items()}
        for batch in BatchLoader(
            feature_map(), write(tmp_path / "both" / "0.parquet", whole), batch_size=10, shuffle=shuffle
        )
    ]
    loader = BatchLoader(feature_map(), paths, batch_size=10, shuffle=shuffle)
    assert (loader.num_samples, loader.num_blocks) == (51, 2)
    assert [{name: column.tolist() for name, column in batch.items()} for batch in loader] == expected
    write(tmp_path / "both" / "0.parquet", one)
    write(tmp_path / "both" / "1.parquet", two)
    parts = BatchLoader(feature_map(), str(tmp_path / "both"), batch_size=10, shuffle=shuffle)
    assert [{name: column.tolist() for name, column in batch.items()} for batch in parts] == expected


def test_columns_are_compact_and_equal_lengths_are_stored_once(tmp_path: Path) -> None:
    rows = 3000
    lengths = np.minimum(100, np.random.default_rng(0).geometric(1 / 9, rows))
    columns = table(rows)
    columns["item_history"] = [[63_000] * n for n in lengths]
    columns["cate_history"] = [[800] * n for n in lengths]
    del columns["age_history"], columns["price"]
    larger = {"max_len": 100, "vocab_size": 63_001}
    specs = {name: spec | larger for name, spec in SPECS.items() if name in columns and name != "user_id"}
    specs["user_id"] = {"type": "meta"}
    path = write(tmp_path / "train.parquet", columns)
    loader = BatchLoader(SimpleNamespace(features=specs, labels=["label"]), path)
    (part,) = loader.parts
    assert part.spans["item_history"] == part.spans["cate_history"]
    assert part.data["item_history"].dtype == np.uint16
    stored = sum(file.stat().st_size for file in (tmp_path / "columns").rglob("*") if file.is_file())
    assert stored / rows < 100
    columns["cate_history"][5] = columns["cate_history"][5] + [800]
    other = BatchLoader(SimpleNamespace(features=specs, labels=["label"]), write(path, columns)).parts[0]
    assert other.spans["item_history"] != other.spans["cate_history"]


def test_the_cache_is_used_and_a_changed_file_is_read_anew(small: tuple[Path, dict[str, list[Any]]]) -> None:
    path, columns = small
    first = order(BatchLoader(feature_map(), path))
    home = path.parent / "columns" / "train"
    (cache,) = home.iterdir()
    made = cache.stat().st_mtime_ns
    assert order(BatchLoader(feature_map(), path)) == first
    assert [c.stat().st_mtime_ns for c in home.iterdir()] == [made]
    stat = path.stat()
    write(path, columns | {"price": columns["price"][::-1]})
    assert path.stat().st_size == stat.st_size  # same size: time and footer must tell
    assert order(BatchLoader(feature_map(), path)) == first[::-1]
    assert len(list(home.iterdir())) == 1
    write(path, columns | {"label": columns["label"][::-1]})  # the footer may be the same, the time is not
    (batch,) = BatchLoader(feature_map(), path, batch_size=50)
    assert batch["label"].tolist() == columns["label"][::-1]
    before = list(home.iterdir())
    os.utime(path, ns=(0, 0))  # nothing but the time tells of a change: rather once too often
    BatchLoader(feature_map(), path)
    assert list(home.iterdir()) != before
    (home / "mine").mkdir()  # what a cache has not made it leaves alone
    path.touch()
    BatchLoader(feature_map(), path)
    (home / "mine").rmdir()
    assert len(list(home.iterdir())) == 1
    # another max_len is another cache of the same file, not a wrong one
    short = feature_map(item_history=SPECS["item_history"] | {"max_len": 3})
    assert all(batch["item_history"].shape[1] <= 3 for batch in BatchLoader(short, path))
    assert len(list(home.iterdir())) == 2


def load_at_once(path: Path, barrier: Any, answers: Any) -> None:
    barrier.wait()
    answers.put(order(BatchLoader(feature_map(), path)))


def test_processes_that_make_the_cache_at_once_all_read_it(tmp_path: Path) -> None:
    columns = table(4000)
    path = write(tmp_path / "train.parquet", columns)
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(4), context.Queue()
    processes = [context.Process(target=load_at_once, args=(path, barrier, answers)) for _ in range(4)]
    for process in processes:
        process.start()
    got = [answers.get(timeout=PATIENCE) for _ in processes]
    for process in processes:
        process.join()
    assert got == [[row["price"] for row in naive(columns)]] * 4
    assert len(os.listdir(tmp_path / "columns" / "train")) == 1


def test_a_cache_that_fails_leaves_nothing(small: tuple[Path, dict[str, list[Any]]]) -> None:
    path, columns = small
    write(path, columns | {"label": [2] * 50})
    with pytest.raises(UserError):
        BatchLoader(feature_map(), path)
    assert not list((path.parent / "columns" / "train").iterdir())


@pytest.mark.parametrize("side", ["pre", "post"])
@pytest.mark.parametrize("fixed", [False, True])
def test_padding_of_fuxictr_is_stripped(tmp_path: Path, side: str, fixed: bool) -> None:
    columns = table(50)
    columns["item_history"][7] = [5, 0, 9]  # a value below the minimal count inside a history stays where it is
    columns["cate_history"][7] = [1, 2, 3]
    columns["age_history"][7] = [3, 2, 1]
    expected = [
        {n: c.tolist() for n, c in batch.items()}
        for batch in BatchLoader(feature_map(), write(tmp_path / "a.parquet", columns))
    ]
    padded = dict(columns)
    for name in ("item_history", "cate_history"):
        zeros = [[0] * (MAX_LEN - len(row)) for row in columns[name]]
        rows = [z + row if side == "pre" else row + z for z, row in zip(zeros, columns[name], strict=True)]
        padded[name] = pa.array(rows, pa.list_(pa.int64(), MAX_LEN)) if fixed else rows
    loader = BatchLoader(feature_map(), write(tmp_path / "b.parquet", padded))
    assert [{n: c.tolist() for n, c in batch.items()} for batch in loader] == expected


FULL = {"item_history": [[0, 2, 3], [4, 0, 6], [7, 8, 0]], "cate_history": [[1, 2, 0], [0, 0, 6], [0, 0, 0]]}


def full_lists() -> dict[str, list[Any]]:
    """Every list of a column has one length, and items lack an id at either end."""
    return {**table(3), **FULL, "age_history": [[9, 8, 7]] * 3}


def test_lists_of_our_own_files_are_read_as_they_are(tmp_path: Path) -> None:
    """Those that the report of a data set names, even if the file was read before there was a report."""
    path, columns = tmp_path / "train.parquet", full_lists()
    write(path, columns)
    assert BatchLoader(feature_map(), path).padded
    (tmp_path / "report.json").write_text(json.dumps({"files": {"train.parquet": {}}}))
    loader = BatchLoader(feature_map(), path, "test")
    (batch,) = loader
    assert not batch.padded
    assert batch.lengths["item_history"].tolist() == [3, 3, 3]
    for name in ("item_history", "cate_history", "age_history"):
        assert batch[name].tolist() == columns[name]
        assert batch.histories[name].tolist() == [one for row in columns[name] for one in row]


def test_padded_columns_of_fuxictr_keep_a_slot_in_which_any_has_a_value(tmp_path: Path) -> None:
    columns = {**full_lists(), "age_history": [[]] * 3}
    (batch,) = BatchLoader(feature_map(), write(tmp_path / "train.parquet", columns), "test")
    assert batch.padded == {"item_history", "cate_history"}
    assert batch.lengths["item_history"].tolist() == batch.lengths["cate_history"].tolist() == [3, 3, 2]
    assert batch["item_history"].tolist() == [[0, 2, 3], [4, 0, 6], [7, 8, 0]]
    assert batch["cate_history"].tolist() == [[1, 2, 0], [0, 0, 6], [0, 0, 0]]


@pytest.mark.parametrize("side", ["pre", "post"])
def test_padded_columns_of_fuxictr_keep_the_newest_items_of_each(side: str, tmp_path: Path) -> None:
    """Of two histories of one width, too: the shorter one loses nothing to the longer."""
    specs = {name: SPECS[name] | {"max_len": 2} for name in ("item_history", "cate_history")}
    rows = {"item_history": [[1, 2, 3], [4], []], "cate_history": [[5], [6], [7, 8, 9]]}
    columns: dict[str, Any] = {**table(3), "age_history": [[]] * 3}
    for name, lists in rows.items():
        zeros = [[0] * (4 - len(row)) for row in lists]
        columns[name] = [z + row if side == "pre" else row + z for z, row in zip(zeros, lists, strict=True)]
    (batch,) = BatchLoader(feature_map(**specs), write(tmp_path / "train.parquet", columns), "test")
    for name, lists in rows.items():
        lengths, values = history(batch, [name])
        found = [part.tolist() for part in values[name].split(lengths.tolist())]
        assert [part[-2:] for part in found] == [row[-2:] for row in lists]
        assert side == "post" or found[0] == lists[0][-2:]


def test_rows_by_their_numbers(small: tuple[Path, dict[str, list[Any]]]) -> None:
    path, columns = small
    found = BatchLoader(feature_map(), path).batch(np.array([7, 3, 7]))
    assert [row["price"] for row in rows_of(found, lengths_of(columns))] == [
        naive(columns)[i]["price"] for i in (7, 3, 7)
    ]
    moved = found.to(torch.device("cpu"))
    assert torch.equal(moved["item_history"], found["item_history"])


def test_long_histories_keep_the_most_recent_items_and_are_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    columns = table(40, longest=2 * MAX_LEN)
    path = write(tmp_path / "train.parquet", columns)
    long = sum(len(row) > MAX_LEN for row in columns["item_history"])
    with caplog.at_level(logging.WARNING):
        loader = BatchLoader(feature_map(), path)
        list(loader), list(loader), BatchLoader(feature_map(), path)
    warnings = [record.getMessage() for record in caplog.records if "item_history" in record.getMessage()]
    assert len(warnings) == 1
    assert f"{long} of 40" in warnings[0]
    assert str(path) in warnings[0]
    assert loader.parts[0].truncated["item_history"] == long
    cut = {name: [row[-MAX_LEN:] if isinstance(row, list) else row for row in rows] for name, rows in columns.items()}
    assert [row for batch in loader for row in rows_of(batch, lengths_of(cut))] == naive(cut)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"item_id": None}, ["no column 'item_id'", "did you mean"]),
        ({"item_id": [ITEMS] * 50}, ["'item_id'", f"id {ITEMS}", f"0 … {ITEMS - 1}"]),
        ({"cate_id": [-1] + [1] * 49}, ["'cate_id'", "id -1"]),
        ({"item_history": [[1, ITEMS]] * 50}, ["'item_history'", f"id {ITEMS}"]),
        ({"label": [0, 1] * 24 + [1, 2]}, ["'label'", "2"]),
        ({"label": [0.0, 1.0] * 24 + [1.0, 0.5]}, ["'label'", "0.5"]),
        ({"label": [0.0, 1.0] * 24 + [1.0, float("nan")]}, ["'label'", "nan"]),
        ({"label": [0, 1] * 24 + [1, None]}, ["'label'", "null"]),
        ({"user_id": [None] + [1] * 49}, ["'user_id'", "null"]),
        ({"user_id": ["a"] * 50}, ["'user_id'", "integers"]),
        ({"item_id": [1.0] * 50}, ["'item_id'", "integers"]),
        ({"item_history": [None] + [[1]] * 49}, ["'item_history'", "null"]),
        ({"item_history": [[1, None]] * 50}, ["'item_history'", "null"]),
        ({"item_history": pa.array([1] * 50)}, ["'item_history'", "sequence"]),
        ({"item_id": [[1]] * 50}, ["'item_id'", "categorical"]),
        ({"price": [float("inf")] * 50}, ["'price'", "not finite"]),
    ],
)
def test_bad_columns_are_one_line_with_file_and_column(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    columns = {name: column for name, column in (table(50) | changes).items() if column is not None}
    path = write(tmp_path / "train.parquet", columns)
    for _ in range(2):  # with and without a cache
        with pytest.raises(UserError) as caught:
            BatchLoader(feature_map(), path)
        message = str(caught.value)
        assert "\n" not in message
        assert str(path) in message
        assert all(word in message for word in words), message


def test_bad_paths_are_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "train.parquet", table(5))
    with pytest.raises(UserError, match=r"did you mean 'train\.parquet'"):
        BatchLoader(feature_map(), tmp_path / "trian.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no parquet files"):
        BatchLoader(feature_map(), tmp_path / "empty")
    with pytest.raises(UserError, match="no rows"):
        BatchLoader(feature_map(), write(tmp_path / "none.parquet", table(0)))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"train\.parquet: not a complete parquet file"):
        BatchLoader(feature_map(), path)
    with pytest.raises(UserError, match="feature 'vector': type 'vectors' is not loaded"):
        BatchLoader(feature_map(vector={"type": "vectors"}), path)


def test_vectors_keep_their_zeros_and_their_dim(tmp_path: Path) -> None:
    """They are no padded histories."""
    vectors = [[0.0, 1.5, 0.0], [0.0, 0.0, 0.0], [2.0, 0.0, 0.0]]
    path = write(tmp_path / "train.parquet", {**table(3), "vector": vectors})
    batches = BatchLoader(feature_map(vector={"type": "embedding", "pretrain_dim": 3}), path, "test", batch_size=2)
    assert torch.cat([batch["vector"] for batch in batches]).tolist() == vectors
    path = write(tmp_path / "other.parquet", {**table(3), "vector": [[1.0], [1.0, 2.0], [3.0]]})
    with pytest.raises(UserError, match="column 'vector' has vectors of 1 … 2 numbers"):
        BatchLoader(feature_map(vector={"type": "embedding"}), path)


def test_fuxictrs_rank_data_loader_takes_it(small: tuple[Path, dict[str, list[Any]]]) -> None:
    from fuxictr.pytorch.dataloaders import RankDataLoader

    path, _ = small
    train, valid = RankDataLoader(
        feature_map(),
        stage="train",
        train_data=str(path),
        valid_data=str(path),
        batch_size=8,
        shuffle=True,
        seed=1,
        data_loader=BatchLoader,
        data_format="parquet",
        num_workers=3,
        embedding_dim=16,
    )
    assert order(train) == order(BatchLoader(feature_map(), path, batch_size=8, shuffle=True, seed=1))
    assert order(valid) == order(BatchLoader(feature_map(), path))
