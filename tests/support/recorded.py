"""Instead of what ``torch.cuda`` has: records kernels of a device that is not there, and launches them again.

As on a GPU, what a recording reads and writes are the tensors of its first run: any decision of the host is frozen.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tests.support.pretended_device import UNDER_WAY


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operator of the block on the device that is no view. After the block what was there before is as it was."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[tuple[Callable[[], Any], list[Any]]] = []
        self.written: dict[int, tuple[Tensor, Tensor]] = {}
        self.made: set[int] = set()

    def __enter__(self) -> Any:
        self.random = torch.get_rng_state()
        return super().__enter__()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.set_rng_state(self.random)
        for x, before in self.written.values():
            x.copy_(before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for x in tree_flatten(given)[0]:
                    if id(x) not in self.made:
                        self.written.setdefault(id(x), (x, x.detach().clone()))
        found = func(*args, **(kwargs or {}))
        given = tree_flatten((args, kwargs, found))[0]  # what the CPU does is not repeated
        there = UNDER_WAY or any(isinstance(x, Tensor) and x.device.type != "cpu" for x in given)
        if there and not func.is_view:
            self.kernels.append((lambda: func(*args, **(kwargs or {})), tree_flatten(found)[0]))
        self.made |= {id(x) for x in tree_flatten(found)[0] if id(x) not in self.written}
        return found

    @torch.no_grad()
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
