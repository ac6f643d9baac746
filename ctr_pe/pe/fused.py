"""Scores of contextual positions, their softmax and dropout in one pass over the pairs, compiled; with the products of
queries and keys and the pooling of values, all of self-attention.

torch needs a dozen passes over all pairs for the sums of gates, two look-ups and their gradients.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ctr_pe import compiled

_LEARNING = "logits", "query", "key", "value", "weight", "bias", "table", "steps"


class _Input(ctypes.Structure):
    """The structure of that name in compiled/contextual.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("B", "H", "Q", "L", "D", "P", "T", "whole", "softmax")),
        *((name, ctypes.c_float) for name in ("sign", "scale", "factor", "product")),
        *((name, ctypes.c_void_p) for name in (*_LEARNING, "allowed", "kept", "norms")),
    )


class _Gradients(ctypes.Structure):
    """The structure of that name in compiled/contextual.h."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in _LEARNING)


@dataclass(frozen=True)
class Rule:
    """How places come from logits, what meets the table, and what comes out.

    ``sign``: gates are σ(sign · logit) · steps. ``newest_whole``: the newest allowed key's gate counts in full,
    whatever its step. ``scale``: factor of the query that meets the table; without effect where it is projected.
    ``softmax``: over the allowed keys, of the placed logits. ``factor``: of the weights that dropout keeps.
    ``product``: in :func:`attend`, logit = product · query · key.
    """

    sign: float
    newest_whole: bool = False
    scale: float = 1.0
    softmax: bool = False
    factor: float = 1.0
    product: float = 1.0


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
    (B, H, Q, L), D = logits.shape, query.shape[-1]
    return _run(rule, (B, H, Q, L, D), logits, query, None, None, table, allowed, gate, steps, kept)


def attend(
    rule: Rule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    allowed: Tensor,
    gate: tuple[Tensor, Tensor] | None = None,
    steps: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """The values that the softmax of :func:`place` pools, whose logits are products of queries and keys.

    Args:
        rule: the signs and scales; always with the softmax.
        query: (B, Q, H, D). key, value: (B, L, H, D).
        table, allowed, gate, steps, kept: as in :func:`place`.

    Returns:
        (B, Q, H, D); zeros where nothing is allowed.

    Raises:
        ValueError: shapes or types that do not match.
        MemoryError: no memory for what a thread works in.
    """
    (B, Q, H, D), L, rule = query.shape, key.shape[1], replace(rule, softmax=True)
    return _run(rule, (B, H, Q, L, D), None, query, key, value, table, allowed, gate, steps, kept)


def _run(
    rule: Rule,
    sizes: tuple[int, ...],
    logits: Tensor | None,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    table: Tensor,
    allowed: Tensor,
    gate: tuple[Tensor, Tensor] | None,
    steps: Tensor | None,
    kept: Tensor | None,
) -> Tensor:
    weight, bias = gate or (None, None)
    (B, H, Q, L, D), P = sizes, table.shape[-1]
    width = P if weight is None else D
    for name, x, shape, dtype in (
        ("query", query, (B, H, Q, width) if key is None else (B, Q, H, width), torch.float32),
        ("key", key, (B, L, H, D), torch.float32),
        ("value", value, (B, L, H, D), torch.float32),
        ("weight", weight, (P, D), torch.float32),
        ("bias", bias, (P,), torch.float32),
        ("steps", steps, (B, H, L), torch.float32),
        ("allowed", allowed, (B, 1, Q, L), torch.bool),
        ("kept", kept, (B, H, Q, L), torch.int16),
    ):
        if x is not None and (x.shape != shape or x.dtype != dtype):
            raise ValueError(f"{name} {tuple(x.shape)} {x.dtype} does not match the others: {shape} {dtype}")
    out: Tensor = _Pass.apply(rule, logits, query, key, value, weight, bias, table, steps, allowed, kept)  # type: ignore[no-untyped-call]
    return out


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: Rule, *given: Tensor | None) -> Tensor:
        given = tuple(None if x is None else x.contiguous() for x in given)
        logits, query, key, *_, allowed, _ = given
        assert query is not None
        assert allowed is not None
        B, _, Q, _ = allowed.shape
        H = query.shape[1 if key is None else 2]
        out = torch.empty_like(query if logits is None else logits)
        norms = query.new_empty(B, H, Q, 2) if rule.softmax else None
        compiled.run("contextual_forward", _input(rule, (*given, norms)), out.data_ptr())
        ctx.save_for_backward(*given, norms)
        ctx.rule = rule
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        given, grad = ctx.saved_tensors, grad.contiguous()
        into = [None if x is None else torch.empty_like(x) for x in given[: len(_LEARNING)]]
        out = ctypes.byref(_Gradients(*map(compiled.address, into)))
        compiled.run("contextual_backward", _input(ctx.rule, given), grad.data_ptr(), out, len(given[6]))
        return None, *into, None, None


def _input(rule: Rule, given: Sequence[Tensor | None]) -> Any:
    _, query, key, _, _, _, table, _, allowed = given[:9]
    assert query is not None
    assert table is not None
    assert allowed is not None
    (B, _, Q, L), H, D, (T, P) = allowed.shape, query.shape[1 if key is None else 2], query.shape[-1], table.shape
    T = min(T, L + 1)  # a place counts keys at most
    numbers = B, H, Q, L, D, P, T, rule.newest_whole, rule.softmax
    return ctypes.byref(
        _Input(*numbers, rule.sign, rule.scale, rule.factor, rule.product, *map(compiled.address, given))
    )
