"""Facts equal a count in loops, on data with every case; advice follows from facts, and its command can be run."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ctr_pe.cli import _parser, main
from ctr_pe.config.field_groups import Group
from ctr_pe.data.dataset import Dataset
from ctr_pe.data.writer import Content, DatasetWriter
from ctr_pe.fuxictr.feature_specs import age_spec, history_spec, target_spec
from ctr_pe.pe import REGISTRY, available_pes, encoding_class
from ctr_pe.study import recommend
from ctr_pe.study.recommend import RULES, Facts, Times, advice, encodings, measure, report

MAX_LEN = 6
Row = dict[str, Any]


def rows_of(rng: np.random.Generator, count: int, unit: int = 60) -> list[Row]:
    """Few items and categories, so that everything repeats; oldest first; histories from none to full."""
    found = []
    for _ in range(count):
        length = int(rng.integers(0, MAX_LEN + 1))
        items = rng.integers(1, 12, length).tolist()
        item = int(rng.integers(1, 12))
        row: Row = {"label": int(rng.random() < 0.3), "user_id": int(rng.integers(0, count // 4)), "item_id": item}
        row |= {"cate_id": 1 + item % 4, "item_history": items, "cate_history": [1 + i % 4 for i in items]}
        found.append(row | {"age_history": (unit * np.sort(rng.integers(0, 5, length))[::-1]).tolist()})
    return found


def write(path: Path, splits: dict[str, list[Row]], ages: bool = True, users: bool = True) -> Dataset:
    features = {"user_id": {"type": "meta"}} if users else {}
    features |= {"item_id": target_spec(12), "cate_id": target_spec(4)}
    features |= {
        "item_history": history_spec("item_id", 12, MAX_LEN),
        "cate_history": history_spec("cate_id", 4, MAX_LEN),
    }
    features |= {"age_history": age_spec(MAX_LEN)} if ages else {}
    groups = [Group(("item_id", "cate_id"), ("item_history", "cate_history"), "age_history" if ages else None)]
    with DatasetWriter(path) as writer:
        for name, rows in splits.items():
            columns = {key: [row[key] for row in rows] for key in ["label", *features]}
            types = {key: pa.list_(pa.int32()) if key.endswith("history") else pa.int32() for key in columns}
            writer.add(name, pa.table(columns, schema=pa.schema(types)))
        return writer.finish(Content("label", "user_id" if users else None, features, groups, {}, {}))


def in_loops(splits: dict[str, list[Row]]) -> dict[str, Any]:
    rows = [row for of_split in splits.values() for row in of_split]
    lengths = sorted(len(row["item_history"]) for row in rows)
    unlike, several, before, repeats, gaps, newest = [], 0, 0, 0, [], []
    for row in rows:
        likes = [place for place, kind in enumerate(row["cate_history"]) if kind == row["cate_id"]]
        if likes:
            unlike.append(sum(kind != row["cate_id"] for kind in row["cate_history"][likes[-1] :]))
        several += len(likes) > 1
        before += row["item_id"] in row["item_history"]
        repeats += len(row["item_history"]) - len(set(row["item_history"]))
        newest += row["age_history"][-1:]
        gaps += [older - newer for older, newer in pairwise(row["age_history"])]
    labels: dict[int, list[int]] = {}
    for row in splits["test"]:
        labels.setdefault(row["user_id"], []).append(row["label"])
    one = [of_user for of_user in labels.values() if len(set(of_user)) == 1]
    return {
        "users": len({row["user_id"] for row in rows}),
        "empty": lengths.count(0) / len(rows),
        "single": lengths.count(1) / len(rows),
        "full": lengths.count(MAX_LEN) / len(rows),
        "times": (
            gaps.count(0) / len(gaps),
            sum(a < 86_400 for a in newest) / len(newest),
            sum(a > 92 * 86_400 for a in newest) / len(newest),
        ),
        "no_like": 1 - len(unlike) / len(rows),
        "several": several / len(rows),
        "seen_before": before / len(rows),
        "repeats": repeats / sum(lengths),
        "one_class_users": len(one) / len(labels),
        "one_class_rows": sum(map(len, one)) / len(splits["test"]),
        "lengths": tuple(np.quantile(lengths, [0.25, 0.5, 0.75], method="inverted_cdf").tolist()),
        "unlike": tuple(np.quantile(unlike, [0.25, 0.5, 0.75], method="inverted_cdf").tolist()),
    }


@pytest.fixture
def splits() -> dict[str, list[Row]]:
    rng = np.random.default_rng(0)
    return {"train": rows_of(rng, 400), "valid": rows_of(rng, 60), "test": rows_of(rng, 80)}


@pytest.mark.parametrize("chunk", [7, 65_536])
def test_facts_equal_a_count_in_loops(
    splits: dict[str, list[Row]], chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recommend, "CHUNK_ROWS", chunk)
    facts = measure(write(tmp_path / "log", splits))
    wanted = in_loops(splits)
    assert (facts.times.tied, facts.times.fresh, facts.times.stale) == pytest.approx(wanted.pop("times"))
    assert facts.times.unit == "minute"
    assert (facts.lengths, facts.unlike) == (wanted.pop("lengths"), wanted.pop("unlike"))
    assert {key: getattr(facts, key) for key in wanted} == pytest.approx(wanted)
    assert (facts.rows, facts.every, facts.like) == ({"train": 400, "valid": 60, "test": 80}, 1, "cate_id")


@pytest.mark.parametrize(("unit", "name"), [(1, "second"), (120, "minute"), (3600, "hour"), (31 * 86_400, "day")])
def test_resolution_and_age_of_times(splits: dict[str, list[Row]], unit: int, name: str, tmp_path: Path) -> None:
    drawn = {split: rows_of(np.random.default_rng(1), len(rows), unit) for split, rows in splits.items()}
    found, wanted = measure(write(tmp_path / "log", drawn)).times, in_loops(drawn)["times"]
    assert found.unit == name
    assert (found.tied, found.fresh, found.stale) == pytest.approx(wanted)
    assert (found.stale > 0.1) == (name == "day")


def test_without_times_and_users(splits: dict[str, list[Row]], tmp_path: Path) -> None:
    facts = measure(write(tmp_path / "log", splits, ages=False, users=False))
    assert (facts.times, facts.users, facts.one_class_users) == (None, None, 0)
    assert "no users" in report(facts, "mine")


def test_items_without_attributes_are_like_themselves(splits: dict[str, list[Row]], tmp_path: Path) -> None:
    dataset = write(tmp_path / "log", splits)
    facts = measure(dataset.model_copy(update={"groups": (Group(("item_id",), ("item_history",)),)}))
    assert facts.like == "item_id"
    assert facts.no_like == pytest.approx(1 - facts.seen_before) != 0


def test_histories_of_a_large_set_are_read_of_some_rows(
    splits: dict[str, list[Row]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = write(tmp_path / "log", splits)
    monkeypatch.setattr(recommend, "ROWS", 200)
    facts = measure(dataset)
    assert facts.every == 3
    assert "histories of one row in 3" in report(facts, "mine")
    wanted = in_loops({name: rows[::3] for name, rows in splits.items()})
    assert facts.several == pytest.approx(wanted["several"])
    assert facts.one_class_users == in_loops(splits)["one_class_users"]  # of all test rows


TIMES = Times(0.0, "second", 0.5, 0.2)
FACTS = Facts(
    dataset="mine",
    rows={"train": 10, "test": 5},
    users=3,
    every=1,
    max_len=100,
    lengths=(2, 5, 9),
    empty=0.0,
    single=0.1,
    full=0.0,
    times=TIMES,
    one_class_users=0.0,
    one_class_rows=0.0,
    like="cate_id",
    no_like=0.2,
    several=0.5,
    unlike=(0, 1, 3),
    seen_before=0.0,
    repeats=0.0,
)


USUAL = "none,naive,rope,cape,cape_constant,cape_cosine"


@pytest.mark.parametrize(
    ("change", "words", "compared"),
    [
        ({}, None, USUAL),
        ({"times": None}, "leave out time_bias, time_rope, cape_time: the data set has no times",
         USUAL),
        ({"times": replace(TIMES, tied=0.48)}, "try time_bias: 48% of neighbours",
         "none,naive,rope,cape,time_bias,cape_constant,cape_cosine"),
        ({"times": replace(TIMES, fresh=0.3, stale=0.25)},
         "mind: the newest item is less than a day old in 30% of the histories and over 92 days in 25%.", USUAL),
        ({"empty": 0.25, "single": 0.75, "several": 0.0}, "leave out rope, cape: no history has two items",
         "none,naive"),
        ({"empty": 0.1, "single": 0.3}, "mind: 40% of the rows have at most one item", USUAL),
        ({"several": 0.05}, "try cape_constant: only 5.0% of the rows have two items of the target's cate_id",
         "none,naive,rope,cape,cape_constant"),
        ({"several": 0.6}, "try cape_constant, cape_cosine: 60% of the rows have two items", USUAL),
        ({"lengths": (2, 5, 11)}, "mind naive: a quarter of the rows have 11 items or more. In DIN on a log of impres",
         USUAL),
        ({"full": 0.2}, "mind: 20% of the histories have 100 items", USUAL),
        ({"one_class_users": 0.4, "one_class_rows": 0.2}, "mind: 40% of the test users, with 20% of the test rows",
         USUAL),
    ],
)  # fmt: skip
def test_each_rule_holds_where_its_facts_do(change: dict[str, Any], words: str | None, compared: str) -> None:
    facts = replace(FACTS, **change)
    usual, lines = ([rule.line(one) for rule in advice(one)] for one in (FACTS, facts))
    new = [line for line in lines if line not in usual]
    assert len(new) == (words is not None)
    assert all(line.startswith(str(words)) for line in new)
    text = report(facts, "mine")
    assert ",".join(encodings(facts)) == compared
    *_, dry, command = text.splitlines()
    assert command == f"  ctr-pe benchmark --dataset mine --pe {compared}"
    assert dry == f"{command} --dry-run"
    assert _parser().parse_args(command.split()[1:]).encodings == compared.split(",")


def test_models_differ_where_histories_have_two_items() -> None:
    without = replace(FACTS, empty=0.4, single=0.6)
    told = ["mind: models differ." in report(facts, "mine") for facts in (FACTS, without)]
    assert told == [True, False]


def test_rules_name_encodings_and_evidence_that_there_are(checkout: Path) -> None:
    for rule in RULES:
        assert rule.advice in ("try", "leave out", "mind")
        assert set(rule.encodings) <= set(available_pes())
        assert rule.evidence == recommend.BY_CONSTRUCTION or (checkout / rule.evidence.partition(",")[0]).is_file()
    (of_times, *_) = RULES
    assert set(of_times.encodings) == {name for name in REGISTRY if encoding_class(name).about.needs_age}


def test_the_command_prints_facts_advice_and_a_command(
    splits: dict[str, list[Row]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "log", splits)
    assert main(["recommend", "--dataset", "log", "--data-root", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "train 400 · valid 60 · test 80; " in out
    assert f"--data-root {tmp_path}" in out.splitlines()[-1]
    assert main(["recommend", "--dataset", "lag", "--data-root", str(tmp_path)]) == 2
    assert "no data set 'lag'" in capsys.readouterr().err
