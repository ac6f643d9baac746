"""The bias by time by the kernel (``csrc/time_decay.h``), which makes no tensor of pairs but the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ctr_pe.ops import native
from ctr_pe.ops.operator import operator
from ctr_pe.ops.time_decay.reference import BUCKETS


def _time_decay(
    logits: Tensor, amount: Tensor, decay: Tensor, table: Tensor, query_age: Tensor, key_age: Tensor, unit: float
) -> Tensor:
    _check(logits, amount, decay, query_age, key_age)
    if table.shape != (BUCKETS, logits.shape[1]):
        raise ValueError(f"table {tuple(table.shape)} must be ({BUCKETS}, {logits.shape[1]})")
    logits, *given = (x.contiguous() for x in (logits, amount, decay, table.T, query_age, key_age))
    out = torch.empty_like(logits)
    native.call("time_decay", *logits.shape, unit, logits, *given, out)
    return out


def _time_decay_fake(logits: Tensor, *others: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _backward(
    grad: Tensor, amount: Tensor, decay: Tensor, query_age: Tensor, key_age: Tensor, unit: float
) -> tuple[Tensor, Tensor, Tensor]:
    _check(grad, amount, decay, query_age, key_age)
    grad, *given = (x.contiguous() for x in (grad, amount, decay, query_age, key_age))
    of_amount, of_decay = torch.empty_like(amount), torch.empty_like(decay)
    of_table = amount.new_empty(len(amount), BUCKETS)
    native.call("time_decay_backward", *grad.shape, unit, grad, *given, of_amount, of_decay, of_table)
    return of_amount, of_decay, of_table


def _backward_fake(grad: Tensor, amount: Tensor, decay: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(amount), torch.empty_like(decay), amount.new_empty(len(amount), BUCKETS)


def _check(logits: Tensor, amount: Tensor, decay: Tensor, query_age: Tensor, key_age: Tensor) -> None:
    B, H, Q, L = logits.shape
    given = amount.shape, decay.shape, query_age.shape, key_age.shape
    if given != ((H,), (H,), (B, 1, Q), (B, 1, L)) or query_age.dtype != torch.int64 or key_age.dtype != torch.int64:
        raise ValueError(
            f"logits {tuple(logits.shape)} do not match {[tuple(shape) for shape in given]} or ages not int64"
        )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, amount, decay, _, query_age, key_age, ctx.unit = inputs
    ctx.save_for_backward(amount, decay, query_age, key_age)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    of_amount, of_decay, of_table = _time_decay_backward(grad, *ctx.saved_tensors, ctx.unit)
    return grad, of_amount, of_decay, of_table.T, None, None, None


time_decay = operator(
    "time_decay(Tensor logits, Tensor amount, Tensor decay, Tensor table, Tensor query_age, Tensor key_age, float unit)"
    " -> Tensor",
    _time_decay,
    _time_decay_fake,
    _gradients,
    _setup,
)
_time_decay_backward = operator(
    "time_decay_backward(Tensor grad, Tensor amount, Tensor decay, Tensor query_age, Tensor key_age, float unit)"
    " -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
