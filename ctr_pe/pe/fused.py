"""Scores of contextual positions in one pass over the pairs, compiled: ``compiled/``.

torch needs a dozen passes over all pairs for the sums of gates, two look-ups and their gradients. Without a compiler at
installation, and for what is said at :func:`suits`, torch does it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

SWITCH = "CTR_PE_COMPILED"
"""Environment variable; 0 leaves the compiled code alone."""


class _Input(ctypes.Structure):
    """The structure of that name in compiled/lines.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("B", "H", "Q", "L", "D", "P", "T", "whole")),
        *((name, ctypes.c_float) for name in ("sign", "scale")),
        *((name, ctypes.c_void_p) for name in ("logits", "query", "weight", "bias", "table", "steps", "allowed")),
    )


class _Gradients(ctypes.Structure):
    """The structure of that name in compiled/lines.h."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("logits", "query", "weight", "bias", "table", "steps"))


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
    scratch.argtypes, scratch.restype = [ctypes.c_int64] * 4, ctypes.c_int64
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


@dataclass(frozen=True)
class Rule:
    """How places come from logits, and what meets the table.

    ``sign``: gates are σ(sign · logit) · steps. ``newest_whole``: the newest allowed key's gate counts in full,
    whatever its step. ``scale``: factor of the query that meets the table; without effect where it is projected.
    """

    sign: float
    newest_whole: bool = False
    scale: float = 1.0


def place_logits(
    rule: Rule,
    logits: Tensor,
    query: Tensor,
    table: Tensor,
    allowed: Tensor,
    gate: tuple[Tensor, Tensor] | None = None,
    steps: Tensor | None = None,
) -> Tensor:
    """logits + t' · e[p] with p the sum of gates from the key to the newest allowed one; t' = SiLU(W t + b), or t.

    What :class:`~ctr_pe.pe.contextual.ContextualEncoding` computes, for what :func:`suits`.

    Args:
        rule: the signs and scales.
        logits: (B, H, Q, L). query: t (B, H, Q, D). table: (T, P). allowed: (B, 1, Q, L) bool.
        gate: W (P, D) and b (P), or None; P is D then.
        steps: (B, H, L), or None for ones.

    Returns:
        (B, H, Q, L); logits themselves where not allowed.

    Raises:
        ValueError: shapes that do not match.
    """
    weight, bias = gate or (None, None)
    placed: Tensor = _Place.apply(rule, logits, query, weight, bias, table, steps, allowed)  # type: ignore[no-untyped-call]
    return placed


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: Rule, *given: Tensor | None) -> Tensor:
        kept = [None if x is None else x.contiguous() for x in given]
        work = _Work(kept, rule)
        placed = torch.empty_like(kept[0])  # type: ignore[arg-type]
        forward, scratch = work.code.contextual_forward, work.scratch.data_ptr()
        forward(ctypes.byref(work.given), placed.data_ptr(), scratch, work.threads)
        ctx.save_for_backward(*kept)
        ctx.rule = rule
        return placed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, query, weight, bias, table, steps, _ = ctx.saved_tensors
        work, grad = _Work(ctx.saved_tensors, ctx.rule), grad.contiguous()
        parts = [torch.empty_like(logits), torch.empty_like(query)]
        rows = table.new_empty(work.given.T, work.given.P)
        shared = [None if x is None else x.new_empty(work.threads, *x.shape) for x in (weight, bias, rows)]
        of_steps = None if steps is None else torch.zeros_like(steps)
        out = _Gradients(*(None if x is None else x.data_ptr() for x in (*parts, *shared, of_steps)))
        backward, scratch = work.code.contextual_backward, work.scratch.data_ptr()
        backward(ctypes.byref(work.given), grad.data_ptr(), ctypes.byref(out), scratch, work.threads)
        of_weight, of_bias, of_rows = (None if x is None else x.sum(0) for x in shared)
        of_table = nn.functional.pad(of_rows, (0, 0, 0, len(table) - len(of_rows)))  # type: ignore[arg-type]
        return None, *parts, of_weight, of_bias, of_table, of_steps, None


class _Work:
    """What the code takes, room for it to work in, and the number of its threads."""

    def __init__(self, given: Sequence[Tensor | None], rule: Rule) -> None:
        code = library()
        assert code is not None
        logits, query, weight, bias, table, steps, allowed = given
        assert logits is not None
        assert query is not None
        assert table is not None
        B, H, Q, L = logits.shape
        D, (T, P) = query.shape[-1], table.shape
        wanted = {
            "query": (query, (B, H, Q, D if weight is not None else P)),
            "weight": (weight, (P, D)),
            "bias": (bias, (P,)),
            "steps": (steps, (B, H, L)),
            "allowed": (allowed, (B, 1, Q, L)),
        }
        if allowed is not None and allowed.dtype != torch.bool:
            raise ValueError(f"allowed must be bool, got {allowed.dtype}")
        for name, (x, shape) in wanted.items():
            if x is not None and tuple(x.shape) != shape:
                raise ValueError(f"{name} {tuple(x.shape)} does not match {shape}, which the logits and table ask for")
        reached = min(T, L + 1)  # a place counts keys at most
        pointers = (None if x is None else x.data_ptr() for x in given)
        self.code, self.threads = code, torch.get_num_threads()
        self.given = _Input(B, H, Q, L, D, P, reached, rule.newest_whole, rule.sign, rule.scale, *pointers)
        self.scratch = logits.new_empty(self.threads, code.contextual_scratch(L, D, P, reached))
