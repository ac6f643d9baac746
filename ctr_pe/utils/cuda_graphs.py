"""CUDA graphs: all kernels of a computation, captured once and then launched as one."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_CAPTURE = threading.Lock()


def run_aside(compute: Callable[[], Tensor], device: torch.device, times: int = 1) -> Tensor:
    """What ``compute`` gives, on a stream as a capture has it: the first runs choose and compile kernels."""
    aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        for _ in range(times):
            found = compute()
    torch.cuda.current_stream(device).wait_stream(aside)
    return found


def capture(compute: Callable[[], Tensor], device: torch.device, pool: Any = None) -> tuple[Any, Tensor]:
    """A CUDA graph of ``compute``, which runs at ``replay()`` and not yet, and the tensor that it then writes.

    ``pool``: memory of graphs of which one runs at a time.
    """
    graph, aside = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # Other threads may load another model meanwhile.
    with (
        _without_garbage_collection(),
        torch.cuda.graph(graph, pool=pool, stream=aside, capture_error_mode="thread_local"),
    ):
        found = compute()
    return graph, found


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Python's collector would delete the graphs of a model that is no longer used, which ends a capture under way with
    an error. It is off for the whole process, so one thread captures at a time."""
    with _CAPTURE:
        collecting = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collecting:
                gc.enable()
