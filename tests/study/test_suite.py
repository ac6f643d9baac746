"""Suites: every cell of a grid runs once, goes on where it stopped, and stands in one table beside what was printed."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ctr_pe.cli import main as command
from ctr_pe.config.yaml import packaged_yaml, parse_overrides
from ctr_pe.data.synthetic.bursts import generate
from ctr_pe.evaluation.metrics import METRICS
from ctr_pe.evaluation.paired import holm
from ctr_pe.pe import available_pes
from ctr_pe.study.benchmark import Request, run
from ctr_pe.study.rendering import as_csv, as_markdown, as_text
from ctr_pe.study.store import Result, RunKey, Store
from ctr_pe.study.suite import Cell, Suite, cells, load_suite, parse_suite
from ctr_pe.study.tables import make_suite_tables
from ctr_pe.utils.errors import UserError
from tests.support.fake_training import train_on_data_set as fast

SUITE: dict[str, Any] = {
    "title": "Lengths",
    "seeds": 2,
    "grids": [
        {"models": ["DIN"], "encodings": ["none", "rope"], "datasets": ["synthetic"], "vary": {"max_len": [2, 5]}},
        {
            "models": ["DIN"],
            "encodings": ["cape"],
            "datasets": ["synthetic"],
            "set": {"epochs": 1},
            "vary": {"max_len": [2, 5], "position_dim": [2, 4]},
        },
    ],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    generate(folder / "synthetic", users=60, valid_users=30, test_users=40, items=100, categories=10)
    return folder


def arguments(root: Path, out: Path, suite: Any = SUITE, **changes: Any) -> Request:
    """As a request; ``pe``, ``model`` and ``set`` as the command line has them."""
    if not isinstance(suite, str):
        file = out.with_name("mine.yaml")
        file.write_text(yaml.dump(suite))
        suite = str(file)
    names = {"pe": "encodings", "model": "models"}
    given = {names.get(key, key): value for key, value in changes.items()}
    given["params"] = parse_overrides(given.pop("set", []))
    return Request(**{"suite": suite, "out": out, "jobs": 1, "data_root": root} | given)


def table(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((out / "suite.csv").open()))


@pytest.mark.parametrize(("name", "number"), [("cape_table2", 84), ("ablation_context_length", 112),
                                              ("ablation_fusion", 32)])  # fmt: skip
def test_the_papers_grids(name: str, number: int) -> None:
    suite = load_suite(name)
    assert (suite.protocol, suite.seeds) == ("paper", 5)
    assert len(cells(suite)) == number
    small = load_suite(f"small_{name}")
    assert small.protocol == "heldout"

    def grid(of: Suite) -> set[tuple[Any, ...]]:
        return {(cell.model, cell.pe, *cell.varied.items()) for cell in cells(of)}

    assert grid(small) == grid(suite)


def test_all_shipped_suites_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["list"]) == 0
    listed = capsys.readouterr().out
    assert len(packaged_yaml("benchmark")) == 16
    assert all(f"  {name} " in listed for name in packaged_yaml("benchmark"))


def test_cells_are_every_combination_once() -> None:
    found = cells(parse_suite({**SUITE, "grids": SUITE["grids"] * 2}, "x"))
    assert len(found) == 2 * 2 + 2 * 2
    assert found[0] == Cell("DIN", "synthetic", "none", {"max_len": 2})
    assert found[-1].overrides == {"epochs": 1, "max_len": 5, "position_dim": 4}


def test_overrides_replace_what_varies() -> None:
    found = cells(parse_suite(SUITE, "x"), "other", {"max_len": 3, "dnn_hidden_units": [8]})
    assert len(found) == 2 + 2
    assert {cell.dataset for cell in found} == {"other"}
    assert all(cell.overrides["max_len"] == 3 and cell.overrides["dnn_hidden_units"] == [8] for cell in found)


@pytest.mark.usefixtures("worker_threads")
def test_runs_resumes_and_prints_every_cell(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(arguments(root, out, pe=["none", "cape"], repeats=1), fast) == 0
    said = capsys.readouterr().err
    assert "Lengths: 6 cells × 1 seed = 6 runs" in said
    finished = [line.split("] ")[1].split(":")[0] for line in said.splitlines() if line.startswith("[")]
    assert len(set(finished)) == 6  # each line says which cell it is
    assert len(table(out)) == 6

    assert run(arguments(root, out), fast) == 0
    shown = capsys.readouterr()
    assert "Lengths: 8 cells × 2 seeds = 16 runs" in shown.err
    assert "6 of 16 runs are there already" in shown.err
    assert "Lengths: synthetic, protocol heldout, 2 seeds" in shown.out
    rows = table(out)
    order = [(row["max_len"], row["pe"], row["position_dim"]) for row in rows]
    for length in ("2", "5"):
        expected = [(length, "none", ""), (length, "rope", ""), (length, "cape", "2"), (length, "cape", "4")]
        assert [cell for cell in order if cell[0] == length] == expected
    assert all(row["seeds"] == "2" and row["gAUC_mean"] and row["logloss_sd"] for row in rows)
    stored = Store(out).read()
    for row in rows:
        if row["pe"] == "none":
            continue
        ours, theirs = (
            [
                result.metrics["gAUC"]
                for key, result in stored.items()
                if key.pe == pe and str(result.params["max_len"]) == row["max_len"]
                if pe == "none" or not row["position_dim"] or str(result.params["position_dim"]) == row["position_dim"]
            ]
            for pe in (row["pe"], "none")
        )
        assert len(ours) == len(theirs) == 2
        gain = float(row["gAUC_minus_none"])
        assert gain == pytest.approx(np.mean(ours) - np.mean(theirs), abs=1e-12)
        assert all(abs(gain - (mine - other)) > 1e-3 for mine, other in zip(ours, theirs, strict=True))
        assert float(row["gAUC_minus_none_low"]) < gain < float(row["gAUC_minus_none_high"])
    p_values = [float(row["gAUC_minus_none_p"]) for row in rows if row["pe"] != "none"]
    corrected = [float(row["gAUC_minus_none_p_holm"]) for row in rows if row["pe"] != "none"]
    assert corrected == pytest.approx(holm(p_values))
    records = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert len(records) == 16
    assert {record["params"].get("position_dim") for record in records if record["pe"] == "cape"} == {2, 4}
    assert {record["params"]["max_len"] for record in records} == {2, 5}
    assert {record["params"]["epochs"] for record in records if record["pe"] == "cape"} == {1}

    assert run(arguments(root, out), fast) == 0
    assert "all 16 runs are there already" in capsys.readouterr().err


CHANGES: dict[str, Any] = {
    "title": "Changes",
    "seeds": 2,
    "grids": [
        {"models": ["DIN"], "encodings": ["none", "cape", "rope", "naive"], "datasets": ["synthetic"]},
        {"models": ["DIN"], "encodings": ["cape"], "datasets": ["synthetic"], "vary": {"position_dim": [2, 4]}},
        {"models": ["DIN"], "encodings": ["rope"], "datasets": ["synthetic"], "vary": {"rope_base": [10.0]}},
    ],
}


@pytest.mark.usefixtures("worker_threads")
@pytest.mark.slow
def test_what_a_change_of_an_encoding_brings(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second table compares each changed cell with the same encoding as it is by default."""
    out = tmp_path / "out"
    assert run(arguments(root, out, CHANGES), fast) == 0
    shown = capsys.readouterr().out
    first, second = shown.split("Changes: synthetic, protocol heldout, 2 seeds")[1:]
    assert second.startswith(": differences to the default")
    assert "p: two-sided, corrected (Holm) for 6 comparisons" in " ".join(first.split())
    assert "p: two-sided, corrected (Holm) for 3 comparisons" in " ".join(second.split())
    lines = [line for line in second.splitlines() if line.startswith("DIN")]
    assert [line.split()[:3] for line in lines] == [
        ["DIN", "cape", "position_dim=2"],
        ["DIN", "cape", "position_dim=4"],
        ["DIN", "rope", "rope_base=10.0"],
    ]
    rows = table(out)
    means = {(row["pe"], row["position_dim"], row["rope_base"]): float(row["gAUC_mean"]) for row in rows}
    for row, line in zip([row for row in rows if row["position_dim"] or row["rope_base"]], lines, strict=True):
        of_default = means[row["pe"], "", ""]
        assert float(row["gAUC_minus_default"]) == pytest.approx(float(row["gAUC_mean"]) - of_default, abs=1e-12)
        assert f"{float(row['gAUC_minus_default']):+.4f} [" in line
    assert all(row["gAUC_minus_default"] == "" for row in rows if not (row["position_dim"] or row["rope_base"]))
    changed = [row for row in rows if row["gAUC_minus_default"]]
    corrected = [float(row["gAUC_minus_default_p_holm"]) for row in changed]
    assert corrected == pytest.approx(holm([float(row["gAUC_minus_default_p"]) for row in changed]))

    alone = {**CHANGES, "grids": CHANGES["grids"][1:]}  # nothing to compare with
    assert run(arguments(root, tmp_path / "alone", alone), fast) == 0
    assert "differences to the default" not in capsys.readouterr().out


@pytest.mark.usefixtures("worker_threads")
def test_runs_that_fail_leave_their_cell_in_the_table(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "ctr_pe.study.benchmark.check_params", lambda *_: None
    )  # the stand-in's key is no hyper-parameter
    monkeypatch.setattr("ctr_pe.study.benchmark.param_problems", lambda *_: [])
    assert run(arguments(root, tmp_path / "out", set=["fail={cape: user}"]), fast) == 1
    shown = capsys.readouterr().out
    assert "4 cells of 8 lack runs" in shown
    assert len(table(tmp_path / "out")) == 8
    assert [row["seeds"] for row in table(tmp_path / "out")].count("0") == 4


def test_ours_beside_the_published_figures(tmp_path: Path) -> None:
    suite = load_suite("cape_table2")
    store, keys = Store(tmp_path), {}
    for cell in cells(suite):
        keys[cell] = [RunKey(cell.model, cell.dataset, "paper", "c", "d", cell.pe, seed) for seed in range(2)]
        if (cell.model, cell.pe, cell.dataset) == ("DIN", "cape", "amazonelectronics_x1"):
            for key, gauc in zip(keys[cell], (0.88, 0.89), strict=True):
                store.append(result(key, {"gAUC": gauc, "AUC": 0.9, "logloss": 0.4}), [])  # type: ignore[arg-type]
    tables = make_suite_tables(suite, store, keys)
    assert [len(table.lines) for table in tables] == [42, 42]
    line = next(line for line in tables[0].lines if line["model"] == "DIN" and line["pe"] == "cape†")
    assert [line[f"{metric}_published"] for metric in METRICS] == [0.885698, 0.888156, 0.428468]
    assert line["gAUC_off"] == pytest.approx(0.885 - 0.885698)
    assert line["logloss_off"] == pytest.approx(0.4 - 0.428468)
    text, markdown = as_text(tables[0]), as_markdown(tables)
    assert text.count("AUC within users") == 1
    assert "‡" not in text
    store.save_rows("d", np.array([0, 1]), np.array([0, 1]), click_rate=0.5)
    assert "‡" not in as_text(make_suite_tables(suite, store, keys)[0])
    store.save_rows("better", np.array([0, 0]), np.array([0, 1]), click_rate=0.1)
    easy = {cell: [key._replace(data_hash="better") for key in of_cell] for cell, of_cell in keys.items()}
    cell = next(cell for cell in easy if (cell.model, cell.pe) == ("DIN", "cape"))
    store.append(result(easy[cell][0], {"gAUC": 0.5, "AUC": 0.5, "logloss": 0.2}), [])  # type: ignore[arg-type]
    assert "0.2000 ‡" in as_text(make_suite_tables(suite, store, easy)[0])  # -log 0.9 = 0.105
    for shown in (text, markdown):
        assert "0.8857 / 0.8882 / 0.4285" in shown
        assert "-0.0007 / +0.0118 / -0.0285" in shown
    assert "first 100" in markdown  # what is to be known about kuaivideo_x1
    lines = [line for table in tables for line in table.lines]
    assert all(line["pe"].endswith("†") for line in lines)
    assert len(as_csv(tables).splitlines()) == 85


def test_generated_content_is_not_compared_with_the_published_figures_beside_it(tmp_path: Path) -> None:
    suite, store = load_suite("cape_table2"), Store(tmp_path)
    cell = next(cell for cell in cells(suite) if (cell.model, cell.pe) == ("BST", "none"))
    key = RunKey("BST", "kuaivideo_x1_generated", "paper", "c", "d", "none", 0)
    store.append(result(key, {"gAUC": 0.5, "AUC": 0.5, "logloss": 0.5}), [])  # type: ignore[arg-type]
    (table,) = make_suite_tables(suite, store, {cell: [key]})
    text = " ".join(as_text(table).split())
    assert "0.6614 / 0.7415 / 0.4461" in text
    assert "none is to be compared" in text
    assert "ours − paper" not in text
    assert np.isnan(table.lines[0]["gAUC_off"])


def result(key: RunKey, metrics: dict[str, float]) -> Result:
    facts: dict[str, Any] = {"epoch": 1, "revision": None, "versions": {}, "seconds": 1.0, "threads": 1}
    return Result(key.model, key.dataset, key.pe, key.seed, key.protocol, metrics, config_hash=key.config_hash,
                  data_hash=key.data_hash, parameters=1, finished="", **facts)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"suite": "cape_tabel2"},
            "--suite cape_tabel2: no such suite, a file ends with .yaml: did you mean 'cape_table2'?",
        ),
        ({"suite": "nowhere.yaml"}, "nowhere.yaml: No such file"),
        ({"suite": {**SUITE, "seed": 1}}, "key 'seed' is unknown: did you mean 'seeds'?"),
        ({"pe": ["cope"]}, "--pe cope: not in suite"),
        ({"model": ["BST"]}, "--model BST: not in suite"),
        ({"set": ["epoch_count=1"]}, "'epoch_count' is unknown"),
        ({"set": ["position_encoding=cape"]}, "use --pe"),
        ({"dataset": "nowhere"}, "no data set 'nowhere'"),
        ({"suite": {**SUITE, "grids": [{**SUITE["grids"][1], "vary": {"position_dim": [0]}}]}}, "position_dim"),
        (
            {"suite": {**SUITE, "grids": [{**SUITE["grids"][0], "models": ["BST"], "set": {"num_heads": 3}}]}},
            "num_heads",
        ),
    ],
)
def test_mistakes_are_refused_before_anything_starts(
    root: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as error:
        run(arguments(root, tmp_path / "out", **changes), fast)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cape_table2", "ablation_context_length", "ablation_fusion"])
def test_every_cell_of_the_papers_grids_trains(name: str, root: Path, tmp_path: Path) -> None:
    """The small form of a suite has the same cells; of what varies the first and the last value."""
    suite = yaml.safe_load(packaged_yaml("benchmark")[name])
    for grid in suite["grids"]:
        grid["vary"] = {key: [values[0], values[-1]] for key, values in grid.get("vary", {}).items()}
    changes = {"dataset": "synthetic", "repeats": 1, "set": ["epochs=1"], "jobs": 2}
    assert run(arguments(root, tmp_path / "out", suite=suite, **changes)) == 0
    rows = table(tmp_path / "out")
    assert len(rows) == len(cells(parse_suite(suite, name), "synthetic"))
    assert all(row["seeds"] == "1" and row["gAUC_mean"] and row["logloss_mean"] for row in rows)


def test_all_means_every_encoding_there_is() -> None:
    suite = load_suite("all_encodings")
    assert [cell.pe for cell in cells(suite) if cell.model == "BST"] == available_pes()
    assert {cell.model for cell in cells(suite)} == {"DIN", "BST", "SASRec"}
    with pytest.raises(UserError, match=r"f\.yaml: 'grids\.0\.encodings': must be a list of encodings, or all"):
        parse_suite({"title": "x", "grids": [{"models": ["DIN"], "encodings": "every", "datasets": ["d"]}]}, "f.yaml")
