"""Files for papers: the forest plot and the LaTeX table have the numbers of the table."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from ctr_pe.config.yaml import model_params
from ctr_pe.evaluation.paired import compare
from ctr_pe.reporting.figures.runs import benchmark_command
from ctr_pe.study.differences import settings
from ctr_pe.study.forest import FILES, panels, write_forest
from ctr_pe.study.rendering import as_latex, escaped
from ctr_pe.study.store import Store
from ctr_pe.study.tables import make_tables
from tests.support.fake_training import fill, jobs_of, rows_of_test, scores_of


def store_of(folder: Path, pes: list[str], **changes: int) -> Store:
    store = Store(folder)
    fill(store, jobs_of(pes, **changes))
    return store


def test_the_forest_has_the_differences_to_none_and_to_naive(tmp_path: Path) -> None:
    store = store_of(tmp_path, ["none", "naive", "cape"])
    (row,) = panels(settings(store))
    labels, users = rows_of_test()
    scores = {pe: {seed: scores_of(pe, seed) for seed in (1, 2)} for pe in ("none", "naive", "cape")}
    shown = {"none": ["naive", "cape"], "naive": ["cape"]}
    assert {panel.baseline: list(panel.differences) for panel in row} == shown
    for panel in row:
        expected = compare(labels, users, scores, panel.baseline)
        for pe, found in panel.differences.items():
            assert found.value == pytest.approx(expected[pe]["gAUC"].value, abs=1e-12)
            assert found[1:3] == pytest.approx(expected[pe]["gAUC"][1:3], abs=0.01)
    assert write_forest(store, settings(store)) == list(FILES)
    assert (tmp_path / "forest.png").read_bytes().startswith(b"\x89PNG")
    written = (tmp_path / "forest.pdf").read_bytes()
    assert written.startswith(b"%PDF")
    write_forest(store, settings(store))
    assert (tmp_path / "forest.pdf").read_bytes() == written


def test_without_naive_there_is_one_panel_and_without_none_no_picture(tmp_path: Path) -> None:
    store = store_of(tmp_path / "a", ["none", "cape"])
    ((panel,),) = panels(settings(store))
    assert list(panel.differences) == ["cape"]
    (setting,) = settings(store)
    assert setting.differences("naive") == {}
    alone = store_of(tmp_path / "b", ["cape"])
    assert write_forest(alone, settings(alone)) == []
    assert not (tmp_path / "b" / "forest.png").exists()


def test_without_the_scores_there_are_points_without_intervals(tmp_path: Path) -> None:
    store = store_of(tmp_path, ["none", "naive", "cape"])
    next((tmp_path / "scores").glob("*cape*")).unlink()
    ((panel, _),) = panels(settings(store))
    assert math.isnan(panel.differences["cape"].low)
    assert not math.isnan(panel.differences["naive"].low)
    assert write_forest(store, settings(store)) == list(FILES)


def test_without_matplotlib_a_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = store_of(tmp_path, ["none", "cape"])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert write_forest(store, settings(store)) == []
    assert "pip install 'ctr_pe[draw]'" in capsys.readouterr().err


def test_latex_has_the_cells_of_the_table(tmp_path: Path) -> None:
    ((table,),) = map(make_tables, settings(store_of(tmp_path, ["none", "cape"])))
    text = as_latex([table])
    assert text.isascii()
    header, *rows = table.shown()
    lines = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len(lines) == 1 + len(rows)
    for line, cells in zip(lines, [header, *rows], strict=True):
        assert line.count(" & ") == len(cells) - 1
        assert line.split(" & ")[0] == cells[0]
    assert lines[-1].split(" & ")[1] == rows[-1][1].replace("±", r"$\pm$")
    assert r"\caption{DIN on made\_up, protocol heldout, 2 seeds" in text
    assert text.count(r"\begin{table}") == text.count(r"\end{table}") == 1


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("a_b & 50 %", r"a\_b \& 50 \%"),
        ("-0.1 [-0.2, +0.3]", "$-$0.1 [$-$0.2, +0.3]"),
        ("user-level gAUC − none†", r"user-level gAUC $-$ none$^\dagger$"),
        ("{x} \\ ~ – ×", r"\{x\} \textbackslash{} \textasciitilde{} -- $\times$"),
    ],
)
def test_signs_are_escaped(text: str, latex: str) -> None:
    assert escaped(text) == latex


def test_the_command_names_what_is_not_usual(tmp_path: Path) -> None:
    usual = model_params("DIN", "made_up")
    changed = {**usual, "epochs": 3, "dnn_hidden_units": [8, 4]}
    store = Store(tmp_path)
    fill(store, jobs_of(["none", "cape"], seeds=3, **changed))
    results = [result for result in store.read().values() if result.seed > 1]
    for result in results:
        result.params.update(changed)
    assert benchmark_command(results, "--out", "a b") == (
        "ctr-pe benchmark --model DIN --pe none,cape --dataset made_up --protocol heldout --seed 2 --repeats 2 "
        "--set 'dnn_hidden_units=[8, 4]' --set epochs=3 --out 'a b'"
    )
