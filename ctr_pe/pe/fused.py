"""Scores of contextual positions in one pass over the pairs, compiled: ``contextual.c``.

torch needs a dozen passes over all pairs for the sums of gates, two look-ups and their gradients. Without a compiler at
installation, and for what is said at :func:`suits`, torch does it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
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


class _Gradients(ctypes.Structure):
    """The structure of that name in contextual.c."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("logits", "query", "table", "steps"))


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
    scratch, forward, backward = code.contextual_scratch, code.contextual_forward, code.contextual_backward
    scratch.argtypes, scratch.restype = [ctypes.c_int64] * 3, ctypes.c_int64
    forward.argtypes, forward.restype = [ctypes.c_void_p] * 3 + [ctypes.c_int], None
    backward.argtypes, backward.restype = [ctypes.c_void_p] * 4 + [ctypes.c_int], None
    return code


def suits(*tensors: Tensor) -> bool:
    """Whether the compiled code can take these: plain float32 tensors on a CPU, and nobody records the operations."""
    return (
        library() is not None
        and torch._C._get_tracing_state() is None
        and not torch.compiler.is_compiling()
        and all(type(x) in _PLAIN and x.dtype == torch.float32 and x.is_cpu for x in tensors)
    )


_PLAIN = (Tensor, torch.nn.Parameter)


def place_logits(
    logits: Tensor, query: Tensor, table: Tensor, allowed: Tensor, sign: float, steps: Tensor | None = None
) -> Tensor:
    """logits + query · e[p] with p the sum of gates σ(sign · logits) · steps, from the key to the newest allowed one.

    What :class:`~ctr_pe.pe.contextual.ContextualEncoding` computes, for what :func:`suits`.

    Args:
        logits: (B, H, Q, L). query: (B, H, Q, P). table: (T, P). allowed: (B, 1, Q, L) bool.
        sign: 1 or -1.
        steps: (B, H, Q, L), or None for ones.

    Returns:
        (B, H, Q, L); logits themselves where not allowed.

    Raises:
        ValueError: shapes that do not match.
    """
    placed: Tensor = _Place.apply(sign, logits, query, table, steps, allowed)  # type: ignore[no-untyped-call]
    return placed


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sign: float, *given: Tensor | None) -> Tensor:
        kept = [None if x is None else x.contiguous() for x in given]
        work = _Work(kept, sign)
        placed = torch.empty_like(kept[0])  # type: ignore[arg-type]
        forward, scratch = work.code.contextual_forward, work.scratch.data_ptr()
        forward(ctypes.byref(work.given), placed.data_ptr(), scratch, work.threads)
        ctx.save_for_backward(*kept)
        ctx.sign = sign
        return placed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, query, table, steps, _ = ctx.saved_tensors
        work, grad = _Work(ctx.saved_tensors, ctx.sign), grad.contiguous()
        of_logits, of_query = torch.empty_like(logits), torch.empty_like(query)
        of_rows = table.new_empty(work.threads, work.given.T, work.given.P)
        of_steps = None if steps is None else torch.empty_like(steps)
        parts = (of_logits, of_query, of_rows, of_steps)
        out = _Gradients(*(None if x is None else x.data_ptr() for x in parts))
        backward, scratch = work.code.contextual_backward, work.scratch.data_ptr()
        backward(ctypes.byref(work.given), grad.data_ptr(), ctypes.byref(out), scratch, work.threads)
        of_table = table.new_zeros(table.shape)
        torch.sum(of_rows, 0, out=of_table[: work.given.T])
        return None, of_logits, of_query, of_table, of_steps, None


class _Work:
    """What the code takes, room for it to work in, and the number of its threads."""

    def __init__(self, given: Sequence[Tensor | None], sign: float) -> None:
        code = library()
        assert code is not None
        logits, query, table, steps, allowed = given
        assert logits is not None
        assert query is not None
        assert table is not None
        assert allowed is not None
        B, H, Q, L = pairs = tuple(logits.shape)
        T, P = table.shape
        found = [tuple(x.shape) for x in (query, steps if steps is not None else logits, allowed)]
        if found != [(B, H, Q, P), pairs, (B, 1, Q, L)] or allowed.dtype != torch.bool:
            raise ValueError(f"logits {pairs} and table {(T, P)} do not match query, steps and allowed {found}")
        reached = min(T, L + 1)  # a place counts keys at most
        pointers = (None if x is None else x.data_ptr() for x in given)
        self.code, self.threads = code, torch.get_num_threads()
        self.given = _Input(B, H, Q, L, P, reached, sign, *pointers)
        self.scratch = logits.new_empty(self.threads, code.contextual_scratch(L, P, reached))
