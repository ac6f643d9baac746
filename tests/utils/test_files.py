"""Temporary folders: none stays, none that is in use or not ours is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ctr_pe.utils import files
from ctr_pe.utils.files import LOCK, remove_abandoned, replacing, scratch_folder

HOLDING = """
import sys, time
from pathlib import Path
from ctr_pe.utils.files import scratch_folder
with scratch_folder(Path(sys.argv[1])) as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    time.sleep(60)
"""


def test_a_folder_is_there_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "new" / "home"

    def use() -> None:
        with scratch_folder(home) as folder:
            (folder / "some").mkdir()
            assert folder.parent == home
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    assert not list(home.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_folder() as folder:
        assert folder.parent == tmp_path
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", Path("/proc")):  # in which mkdir says that there is no such folder
        with pytest.raises(OSError), scratch_folder(place):
            pass


def test_what_a_killed_process_left_is_removed_and_what_is_in_use_is_not(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDING, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    theirs = Path(process.stdout.readline().strip())
    with scratch_folder(tmp_path) as ours:
        with scratch_folder(tmp_path):
            assert (theirs / "file").exists()
            assert ours.exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert theirs.exists()
        with scratch_folder(tmp_path):
            assert not theirs.exists()
            assert ours.exists()


def test_what_is_not_ours_is_not_touched(tmp_path: Path) -> None:
    users, linked = tmp_path / "ctr-pe-results", tmp_path / "elsewhere"
    users.mkdir()
    linked.mkdir()
    (users / "results.jsonl").touch()
    (linked / "file").touch()
    os.symlink(linked, tmp_path / "ctr-pe-abcdefgh")
    (tmp_path / f"ctr-pe-abcdefgh{LOCK}").touch()
    with scratch_folder(tmp_path):
        pass
    assert (users / "results.jsonl").exists()
    assert (linked / "file").exists()


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "new" / "file"

    def write(text: str, error: type[BaseException] | None = None) -> None:
        with replacing(file) as partial:
            partial.write_text(text)
            if error is not None:
                raise error

    write("first")
    with pytest.raises(KeyboardInterrupt):
        write("second", KeyboardInterrupt)
    assert file.read_text() == "first"
    write("third")
    assert file.read_text() == "third"
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("folder", [True, False])
def test_a_process_that_was_killed_at_the_start_or_the_end_leaves_nothing(folder: bool, tmp_path: Path) -> None:
    """Its lock file is there before the folder, and until after it."""
    (tmp_path / f"ctr-pe-abcdefgh{LOCK}").touch()
    if folder:
        (tmp_path / "ctr-pe-abcdefgh").mkdir()
    remove_abandoned(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_vocabulary_is_written_as_other_json(tmp_path: Path) -> None:
    content = {"item_id": {"": 1, 'é "\\/\x7f\u2028': 2, "a\nb\t\x1f": 3}, "none": {}}
    files.write_vocabularies(tmp_path / "one", content)
    files.write_json(tmp_path / "other", content)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
