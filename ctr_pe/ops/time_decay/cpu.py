"""The bias by time by the kernel (``csrc/time_decay.h``), which makes no other tensor of pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ctr_pe.ops import native
from ctr_pe.ops.operator import operator
from ctr_pe.ops.time_decay.reference import BUCKETS


def _time_decay(*arguments: Any) -> Tensor:
    *given, unit = arguments
    out = _fake(*arguments)
    _check(out, *given)
    given[2] = given[2].T.contiguous()
    native.call("time_decay", *out.shape, unit, *given, out)
    return out


def _fake(amount: Tensor, decay: Tensor, table: Tensor, query_age: Tensor, key_age: Tensor, *_: float) -> Tensor:
    return amount.new_empty(len(key_age), len(amount), query_age.shape[-1], key_age.shape[-1])


def _time_decay_backward(into: list[Tensor], grad: Tensor, *arguments: Any) -> None:
    *given, unit = arguments
    _check(grad, *given)
    del given[2]  # the gradients do not depend on the table
    native.call("time_decay_backward", *grad.shape, unit, grad, *given, *into)


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
