"""The same command gives the same rows, however it is run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ctr_pe.data.synthetic.bursts import generate
from tests.support.stored_rows import rows

SMALL = ["epochs=2", "batch_size=64", "embedding_dim=8", "net_dropout=0.2", "attention_dropout=0.2"]


def benchmark(root: Path, out: Path, *options: str, hash_seed: int = 0) -> Path:
    """Two encodings, two seeds, by the command itself."""
    command = [sys.executable, "-m", "ctr_pe.cli", "benchmark", "--dataset", "small", "--data-root", str(root)]
    command += ["--repeats", "2", "--out", str(out), *options]
    for pair in SMALL:
        command += ["--set", pair]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return out


def results(out: Path) -> list[Any]:
    """Of each run what does not depend on how its batches are loaded."""
    found = [json.loads(line) for line in rows(out)]
    return [[row[key] for key in ("pe", "seed", "metrics", "epoch", "auxiliary", "history")] for row in found]


@pytest.mark.slow
def test_the_same_command_gives_the_same_rows(tmp_path: Path) -> None:
    """One after another or side by side, whatever the order of Python's sets, with batches made ahead or not."""
    generate(tmp_path / "small", users=100, valid_users=30, test_users=30)
    first = benchmark(tmp_path, tmp_path / "first", "--jobs", "1")
    second = benchmark(tmp_path, tmp_path / "second", "--jobs", "2", hash_seed=1)
    assert rows(first) == rows(second)
    for file in sorted((first / "scores").iterdir()):
        assert file.read_bytes() == (second / "scores" / file.name).read_bytes()
    ahead = benchmark(tmp_path, tmp_path / "ahead", "--jobs", "2", "--set", "num_workers=2")
    assert results(ahead) == results(first)
