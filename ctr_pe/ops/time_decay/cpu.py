"""The bias by time by the kernel (``csrc/time_decay.h``), which makes no other tensor of pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from ctr_pe.ops import native
from ctr_pe.ops.operator import operator
from ctr_pe.ops.time_decay.reference import BUCKETS


def _time_decay(
    amount: Tensor, decay: Tensor, table: Tensor, query_age: Tensor, key_age: Tensor, unit: float
) -> Tensor:
    out = _fake(amount, decay, table, query_age, key_age)
    _check(out, amount, decay, table, query_age, key_age)
    native.call("time_decay", *out.shape, unit, amount, decay, table.T.contiguous(), query_age, key_age, out)
    return out


def _fake(amount: Tensor, decay: Tensor, table: Tensor, query_age: Tensor, key_age: Tensor, *_: float) -> Tensor:
    (B, _, L), Q, H = key_age.shape, query_age.shape[-1], len(amount)
    return amount.new_empty(B, H, Q, L)


def _time_decay_backward(
    into: list[Tensor],
    grad: Tensor,
    amount: Tensor,
    decay: Tensor,
    table: Tensor,
    query_age: Tensor,
    key_age: Tensor,
    unit: float,
) -> None:
    _check(grad, amount, decay, table, query_age, key_age)
    native.call("time_decay_backward", *grad.shape, unit, grad, amount, decay, query_age, key_age, *into)


def _check(pairs: Tensor, *given: Tensor) -> None:
    B, H, Q, L = pairs.shape
    shapes, ages = [tuple(x.shape) for x in given], given[3:]
    if shapes != [(H,), (H,), (BUCKETS, H), (B, 1, Q), (B, 1, L)] or any(x.dtype != torch.int64 for x in ages):
        raise ValueError(f"pairs {(B, H, Q, L)} do not match {shapes}, or ages are not int64")


time_decay = operator(
    "time_decay(Tensor amount, Tensor decay, Tensor table, Tensor query_age, Tensor key_age, float unit) -> Tensor",
    _time_decay,
    _fake,
    _time_decay_backward,
    learned="amount decay table",
)
