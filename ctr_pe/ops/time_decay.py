"""A bias by the time between events: a power law and a learned step function. The kernel (``csrc/time_decay.h``) makes
no other tensor of pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ctr_pe.ops import native
from ctr_pe.ops.operator import operator

BUCKETS = 32


def time_decay_bias(
    logits: Tensor, amount: Tensor, decay: Tensor, table: Tensor, query_age: Tensor, key_age: Tensor, unit: float
) -> Tensor:
    """logits + a_h (1 + Δ/u)^(-b_h) + B[bucket(Δ), h], Δ the seconds between query and key, whichever is older.

    Bucket 0 holds Δ = 0, bucket k the times from 2^(k-1) to 2^k seconds, the last one all longer times.

    Args:
        logits: (B, H, Q, L). amount, decay: a and b (H,). table: B (32, H).
        query_age: (B or 1, 1, Q) int64, seconds. key_age: (B, 1, L).
        unit: u, in seconds.

    Returns:
        (B, H, Q, L), float32 at least.

    Raises:
        ValueError: shapes or types that do not match.
    """
    logits = logits.float() if logits.itemsize < 4 else logits
    run = time_decay_cpu if native.takes(logits, amount, decay, table) else in_torch
    amount, decay, table = (x.to(logits.dtype) for x in (amount, decay, table))
    bias: Tensor = run(amount, decay, table, query_age.expand(key_age.shape[0], 1, -1), key_age, unit)
    if bias.shape != logits.shape:
        raise ValueError(f"logits {tuple(logits.shape)} do not match {tuple(bias.shape)} of heads and ages")
    return logits + bias


def in_torch(amount: Tensor, decay: Tensor, table: Tensor, query_age: Tensor, key_age: Tensor, unit: float) -> Tensor:
    seconds = (key_age.unsqueeze(-2) - query_age.unsqueeze(-1)).abs()
    power = torch.exp(-decay.view(-1, 1, 1) * torch.log1p(seconds.to(decay.dtype) / unit))
    # Half a second more, so that in float64 no logarithm is so near to a whole number that rounding reaches it.
    bucket = (torch.log2(seconds.double() + 0.5).floor() + 1).clamp(max=BUCKETS - 1).long()
    # Gathered from a table per query: the gradient of a plain look-up of all pairs takes ten times as long.
    tables = table.T.unsqueeze(1).expand(bucket.shape[0], -1, bucket.shape[2], -1)
    steps = tables.gather(-1, bucket.expand(-1, amount.shape[0], -1, -1))
    return amount.view(-1, 1, 1) * power + steps


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


time_decay_cpu = operator(
    "time_decay(Tensor amount, Tensor decay, Tensor table, Tensor query_age, Tensor key_age, float unit) -> Tensor",
    _time_decay,
    _fake,
    _time_decay_backward,
    learned="amount decay table",
)
