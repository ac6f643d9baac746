"""Instead of what ``torch.cuda`` has: records kernels of a device that is not there, and launches them again.

As on a GPU, what a recording reads and writes are the tensors of its first run: any decision of the host is frozen.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operator of the block that is no view."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[tuple[Callable[[], Any], list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.kernels.append((lambda: func(*args, **(kwargs or {})), tree_flatten(found)[0]))
        return found

    def replay(self) -> None:
        for launch, results in self.kernels:
            for new, old in zip(tree_flatten(launch())[0], results, strict=True):
                if isinstance(old, Tensor) and new is not old:
                    old.copy_(new)

    def pool(self) -> None:
        return None


@contextmanager
def _graph(recording: Recording, **options: Any) -> Iterator[None]:
    assert not gc.isenabled()  # to delete another recording would end this one
    with recording:
        yield
    assert not gc.isenabled()


class _Stream:
    def __init__(self, device: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


CUDA: dict[str, Any] = {
    "Stream": _Stream,
    "current_stream": _Stream,
    "stream": nullcontext,
    "CUDAGraph": Recording,
    "graph": _graph,
}
