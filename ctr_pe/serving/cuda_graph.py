"""Small requests on a GPU, whose time goes into launching kernels rather than into computing.

They are padded to few sizes, and all kernels of a size are launched as one: a CUDA graph, captured at the first request
of that size. B histories, L history slots, K targets of each.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ctr_pe.sequence.transfer import pinned
from ctr_pe.serving.request_graph import AXES, RequestGraph

LARGEST = 2**17
"""(target, slot) pairs of a small request, at most: of a larger one padding costs more than launches."""
WARMING = 2
"""Runs before the capture: they choose and compile kernels."""
_CAPTURE = threading.Lock()

Sizes = tuple[int, int, int]
Run = Callable[[dict[str, Tensor]], Tensor]


class CUDAGraphs:
    """Scores of small requests by a model on a GPU, from any thread: a CUDA graph for each size.

    A graph has the addresses of the model's tensors: it sees weights that change in place, and a model that moves to
    another device needs ``CUDAGraphs`` of its own.
    """

    def __init__(self, model: Any) -> None:
        self.graph, self.device = RequestGraph(model, of_request=()), model.device
        self._most = max((group.max_len for group in model.groups), default=1)
        self._graphs: dict[Sizes, Run] = {}
        self._pool: Any = None  # memory of all graphs: one runs at a time
        self._lock = threading.Lock()

    def sizes(self, given: Mapping[str, Tensor]) -> Sizes:
        """B, L and K that the request is padded to: powers of two, and L at most the longest history of the model."""
        slots = max((given[name].shape[1] for name, kind in self.graph.inputs.items() if "L" in AXES[kind]), default=1)
        rows, targets = self._targets(given)
        most = self._most if slots <= self._most else 2 * slots
        return _rounded(rows), min(_rounded(slots), most), _rounded(targets)

    def takes(self, given: Mapping[str, Tensor]) -> bool:
        """Whether the request is small."""
        rows, slots, targets = self.sizes(given)
        return rows * slots * targets <= LARGEST

    @torch.inference_mode()
    def __call__(self, given: Mapping[str, Tensor]) -> Tensor:
        """Click probabilities (B, K), on the CPU.

        ``given``: on the CPU, histories and ages (B, any) and targets and other fields (B, K), as
        :class:`~ctr_pe.serving.request_graph.RequestGraph` names them; what it does not name is not read.
        """
        sizes = self.sizes(given)
        padded = {name: _padded(given[name], kind, sizes) for name, kind in self.graph.inputs.items()}
        rows, targets = self._targets(given)
        with self._lock:
            if sizes not in self._graphs:
                self._graphs[sizes] = self._capture(padded)
            return self._graphs[sizes](padded)[:rows, :targets].float().cpu()

    def _targets(self, given: Mapping[str, Tensor]) -> tuple[int, int]:
        """B and K."""
        rows, targets = next(given[name].shape[:2] for name, kind in self.graph.inputs.items() if kind == "target")
        return rows, targets

    def _capture(self, padded: Mapping[str, Tensor]) -> Run:
        """A graph of these sizes: a function of padded requests."""
        inputs = {name: x.to(self.device) for name, x in padded.items()}
        aside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(aside):
            for _ in range(WARMING):
                self.graph(inputs)
        torch.cuda.current_stream(self.device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads may load another model meanwhile.
        with (
            _without_garbage_collection(),
            torch.cuda.graph(graph, pool=self._pool, stream=aside, capture_error_mode="thread_local"),
        ):
            scores: Tensor = self.graph(inputs)
        self._pool = graph.pool()

        def replay(given: Mapping[str, Tensor]) -> Tensor:
            for name, x in given.items():
                inputs[name].copy_(pinned(x, self.device), non_blocking=True)
            graph.replay()
            return scores

        return replay


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


def _rounded(size: int) -> int:
    """The power of two from ``size`` on."""
    return 1 << max(0, size - 1).bit_length()


def _padded(x: Tensor, kind: str, sizes: Sizes) -> Tensor:
    """With zeros after each axis: empty histories, slots and targets of padding."""
    of_axis = dict(zip("BLK", sizes, strict=True))
    more = [of_axis[axis] - x.shape[place] for place, axis in enumerate(AXES[kind])]
    more += [0] * (x.dim() - len(more))
    return nn.functional.pad(x, [n for pair in zip([0] * len(more), reversed(more), strict=True) for n in pair])
