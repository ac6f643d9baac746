"""``ctr-pe data check`` reads as ``data build`` does, and names every error that the build would end with."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from ctr_pe.cli import main
from ctr_pe.config.yaml import load_json
from ctr_pe.data.logs.check import check
from ctr_pe.data.logs.log import build, by_frequency, summary
from ctr_pe.data.logs.recipe import Recipe, load_recipe
from ctr_pe.utils.errors import UserError
from tests.support.fuzz.data_files import FAULTS, Case, Log

OF_OTHER_THINGS = {"a value of an option", "a place that cannot be written to", "a column in two roles"}


def written(case: Case, place: Path) -> dict[str, Any]:
    """The files of a case, and the options of a recipe."""
    case.write(place)
    given: dict[str, Any] = {"protocol": case.command[case.command.index("--protocol") + 1]}
    return given | {key: place / case.command[case.command.index(f"--{key}") + 1] for key in ("interactions", "items")}


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.__name__ for fault in FAULTS])
def test_what_a_build_refuses_is_a_problem(fault: Any, tmp_path: Path) -> None:
    case = fault(Log(np.random.default_rng(7)))
    if case.kind in OF_OTHER_THINGS:
        return
    recipe = load_recipe(None, written(case, tmp_path / "files"))
    try:
        build(recipe, tmp_path / "set")
        refused = ""
    except UserError as error:
        refused = str(error)
    problems = check(recipe).problems
    assert refused in problems if refused else problems == []


def test_what_a_build_takes_has_none(tmp_path: Path) -> None:
    for number in range(4):
        case = Log(np.random.default_rng([7, number])).either("sound")
        assert check(load_recipe(None, written(case, tmp_path / f"{number}"))).problems == []


def recipe_of(folder: Path, table: pl.DataFrame, name: str = "log.csv", **given: Any) -> Recipe:
    file = folder / name
    if name.endswith(".csv"):
        table.write_csv(file)
    else:
        table.write_parquet(file, row_group_size=500)
    return load_recipe(None, {"interactions": file, "protocol": "impressions", "attributes": None, **given})


def log_of(rows: int = 60) -> pl.DataFrame:
    place = np.arange(rows)
    return pl.DataFrame({
        "user_id": [f"u{one % 6}" for one in place], "item_id": place % 7, "timestamp": 1_600_000_000 + 60 * place,
        "label": place // 2 % 2, "price": place / 2, "device": ["tv", None, "phone"] * (rows // 3),
    })  # fmt: skip


def test_all_problems_are_named_at_once(tmp_path: Path) -> None:
    table = log_of().with_columns(
        timestamp=pl.when(pl.col("item_id") == 6).then(pl.col("timestamp") * 1000).otherwise("timestamp"),
        label=pl.when(pl.col("item_id") == 5).then(3).otherwise("label"),
        price=pl.format("{},5", "item_id"),
    )
    columns = {"price": "event, numeric", "huor": "event", "group": "user"}
    found = check(recipe_of(tmp_path, table, columns=columns))
    said = "\n".join(found.problems)
    for part in ("numeric column 'price' holds '0,5' in row 1", "no event column 'huor'", "no user column 'group'"):
        assert part in said
    assert "time column 'timestamp', row " in said
    assert "label column 'label' holds 3" in said
    assert len(found.problems) >= 5


def test_a_file_without_names_says_so(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_text("".join(f"{row % 7},1{row % 5},{1_600_000_000 + row}\n" for row in range(60)))
    found = check(load_recipe(None, {"interactions": file, "protocol": "leave-one-out"}))
    numbers = "the first row has numbers in place of names"
    assert f"{file}: no user column 'user_id': {numbers}" in found.problems


@pytest.mark.parametrize("name", ["LOG.CSV", "Log.Csv.GZ", "log.TSV"])
def test_a_suffix_may_be_in_capitals(name: str, tmp_path: Path) -> None:
    file, text = tmp_path / name, log_of().write_csv(separator="\t" if name == "log.TSV" else ",").encode()
    file.write_bytes(gzip.compress(text) if name.endswith("GZ") else text)
    found = check(load_recipe(None, {"interactions": file, "protocol": "din"}))
    assert not found.problems
    assert "60 rows looked at" in found.lines[0]


def test_it_says_how_columns_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe_of(tmp_path, log_of())
    os.chdir(tmp_path)
    assert main(["data", "check", "log.csv", "--column", "device=event"]) == 0
    said = capsys.readouterr().out
    assert "log.csv: all 60 rows looked at" in said
    assert "device     String        event: categorical, 20 missing" in said
    assert "'u1'     1        1600000060  0      None" in said
    assert "users: 6; events of one: 10 to 10, half of them up to 10; users by events: 6-20: 6 (100%)" in said
    assert "items: 7; items by events: 6-20: 7 (100%)" in said
    assert "label 1: 30, label 0: 30; users with both: 6" in said
    assert "not read: price: --column price=event reads the first one" in said
    assert "no problem" in said
    assert main(["data", "check", "log.csv", "--user", "usr_id"]) == 1
    said = capsys.readouterr().out
    assert "error: log.csv: no user column 'usr_id': did you mean 'user_id'?" in said
    assert "'u0'     0        1600000000" in said


@pytest.mark.parametrize(("name", "said"), [("log.csv", "the first 400 rows"), ("log.parquet", "pieces of the file")])
def test_a_sample_is_looked_at(name: str, said: str, tmp_path: Path) -> None:
    """Of a text file its beginning, of parquet all of its parts."""
    found = check(recipe_of(tmp_path, log_of(6000), name), 400)
    assert said in found.lines[0]
    assert "400 rows looked at" in found.lines[0]
    assert "6,000" not in "\n".join(found.lines)
    times = next(line for line in found.lines if "seconds" in line)
    assert ("2020-09-17" in times) == (name == "log.parquet")


def test_ids_by_frequency() -> None:
    assert (
        by_frequency(np.array([1, 1, 2, 5, 20, 21, 0, 900])) == "1: 2 (29%), 2-5: 2 (29%), 6-20: 1 (14%), >20: 2 (29%)"
    )
    assert by_frequency(np.zeros(0, np.int64)) == ""


@pytest.mark.parametrize("protocol", ["din", "impressions"])
@pytest.mark.parametrize("block_size", [10**6, 20])
def test_a_build_shows_rows_as_read_beside_rows_as_written(protocol: str, block_size: int, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, log_of(), columns={"device": "event", "price": "event, numeric, num_buckets=3"})
    recipe = recipe.model_copy(update={"protocol": protocol})
    dataset = build(recipe, tmp_path / "set", block_size=block_size)
    examples = load_json(dataset.path / "report.json")["examples"]
    assert 1 <= len(examples) <= 5
    for read, written in examples:
        raw = dict(part.split("=") for part in read.split(" "))
        assert f"label={raw['label']} item_id={raw['item_id']} " in written
        assert f"device={raw['device'].strip(chr(39)).replace('None', 'unknown')} " in written
        assert " price=≤" in written
        chosen = log_of().filter((pl.col("user_id") == raw["user_id"].strip("'")) & (pl.col("label") == 1))
        before = chosen.filter(pl.col("timestamp") < int(raw["timestamp"]))["item_id"].to_list()
        shown = " ".join(map(str, before[-5:]))
        assert written.endswith(f"history: {'… ' * (len(before) > 5)}{shown} ({len(before)})" if before else "empty")
    said = summary(dataset)
    assert "rows as read → as written, ids back to raw values:" in said
    assert "items by events: " in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (pl.col("timestamp") * 1000, "no time in seconds"),
        (pl.col("timestamp").cast(pl.String), "holds no date of ISO 8601"),
        (pl.duration(seconds="timestamp").alias("timestamp"), "holds Duration"),
        (pl.lit(None).alias("item_id"), "null values: item_id: "),
        (pl.lit(None, pl.Int64).alias("timestamp"), "null values: timestamp: "),
        (pl.col("user_id").alias("user"), ""),
    ],
)
@pytest.mark.parametrize("protocol", ["din", "impressions"])
def test_what_one_mistake_brings_about_is_no_further_problem(
    change: pl.Expr, said: str, protocol: str, tmp_path: Path
) -> None:
    problems = check(recipe_of(tmp_path, log_of().with_columns(change), "log.parquet", protocol=protocol)).problems
    assert len(problems) == bool(said)
    assert said in "".join(problems)


def test_the_label_is_not_asked_for_where_user_and_item_are_missing(tmp_path: Path) -> None:
    table = log_of().rename({"user_id": "uid", "label": "clicked"})
    problems = check(recipe_of(tmp_path, table)).problems
    assert "no user column 'user_id': did you mean 'uid'" in problems[0]
    assert not any("label: which of" in problem for problem in problems)
