"""What is written takes its name when it is complete; of what failed, or was killed, nothing stays for long."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from ctr_pe.cli import main
from ctr_pe.data.writer import written
from ctr_pe.utils.errors import UserError
from ctr_pe.utils.files import scratch_beside

KILLED = """
import os, signal, sys
from pathlib import Path
from ctr_pe.utils.files import scratch_beside
with scratch_beside(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("written")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def command(folder: Path, out: str = "set") -> list[str]:
    events = [(user, 7 * user % 5 + place, place) for user in range(9) for place in range(6)]
    pl.DataFrame(events, ["user_id", "item_id", "position"], orient="row").write_parquet(folder / "log.parquet")
    given = ["--protocol", "din", "--interactions", str(folder / "log.parquet"), "--out", str(folder / out)]
    return ["data", "build", *given]


def test_parents_are_not_made_before_the_end(tmp_path: Path) -> None:
    with scratch_beside(tmp_path / "a" / "b" / "set") as folder:
        assert not (tmp_path / "a").exists()
        assert list(folder.iterdir()) == []
    assert list(tmp_path.iterdir()) == []
    assert main(command(tmp_path, "a/b/set")) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"log.parquet", "a"}


def test_a_build_removes_what_a_killed_one_has_left_and_nothing_of_others(tmp_path: Path) -> None:
    for name in ("set.partial", "set.old", "ctr-pe-set"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("mine")
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "set")])
    assert len(list(tmp_path.iterdir())) == 5  # a folder and its lock
    assert main(command(tmp_path)) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        *("log.parquet", "set", "set.partial", "set.old", "ctr-pe-set")
    }
    assert len(list(tmp_path.rglob("thesis.txt"))) == 3


@pytest.mark.parametrize("out", ["file/set", "x" * 300])
def test_a_place_that_cannot_be_written_to_is_one_line(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").touch()
    reason = r"cannot be written: (Not a directory|File name too long)$"
    with pytest.raises(UserError, match=reason), written(tmp_path / out), scratch_beside(tmp_path / out) as folder:
        folder.rename(tmp_path / out)


@pytest.mark.slow
@pytest.mark.parametrize("most", [1000, 2000])
def test_a_full_disk_is_one_line(tmp_path: Path, most: int) -> None:
    """By a limit on the size of files, which fails in the same calls."""
    done = subprocess.run(
        [sys.executable, "-m", "ctr_pe.cli", *command(tmp_path)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)),
        capture_output=True,
        text=True,
    )
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert done.returncode == 2
    assert line.startswith(f"ctr-pe: error: {tmp_path / 'set'}: cannot be written: ")
    assert [path.name for path in tmp_path.iterdir()] == ["log.parquet"]
