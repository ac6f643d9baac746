"""Scores of contextual positions, their softmax and dropout in one pass over the pairs, compiled.

torch needs a dozen passes over all pairs for the sums of gates, two look-ups and their gradients.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ctr_pe import compiled


class _Input(ctypes.Structure):
    """The structure of that name in compiled/contextual.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("B", "H", "Q", "L", "D", "P", "T", "whole", "softmax")),
        *((name, ctypes.c_float) for name in ("sign", "scale", "factor")),
        *((name, ctypes.c_void_p) for name in ("logits", "query", "weight", "bias", "table", "steps", "allowed")),
        *((name, ctypes.c_void_p) for name in ("kept", "norms")),
    )


class _Gradients(ctypes.Structure):
    """The structure of that name in compiled/contextual.h."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("logits", "query", "weight", "bias", "table", "steps"))


@dataclass(frozen=True)
class Rule:
    """How places come from logits, what meets the table, and what comes out.

    ``sign``: gates are σ(sign · logit) · steps. ``newest_whole``: the newest allowed key's gate counts in full,
    whatever its step. ``scale``: factor of the query that meets the table; without effect where it is projected.
    ``softmax``: over the allowed keys, of the placed logits. ``factor``: of the weights that dropout keeps.
    """

    sign: float
    newest_whole: bool = False
    scale: float = 1.0
    softmax: bool = False
    factor: float = 1.0


def place(
    rule: Rule,
    logits: Tensor,
    query: Tensor,
    table: Tensor,
    allowed: Tensor,
    gate: tuple[Tensor, Tensor] | None = None,
    steps: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """logits + t' · e[p] with p the sum of gates from the key to the newest allowed one; t' = SiLU(W t + b), or t.

    What :class:`~ctr_pe.pe.contextual.ContextualEncoding` computes, for what :func:`~ctr_pe.compiled.suits`.

    Args:
        rule: the signs and scales.
        logits: (B, H, Q, L). query: t (B, H, Q, D). table: (T, P). allowed: (B, 1, Q, L) bool.
        gate: W (P, D) and b (P), or None; P is D then.
        steps: (B, H, L), or None for ones.
        kept: (B, H, Q, L) int16, 1 for a weight that dropout keeps, 0 for others; None without dropout.

    Returns:
        (B, H, Q, L); logits themselves where not allowed, or zero with ``softmax``; where nothing is allowed, 1 / L.

    Raises:
        ValueError: shapes or types that do not match.
        MemoryError: no memory for what a thread works in.
    """
    weight, bias = gate or (None, None)
    (B, H, Q, L), D, P = logits.shape, query.shape[-1], table.shape[-1]
    for name, x, shape, dtype in (
        ("query", query, (B, H, Q, P if weight is None else D), torch.float32),
        ("weight", weight, (P, D), torch.float32),
        ("bias", bias, (P,), torch.float32),
        ("steps", steps, (B, H, L), torch.float32),
        ("allowed", allowed, (B, 1, Q, L), torch.bool),
        ("kept", kept, (B, H, Q, L), torch.int16),
    ):
        if x is not None and (x.shape != shape or x.dtype != dtype):
            raise ValueError(f"{name} {tuple(x.shape)} {x.dtype} does not match the logits and table: {shape} {dtype}")
    placed: Tensor = _Place.apply(rule, logits, query, weight, bias, table, steps, allowed, kept)  # type: ignore[no-untyped-call]
    return placed


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: Rule, *given: Tensor | None) -> Tensor:
        logits, *others = (None if x is None else x.contiguous() for x in given)
        assert logits is not None
        placed = torch.empty_like(logits)
        norms = logits.new_empty(*logits.shape[:-1], 2) if rule.softmax else None
        compiled.run("contextual_forward", _input(rule, (logits, *others, norms)), placed.data_ptr())
        ctx.save_for_backward(logits, *others, norms)
        ctx.rule = rule
        return placed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        given, grad = ctx.saved_tensors, grad.contiguous()
        into = [None if x is None else torch.empty_like(x) for x in given[:6]]
        out = ctypes.byref(_Gradients(*map(compiled.address, into)))
        compiled.run("contextual_backward", _input(ctx.rule, given), grad.data_ptr(), out, len(given[4]))
        return None, *into, None, None


def _input(rule: Rule, given: Sequence[Tensor | None]) -> Any:
    logits, query, _, _, table = given[:5]
    assert logits is not None
    assert query is not None
    assert table is not None
    (B, H, Q, L), D, (T, P) = logits.shape, query.shape[-1], table.shape
    T = min(T, L + 1)  # a place counts keys at most
    numbers = B, H, Q, L, D, P, T, rule.newest_whole, rule.softmax, rule.sign, rule.scale, rule.factor
    return ctypes.byref(_Input(*numbers, *map(compiled.address, given)))
