"""The README's code runs as it stands."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from ctr_pe.data.synthetic.bursts import generate


@pytest.fixture(scope="module")
def blocks(checkout: Path) -> dict[str, list[str]]:
    """Language -> code blocks, in order."""
    found: dict[str, list[str]] = {}
    text = (checkout / "README.md").read_text(encoding="utf-8")
    for language, code in re.findall(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        found.setdefault(language, []).append(code)
    return found


def run(code: str, folder: Path) -> dict[str, object]:
    file = folder / "readme.py"
    file.write_text(code)
    return runpy.run_path(str(file))


def test_every_python_block_is_run_below(blocks: dict[str, list[str]]) -> None:
    assert len(blocks["python"]) == 3
    assert len(blocks["yaml"]) == 1


def test_the_first_two_bash_blocks_install_and_run(blocks: dict[str, list[str]]) -> None:
    first, second = blocks["bash"][:2]
    assert "ctr-pe benchmark" in first
    assert "pytest" in second
    assert all("pip install -q -c constraints.txt" in block for block in (first, second))


def test_one_encoding_in_your_own_model(blocks: dict[str, list[str]], tmp_path: Path) -> None:
    names = run(blocks["python"][0], tmp_path)
    assert names["interest"].shape == (32, 128)  # type: ignore[attr-defined]
    assert names["weights"].shape == (32, 100)  # type: ignore[attr-defined]


def test_from_a_fuxictr_config(
    blocks: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(tmp_path / "data" / "synthetic", users=60, valid_users=30, test_users=30)
    (tmp_path / "experiment.yaml").write_text(blocks["yaml"][0])
    monkeypatch.chdir(tmp_path)
    run(blocks["python"][1], tmp_path)
    assert "gAUC" in capsys.readouterr().out


def test_from_a_log_to_ranked_candidates(
    blocks: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = blocks["python"][2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    draw = np.random.default_rng(0)
    log = pl.DataFrame({"user_id": draw.integers(0, 40, 800), "item_id": draw.integers(0, 60, 800)})
    log = log.with_columns(timestamp=pl.int_range(pl.len()) + 1_700_000_000)
    items = pl.DataFrame({"item_id": range(60), "cate_id": [i % 7 for i in range(60)]})
    candidates = pl.DataFrame({"user_id": range(40)}).join(items.select("item_id"), how="cross")
    named = {"log": log, "items": items, "candidates": candidates, "today": log.tail(50)}
    for name, table in named.items():
        table.write_parquet(tmp_path / f"{name}.parquet")
    monkeypatch.chdir(tmp_path)
    ranker = run(code, tmp_path)["ranker"]
    ranked = ranker.rank(None, candidates, k=10)  # type: ignore[attr-defined]
    assert ranked.columns == ["user_id", "item_id", "score", "rank"]
    assert ranked.height == 400
    assert "gAUC" in capsys.readouterr().out
