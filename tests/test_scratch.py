"""Temporary folders are ours alone; what a killed run has left is removed by the next, and nothing else is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ctr_pe.data.writer import written
from ctr_pe.errors import UserError
from ctr_pe.scratch import LOCK, scratch_folder, whole_file

KILLED = """
import os, signal, sys
from pathlib import Path
from ctr_pe.scratch import scratch_folder
with scratch_folder(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("written")
    print(flush=True)
    if sys.argv[2:]:
        sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def kill(out: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(out)], stdout=subprocess.DEVNULL)


def test_a_folder_is_empty_and_goes_in_the_end(tmp_path: Path) -> None:
    with scratch_folder(tmp_path / "no" / "such" / "set") as folder:
        assert list(folder.iterdir()) == []
        (folder / "file").touch()
    assert list(tmp_path.iterdir()) == []


def test_the_next_run_removes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    for _ in range(2):
        kill(tmp_path / "set")
    assert len(list(tmp_path.iterdir())) == 1
    kill(tmp_path / "other [a-z]*")
    assert len(list(tmp_path.iterdir())) == 2
    for name in ("set", "other [a-z]*"):
        with scratch_folder(tmp_path / name):
            pass
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_lives_keeps_its_folder(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "set"), "wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with scratch_folder(tmp_path / "set"), scratch_folder(tmp_path / "set"):
            assert len(list(tmp_path.glob("*/content/half"))) == 1
            assert len(list(tmp_path.iterdir())) == 3
        other.communicate(b"")
    with scratch_folder(tmp_path / "set"):
        assert len(list(tmp_path.iterdir())) == 1


def test_folders_of_others_stay_whatever_their_names(tmp_path: Path) -> None:
    kill(tmp_path / "set")
    (left,) = tmp_path.iterdir()
    without = tmp_path / f"{left.name[:-8]}abcdefgh"
    longer = tmp_path / f"{left.name}.mine"
    for folder in (without, longer, tmp_path / "set.partial"):
        folder.mkdir()
        (folder / "thesis.txt").write_text("mine")
    (longer / LOCK).touch()
    link = tmp_path / f"{left.name[:-8]}ijklmnop"
    link.symlink_to(tmp_path / "set.partial")
    with scratch_folder(tmp_path / "set"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {without.name, longer.name, "set.partial", link.name}
    assert len(list(tmp_path.rglob("thesis.txt"))) == 3


def test_a_file_is_written_whole_or_not(tmp_path: Path) -> None:
    file = tmp_path / "new" / "file.txt"
    with whole_file(file) as path:
        path.write_text("one")
        assert not file.exists()
    with pytest.raises(FileNotFoundError), whole_file(file):
        pass  # nothing is written
    assert file.read_text() == "one"
    assert [path.name for path in file.parent.iterdir()] == ["file.txt"]


@pytest.mark.parametrize("out", ["file/set", "x" * 300])
def test_a_place_that_cannot_be_written_to_is_one_line(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").touch()
    reason = r"cannot be written: (Not a directory|File name too long)$"
    with pytest.raises(UserError, match=reason), written(tmp_path / out), scratch_folder(tmp_path / out) as folder:
        folder.rename(tmp_path / out)
