"""Broken logs are refused in one line that says what and where; nothing is left behind."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.fuzz.data_files import FAULTS, REFUSED, cases, run, sound


def test_logs_that_are_not_broken_are_built(tmp_path: Path) -> None:
    assert run(sound(4), tmp_path) == {"sound": Counter({"accepted": 4})}


def test_broken_logs_are_refused(tmp_path: Path) -> None:
    found = run(list(cases(len(FAULTS)))[::2], tmp_path)
    assert {outcome for of_kind in found.values() for outcome in of_kind} == {REFUSED}


@pytest.mark.slow
def test_many_broken_logs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(cases(300, seed=1), tmp_path)
    with capsys.disabled():
        print(f"\n{sum(map(Counter.total, found.values()))} broken logs of {len(found)} kinds")
    assert {outcome for of_kind in found.values() for outcome in of_kind} == {REFUSED}
