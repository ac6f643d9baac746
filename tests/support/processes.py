"""Looking at other processes (Linux)."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PATIENCE = 120
"""Seconds to wait for what takes one or two where nothing else runs."""


def wait_for(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Until ``condition`` holds; files that vanish while it looks at them do not stop it."""
    end = time.monotonic() + seconds
    while True:
        with suppress(FileNotFoundError):
            if condition():
                return
        assert time.monotonic() < end
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def workers_of(pid: int) -> list[int]:
    """Child processes that multiprocessing spawned, without its own helper."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == pid and b"spawn_main" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
