"""A bias by the time between events: a power law and a learned step function."""

from __future__ import annotations

from torch import Tensor

from ctr_pe.ops import native
from ctr_pe.ops.time_decay import cpu, reference
from ctr_pe.ops.time_decay.reference import BUCKETS


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
    run = cpu.time_decay if native.takes(logits, amount, decay, table) else reference.time_decay
    amount, decay, table = (x.to(logits.dtype) for x in (amount, decay, table))
    bias: Tensor = run(amount, decay, table, query_age.expand(key_age.shape[0], 1, -1), key_age, unit)
    if bias.shape != logits.shape:
        raise ValueError(f"logits {tuple(logits.shape)} do not match {tuple(bias.shape)} of heads and ages")
    return logits + bias


__all__ = ["BUCKETS", "time_decay_bias"]
