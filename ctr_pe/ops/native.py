"""The compiled kernels: the one place that loads them and calls a C function.

Wheels for Linux have them, and ``pip install`` of the sources compiles ``csrc/`` where there is a C compiler. Without
them, or with ``CTR_PE_COMPILED=0`` in the environment, the operators run in torch. They find torch's OpenMP in the
process, so that its threads are theirs.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

SWITCH = "CTR_PE_COMPILED"
"""Environment variable; 0 leaves the kernels alone."""


def load() -> ctypes.CDLL | None:
    """The compiled library, or None."""
    # The name of the stable ABI before that of this Python, which earlier versions of this package gave it.
    files = (Path(__file__).with_name(f"_kernels{suffix}") for suffix in reversed(EXTENSION_SUFFIXES))
    file = next((file for file in files if file.exists()), None)
    if file is None or os.environ.get(SWITCH) == "0":
        return None
    try:
        return ctypes.CDLL(str(file))
    except OSError:  # built for another machine
        return None


LIBRARY = load()


def takes(*tensors: Tensor | None) -> bool:
    """Whether a kernel can take these: float32 on a CPU."""
    usable = LIBRARY is not None and not seen_into()
    return usable and all(x is None or (x.dtype == torch.float32 and x.is_cpu) for x in tensors)


_PORTABLE: list[bool] = []


@contextmanager
def portable() -> Iterator[None]:
    """What runs inside takes torch's own operators alone, and no loop over sizes: what a file of another runtime can
    hold."""
    _PORTABLE.append(True)
    try:
        yield
    finally:
        _PORTABLE.pop()


def seen_into() -> bool:
    """Whether what runs now has to be torch's own operators: ``torch.func`` transforms these alone."""
    return bool(_PORTABLE) or transforms()


def traced() -> bool:
    """Whether what runs now becomes a graph or is transformed, so that no step may depend on the size of a batch."""
    return seen_into() or torch.compiler.is_compiling()


def transforms() -> bool:
    """Whether ``torch.func`` transforms what runs now: ``grad``, ``vmap`` and the like. In a graph that is compiled or
    exported operators stay as they are."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def call(name: str, *arguments: Tensor | float | None) -> None:
    """Calls a C function with as many threads as torch has. A tensor becomes a pointer to its first element, None a
    null pointer, an int an int64_t, a float a double.

    Raises:
        ValueError: a tensor that is not contiguous.
        MemoryError: no memory left for what the threads work in.
    """
    if not getattr(LIBRARY, name)(*map(_c, arguments), ctypes.c_int64(torch.get_num_threads())):
        raise MemoryError(f"{name}: no memory left to work in")


def _c(x: Tensor | float | None) -> object:
    if x is None:
        return None
    if isinstance(x, Tensor):
        if not x.is_contiguous():
            raise ValueError(f"the kernels take contiguous tensors only, not strides {x.stride()}")
        return ctypes.c_void_p(x.data_ptr())
    return ctypes.c_double(x) if isinstance(x, float) else ctypes.c_int64(x)


def description() -> str:
    """``compiled (avx512)``, ``compiled (avx2)`` or ``compiled``, by the vectors of this processor; else ``torch``."""
    if LIBRARY is None:
        return "torch"
    return {16: "compiled (avx512)", 8: "compiled (avx2)"}.get(LIBRARY.vector_lanes(), "compiled")


def compiler() -> str | None:
    """Name and version of the compiler that built the kernels; None without them."""
    if LIBRARY is None:
        return None
    LIBRARY.compiler.restype = ctypes.c_char_p
    found: bytes = LIBRARY.compiler()
    return found.decode()
