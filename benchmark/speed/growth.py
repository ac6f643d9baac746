"""How target attention with CAPE grows with the history, from 10^2 to 10^5 items, at a constant number of items.

B rows of L items each, B · L = N items; D item dim. The table of CAPE has L + 1 rows.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmark.speed import memory, models
from benchmark.speed.cases import Settings
from benchmark.speed.timing import Figure, say
from ctr_pe import Positions, build_pe
from ctr_pe.units import TargetAttention

DIM = 64
LENGTHS = (100, 1_000, 10_000, 100_000)


def seconds(settings: Settings) -> Figure:
    """Seconds of forward and backward at the worst length over those at 100, for the same number of items."""
    items, wait = settings.size(400_000, 100_000), models.wait(settings.gpu) or (lambda: None)
    calls = {length: _attention(items, length, settings.gpu) for length in LENGTHS}
    taken: dict[int, list[float]] = {length: [] for length in LENGTHS}
    say(f"{items:,} items in histories of {', '.join(map(str, LENGTHS))}")
    for number in range(-1, 3 * settings.repeats):  # short calls: more of them
        for length in LENGTHS[:: -1 if number % 2 else 1]:
            wait()
            start = time.perf_counter()
            calls[length]()
            wait()
            if number >= 0:
                taken[length].append(time.perf_counter() - start)
    ratios = {
        length: [long / short for long, short in zip(taken[length], taken[LENGTHS[0]], strict=True)]
        for length in LENGTHS[1:]
    }
    worst = max(ratios, key=lambda length: statistics.median(ratios[length]))
    medians = {str(length): statistics.median(taken[length]) for length in LENGTHS}
    return Figure(
        ratios[worst],
        medians[str(worst)],
        medians[str(LENGTHS[0])],
        against="as many items in histories of 100",
        details={"items": items, "worst_length": worst, "seconds": medians},
    )


def memory_(settings: Settings) -> Figure:
    """Peak memory that a forward and backward add, at the worst length over that at 100."""
    items = settings.size(400_000, 100_000)
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:  # each length in a fresh process
        peaks = {length: pool.apply(_peak, (items, length, settings.gpu)) for length in LENGTHS}
    in_mb = {str(length): peak / 1e6 for length, peak in peaks.items()}
    worst, short = max(LENGTHS[1:], key=peaks.__getitem__), LENGTHS[0]
    return Figure(
        [peaks[worst] / peaks[short]],
        in_mb[str(worst)],
        in_mb[str(short)],
        of="MB",
        against="as many items in histories of 100",
        details={"items": items, "worst_length": worst, "peak_mb": in_mb},
    )


def tensor(settings: Settings) -> Figure:
    """Elements of the largest tensor of a forward and backward over those of the histories (B, L, D).

    At 4,000 items in a history a tensor (B, L, L) or (B, L, T) would have 63 times as many.
    """
    length, rows = 4_000, settings.size(8, 2)
    largest = largest_tensor(_attention(rows * length, length, settings.gpu))
    history = rows * length * DIM
    return Figure([largest / history], largest, history, of="elements", against="the histories (B, L, D)")


def largest_tensor(call: Callable[[], object]) -> int:
    """Elements of the largest tensor that any operation in ``call`` makes."""

    class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for made in out if isinstance(out, Sequence) else [out]:
                if isinstance(made, Tensor) and made.untyped_storage().nbytes() >= made.numel() * made.element_size():
                    self.elements = max(self.elements, made.numel())  # an expanded view takes no memory
            return out

    seen = Largest()  # type: ignore[no-untyped-call]
    with seen:
        call()
    return seen.elements


def _attention(items: int, length: int, gpu: int) -> Callable[[], object]:
    """Forward and backward of target attention with CAPE over full histories."""
    device = torch.device(f"cuda:{gpu}" if gpu >= 0 else "cpu")
    random = torch.Generator().manual_seed(0)
    rows = items // length
    unit = TargetAttention(DIM, "dot", build_pe("cape", DIM, length)).to(device)
    target = torch.randn(rows, DIM, generator=random).to(device).requires_grad_()
    history = torch.randn(rows * length, DIM, generator=random).to(device).requires_grad_()
    mask = torch.ones(rows, length, dtype=torch.bool, device=device)

    def call() -> None:
        target.grad = history.grad = None
        interest, _ = unit(target, history, Positions.from_mask(mask))
        interest.sum().backward()

    return call


def _peak(items: int, length: int, gpu: int) -> int:
    call = _attention(items, length, gpu)
    if gpu >= 0:
        before = torch.cuda.memory_allocated(gpu)
        call()
        return torch.cuda.max_memory_allocated(gpu) - before
    memory.reset_peak()
    before = memory.status("VmRSS")
    call()
    return memory.status("VmHWM") - before
