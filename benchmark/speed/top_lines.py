"""Where a training step spends its time: the longest operations by the profiler, for docs/performance.md.

python -m benchmark.speed.top_lines DIN --full
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

if __name__ == "__main__":
    sys.path[0] = str(
        Path(__file__).resolve().parents[2]
    )  # the checkout, whose packages benchmark and ctr_pe are measured

from benchmark.speed import data, models
from ctr_pe.utils.allocator import keep_memory

WARM_UP, STEPS = 3, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model", help="DIN, DIEN, BST, DMIN, TIN or SASRec, as configured for Amazon Electronics")
    add("--pe", default="none", help="position encoding (default: none)")
    add("--full", action="store_true", help="every history has 100 items (default: 9 on average)")
    add("--rows", type=int, default=1024, help="of a batch (default: 1024)")
    add("--keep-memory", action="store_true", help="the allocator as the commands have it")
    add("--lines", type=int, default=5, help="(default: 5)")
    args = parser.parse_args()
    if args.keep_memory:
        keep_memory()
    with tempfile.TemporaryDirectory() as folder:
        dataset = data.write(
            Path(folder, "amazon"), data.draw(4 * args.rows, args.full), ages=models.needs_age(args.pe)
        )
        model = models.ours(args.model, dataset, pe=args.pe)
        step = models.steps(model, [batch for batch, _ in data.batches(dataset, model.feature_map, args.rows, 4)])
        for number in range(WARM_UP):
            step(number)
        seconds = [_seconds(step, number) for number in range(STEPS)]
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for number in range(STEPS):
                step(number)
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    print(
        f"{args.model}, {args.pe}: {1e3 * statistics.median(seconds):.0f} ms a step, {torch.get_num_threads()} threads"
    )
    for event in events[: args.lines]:
        share, calls = event.self_cpu_time_total / total, event.count / STEPS
        print(f"{event.key:<40} {event.self_cpu_time_total / STEPS / 1e3:8.1f} ms {share:6.1%} {calls:7.0f} calls")


def _seconds(step: Callable[[int], object], number: int) -> float:
    start = time.perf_counter()
    step(number)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
