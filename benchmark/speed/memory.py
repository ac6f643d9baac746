"""Memory of a process, in bytes."""

from __future__ import annotations

import os
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType


def status(field: str, process: int | str = "self") -> int:
    """A size of a process: VmRSS, RssAnon (its own), RssFile (mapped files, which the system may drop), VmHWM."""
    for line in Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise ValueError(f"/proc/{process}/status has no {field}")


def reset_peak() -> None:
    """VmHWM counts from here."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_of(command: list[str]) -> tuple[int, int, int]:
    """Exit code of a command, whose output is dropped, the most memory of its own that it had, and the most that was
    resident, mapped files included."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    with Peak(process.pid) as own:
        _, state, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(state)
    return process.returncode, own.bytes, usage.ru_maxrss * 1024


class Peak:
    """The most memory of its own that a process had inside the context, sampled 50 times a second."""

    def __init__(self, process: int | str = "self") -> None:
        self.bytes = 0
        self._process = process
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            with suppress(OSError, ValueError):  # it has ended
                self.bytes = max(self.bytes, status("RssAnon", self._process))
            if self._over.wait(0.02):
                return
