"""Where a service that was started as a process answers."""

from __future__ import annotations

import re
import subprocess


def address_of(running: subprocess.Popen[str]) -> tuple[str, list[str]]:
    """The address that a service says on stderr, and its lines so far. Raises AssertionError if it ends without one."""
    assert running.stderr is not None
    lines: list[str] = []
    for line in running.stderr:
        lines.append(line)
        if address := re.search(r"http://[\d.]+:\d+", line):
            return address[0], lines
    raise AssertionError("".join(lines))
