"""Contextual positions by the kernel (``csrc/contextual.h``), in one pass over the pairs each way; torch takes two
dozen. With the products of queries and keys and the pooling of values it is all of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ctr_pe.ops import native
from ctr_pe.ops.operator import operator

# The arguments of these four are those of their schemas, below.


def _bias(*arguments: Any) -> Tensor:
    logits, query, table, allowed, weight, bias, steps, sign, scale, among_items = arguments
    (B, H, Q, L), D, (rows, P) = logits.shape, query.shape[-1], table.shape
    _check((B, H, Q, L, D), table, allowed, weight, bias, steps, query=(query, (B, H, Q, D)))
    logits, query, *given = _contiguous(logits, query, weight, bias, table, steps, allowed)
    out = torch.empty_like(logits)
    native.call("contextual_bias", B, H, Q, L, D, P, rows, among_items, sign, scale, logits, query, *given, out)
    return out


def _bias_backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    logits, query, table, allowed, weight, bias, steps, sign, scale, among_items = arguments
    (B, H, Q, L), D, (rows, P) = logits.shape, query.shape[-1], table.shape
    _check((B, H, Q, L, D), table, allowed, weight, bias, steps, query=(query, (B, H, Q, D)), grad=(grad, logits.shape))
    given = _contiguous(logits, query, weight, bias, table, steps, allowed, grad)
    out = _like(logits, query, table, weight, bias, steps)
    of_logits, of_query, of_table, *others = out
    into = of_logits, of_query, *_where(others[:2], weight), of_table, *_where(others[2:], steps)
    native.call("contextual_bias_backward", B, H, Q, L, D, P, rows, among_items, sign, scale, *given, *into)
    return out


def _attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    query, key, value, table, allowed, weight, bias, steps, kept, *options = arguments
    (B, Q, H, D), L, (rows, P) = query.shape, key.shape[1], table.shape
    _check((B, H, Q, L, D), table, allowed, weight, bias, steps, **_vectors(query, key, value, kept))
    query, *given = _contiguous(query, key, value, weight, bias, table, steps, allowed, kept)
    out, norms = torch.empty_like(query), query.new_empty(B, H, Q, 2)
    native.call("contextual_attention", B, H, Q, L, D, P, rows, *options, query, *given, norms, out)
    return out, norms


def _attention_backward(grad: Tensor, norms: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    query, key, value, table, allowed, weight, bias, steps, kept, *options = arguments
    (B, Q, H, D), L, (rows, P) = query.shape, key.shape[1], table.shape
    of_output = {"grad": (grad, (B, Q, H, D)), "norms": (norms, (B, H, Q, 2))}
    _check((B, H, Q, L, D), table, allowed, weight, bias, steps, **_vectors(query, key, value, kept), **of_output)
    given = _contiguous(query, key, value, weight, bias, table, steps, allowed, kept, norms, grad)
    out = _like(query, key, value, table, weight, bias, steps)
    *of_vectors, of_table, of_weight, of_bias, of_steps = out
    into = *of_vectors, *_where([of_weight, of_bias], weight), of_table, *_where([of_steps], steps)
    native.call("contextual_attention_backward", B, H, Q, L, D, P, rows, *options, *given, *into)
    return out


def _vectors(query: Tensor, key: Tensor, value: Tensor, kept: Tensor | None) -> dict[str, Any]:
    (B, Q, H, D), L = query.shape, key.shape[1]
    return {"key": (key, (B, L, H, D)), "value": (value, (B, L, H, D)), "kept": (kept, (B, H, Q, L))}


def _check(
    sizes: tuple[int, ...],
    table: Tensor,
    allowed: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    steps: Tensor | None,
    **others: tuple[Tensor | None, tuple[int, ...]],
) -> None:
    (B, H, Q, L, D), P = sizes, table.shape[-1]
    given = {
        "table": (table if weight is None else None, (len(table), D)),
        "weight": (weight, (P, D)),
        "bias": (bias, (P,)),
        "steps": (steps, (B, H, L)),
        "allowed": (allowed, (B, 1, Q, L)),
        **others,
    }
    for name, (x, shape) in given.items():
        dtype = {"allowed": torch.bool, "kept": torch.int16}.get(name, torch.float32)
        if x is not None and (x.shape != shape or x.dtype != dtype):
            raise ValueError(f"{name} {tuple(x.shape)} {x.dtype} does not match the others: {tuple(shape)} {dtype}")
    if len(table) == 0:
        raise ValueError("a table without rows")


def _contiguous(*tensors: Tensor | None) -> list[Any]:
    return [None if x is None else x.contiguous() for x in tensors]


def _like(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Memory for the gradients; an empty tensor for that of None."""
    (first, *_) = tensors
    assert first is not None
    return tuple(first.new_empty(0 if x is None else x.shape) for x in tensors)


def _where(gradients: list[Tensor], given: Tensor | None) -> list[Tensor | None]:
    return [None if given is None else gradient for gradient in gradients]


def _setup_bias(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.options = inputs[7:]


def _bias_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    found = _contextual_bias_backward(grad, *ctx.saved_tensors, *ctx.options)
    of_logits, of_query, of_table, *others = found
    weight, steps = ctx.saved_tensors[4], ctx.saved_tensors[6]
    return (of_logits, of_query, of_table, None, *_where(others[:2], weight), *_where(others[2:], steps),
            None, None, None)  # fmt: skip


def _setup_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], *inputs[:9])
    ctx.options = inputs[9:]


def _attention_gradients(ctx: Any, grad: Tensor, of_norms: Tensor | None) -> tuple[Tensor | None, ...]:
    found = _contextual_attention_backward(grad, *ctx.saved_tensors, *ctx.options)
    *of_vectors, of_table, of_weight, of_bias, of_steps = found
    weight, steps = ctx.saved_tensors[6], ctx.saved_tensors[8]
    return (*of_vectors, of_table, None, *_where([of_weight, of_bias], weight), *_where([of_steps], steps),
            None, None, None, None, None)  # fmt: skip


_LEARNED = "Tensor table, Tensor allowed, Tensor? weight, Tensor? bias, Tensor? steps"
_BIAS = f"Tensor logits, Tensor query, {_LEARNED}, float sign, float scale, bool among_items"
_ATTENTION = (
    f"Tensor query, Tensor key, Tensor value, {_LEARNED}, Tensor? kept,"
    " float sign, float scale, float product, float factor"
)
contextual_bias = operator(
    f"contextual_bias({_BIAS}) -> Tensor",
    _bias,
    lambda logits, *others: logits.new_empty(logits.shape),
    _bias_gradients,
    _setup_bias,
)
_contextual_bias_backward = operator(
    f"contextual_bias_backward(Tensor grad, {_BIAS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _bias_backward,
    lambda grad, logits, query, table, allowed, weight, bias, steps, *others: _like(
        logits, query, table, weight, bias, steps
    ),
)
contextual_attention = operator(
    f"contextual_attention({_ATTENTION}) -> (Tensor, Tensor)",
    _attention,
    lambda query, key, value, table, allowed, *others: (
        query.new_empty(query.shape),
        query.new_empty(query.shape[0], query.shape[2], query.shape[1], 2),
    ),
    _attention_gradients,
    _setup_attention,
)
_contextual_attention_backward = operator(
    f"contextual_attention_backward(Tensor grad, Tensor norms, {_ATTENTION})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _attention_backward,
    lambda grad, norms, query, key, value, table, allowed, weight, bias, steps, *others: _like(
        query, key, value, table, weight, bias, steps
    ),
)
