"""Contextual positions by the kernel (``csrc/contextual.h``), in one pass over the pairs each way; torch takes two
dozen. With the products of queries and keys and the pooling of values it is all of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ctr_pe.ops import native
from ctr_pe.ops.contextual.shapes import checked
from ctr_pe.ops.operator import operator

FLOATS = (torch.float32,)
_LEARNED = "Tensor? weight, Tensor? bias, Tensor table, Tensor? gate_weights, Tensor allowed"
_BIAS = f"Tensor logits, Tensor query, {_LEARNED}, bool among_items, float sign, float scale"
_ATTENTION = (
    f"Tensor query, Tensor key, Tensor value, {_LEARNED}, Tensor? kept,"
    " float sign, float scale, float product, float factor"
)
# The arguments of these four are those of their schemas, which C takes in the same order, options first.


def _bias(*arguments: Any) -> Tensor:
    out = torch.empty_like(arguments[0])
    native.call("contextual_bias", *_bias_given(*arguments), out)
    return out


def _bias_backward(into: list[Tensor | None], grad: Tensor, *arguments: Any) -> None:
    native.call("contextual_bias_backward", *_bias_given(*arguments, grad=grad), grad, *into)


def _bias_given(*arguments: Any, grad: Tensor | None = None) -> tuple[Any, ...]:
    logits, query, *learned = arguments[:7]
    B, H, Q, L = logits.shape
    sizes = B, H, Q, L, query.shape[-1]
    of_pairs = {"query": (query, (B, H, Q, query.shape[-1])), "grad": (grad, (B, H, Q, L))}
    return *checked(FLOATS, sizes, of_pairs, *learned), *arguments[7:], *arguments[:7]


def _attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    given = _attention_given(None, None, *arguments)
    out, norms = _attention_fake(*arguments)
    native.call("contextual_attention", *given, norms, out)
    return out, norms


def _attention_fake(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    B, Q, H, _ = query.shape
    return query.new_empty(query.shape), query.new_empty(B, H, Q, 2)


def _attention_backward(into: list[Tensor | None], grad: Tensor, norms: Tensor, *arguments: Any) -> None:
    given = _attention_given(grad, norms, *arguments)
    native.call("contextual_attention_backward", *given, norms, grad, *into)


def _attention_given(grad: Tensor | None, norms: Tensor | None, *arguments: Any) -> tuple[Any, ...]:
    query, key, value, *learned, kept = arguments[:9]
    (B, Q, H, D), L = query.shape, key.shape[1]
    of_pairs = {
        "key": (key, (B, L, H, D)),
        "value": (value, (B, L, H, D)),
        "kept": (kept, (B, H, Q, L)),
        "grad": (grad, (B, Q, H, D)),
        "norms": (norms, (B, H, Q, 2)),
    }
    return *checked(FLOATS, (B, H, Q, L, D), of_pairs, *learned), *arguments[9:], *arguments[:9]


contextual_bias = operator(
    f"contextual_bias({_BIAS}) -> Tensor",
    _bias,
    lambda logits, *others: logits.new_empty(logits.shape),
    _bias_backward,
    learned="logits query weight bias table gate_weights",
)
contextual_attention = operator(
    f"contextual_attention({_ATTENTION}) -> (Tensor, Tensor)",
    _attention,
    _attention_fake,
    _attention_backward,
    learned="query key value weight bias table gate_weights",
)
