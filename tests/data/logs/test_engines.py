"""A build on a cluster gives the files of a build on this machine, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from ctr_pe.cli import main
from ctr_pe.data.dataset import Dataset
from ctr_pe.data.logs.log import build
from ctr_pe.data.logs.recipe import load_recipe
from ctr_pe.utils.errors import UserError
from tests.support.on_clusters import CLUSTERS, DyingOnce

cloudpickle = pytest.importorskip("cloudpickle")
SIZE = 150  # events of a block


class Loop:
    """An engine in this process, which hands over as a cluster does, and out of order."""

    def __init__(self, *_: Any) -> None:
        pass

    def map(self, call: Callable[[Any], Any], parts: Sequence[Any]) -> Iterator[Any]:
        for part in [*parts][::-1]:
            yield sent(sent(call)(sent(part)))

    def shuffle(self, split: Callable[[int], Iterable[Any]], parts: int, gather: Callable[..., None]) -> None:
        groups: dict[int, list[bytes]] = {}
        for part in range(parts):
            for group, piece in sent(split)(part):
                groups.setdefault(group, []).append(piece)
        for group, pieces in groups.items():
            sent(gather)(group, pieces)

    def close(self) -> None:
        pass


def sent(what: Any) -> Any:
    return cloudpickle.loads(cloudpickle.dumps(what))


def write_log(folder: Path, rows: int = 1500) -> None:
    """A log with repeated rows, missing values, a table of items and one of users."""
    draw = np.random.default_rng(0)
    log = pl.DataFrame({
        "user_id": [f"u{n}" for n in draw.integers(0, 90, rows)],
        "item_id": draw.integers(0, 60, rows),
        "timestamp": 1_700_000_000 + draw.integers(0, 5_000, rows),
        "label": draw.integers(0, 2, rows),
        "hour": pl.Series(draw.integers(0, 24, rows)).cast(pl.String).replace("7", None),
        "price": draw.random(rows),
        "watch": draw.random(rows),
        "tags": [["a", "b", "c"][: n % 4] for n in draw.integers(0, 9, rows).tolist()],
        "action": draw.choice(["click", "buy", "look"], rows),
    })  # fmt: skip
    pl.concat([log, log.head(40).with_columns(price=pl.lit(9.0))]).write_parquet(folder / "log.parquet")
    pl.DataFrame({"item_id": range(55), "cate_id": [n % 7 for n in range(55)]}).write_csv(folder / "items.csv")
    pl.DataFrame({"user_id": [f"u{n}" for n in range(80)], "age": range(80)}).write_parquet(folder / "users.parquet")


COLUMNS = {"hour": "event", "price": "event, numeric", "tags": "event, sequence", "watch": "event, numeric, afterwards"}
RECIPES: dict[str, dict[str, Any]] = {
    "din": {"protocol": "din", "keep": "last"},
    "impressions": {"protocol": "impressions", "keep": "all", "negatives": True, "users": "users.parquet"},
    "behaviours": {"protocol": "din", "keep": "first", "behaviours": {"action": ["click", "buy"]}},
    "leave-one-out": {"protocol": "leave-one-out", "keep": "first", "label": None},
    "temporal": {"protocol": "temporal", "keep": "all", "label": None, "drop": {"action": "look"}},
}


def recipe(folder: Path, name: str) -> Any:
    given = {"interactions": folder / "log.parquet", "items": folder / "items.csv", "max_len": 7, **RECIPES[name]}
    columns = COLUMNS | ({"age": "user, numeric"} if "users" in given else {})
    given |= {"users": folder / given["users"]} if "users" in given else {}
    return load_recipe(None, {**given, "columns": columns})


def check_same(one: Dataset, other: Dataset) -> None:
    """All files, and all that the report counts."""
    assert other.files == one.files
    for name in ("items.parquet", "users.parquet"):
        if (one.path / name).exists():
            assert pl.read_parquet(other.path / name).equals(pl.read_parquet(one.path / name))
    here, there = (json.loads((dataset.path / "report.json").read_text()) for dataset in (one, other))
    for report in (here, there):
        del report["seconds"], report["rows_per_second"]
    assert there == here
    assert here["examples"]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log")
    write_log(folder)
    return folder


@pytest.mark.parametrize("size", [SIZE, 10**6])
@pytest.mark.parametrize("name", RECIPES)
def test_workers_make_the_files_of_this_process(
    name: str, size: int, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctr_pe.data.logs.log.open_engine", Loop)
    given = recipe(log, name)
    one = build(given, tmp_path / "one", "set", block_size=size)
    check_same(one, build(given, tmp_path / "other", "set", block_size=size, engine="loop"))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one", "other"]


def test_shards_and_texts(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctr_pe.data.logs.log.open_engine", Loop)
    table = pl.read_parquet(log / "log.parquet").select("user_id", "item_id", "timestamp", "hour").unique()
    table.sort("hour", "item_id", "timestamp").write_csv(tmp_path / "log.csv")
    given = load_recipe(None, {"interactions": tmp_path / "log.csv", "protocol": "din", "keep": "all"})
    how: dict[str, Any] = {"block_size": SIZE, "shard_rows": 100}
    check_same(build(given, tmp_path / "a", "a", **how), build(given, tmp_path / "b", "a", engine="loop", **how))


def test_a_mistake_that_only_events_show(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctr_pe.data.logs.log.open_engine", Loop)
    given = load_recipe(None, {"interactions": log / "log.parquet", "protocol": "din"})
    with pytest.raises(
        UserError, match=r"rows repeat the user_id, item_id, timestamp of another row, the first is row"
    ):
        build(given, tmp_path / "set", block_size=SIZE, engine="loop")
    assert not list(tmp_path.iterdir())


def test_an_engine_that_is_unknown_is_named(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--interactions", str(log / "log.parquet"), "--protocol", "din", "--out", str(tmp_path / "set")]
    assert main(["data", "build", *given, "--engine", "spak"]) == 2
    assert "--engine spak: did you mean 'spark'?" in capsys.readouterr().err


@pytest.fixture(scope="module", params=sorted(CLUSTERS))
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    with CLUSTERS[request.param]():
        yield request.param


@pytest.mark.slow
def test_a_cluster_makes_the_files_of_this_machine(
    engine: str, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker dies in each of the two passes."""
    from ctr_pe.utils import engines

    given = recipe(log, "impressions")
    one = build(given, tmp_path / "one", "set", block_size=400)
    kind: Any = {"ray": engines.RayEngine, "spark": engines.SparkEngine}[engine]
    whole, passes = kind.map, [tmp_path / "count", tmp_path / "write"]

    def dying(self: Any, call: Any, parts: Any) -> Iterator[Any]:
        folder = passes.pop(0)
        folder.mkdir()
        return whole(self, DyingOnce(call, folder, [*parts][1]), parts)

    monkeypatch.setattr(kind, "map", dying)
    check_same(one, build(given, tmp_path / "other", "set", block_size=400, engine=engine))
    assert not passes
    calls = DyingOnce.calls(tmp_path / "count")
    assert calls == sorted([*range(calls[-1] + 1), 1])
