"""Temporary files and folders of which none stays: what a killed process has left is removed by the next beside it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ctr_pe.utils.errors import OWN, UserError

LOCK = ".lock"
"""A folder ``ctr-pe-abc`` has a file ``ctr-pe-abc.lock`` beside it, which is made before it and removed after it, and
locked as long as the process lives."""
TRIES = 100  # to make a folder, while others remove it


@contextmanager
def file_errors(file: Path) -> Iterator[None]:
    """An OSError within becomes a UserError that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{file}: {error.strerror or error}") from None


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


@contextmanager
def scratch_beside(out: Path) -> Iterator[Path]:
    """An empty folder on the file system of ``out``, whose parents are not made for it. Raises OSError."""
    home = next(folder for folder in out.absolute().parents if folder.exists())
    if not home.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(home))
    with scratch_folder(home) as scratch:
        (scratch / "content").mkdir()
        yield scratch / "content"


@contextmanager
def new_folder(out: Path, replace: bool = False) -> Iterator[Path]:
    """An empty folder beside ``out`` that takes its name in the end, or nothing is left of it; see :func:`move`."""
    with scratch_beside(out) as scratch:
        (scratch / "new").mkdir()
        yield scratch / "new"
        move(scratch / "new", out, replace)


def move(made: Path, out: Path, replace: bool = False) -> None:
    """Give a folder its name; with ``replace``, one that has it goes to "old" beside ``made``. Raises UserError."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if replace and out.exists():
        out.rename(made.with_name("old"))
    try:
        made.rename(out)
    except OSError as error:  # it has appeared meanwhile
        raise UserError(f"{out}: {error.strerror}") from None


def write_json(file: Path, content: Any, allow_nan: bool = True) -> None:
    """Indented, in UTF-8. Raises ValueError for a number that JSON lacks unless ``allow_nan``."""
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=allow_nan)
    file.write_text(text + "\n", encoding="utf-8")


def write_vocabularies(file: Path, content: Mapping[str, Mapping[str, int]]) -> None:
    """The bytes of :func:`write_json`, in a sixth of its time: a vocabulary may have millions of values."""
    from pydantic_core import to_json

    file.write_bytes(to_json(content, indent=1) + b"\n")


def json_text(content: Any) -> str:
    """Indented JSON, with null for what is not finite, and with the text of what JSON does not know, such as a path."""
    from pydantic_core import to_json

    return to_json(content, indent=2, inf_nan_mode="null", fallback=str).decode() + "\n"


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
