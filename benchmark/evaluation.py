"""Speed of ctr_pe's gAUC beside FuxiCTR's, measured alternately in one process on the same table.

    python benchmark/evaluation.py --groups 10000 --repeats 5 --json evaluation.json

Prints rows per second of both and the ratio of their times: the median over the repeats, and the smallest and largest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ctr_pe.evaluation import evaluate


def seconds_of(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=10_000, help="users in the table")
    parser.add_argument("--rows-per-group", type=int, default=8, help="mean rows per user")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()

    from fuxictr.metrics import evaluate_metrics

    random = np.random.default_rng(args.seed)
    rows = args.groups * args.rows_per_group
    groups = np.concatenate([np.arange(args.groups), random.integers(0, args.groups, rows - args.groups)])
    labels = random.integers(0, 2, rows)
    scores = random.random(rows).round(3)  # rounded, so that there are ties

    def ours() -> float:
        return evaluate(labels, scores, groups, ["gAUC"])["gAUC"]

    def theirs() -> float:
        return float(evaluate_metrics(labels, scores, ["gAUC"], groups)["gAUC"])

    difference = abs(ours() - theirs())  # also warms both up
    pairs = [(seconds_of(ours), seconds_of(theirs)) for _ in range(args.repeats)]
    ratios = [slow / fast for fast, slow in pairs]
    mine, other = (statistics.median(times) for times in zip(*pairs, strict=True))
    result = {
        "groups": args.groups,
        "rows": rows,
        "repeats": args.repeats,
        "seed": args.seed,
        "ctr_pe_seconds": mine,
        "fuxictr_seconds": other,
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "difference": difference,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    print(f"gAUC of {rows:,} rows in {args.groups:,} groups, {args.repeats} alternating measurements (medians)")
    print(f"  ctr_pe   {mine:10.4f} s  {rows / mine:14,.0f} rows/s")
    print(f"  fuxictr  {other:10.4f} s  {rows / other:14,.0f} rows/s")
    print(f"  ratio    {result['ratio_median']:8.0f} ×  ({min(ratios):.0f} to {max(ratios):.0f})")
    print(f"  the two values differ by {difference:.1e}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
