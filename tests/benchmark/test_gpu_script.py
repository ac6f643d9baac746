"""The script for a GPU, without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmark import gpu

SCRIPT = Path(gpu.__file__).with_suffix(".sh")


@pytest.mark.slow
def test_it_measures_every_kind_of_row_on_a_device_that_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "dry.json"
    command = [str(SCRIPT), "--dry-run", "--models", "TIN", "--json", str(file)]
    environment = os.environ | {"PYTHON": sys.executable}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    found = json.loads(file.read_text())
    assert "no results" in found["machine"]["device"]
    kinds = [(row["what"], row.get("batch_size"), row.get("full"), row.get("users")) for row in found["rows"]]
    assert kinds[0] == ("step", 1024, False, None)
    assert ("nccl", None, None, None) in kinds
    steps = [row for row in found["rows"] if row["what"] == "step"]
    assert len(steps) == 2
    for row in steps:
        assert row["none"]["ms"] > 0
        assert row["cape"]["graphs"] > 0
    assert {row["users"] for row in found["rows"] if row["what"] == "request"} == {1, 64}


def test_no_row_begins_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    monkeypatch.setattr(gpu, "_pretend", lambda stack: None)
    monkeypatch.setattr(gpu, "_step", lambda machine, name, size, full: measured.append(name) or {})
    assert gpu.main(["--dry-run", "--minutes", "-1", "--json", str(tmp_path / "gpu.json")]) == 0
    assert measured == []


def test_a_row_that_fails_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> dict[str, object]:
        raise RuntimeError("no\nmemory")

    monkeypatch.setattr(gpu, "_pretend", lambda stack: None)
    for name in ("_step", "_request", "_nccl"):
        monkeypatch.setattr(gpu, name, broken if name == "_request" else lambda *given: {})
    file = tmp_path / "gpu.json"
    assert gpu.main(["--dry-run", "--models", "BST", "--json", str(file)]) == 1
    rows = json.loads(file.read_text())["rows"]
    assert {row["error"] for row in rows if row["what"] == "request"} == {"RuntimeError: no memory"}
    assert len(rows) == 2 + 4 + 1
