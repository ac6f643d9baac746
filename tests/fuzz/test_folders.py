"""Model folders that are broken in one place: one line, or scores; never a raw error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.fuzz import folders


@pytest.mark.slow
def test_every_folder_is_refused_in_one_line_or_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "a" / "b"
    here.mkdir(parents=True)
    monkeypatch.chdir(here.parent)
    found, wrong = folders.outcomes(folders.made(tmp_path / "sound"), here)
    with capsys.disabled():
        print(json.dumps(found))
    assert not wrong, "\n".join(wrong)
    assert sum(counts["refused"] for counts in found.values()) > 1000
    for kind in found.keys() - {"a value of model.json"}:  # which holds the hashes of all other files
        assert found[kind].keys() == {"refused"}
