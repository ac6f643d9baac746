"""Tables that people paste: the best figures, stars of the corrected p, published columns, in every format."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from ctr_pe.cli import main
from ctr_pe.data.synthetic.bursts import generate
from ctr_pe.study.benchmark import Request, run
from ctr_pe.study.differences import settings
from ctr_pe.study.marks import beside_published, marks
from ctr_pe.study.rendering import FORMATS, Mark, Table, as_csv, as_latex, as_markdown, as_text, show
from ctr_pe.study.store import Store
from ctr_pe.study.tables import make_tables
from ctr_pe.utils.errors import UserError
from tests.support.fake_training import fill, jobs_of, result_of


def lines_of(**means: list[float]) -> list[dict[str, Any]]:
    """A row per number, of models A, A, B, B, …"""
    rows = range(len(next(iter(means.values()))))
    return [{"model": "AB"[row // 2], **{f"{name}_mean": of[row] for name, of in means.items()}} for row in rows]


def table_of(folder: Path, **changes: Any) -> Table:
    store = Store(folder)
    fill(store, jobs_of(["none", "naive", "cape"], seeds=3, **changes))
    (setting,) = settings(store)
    return make_tables(setting)[0]


def test_the_best_is_the_highest_and_of_a_loss_the_lowest_of_each_model() -> None:
    lines = lines_of(gAUC=[0.5, 0.7, 0.8, 0.6], logloss=[0.3, 0.2, math.nan, 0.4])
    found = marks(lines, ["gAUC", "logloss"], "none", ["model"])
    assert {place for place, mark in found["marks"].items() if mark.best} == {(1, "gAUC"), (2, "gAUC"), (1, "logloss")}
    assert found["legend"] == ("Bold: the best mean of its column, among rows of the same model.",)
    everywhere = marks(lines, ["gAUC"], "none")
    assert everywhere["marks"] == {(2, "gAUC"): Mark(True, "")}
    assert everywhere["legend"] == ("Bold: the best mean of its column.",)


def test_figures_that_are_printed_alike_are_all_the_best() -> None:
    found = marks(lines_of(AUC=[0.70001, 0.70002, 0.6]), ["AUC"], "none")["marks"]
    assert found.keys() == {(0, "AUC"), (1, "AUC")}
    assert marks(lines_of(AUC=[0.70001, 0.70002]), ["AUC"], "none")["marks"] == {}


def test_stars_are_of_the_corrected_p() -> None:
    lines = lines_of(gAUC=[0.5, 0.6, 0.7, 0.8])
    for line, p in zip(lines, [math.nan, 0.05, 0.049, 0.0099], strict=True):
        line |= {"gAUC_minus_none_p": 0.001, "gAUC_minus_none_p_holm": p}
    found = marks(lines, ["gAUC"], "none")
    assert found["marks"] == {(2, "gAUC"): Mark(False, "*"), (3, "gAUC"): Mark(True, "**")}
    assert found["legend"][1].startswith("* p < 0.05, ** p < 0.01: of the difference to none, two-sided, corrected")


def test_each_format_marks_the_same_cells(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    best = str(table.cells[2]["gAUC"])
    assert table.marks[2, "gAUC"] == Mark(True, "**")
    markdown, latex, page = (FORMATS[name]([table]) for name in ("markdown", "latex", "html"))
    assert f"| **{best}**\\*\\* |" in markdown
    assert rf"\textbf{{{best.replace('±', chr(36) + chr(92) + 'pm' + chr(36))}}}$^{{**}}$" in latex
    assert f"<td><b>{best}</b><sup>**</sup></td>" in page
    for text in (markdown.replace("\\", ""), latex.replace("$", ""), page.replace("&lt;", "<")):
        assert "* p < 0.05, ** p < 0.01: of the difference to none" in text
        assert "Bold: the best mean of its column." in text
    assert page == table._repr_html_()


def test_files_beside_a_store_and_a_terminal_text_have_no_marks(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    assert "*" not in as_markdown([table]) + as_text(table) + as_latex([table])
    bold = as_text(table, bold=True)
    assert f"\x1b[1m{table.cells[2]['gAUC']}\x1b[0m  " in bold
    assert re.sub(r"\x1b\[\d?m", "", bold) == as_text(table)


@pytest.mark.parametrize(
    ("terminal", "environment", "coloured"),
    [(True, {}, True), (False, {}, False), (True, {"NO_COLOR": "1"}, False), (True, {"TERM": "dumb"}, False)],
)
def test_a_text_is_coloured_on_terminals_alone(
    terminal: bool,
    environment: dict[str, str],
    coloured: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = table_of(tmp_path)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    show([table])
    assert ("\x1b[" in capsys.readouterr().out) is coloured


def test_html_and_markdown_escape_what_stands_in_a_table() -> None:
    table = Table("a < b", [], [{"x|y": "<i> | &"}], ["<note>"])
    assert "<td>&lt;i&gt; | &amp;</td>" in FORMATS["html"]([table])
    assert "<li>&lt;note&gt;</li>" in FORMATS["html"]([table])
    assert r"| <i> \| & |" in as_markdown([table])


def test_a_csv_has_the_columns_of_all_tables_and_without_lines_the_cells() -> None:
    tables = [Table("", [{"a": 1}], [], []), Table("", [{"a": 2, "b": math.nan}, {"b": 3}], [], [])]
    assert list(csv.reader(io.StringIO(as_csv(tables)))) == [["a", "b"], ["1", ""], ["2", ""], ["", "3"]]
    assert as_csv([Table("", [], [{"runs": "5", "step": None}], [])]) == "runs,step\n5,\n"


def test_published_figures_have_columns_of_their_own(tmp_path: Path) -> None:
    table = beside_published(table_of(tmp_path / "a", dataset="amazonelectronics_x1"))
    row = table.cells[2]
    assert row["gAUC published"] == "0.8857"
    off = table.lines[2]["gAUC_mean"] - table.lines[2]["gAUC_published"]
    assert row["gAUC ours − published"] == f"{off:+.4f}"
    assert "CAPE paper†" not in row
    names = list(row)
    assert names[names.index("gAUC") + 1] == "gAUC published"
    assert FORMATS["markdown"]([table]).count("| 0.8857 |") == 1
    generated = beside_published(table_of(tmp_path / "b", dataset="amazonelectronics_x1_generated"))
    assert generated.cells[2]["gAUC published"] == "0.8857"
    assert generated.cells[2]["gAUC ours − published"] is None


def test_report_has_published_figures_beside_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table_of(tmp_path, dataset="amazonelectronics_x1")
    assert main(["report", str(tmp_path), "--published"]) == 0
    header = capsys.readouterr().out.splitlines()[2]
    assert header.index("gAUC published") < header.index("gAUC ours − published") < header.index("logloss published")


def test_published_is_refused_where_nothing_is_before_anything_runs(tmp_path: Path) -> None:
    generate(tmp_path / "mine", users=120, valid_users=30, test_users=40, items=200, categories=10)
    with pytest.raises(UserError, match=r"nothing is published of DIN on mine: .*amazonelectronics_x1"):
        run(Request(published=True, dataset="mine", data_root=tmp_path, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["text", *FORMATS])
def test_report_prints_the_tables_of_a_store(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = table_of(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(["report", str(tmp_path), "--format", form]) == 0
    shown, said = capsys.readouterr()
    assert said == ""
    assert sorted(tmp_path.rglob("*")) == before
    assert {"text": f"{table.lines[2]['gAUC_mean']:.4f} ±", "latex": r"\toprule", "html": "<caption>"}.get(
        form, "cape"
    ) in shown
    if form == "json":
        assert [row["pe"] for row in json.loads(shown)[0]["rows"]] == ["none", "naive", "cape"]
        assert json.loads(shown)[0]["rows"][0]["gAUC_minus_none"] is None
    if form == "csv":
        assert len(list(csv.DictReader(io.StringIO(shown)))) == 3


def test_report_prints_tables_of_next_items(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    for job in jobs_of(model="SASRec"):
        store.append(result_of(job.key, metrics={"NDCG@10": 0.1 * job.key.seed}), None)
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(tmp_path), "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)
    assert [row["NDCG@10_mean"] for row in table["rows"]] == pytest.approx([0.15, 0.15])
