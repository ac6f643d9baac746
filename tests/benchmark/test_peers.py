"""benchmark/peers.py: what it makes of workers' figures, that it goes on where it was stopped, and our own worker."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from benchmark import peers
from benchmark.peers import METRICS, SIDES, Side
from ctr_pe.utils.errors import UserError

FAKE = """#!{python}
import json, sys
from pathlib import Path
given = json.loads(sys.argv[-1])
print(json.dumps({{"fake": "1.0"}}), flush=True)
log = Path(given["folder"], "calls")
scale, done = given.get("scale", 16.0), 0
for line in sys.stdin:
    name = line.strip()
    with log.open("a") as file:
        print(given["seed"], scale, name, file=file)
    done += name == "epoch"
    if done == given.get("fails_in"):
        sys.exit(3)
    value = 0.05 + 0.001 * done + 0.01 * given["seed"]
    figures = {{"Recall@10": value, "NDCG@10": value / 2}} if name == "evaluate" else {{}}
    print(json.dumps({{"seconds": scale * (2 if name == "epoch" else 1), **figures}}), flush=True)
"""


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """An interpreter that runs no module, but answers as a worker does."""
    file = tmp_path / "python"
    file.write_text(FAKE.format(python=sys.executable), encoding="utf-8")
    file.chmod(0o755)
    return file


def sides(fake: Path, **of_theirs: Any) -> dict[str, Side]:
    return {
        "ours": Side([str(fake)], {"threads": 1, "scale": 1.0}),
        "theirs": Side([str(fake)], {"threads": 1, "scale": 9.0, **of_theirs}),
    }


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text(encoding="utf-8").splitlines()


def measured(
    found: dict[str, Any], of: Mapping[str, Side], folder: Path, seeds: Sequence[Sequence[str]] = (SIDES,)
) -> int:
    """How often the results were saved; of two epochs."""
    saved: list[str] = []
    peers.measure(found, of, folder, seeds, 2, lambda: saved.append(json.dumps(found)))
    return len(saved)


def test_sides_take_turns_and_every_epoch_is_saved(fake: Path, tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    assert measured(found, sides(fake), tmp_path) == 2
    order = ["1.0 epoch", "9.0 epoch", "1.0 evaluate", "9.0 evaluate"]
    assert [line[2:] for line in calls(tmp_path)] == [*order, order[1], order[0], order[3], order[2]]
    assert found["versions"] == {"ours": {"fake": "1.0"}, "theirs": {"fake": "1.0"}}
    first, second = found["rounds"]["0"]
    assert first["theirs"].pop("memory") > 1e6
    assert first["theirs"] == pytest.approx({"epoch": 18.0, "evaluate": 9.0, "Recall@10": 0.051, "NDCG@10": 0.0255})
    assert second["ours"]["NDCG@10"] == pytest.approx(0.026)


def test_it_goes_on_with_what_is_missing(fake: Path, tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    seeds = [SIDES, SIDES[:1]]
    with pytest.raises(UserError, match=r"python: has ended with code 3, see above"):
        measured(found, sides(fake, fails_in=2), tmp_path)
    assert [len(found["rounds"]["0"]), "1" in found["rounds"]] == [1, False]
    found["settings"]["theirs"].pop("fails_in")
    assert measured(found, sides(fake), tmp_path, seeds) == 1 + 2
    assert [[*epoch] for epoch in found["rounds"]["1"]] == [["ours"]] * 2
    before = calls(tmp_path)
    assert measured(found, sides(fake), tmp_path, seeds) == 0
    assert calls(tmp_path) == before
    assert measured(found, sides(fake), tmp_path, [SIDES, SIDES]) == 2  # a seed that theirs has not
    with pytest.raises(UserError, match="results of other settings"):
        measured(found, sides(fake, width=32), tmp_path)


def test_evaluations_take_turns_after_an_epoch_of_training(fake: Path, tmp_path: Path) -> None:
    found, saved = dict[str, Any](), list[int]()

    def evaluate(count: int) -> None:
        peers.evaluate(found, sides(fake), tmp_path, count, lambda: saved.append(len(found["evaluations"])))

    evaluate(3)
    one, other = "1.0 evaluate", "9.0 evaluate"
    assert [line[2:] for line in calls(tmp_path)] == ["1.0 epoch", "9.0 epoch", one, other, other, one, one, other]
    assert found == {"evaluations": [{"ours": 1.0, "theirs": 9.0}] * 3}
    evaluate(2)
    assert saved == [3]


def test_figures_are_medians_and_metrics_have_an_interval_of_seeds() -> None:
    def epoch(seconds: float, metric: float, theirs: bool = True) -> dict[str, dict[str, float]]:
        own = {"epoch": seconds, "evaluate": 1.0, "memory": 5e8, **dict.fromkeys(METRICS, metric)}
        other = {"epoch": 9 * seconds, "evaluate": 4.0, "memory": 2e9, **dict.fromkeys(METRICS, metric + 0.004)}
        return {"ours": own, "theirs": other} if theirs else {"ours": own}

    rounds = {"0": [epoch(1.0, 0.01), epoch(2.0, 0.05), epoch(30.0, 0.06)]}
    peer = peers.PEERS["rectools"]
    epochs, lines = peers.compared({"rounds": rounds}, peer)
    by_name = {line["figure"]: line for line in lines}
    assert epochs == 3
    assert [line["ok"] for line in lines] == [True, False, True, None, None]
    assert by_name["epoch"]["theirs"] == 18.0
    assert by_name["epoch"]["ratio"] == 9.0
    evaluations = [{"ours": 1.0, "theirs": seconds} for seconds in (11.0, 3.0, 12.0, 50.0)]
    of_more = peers.compared({"rounds": rounds, "evaluations": evaluations}, peer)[1][1]
    assert (of_more["figure"], of_more["theirs"], of_more["ratio"], of_more["ok"]) == ("evaluate", 11.5, 11.5, True)
    for spread, ok in ((0.002, True), (0.0002, False)):
        more = {str(seed): [epoch(1.0, 0.0, False), epoch(1.0, 0.05 + seed * spread, False)] for seed in (-1, 1)}
        epochs, lines = peers.compared({"rounds": rounds | more}, peer)
        line = lines[-1]
        assert (epochs, line["ok"]) == (2, ok)
        assert line["difference"] == pytest.approx(-0.004)
        # three of ours and one of theirs: Student's t of 2 degrees of freedom
        assert line["high"] - line["low"] == pytest.approx(2 * 4.302653 * spread * (1 / 3 + 1) ** 0.5)


def test_of_a_small_log_both_sides_have_the_same_split(
    fake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Our own worker, and what a peer's is given."""
    draw = np.random.default_rng(0)
    log = pl.DataFrame({"user_id": np.repeat(np.arange(40), 7), "item_id": draw.integers(1, 30, 280)})
    log = log.with_columns(position=pl.int_range(pl.len()).over("user_id"), timestamp=pl.int_range(pl.len()))
    log.sample(fraction=1.0, shuffle=True, seed=0).write_parquet(tmp_path / "interactions.parquet")
    pl.DataFrame({"item_id": range(30), "cate_id": range(30)}).write_parquet(tmp_path / "items.parquet")
    rows, answers = peers.write_log(tmp_path, peers.RECIPE, tmp_path, None)
    assert (rows, answers) == (40, 40 * 4)
    with np.load(tmp_path / "events.npz") as events:
        given = {name: events[name] for name in events.files}
    assert given["item"].tolist() == log["item_id"].to_list()
    assert given["place"][given["test"]].tolist() == [6] * 40
    assert given["place"][given["train"]].tolist() == [0, 1, 2, 3, 4] * 40
    assert given["before_test"].sum() == 40 * 6
    file = tmp_path / "peers.json"
    words = ["--data", str(tmp_path), "--recbole", str(fake), "--json", str(file), "--epochs", "1", "--seeds", "1"]
    words += ["--evaluations", "2"]
    peers.main(words)
    assert "| RecBole | training, an epoch | " in capsys.readouterr().out
    found = json.loads(file.read_text(encoding="utf-8"))["pairs"]["recbole"]
    assert found["settings"]["theirs"]["rows"] == answers  # of one batch
    (epoch,) = found["rounds"]["0"]
    assert 0 <= epoch["ours"]["NDCG@10"] <= epoch["ours"]["Recall@10"] <= 1
    assert len(found["evaluations"]) == 2
    assert peers.main(["--json", str(file)]) in (0, 1)
    assert peers.main(["--json", str(tmp_path / "none.json")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_the_page_has_the_table_of_the_results(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peers.main([])
    page = (checkout / "docs" / "next_item.md").read_text(encoding="utf-8")
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(peers.PEERS) * (len(peers.GOALS) + len(METRICS))
    assert [row for row in rows if row not in page] == []
