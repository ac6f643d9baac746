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

from ctr_pe.utils.errors import OWN

LOCK = ".lock"
"""A folder ``ctr-pe-abc`` has a file ``ctr-pe-abc.lock`` beside it, which is made before it and removed after it, and
locked as long as the process lives."""
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
    file, lock = _locked(Path(tempfile.gettempdir()) if parent is None else parent)
    try:
        file.with_suffix("").mkdir(mode=0o700)
        yield file.with_suffix("")
    finally:
        _remove(file)
        os.close(lock)


def remove_abandoned(parent: Path | None = None) -> None:
    """Remove the folders of processes that have been killed: their locks are free. What has no lock beside it is not
    ours and is not touched."""
    home = Path(tempfile.gettempdir()) if parent is None else parent
    for file in home.glob(f"{OWN}{'?' * 8}{LOCK}"):
        try:
            lock = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # another user's, or gone
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(file)
        except OSError:  # in use
            pass
        finally:
            os.close(lock)


def _locked(home: Path) -> tuple[Path, int]:
    """A new lock file, locked."""
    for more in range(TRIES, -1, -1):
        home.mkdir(parents=True, exist_ok=True)
        try:
            lock, name = tempfile.mkstemp(LOCK, OWN, home)
        except FileNotFoundError:  # another process has just removed home, which was empty, or nothing can be made here
            if not more:
                raise
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if Path(name).exists():
            return Path(name), lock
        os.close(lock)  # another process has taken it for abandoned, before the lock
    raise FileExistsError(errno.EEXIST, "always taken by another process", str(home))


def _remove(file: Path) -> None:
    """A lock file, after its folder; a link is not followed."""
    shutil.rmtree(file.with_suffix(""), ignore_errors=True)
    file.unlink(missing_ok=True)
