"""Times this checkout against another revision: python -m benchmark.speed.pairs --against REVISION

Both run at once, each in a process of its own, and compute in turn: one repeat here, one there, the order changing from
repeat to repeat, so that other load on the machine affects both. A row is the mean ratio of their times, new to old,
with a 95 % interval (of logarithms, by Student's t). Training steps, an epoch of the loader, requests, `data build` and
`predict` are timed with one thread, on a log that is drawn from a seed.

Exits with 1 where the interval of a row lies above the limit (``--most``, 1.03 by default).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from scipy import stats

CHECKOUT = Path(__file__).resolve().parents[2]
LEAST = 0.05
"""Seconds of one repeat at least: quicker rows are called several times."""


class Side:
    """A process that measures one revision."""

    def __init__(self, root: Path, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).with_name("pairs_worker.py")), str(folder)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, cwd=folder, **pipes)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a process that measures has ended: see above")
        return json.loads(line)

    def seconds(self, row: str, times: int) -> float:
        """Of ``times`` calls."""
        assert self.process.stdin is not None
        print(json.dumps([row, times]), file=self.process.stdin, flush=True)
        return float(self.answer()) / times


@contextmanager
def revision(name: str) -> Iterator[Path]:
    """A checkout of another revision, with links to its models and the kernels of this one, or its own compiled."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "checkout"
        git = ["git", "-C", str(CHECKOUT), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", str(root), name], check=True)
        try:
            for link, target in (("model_zoo", "../model_zoo"), ("configs", "../config")):
                if not (root / "ctr_pe" / link).exists():
                    (root / "ctr_pe" / link).symlink_to(target)
            compile_ = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
            subprocess.run(compile_, cwd=root, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            yield root
        finally:
            subprocess.run([*git, "remove", "--force", str(root)], check=True)


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean of ratios and its 95 % interval; the interval of a single ratio is unbounded."""
    logarithms = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logarithms)
    if len(ratios) < 2:
        return math.exp(mean), 0.0, math.inf
    half = float(stats.t.ppf(0.975, len(ratios) - 1)) * statistics.stdev(logarithms) / math.sqrt(len(ratios))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def compare(new: Side, old: Side, chosen: str, repeats: int, most: float) -> list[str]:
    """Measures and prints each row whose name has ``chosen`` in it; gives the names of those slower than ``most``."""
    names = [name for name in new.answer() if chosen in name]
    old.answer()
    slower = []
    print(f"{'new / old':32} ratio  95 % interval     new, ms", flush=True)
    for name in names:
        times = max(1, round(LEAST / old.seconds(name, 1)))
        ratios, seconds = [], []
        for repeat in range(repeats):
            order = (new, old) if repeat % 2 else (old, new)
            taken = {side: side.seconds(name, times) for side in order}
            ratios.append(taken[new] / taken[old])
            seconds.append(taken[new])
        mean, low, high = interval(ratios)
        slower += [name] if low > most else []
        mark = "  slower" if low > most else ""
        print(
            f"{name:32} {mean:5.2f}  [{low:.2f}, {high:.2f}]  {1000 * statistics.median(seconds):10.1f}{mark}",
            flush=True,
        )
    return slower


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.speed.pairs", description=__doc__)
    parser.add_argument("--against", required=True, help="a git revision of this repository")
    parser.add_argument("--only", default="", help="rows whose name has this text in it")
    parser.add_argument("--repeats", type=int, default=15, help="pairs of times per row")
    parser.add_argument("--most", type=float, default=1.03, help="a row is slower if its interval lies above it")
    args = parser.parse_args(given)
    with ExitStack() as stack:
        other = stack.enter_context(revision(args.against))
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
        new, old = (Side(root, folder) for root, folder in zip((CHECKOUT, other), folders, strict=True))
        for side in (new, old):
            stack.callback(side.process.kill)
        slower = compare(new, old, args.only, args.repeats, args.most)
    print(f"slower than {args.most}: {', '.join(slower)}" if slower else f"none is shown to be slower than {args.most}")
    return bool(slower)


if __name__ == "__main__":
    sys.exit(main())
