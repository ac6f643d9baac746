"""Broken tables: the estimator and ``ctr-pe predict`` refuse them in one line, and leave nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ctr_pe import load
from tests.support.fuzz import broken_tables, folders


@pytest.mark.slow
def test_every_broken_table_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = folders.made(tmp_path / "sound")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    found, wrong = broken_tables.outcomes(load(sound), sound)
    with capsys.disabled():
        print(json.dumps(found))
    assert not wrong, "\n".join(wrong)
    assert sum(counts[broken_tables.REFUSED] for counts in found.values()) > 500
