"""Code in C for what torch makes many passes over memory for: scores of contextual positions, scores by offset,
biases by time, turned planes, Dice, dropout's masks.

``pip install`` compiles it where there is a C compiler (Linux). Without one, and for what is said at :func:`suits`,
torch does the same.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

SWITCH = "CTR_PE_COMPILED"
"""Environment variable; 0 leaves the compiled code alone."""


@cache
def library() -> ctypes.CDLL | None:
    """The compiled code, or None."""
    files = (Path(__file__).with_name(f"_code{suffix}") for suffix in EXTENSION_SUFFIXES)
    found = next((file for file in files if file.exists()), None)
    if found is None or os.environ.get(SWITCH) == "0":
        return None
    try:
        code = ctypes.CDLL(str(found))
    except OSError:  # built for another machine
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int
    code.contextual_forward.argtypes = [pointer] * 2 + [number]
    code.contextual_backward.argtypes = [pointer] * 3 + [ctypes.c_int64, number]
    code.fade_forward.argtypes = [pointer] * 3 + [number]
    code.fade_backward.argtypes = [pointer] * 4 + [number]
    code.gate_forward.argtypes = [pointer] * 2 + [number]
    code.gate_backward.argtypes = [pointer] * 6 + [number]
    code.turn_forward.argtypes = [pointer] * 3 + [number]
    code.turn_backward.argtypes = [pointer] * 4 + [number]
    code.relative_forward.argtypes = [pointer] * 3 + [number]
    code.relative_backward.argtypes = [pointer] * 4 + [number]
    code.keep.argtypes = [ctypes.c_uint64, ctypes.c_int64, ctypes.c_int16, pointer, number]
    return code


def run(name: str, *arguments: object) -> None:
    """A function of the code, with as many threads as torch has.

    Raises:
        MemoryError: no memory for what the threads work in.
    """
    if not getattr(library(), name)(*arguments, torch.get_num_threads()):
        raise MemoryError("no memory left to work in")


def address(x: Tensor | None) -> int | None:
    """Where its numbers lie; None for None."""
    return None if x is None else x.data_ptr()


def suits(*tensors: Tensor) -> bool:
    """Whether the compiled code can take these: plain float32 tensors on a CPU, and nobody records the operations."""
    return (
        library() is not None
        and torch._C._get_tracing_state() is None
        and not torch.compiler.is_compiling()
        and all(type(x) in _PLAIN and x.dtype == torch.float32 and x.is_cpu for x in tensors)
    )


_PLAIN = (Tensor, torch.nn.Parameter)
