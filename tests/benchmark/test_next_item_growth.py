"""benchmark/next_item_growth.py runs on small logs, and draws what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark import next_item_growth as growth
from benchmark.next_item_growth import Size


@pytest.mark.slow
def test_it_measures_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(growth, "GROWING", {"items": [Size(60, 6), Size(300, 6)], "length": [Size(60, 6), Size(60, 9)]})
    files = {"--json": tmp_path / "growth.json", "--draw": tmp_path / "growth.png"}
    assert growth.main([str(part) for pair in files.items() for part in pair]) == 0
    found = json.loads(files["--json"].read_text())
    assert {(one["items"], one["length"], one["loss"]) for one in found} == {
        (*size, loss) for size in [(60, 6), (300, 6), (60, 9)] for loss in growth.LOSSES
    }
    assert all(one["train"] > 0 and one["rank"] > 0 for one in found)
    assert files["--draw"].read_bytes().startswith(b"\x89PNG")


def test_every_item_is_in_a_training_row(tmp_path: Path) -> None:
    """So that as many are ranked as the log has."""
    import polars as pl

    from ctr_pe.data.dataset import open_dataset

    dataset = open_dataset(str(growth._built(Size(300, 6), tmp_path)))
    assert dataset.rows == {"train": 640, "valid": 640, "test": 640}
    train = pl.read_parquet(dataset.split("train"))
    assert train["item_history"].explode(empty_as_null=False).append(train["item_id"]).n_unique() == 300
