"""Temporary files and folders of which none stays: what a killed process has left is removed by the next beside it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX, LOCK = "ctr-pe-", "ctr-pe.lock"  # the lock is held as long as the process that made the folder lives
TRIES = 100  # to make a folder, while others remove it


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of ``file`` at the end: all or nothing, also when two processes write
    the same file. Raises OSError."""
    with scratch_folder(file.parent) as folder:
        yield folder / file.name
        (folder / file.name).replace(file)


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """A folder in ``parent``, or where the system has temporary files, until the end; those that killed processes have
    left there are removed. Raises OSError."""
    remove_abandoned(parent)
    folder, lock = _locked_folder(Path(tempfile.gettempdir()) if parent is None else parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_abandoned(parent: Path | None = None) -> None:
    """Remove the folders of processes that have been killed: their locks are free. A folder without our lock file is
    not ours and is not touched."""
    home = Path(tempfile.gettempdir()) if parent is None else parent
    for file in home.glob(f"{PREFIX}*/{LOCK}"):
        try:
            lock = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # another user's, or gone
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not file.parent.is_symlink():
                shutil.rmtree(file.parent, ignore_errors=True)
        except OSError:  # in use
            pass
        finally:
            os.close(lock)


def _locked_folder(home: Path) -> tuple[Path, int]:
    for more in range(TRIES, -1, -1):
        home.mkdir(parents=True, exist_ok=True)
        try:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=home))
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:  # another process has just removed what was empty, or nothing can be made here
            if not more:
                raise
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / LOCK).exists():
            return folder, lock
        os.close(lock)  # another process has taken it for abandoned, before the lock
    raise FileExistsError(errno.EEXIST, "always taken by another process", str(home))
