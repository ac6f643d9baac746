"""``ctr-pe reproduce``: the command, published and own figures, and the time that is left."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ctr_pe.cli import main
from ctr_pe.data.synthetic.bursts import generate
from ctr_pe.study.benchmark import Request, run_params
from ctr_pe.study.estimate import Estimate
from ctr_pe.study.reproduce import command, reproduction, wanted
from ctr_pe.study.store import Store, hash_of
from ctr_pe.utils.errors import UserError
from tests.support.fake_training import jobs_of, result_of

NAME = "amazonelectronics_x1"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The runs of which steps are measured: of 2 s each, from 10 to 100 of them, and no evaluation."""
    runs: list[Any] = []
    monkeypatch.setattr(
        "ctr_pe.study.estimate.measure", lambda run: runs.append(run) or Estimate(2.0, 0.0, (10, 100), (0, 0))
    )
    return runs


def request_of(folder: Path, rows: list[str] | None = None, **changes: Any) -> Request:
    given: dict[str, Any] = {"data_root": folder / "data", "out": folder / "out", "jobs": 1, "dataset": NAME}
    return wanted("cape-table2", rows or ["DIN"], Request(**given | changes))


def store_runs(folder: Path, processor: str, pe: str = "cape", seeds: int = 2, **changes: Any) -> None:
    store, params = Store(folder), run_params("DIN", NAME)
    for job in jobs_of([pe], seeds, dataset=NAME, protocol="paper"):
        key = job.key._replace(config_hash=hash_of(params), seed=job.key.seed - 1)
        store.append(result_of(key, processor=processor, **changes), None)


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("cape-tabel2", [], "cape-tabel2: no such table: did you mean 'cape-table2'?"),
        ("cape-table2", ["DINN"], "--row DINN: not in cape-table2: did you mean 'DIN'?"),
    ],
)
def test_a_wrong_name_lists_the_nearest(name: str, rows: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        wanted(name, rows, Request())
    assert message in str(error.value)


def test_the_command_is_that_of_the_options() -> None:
    request = wanted("cape-table2", ["DIN", "BST"], Request(encodings=["none", "cape"], repeats=2, threads=2))
    assert (
        command(request)
        == "ctr-pe benchmark --suite cape_table2 --repeats 2 --model DIN,BST --pe none,cape --threads 2"
    )


def test_published_and_own_figures_stand_in_a_row(tmp_path: Path, measured: list[Any]) -> None:
    store_runs(tmp_path / "elsewhere" / "mine", "another", metrics={"gAUC": 0.88, "AUC": 0.89, "logloss": 0.43})
    store_runs(tmp_path / "out", "another", "none", seeds=5)
    table = reproduction(request_of(tmp_path, encodings=["none", "cape"], threads=2), [tmp_path / "elsewhere"])
    none, cape = table.cells
    assert (none["missing"], none["seeds"]) == ("0", "5")
    assert (cape["published"], cape["ours"]) == ("0.8857 / 0.8882 / 0.4285", "0.8800 / 0.8900 / 0.4300")
    assert (cape["missing"], cape["seeds"]) == ("5", "2")  # they are not where the command looks
    assert table.lines[1]["gAUC_published"] == 0.885698
    assert sum("the epoch selected on the test rows" in note for note in table.notes) == 2  # ours, and the paper's


def test_time_is_of_runs_recorded_on_this_processor(
    tmp_path: Path, measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctr_pe.study.reproduce.name_of", lambda device: "this one")
    store_runs(tmp_path / "out", "this one", seeds=2, seconds=1200.0)
    table = reproduction(request_of(tmp_path, encodings=["cape"]), [])
    assert table.cells[0]["time of a run"] == "20 min"
    assert table.notes[0] == "Time of the missing runs: 1 h, 1 at once; less if training stops early."
    assert "time: the mean of the recorded runs on this processor." in table.notes
    assert measured == []


def test_time_is_measured_once_per_model_on_a_small_set_of_the_form_of_one_that_is_not_there(
    tmp_path: Path, measured: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ctr_pe.study.reproduce.SHARES", {NAME: 0.001})
    table = reproduction(request_of(tmp_path, ["DIN", "TIN"], encodings=["none", "cape"]), [])
    assert [run.model for run in measured] == ["DIN", "TIN"]
    assert [line["seconds_least"] for line in table.lines] == [20_000.0] * 4
    assert [line["seconds_most"] for line in table.lines] == [200_000.0] * 4
    notes = " ".join(table.notes)
    assert f"The data set {NAME} is not there: `ctr-pe data fetch {NAME}` fetches it." in notes
    assert "measured on 0.1 % of amazonelectronics_x1's rows, generated in its form" in notes
    assert not (tmp_path / "data").exists()
    assert "measuring steps of TIN with none" in capsys.readouterr().err


def test_time_is_not_known_of_a_log_that_is_not_there(tmp_path: Path, measured: list[Any]) -> None:
    request = wanted(
        "small-cape-table2", ["DIN"], Request(dataset="amazon_sports", data_root=tmp_path, encodings=["cape"])
    )
    table = reproduction(request, [])
    assert table.notes[0] == "Time of the missing runs: not known."
    assert any("ctr-pe data build --recipe amazon_sports" in note for note in table.notes)
    assert measured == []


def test_time_is_measured_on_the_data_set_where_it_is_there(tmp_path: Path, measured: list[Any]) -> None:
    generate(tmp_path / "data" / "mine", users=120, valid_users=30, test_users=40, items=200, categories=10)
    table = reproduction(request_of(tmp_path, dataset="mine", encodings=["cape"]), [])
    assert [run.pe for run in measured] == ["cape"]
    assert (table.lines[0]["seconds_least"], table.lines[0]["seconds_most"]) == (20.0, 200.0)


def test_published_figures_of_next_items_are_found_without_the_data_set(tmp_path: Path, measured: list[Any]) -> None:
    table = reproduction(wanted("kernel", [], Request(data_root=tmp_path, encodings=["kernel"])), [])
    assert str(table.cells[0]["published"]).startswith("NDCG@10 0.0394 / Recall@10 0.0683")


def test_the_command_line(
    tmp_path: Path, measured: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ctr_pe.study.reproduce.SHARES", {})
    monkeypatch.chdir(tmp_path)
    given = ["reproduce", "cape-table2", "--row", "DIN", "--dataset", NAME, "--pe", "none"]
    printed = "ctr-pe benchmark --suite cape_table2 --dataset amazonelectronics_x1 --model DIN --pe none"
    assert main(given) == 0
    assert capsys.readouterr().out.endswith(f"\n\n{printed}\n")
    assert main([*given, "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)
    assert table["notes"][-1] == f"Command: {printed}"
    ran: list[Request] = []
    monkeypatch.setattr("ctr_pe.study.benchmark.run", lambda request: ran.append(request) or 1)
    assert main([*given, "--run"]) == 1
    assert ran == [
        replace(Request(suite="cape_table2", published=True), models=["DIN"], encodings=["none"], dataset=NAME)
    ]
    assert list(tmp_path.iterdir()) == []
