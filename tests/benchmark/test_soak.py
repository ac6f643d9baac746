"""benchmark/soak.py: what grows is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark import soak
from benchmark.soak import MIB, Look
from ctr_pe.data.synthetic.bursts import generate


@pytest.mark.parametrize(
    ("looks", "grown"),
    [
        ([Look(100 * MIB, 9)] * 40, False),
        ([Look(50 * MIB, 4)] * 4 + [Look(100 * MIB, 9)] * 36, False),  # it starts
        ([Look((100 + n) * MIB, 9) for n in range(40)], True),
        ([Look(100 * MIB, 9 + n // 8) for n in range(40)], True),
        ([Look(100 * MIB, 9 + n % 2) for n in range(40)], False),
    ],
)
def test_growth_is_found(looks: list[Look], grown: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.report(7, looks) is grown
    assert ("GROWN" in capsys.readouterr().out) == grown


@pytest.mark.slow
def test_a_benchmark_is_watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate(tmp_path / "synthetic", users=60, valid_users=20, test_users=20)
    small = [
        "--dataset",
        "synthetic",
        "--data-root",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
        "--set",
        "epochs=1",
    ]
    assert soak.main(["--minutes", "0.7", "--", "--jobs", "1", "--repeats", "2000", *small]) in (0, 1)
    assert capsys.readouterr().out.count("MiB") >= 2  # the benchmark and its worker, which has to live half the time
