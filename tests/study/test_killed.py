"""``kill -9`` at any instant: the same command again gives the same rows, and no epoch that has ended is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from ctr_pe.data.synthetic.bursts import generate
from ctr_pe.study.store import Store
from tests.support.stored_rows import rows

KILLS = 30


@pytest.mark.slow
def test_a_benchmark_that_is_killed_again_and_again_gives_the_same_rows(tmp_path: Path) -> None:
    """Three encodings, five seeds."""
    generate(tmp_path / "data" / "tiny", users=60, valid_users=20, test_users=20)
    out, temporary = tmp_path / "out", tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "tests.support.killed", str(tmp_path / "data"), str(out), str(KILLS)]
    environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kills = len(done.stderr.split("after each kill: ")[1].splitlines()[0].split(","))
    print(f"{kills} kills")
    assert kills > KILLS / 2
    assert len(rows(out)) == 15
    assert rows(out) == rows(tmp_path / "whole")
    for key in Store(out).read():
        name = f"{key.name}.npy"
        assert (out / "scores" / name).read_bytes() == (tmp_path / "whole" / "scores" / name).read_bytes()
    begun: dict[tuple[str, str], list[int]] = {}
    for line in (tmp_path / "out.log").read_text().splitlines():
        pe, seed, epoch = line.split()
        begun.setdefault((pe, seed), []).append(int(epoch))
    assert len(begun) == 15
    for epochs in begun.values():
        assert epochs == sorted(epochs), epochs  # it never goes back behind an epoch that has begun
    assert sum(again - 1 for epochs in begun.values() for again in Counter(epochs).values()) <= 2 * KILLS
    left = [path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_dir()]
    assert sorted(left) == ["runs", "scores", "users"]
    assert not list(temporary.glob("ctr-pe-*"))
