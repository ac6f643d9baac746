"""GRUs whose steps are gated by attention, over rows of different lengths."""

from __future__ import annotations

from torch import Tensor

from ctr_pe.ops import accelerator, native
from ctr_pe.ops.recurrence.gradients import Recurrence
from ctr_pe.ops.recurrence.reference import attention_step, recur


def attention_gru(of_items: Tensor, weights: Tensor, sizes: list[int], weight_hh: Tensor, bias_hh: Tensor) -> Tensor:
    """h' = (1 - a u) ⊙ h + a u ⊙ c with u, r = σ(W x + U h), c = tanh(W x + r ⊙ U h); the first state is zero.

    Entries are ordered by step, within a step by length of row, longest first.

    Args:
        of_items: W x and its bias (N, 3 S): u, r, c; or (N, 2 S): r and c, where u is 1. For K targets of one history
            (N, K or 1, ...).
        weights: a (N, 1), for K targets (N, K, 1).
        sizes: rows of each step.
        weight_hh, bias_hh: U (3 S or 2 S, S) and its bias.

    Returns:
        The states (N, S) in this order, or (N, K, S), of the type of ``weight_hh``.
    """
    step = attention_step(weight_hh)
    if not sizes or native.traced() or (of_items.is_cpu and not accelerator.INTERPRETED):
        return recur(step, of_items, weights, sizes, weight_hh, bias_hh)
    given = (of_items.to(weight_hh.dtype), weights.to(weight_hh.dtype))
    found: Tensor = Recurrence.apply(step, *given, sizes, weight_hh, bias_hh)  # type: ignore[no-untyped-call]
    return found
