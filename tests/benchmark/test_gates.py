"""benchmark/gates.py: the gates that an encoding has by construction are found."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from benchmark import gates
from ctr_pe.cli import main
from ctr_pe.data.synthetic.context import generate


@pytest.mark.slow
@pytest.mark.parametrize("model", ["DIN", "SASRec"])
def test_true_gates_and_constant_ones_are_found(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate(tmp_path / "synthetic_context", users=100, valid_users=20, test_users=60)
    run = [
        "benchmark",
        "--model",
        model,
        "--pe",
        "cape_constant,cape_oracle,naive",
        "--set",
        "epochs=1",
        "--repeats",
        "1",
    ]
    out = tmp_path / "out"
    assert main([*run, "--jobs", "1", "--keep-weights", "--data-root", str(tmp_path), "--out", str(out)]) == 0
    assert gates.main([str(out), "--data-root", str(tmp_path)]) == 0
    rows = pl.read_csv(out / gates.FILE)
    assert set(rows["encoding"]) == {"cape_constant", "cape_oracle"}  # naive has no gates
    for row in rows.to_dicts():
        expected = (0.5, 0.5, 0.5) if row["encoding"] == "cape_constant" else (0.0, 1.0, 1.0)
        assert (row["like"], row["unlike"], row["auc"]) == pytest.approx(expected, abs=1e-5)
    assert "Gates after training" in capsys.readouterr().out


def test_without_weights_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gates.main([str(tmp_path)]) == 2
    assert "--keep-weights" in capsys.readouterr().err
