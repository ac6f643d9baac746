"""What one GPU does in eight minutes: training steps as CUDA graphs beside FuxiCTR's, requests, memory, NCCL.

    benchmark/gpu.sh --fuxictr-zoo PATH --json gpu.json
    benchmark/gpu.sh --dry-run --json dry.json       # without a GPU: does it run? Its figures are no results

A row of the JSON is written as soon as it is measured; the most telling come first, none begins after ``--minutes``.
Milliseconds are those of one step, the median over rounds of 20 steps on batches that come from the CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmark.speed import data, models
from benchmark.speed.cases import Settings
from ctr_pe.serving.request_graph import CUDAGraphs, histories_in, random_request
from ctr_pe.training.source import prefetch_plans
from ctr_pe.training.step_graphs import StepGraphs
from ctr_pe.utils.errors import one_line
from ctr_pe.utils.files import replacing

MODELS = ("DIN", "BST", "SASRec", "DIEN", "DMIN", "TIN")
SHAPES = ((1024, False), (1024, True), (4096, False), (4096, True))
WARM = 2
"""Rounds before the clock: each size of a batch is met, captured, and launched once."""


@dataclass(frozen=True)
class Machine:
    """``dry``: the device is not there, and sizes are small. ``until``: when no further row begins."""

    dry: bool
    until: float
    settings: Settings

    @property
    def rounds(self) -> int:
        return 1 if self.dry else 3

    @property
    def steps(self) -> int:
        return 2 if self.dry else 20

    def wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 if a row could not be measured, 2 without a GPU."""
    args = _parser().parse_args(argv)
    if not (args.dry_run or torch.cuda.is_available()):
        print("no CUDA device: --dry-run tries the script without one", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ctr-pe-gpu-") as folder, ExitStack() as stack:
        if args.dry_run:
            _pretend(stack)
        settings = Settings(args.dry_run, Path(folder), 0, args.fuxictr_zoo)
        machine = Machine(args.dry_run, time.monotonic() + 60 * args.minutes, settings)
        for row, call in _rows(machine, args.models):
            if time.monotonic() > machine.until:
                print(f"{60 * args.minutes:g} seconds are over: rows from {row} on are left out", file=sys.stderr)
                break
            began = time.monotonic()
            try:
                found = call()
            except Exception as error:
                found = {"error": one_line(f"{type(error).__name__}: {error}")[:300]}
            rows.append(row | found | {"seconds": round(time.monotonic() - began, 1)})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            with replacing(args.json) as partial:
                partial.write_text(json.dumps({"machine": _machine(machine), "rows": rows}, indent=1), encoding="utf-8")
    return 1 if any("error" in row for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", type=Path, required=True, metavar="FILE", help="written after each row")
    add("--fuxictr-zoo", type=Path, metavar="PATH", help="a checkout of FuxiCTR; without, padded models kept here")
    add("--models", type=lambda text: text.split(","), default=MODELS, metavar="NAME,…", help="default: all six")
    add("--minutes", type=float, default=7.0, metavar="N", help="no row begins later (default: 7)")
    add("--dry-run", action="store_true", help="small sizes on a device that is not there")
    return parser


def _pretend(stack: ExitStack) -> None:
    """The device that is not there, with recordings in place of CUDA graphs."""
    from tests.support import recorded
    from tests.support.pretended_device import elsewhere

    stack.enter_context(elsewhere())
    stack.enter_context(mock.patch.multiple(torch.cuda, **recorded.CUDA))
    stack.enter_context(mock.patch.object(StepGraphs, "of", StepGraphs))  # which else wants CUDA


def _machine(machine: Machine) -> dict[str, Any]:
    name = "not there: no results" if machine.dry else torch.cuda.get_device_name()
    return {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda}


Row = dict[str, Any]


def _rows(machine: Machine, names: Sequence[str]) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """What each row is about, and what measures it."""
    for number, (size, full) in enumerate(SHAPES[:2] if machine.dry else SHAPES):
        for name in names:
            about: Row = {"what": "step", "model": name, "batch_size": size, "full": full}
            yield about, partial(_step, machine, name, size, full)
        if number == 0:
            for name, users in product(["DIN", *(one for one in names if one != "DIN")], (1, 64)):
                about = {"what": "request", "model": name, "users": users, "candidates": 1000}
                yield about, partial(_request, machine, name, users)
            yield {"what": "nccl"}, partial(_nccl, machine)


def _step(machine: Machine, name: str, size: int, full: bool) -> Row:
    """Milliseconds of FuxiCTR's step, and of ours with and without CAPE, as CUDA graphs and kernel by kernel."""
    folder = machine.settings.folder / f"{name}-{size}-{full}"
    size = 16 if machine.dry else size
    dataset = data.write(folder, data.draw(4 * size, full))
    theirs, against = models.baseline(name, dataset, 0, machine.settings.zoo)
    trimmed, padded = zip(*data.batches(dataset, theirs.feature_map, size, 4), strict=True)
    row: Row = {"against": against, "baseline": _timed(machine, theirs, padded)["ms"]}
    del theirs
    for pe in ("none", "cape"):
        model = models.ours(name, dataset, 0, pe=pe)
        found, graphs = _timed(machine, model, trimmed), model.step_graphs
        found |= {"times": row["baseline"] / found["ms"], "graphs": 0 if graphs is None else len(graphs._graphs)}
        if graphs is not None:
            graphs.close()
            model.step_graphs = None
        row[pe] = found | {"kernel_by_kernel": _timed(machine, model, trimmed)["ms"]}
    return row


def _timed(machine: Machine, model: Any, batches: Sequence[Mapping[str, Tensor]]) -> Row:
    """``ms`` of a step, ``busy``, the share of it in which the device computes, and ``gigabytes`` at most."""

    def steps() -> None:
        for batch in prefetch_plans(model, [batches[step % len(batches)] for step in range(machine.steps)]):
            model.train_step(batch)

    if not machine.dry:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM):
        steps()
    ms = 1000 * statistics.median(_seconds(machine, steps) for _ in range(machine.rounds)) / machine.steps
    if machine.dry:
        return {"ms": ms}
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        steps()
        machine.wait()
    computing = sum(event.self_device_time_total for event in profile.key_averages()) / 1000 / machine.steps
    memory = torch.cuda.max_memory_allocated() / 1e9
    return {"ms": ms, "device_ms": computing, "busy": computing / ms, "gigabytes": memory}


def _seconds(machine: Machine, call: Callable[[], object]) -> float:
    machine.wait()
    start = time.perf_counter()
    call()
    machine.wait()
    return time.perf_counter() - start


def _request(machine: Machine, name: str, users: int) -> Row:
    """Milliseconds of one call with the published configuration and CAPE, from the CPU and back."""
    dataset = data.write(machine.settings.folder / f"{name}-{users}-request", data.draw(8, full=True))
    model = models.ours(name, dataset, 0, pe="cape").eval()
    slots, targets = (7, 5) if machine.dry else (data.MAX_LEN, 1000)
    given, graphs = random_request(model, users, slots, targets), CUDAGraphs(model)
    histories = histories_in(model, given)
    others = {field: given[field] for field in model.other_fields}
    others = {field: x if x.dim() > 1 else x.unsqueeze(1).expand(-1, targets) for field, x in others.items()}

    @torch.inference_mode()
    def call() -> object:
        if graphs.takes(given):
            return graphs({**given, **others})
        return model.score_candidates(model.encode(histories), others).cpu()

    for _ in range(2 if machine.dry else 5):
        call()
    taken = sorted(1000 * _seconds(machine, call) for _ in range(3 if machine.dry else 50))
    return {"ms": statistics.median(taken), "slowest": taken[-1], "graph": graphs.takes(given)}


def _nccl(machine: Machine) -> Row:
    """Whether NCCL adds up in a process group of one."""
    import torch.distributed as dist

    backend, file = "gloo" if machine.dry else "nccl", (machine.settings.folder / "processes").absolute()
    dist.init_process_group(backend, init_method=f"file://{file}", rank=0, world_size=1)
    try:
        x = torch.ones(4) if machine.dry else torch.ones(4, device="cuda")
        dist.all_reduce(x)
        return {"backend": backend, "works": x.tolist() == [1.0] * 4}
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
