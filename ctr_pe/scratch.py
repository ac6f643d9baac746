"""Temporary folders: their names are random, they are ours alone, and they are removed in the end.

A killed run leaves its folder; the next one that works in the same place removes it. A folder is ours if it has a name
of ours and holds our lock file, and it is left over if no process holds the lock.
"""

from __future__ import annotations

import fcntl
import glob
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = "ctr-pe.lock"


@contextmanager
def scratch_folder(beside: Path | None = None) -> Iterator[Path]:
    """An empty folder on the file system of ``beside``, a path that may not exist yet, else in the system's place.

    Raises OSError if it cannot be made.
    """
    home = Path(tempfile.gettempdir()) if beside is None else _existing(Path(beside).absolute().parent)
    stem = f".{'' if beside is None else Path(beside).name[:100]}.ctr-pe-"
    _remove_left_over(home, stem)
    with tempfile.TemporaryDirectory(prefix=stem, dir=home, ignore_cleanup_errors=True) as made:
        folder = Path(made)
        with (folder / "new.lock").open("x") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released by the system when we are killed
            (folder / "new.lock").rename(folder / LOCK)  # from now on the folder can be recognised
            (folder / "content").mkdir()
            yield folder / "content"


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """A path that takes the name of ``file`` in the end: all or nothing, also when two processes write the same file.

    Raises OSError if it cannot be written.
    """
    with scratch_folder(file) as folder:
        yield folder / file.name
        file.parent.mkdir(parents=True, exist_ok=True)
        (folder / file.name).replace(file)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    return next((path for path in (folder, *folder.parents) if path.exists()), folder)


def _remove_left_over(home: Path, stem: str) -> None:
    for folder in home.glob(f"{glob.escape(stem)}????????"):
        try:
            with (folder / LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # another's folder, or its run is alive
            continue
