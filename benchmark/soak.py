"""Does a long benchmark hold its memory and its open files? Runs one, and looks at all of its processes now and then.

Memory and files of each process must stay as they were after the first tenth of the time, memory within 5 %. Linux
alone.

example:
  python -m benchmark.soak --minutes 120 -- --jobs 1 --dataset synthetic --set epochs=1 --repeats 2000
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ALLOWED, WARM_UP, LOOKS = 1.05, 0.1, 300
MIB = 2**20


class Look(NamedTuple):
    """At one process: resident bytes, open files."""

    memory: int
    files: int


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    command = [sys.executable, "-m", "ctr_pe.cli", "benchmark", *args.options]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    end, seen = time.monotonic() + 60 * args.minutes, defaultdict[int, list[Look]](list)
    while time.monotonic() < end and run.poll() is None:
        time.sleep(60 * args.minutes / LOOKS)
        for pid in family(run.pid):
            if (look := look_at(pid)) is not None:
                seen[pid].append(look)
    ended_before = run.poll() is not None
    run.send_signal(signal.SIGINT)
    run.wait()
    if ended_before:
        print(f"soak: the benchmark ended by itself, with exit code {run.returncode}: give it more --repeats")
        return 2
    long_lived = {pid: looks for pid, looks in seen.items() if len(looks) > LOOKS / 2}
    grown = [report(pid, looks) for pid, looks in long_lived.items()]
    return int(any(grown))


def report(pid: int, looks: list[Look]) -> bool:
    """Print a line about a process -> whether it has grown."""
    looks = looks[int(len(looks) * WARM_UP) :]
    tenth = max(1, len(looks) // 10)
    (first, files), (last, more) = (
        (statistics.median(one.memory for one in part), min(one.files for one in part))
        for part in (looks[:tenth], looks[-tenth:])
    )
    grown = last > ALLOWED * first or more > files
    print(f"process {pid}: {first / MIB:.0f} to {last / MIB:.0f} MiB, {files} to {more} files{' GROWN' * grown}")
    return grown


def family(pid: int) -> list[int]:
    """The process and those below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += family(int(child))
    return found


def look_at(pid: int) -> Look | None:
    """None if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return Look(4096 * pages, len(list(Path(f"/proc/{pid}/fd").iterdir())))
    except OSError:
        return None


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("soak.py", description=__doc__, formatter_class=form)
    parser.add_argument("--minutes", type=float, default=120.0, metavar="N", help="how long (default: 120)")
    parser.add_argument("options", nargs="*", metavar="OPTION", help="of ctr-pe benchmark, after --")
    return parser


if __name__ == "__main__":
    sys.exit(main())
