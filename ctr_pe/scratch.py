"""Temporary folders of which none stays: what a killed process has left is removed by the next that finds it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ctr_pe.errors import UserError

PREFIX, LOCK = "ctr-pe-", "ctr-pe.lock"  # the lock is held as long as the process that made the folder lives


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """A folder in ``parent``, or where the system has temporary files, until the end; those that killed processes have
    left there are removed. Raises UserError if it cannot be made."""
    home = Path(tempfile.gettempdir()) if parent is None else parent
    try:
        remove_abandoned(home)
        folder, lock = _locked_folder(home)
    except OSError as error:
        raise UserError(f"{home}: {error.strerror}") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder(home: Path) -> tuple[Path, int]:
    while True:
        home.mkdir(parents=True, exist_ok=True)
        try:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=home))
        except FileNotFoundError:  # another process has just removed home, which was empty
            continue
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / LOCK).exists():
            return folder, lock
        os.close(lock)  # another process has taken it for abandoned, before the lock


def remove_abandoned(home: Path) -> None:
    """Remove the folders of processes that have been killed: their locks are free. A folder without our lock file is
    not ours and is not touched."""
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
