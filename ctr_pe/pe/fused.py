"""Scores of contextual positions in one pass over the pairs, compiled: ``contextual.c``.

torch needs a dozen passes over all pairs for the sums of gates, two look-ups and their gradients. Without a compiler at
installation, and for what is said at :func:`suits`, torch does it.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

SWITCH = "CTR_PE_COMPILED"
"""Environment variable; 0 leaves the compiled code alone."""


class _Input(ctypes.Structure):
    """The structure of that name in contextual.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("B", "H", "Q", "L", "P", "T")),
        ("sign", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("logits", "query", "table", "steps", "allowed")),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The compiled code, or None."""
    files = (Path(__file__).with_name(f"_contextual{suffix}") for suffix in EXTENSION_SUFFIXES)
    found = next((file for file in files if file.exists()), None)
    if found is None or os.environ.get(SWITCH) == "0":
        return None
    try:
        code = ctypes.CDLL(str(found))
    except OSError:  # built for another machine
        return None
    code.scratch_size.argtypes, code.scratch_size.restype = [ctypes.c_int64] * 3, ctypes.c_int64
    code.forward.argtypes, code.forward.restype = [ctypes.c_void_p] * 3 + [ctypes.c_int], None
    code.backward.argtypes, code.backward.restype = [ctypes.c_void_p] * 7 + [ctypes.c_int], None
    return code


def suits(*tensors: Tensor | None) -> bool:
    """Whether the compiled code can take these: plain float32 tensors on a CPU, and nobody records the operations."""
    return (
        library() is not None
        and not torch.jit.is_tracing()
        and not torch.compiler.is_compiling()
        and all(type(x) in _PLAIN and x.dtype == torch.float32 and x.is_cpu for x in tensors if x is not None)
    )


_PLAIN = (Tensor, torch.nn.Parameter)


def place_logits(
    logits: Tensor, query: Tensor, table: Tensor, allowed: Tensor, sign: float, steps: Tensor | None
) -> Tensor:
    """logits + query · e[p] with p the sum of gates σ(sign · logits) · steps, from the key to the newest allowed one.

    What :class:`~ctr_pe.pe.contextual.ContextualEncoding` computes, for what :func:`suits`.

    Args:
        logits: (B, H, Q, L). query: (B, H, Q, P). table: (T, P). allowed: (B, 1, Q, L) bool.
        sign: 1 or -1.
        steps: (B, H, Q, L), or None for ones.

    Returns:
        (B, H, Q, L); logits themselves where not allowed.
    """
    placed: Tensor = _Place.apply(logits, query, table, steps, allowed, sign)  # type: ignore[no-untyped-call]
    return placed


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, query: Tensor, table: Tensor, steps: Tensor | None, allowed: Tensor, sign: float
    ) -> Tensor:
        kept = [None if x is None else x.contiguous() for x in (logits, query, table, steps, allowed)]
        given, scratch, threads = _given(kept, sign)
        placed = torch.empty_like(kept[0])  # type: ignore[arg-type]
        _code().forward(ctypes.byref(given), placed.data_ptr(), scratch.data_ptr(), threads)
        ctx.save_for_backward(*kept)
        ctx.sign = sign
        return placed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        logits, query, table, steps, _ = kept
        given, scratch, threads = _given(kept, ctx.sign)
        of_logits, of_query = torch.empty_like(logits), torch.empty_like(query)
        of_rows = table.new_empty(threads, given.T, given.P)
        of_steps = None if steps is None else torch.empty_like(steps)
        out = (grad.contiguous(), of_logits, of_query, of_rows, of_steps)
        _code().backward(
            ctypes.byref(given), *(None if x is None else x.data_ptr() for x in out), scratch.data_ptr(), threads
        )
        of_table = torch.zeros_like(table)
        torch.sum(of_rows, 0, out=of_table[: given.T])
        return of_logits, of_query, of_table, of_steps, None, None


def _given(kept: Any, sign: float) -> tuple[_Input, Tensor, int]:
    """What the code takes, room for its work, and the number of threads."""
    logits, query, table, steps, allowed = kept
    reached = min(len(table), logits.shape[-1] + 1)  # a position counts keys at most
    pointers = (None if x is None else x.data_ptr() for x in (logits, query, table, steps, allowed))
    given = _Input(*logits.shape, table.shape[1], reached, sign, *pointers)
    threads = torch.get_num_threads()
    return given, logits.new_empty(threads, _code().scratch_size(given.L, given.P, given.T)), threads


def _code() -> ctypes.CDLL:
    code = library()
    assert code is not None
    return code
