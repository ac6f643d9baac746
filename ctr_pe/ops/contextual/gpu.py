"""Contextual positions by Triton: attention in one launch forwards and two backwards, or the bias alone likewise.

B batch, H heads, Q queries, L keys, D width of the queries, P that of the table, T its rows, R those that positions can
reach.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ctr_pe.ops import accelerator
from ctr_pe.ops.contextual.shapes import checked
from ctr_pe.ops.dropout import factor_of, least
from ctr_pe.ops.operator import operator

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_LEARNED = "Tensor? weight, Tensor? bias, Tensor table, Tensor? gate_weights, Tensor allowed"
_BIAS = f"Tensor logits, Tensor query, {_LEARNED}, Tensor? gate_logits, bool among_items, float sign, float scale"
_ATTENTION = (
    f"Tensor query, Tensor key, Tensor value, {_LEARNED}, Tensor? seed,"
    " float sign, float scale, float product, float rate"
)
# The kernels are imported where they run: Triton need not be installed.


def _attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    from ctr_pe.ops.triton.attention import attend

    *tensors, sign, scale, product, rate = arguments
    B, H, Q, L, D, P, T = _attention_sizes(None, None, *arguments)
    out, made = _attention_fake(*arguments)
    R, programs = min(T, L + 1), min(B * H * accelerator.tiles(Q), accelerator.FORWARDS)
    given = *tensors, out, made, accelerator.scratch(out, programs, accelerator.QUERIES, R + 1)
    numbers = sign, scale, product, factor_of(rate), least(rate), B, H, Q, L, D, P, R
    accelerator.launch(attend, programs, *given, *numbers, **_attention_constants(D, P, tensors))
    return out, made


def _attention_fake(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    B, Q, H, _ = query.shape
    return query.new_empty(query.shape), query.new_empty(B, H, Q, 2, dtype=torch.float32)


def _attention_backward(into: list[Tensor | None], grad: Tensor, out: Tensor, made: Tensor, *arguments: Any) -> None:
    from ctr_pe.ops.triton.attention import attend_backward

    *tensors, sign, scale, product, rate = arguments
    B, H, Q, L, D, P, T = _attention_sizes(grad, made, *arguments)
    *of_vectors, of_weight, of_bias, of_table, of_gate_weights = into
    R, programs = min(T, L + 1), min(B * H, accelerator.BACKWARDS)
    sums = _sums(grad, programs, of_table, of_weight, of_bias)
    work = accelerator.scratch(out, programs, 2 * accelerator.QUERIES * (R + 1) + L * (2 * D + 1))
    given = grad, out, made, *tensors, *of_vectors, of_gate_weights, work, sums
    numbers = sign, scale, product, factor_of(rate), least(rate), B, H, Q, L, D, P, R, T
    accelerator.launch(attend_backward, programs, *given, *numbers, **_attention_constants(D, P, tensors))
    _total(sums, of_table, of_weight, of_bias)


def _attention_sizes(grad: Tensor | None, made: Tensor | None, *arguments: Any) -> tuple[int, ...]:
    query, key, value, *learned, seed = arguments[:9]
    (B, Q, H, D), L = query.shape, key.shape[1]
    others = {
        "key": (key, (B, L, H, D)),
        "value": (value, (B, L, H, D)),
        "seed": (seed, (1,)),
        "grad": (grad, (B, Q, H, D)),
        "made": (made, (B, H, Q, 2)),
    }
    return checked(FLOATS, (B, H, Q, L, D), others, *learned)


def _attention_constants(D: int, P: int, tensors: list[Any]) -> dict[str, Any]:
    query, _, _, weight, _, _, gate_weights, _, seed = tensors
    return {**_constants(D, P, query, weight, gate_weights), "DROPS": seed is not None}


def _bias(*arguments: Any) -> Tensor:
    from ctr_pe.ops.triton.bias import add_bias

    logits, query, weight, bias, table, gate_weights, allowed, gate_logits, among_items, sign, scale = arguments
    B, H, Q, L, D, P, T = _bias_sizes(None, *arguments)
    out, lines = torch.empty_like(logits), B * H * Q
    R, programs = min(T, L + 1), min(accelerator.tiles(lines), accelerator.FORWARDS)
    gating = logits if gate_logits is None else gate_logits
    scores = accelerator.scratch(out, programs, accelerator.QUERIES, R + 1)
    given = logits, query, weight, bias, table, gate_weights, allowed, gating, out, scores
    constants = {**_constants(D, P, query, weight, gate_weights), "AMONG": among_items}
    accelerator.launch(add_bias, programs, *given, sign, scale, lines, H, Q, L, D, P, R, **constants)
    return out


def _bias_backward(into: list[Tensor | None], grad: Tensor, *arguments: Any) -> None:
    from ctr_pe.ops.triton.bias import add_bias_backward

    logits, query, weight, bias, table, gate_weights, allowed, gate_logits, among_items, sign, scale = arguments
    B, H, Q, L, D, P, T = _bias_sizes(grad, *arguments)
    of_logits, of_query, of_weight, of_bias, of_table, of_gate_weights, of_gate_logits = into
    lines, separate = B * H * Q, gate_logits is not None
    gating, of_gating = (gate_logits, of_gate_logits) if separate else (logits, of_logits)
    R, programs = min(T, L + 1), min(accelerator.tiles(lines), accelerator.BACKWARDS)
    sums = _sums(grad, programs, of_table, of_weight, of_bias)
    work, of_lines = accelerator.scratch(grad, programs, 2, accelerator.QUERIES, R + 1), of_gate_weights
    if gate_weights is not None and Q > 1:  # one per line, summed over the queries below
        of_lines = accelerator.scratch(grad, B, H, Q, L)
    given = grad, query, weight, bias, table, gate_weights, allowed, gating, of_query, of_lines, of_gating, work, sums
    constants = {**_constants(D, P, query, weight, gate_weights), "AMONG": among_items, "SEPARATE": separate}
    accelerator.launch(add_bias_backward, programs, *given, sign, scale, lines, H, Q, L, D, P, R, T, **constants)
    _total(sums, of_table, of_weight, of_bias)
    if of_gate_logits is not None and of_logits is not None:
        of_logits.copy_(grad)
    if of_lines is not of_gate_weights and of_lines is not None and of_gate_weights is not None:
        of_gate_weights.copy_(of_lines.sum(2))


def _bias_sizes(grad: Tensor | None, *arguments: Any) -> tuple[int, ...]:
    logits, query, *learned, gate_logits = arguments[:8]
    (B, H, Q, L), D = logits.shape, query.shape[-1]
    others = {
        "logits": (logits, (B, H, Q, L)),
        "query": (query, (B, H, Q, D)),
        "gate_logits": (gate_logits, (B, H, Q, L)),
        "grad": (grad, (B, H, Q, L)),
    }
    return checked(FLOATS, (B, H, Q, L, D), others, *learned)


def _constants(D: int, P: int, query: Tensor, weight: Tensor | None, gate_weights: Tensor | None) -> dict[str, Any]:
    """What a kernel is compiled for."""
    sizes = {"QUERIES": accelerator.QUERIES, "KEYS": accelerator.KEYS, "ROWS": accelerator.ROWS}
    widths = {"WIDTH": accelerator.padded(D), "PLACES": accelerator.padded(P)}
    given = {
        "GATED": weight is not None,
        "STEPPED": gate_weights is not None,
        "PRECISION": accelerator.precision(query),
    }
    return {**sizes, **widths, **given}


def _sums(like: Tensor, programs: int, *parameters: Tensor | None) -> Tensor:
    """Where each program adds up its gradients of table, W and b."""
    return accelerator.scratch(like, programs, sum(x.numel() for x in parameters if x is not None))


def _total(sums: Tensor, of_table: Tensor | None, of_weight: Tensor | None, of_bias: Tensor | None) -> None:
    from ctr_pe.ops.triton.tiles import total

    programs, size = sums.shape
    parts = [0 if x is None else x.numel() for x in (of_table, of_weight)]
    given = sums, of_table, of_weight, of_bias, programs, *parts, size
    accelerator.launch(total, -(-size // accelerator.ENTRIES), *given, ENTRIES=accelerator.ENTRIES)


contextual_bias = operator(
    f"contextual_bias_gpu({_BIAS}) -> Tensor",
    _bias,
    lambda logits, *others: logits.new_empty(logits.shape),
    _bias_backward,
    learned="logits query weight bias table gate_weights gate_logits",
    devices=accelerator.DEVICES,
)
contextual_attention = operator(
    f"contextual_attention_gpu({_ATTENTION}) -> (Tensor, Tensor)",
    _attention,
    _attention_fake,
    _attention_backward,
    learned="query key value weight bias table gate_weights",
    devices=accelerator.DEVICES,
    first_made=0,
)
