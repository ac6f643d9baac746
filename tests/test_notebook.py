"""docs/notebook.ipynb says what its code gives today, and progress in a notebook is a widget."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

WIDGET = "application/vnd.jupyter.widget-view+json"


def executed(notebook: Any, folder: Path) -> Any:
    """The notebook, run by a kernel of its own in ``folder``."""
    client = pytest.importorskip("nbclient", reason="nbclient is not installed: the extra docs")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    return client.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()


def shown(notebook: Any) -> list[list[tuple[str, Any]]]:
    """Of each cell its outputs: kind, and text without fractions, which differ between processors, nor the widths of
    columns: a fraction may end in a 0 that is not shown."""
    found = []
    for cell in notebook.cells:
        texts = []
        for output in cell.get("outputs", []):
            content = {"stream": output.get("text")} if output.output_type == "stream" else dict(output.get("data", {}))
            kinds = {kind: "" if kind == "image/png" else str(text) for kind, text in content.items()}
            alike = {kind: re.sub(r"\d+\.\d+|0x\w+", "#", text) for kind, text in sorted(kinds.items())}
            texts += [(kind, re.sub(r"([ ─═])\1+", r"\1", text)) for kind, text in alike.items()]
        found.append(texts)
    return found


def gauc(notebook: Any) -> list[float]:
    """Of the table of the encodings."""
    (table,) = [
        output.data["text/html"] for cell in notebook.cells if ".metrics_" in cell.source for output in cell.outputs
    ]
    return [float(row[0]) for row in re.findall(r"<td>(0\.\d+)</td><td>(0\.\d+)</td><td>(0\.\d+)</td>", table)]


@pytest.mark.slow
def test_the_notebook_gives_what_it_shows(checkout: Path, tmp_path: Path) -> None:
    formats = pytest.importorskip("nbformat", reason="nbformat is not installed: the extra docs")
    text = (checkout / "docs" / "notebook.ipynb").read_text(encoding="utf-8")
    stored = formats.reads(text, as_version=4)
    formats.validate(stored)
    ran = executed(formats.reads(text, as_version=4), tmp_path)
    ranked = [place for place, cell in enumerate(stored.cells) if ".rank(None" in cell.source]
    for place, (now, then) in enumerate(zip(shown(ran), shown(stored), strict=True)):
        if place in ranked:  # the order of items of nearly the same score may differ
            now, then = ([(kind, re.sub(r"\d+", "#", found)) for kind, found in one] for one in (now, then))
        assert now == then, stored.cells[place].source
    assert gauc(ran) == pytest.approx(gauc(stored), abs=0.02)
    none, rope, cape = gauc(stored)
    assert min(rope, cape) > none + 0.02
    assert list(tmp_path.iterdir()) == []


IN_A_NOTEBOOK = """
from types import SimpleNamespace
from ctr_pe.study.runner import Job, _Progress
from ctr_pe.study.store import RunKey
import sys
key = RunKey("DIN", "shown", "heldout", "hash", "hash", "cape", 0)
job = Job(SimpleNamespace(), key)
progress = _Progress(1, 0, sys.stderr, lambda result: result.metrics)
progress.begin(job)
progress.update(job, {"epoch": 1, "batch": 0, "batches": 2})
progress.finish(job, SimpleNamespace(metrics={"gAUC": 0.5}, epoch=1, seconds=1.0))
progress.close()
"""


@pytest.mark.slow
def test_progress_in_a_notebook_is_a_widget(tmp_path: Path) -> None:
    formats = pytest.importorskip("nbformat", reason="nbformat is not installed: the extra docs")
    pytest.importorskip("ipywidgets", reason="ipywidgets is not installed")
    given = formats.v4.new_notebook(cells=[formats.v4.new_code_cell(IN_A_NOTEBOOK)])
    ran = executed(given, tmp_path)
    outputs = ran.cells[0].outputs
    assert [output.output_type for output in outputs] == ["display_data"] * 2  # the runs; the one that is under way
    assert all(WIDGET in output.data for output in outputs)
    states = [
        one["state"] for one in ran.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"].values()
    ]
    assert any("1/1" in str(state.get("value")) for state in states), states
