"""Cross-entropy of a softmax over all items whose logits are products, without all logits in memory.

The logits of a chunk of rows are made, turned into their own gradient where they are, and multiplied by the items and
the states at once: three products in all, as of the plain operator, and memory for one chunk. The gradients of states
and items are kept from the forward pass, for the loss is a mean and the gradient of it a factor.

P rows, V items, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOGITS = {"cpu": 2**22}
"""Of a chunk, by device: on a CPU about what its cache holds."""
MORE = 2**27
FEWEST = 32
"""Rows of a chunk: products of fewer take longer."""


def chunk_rows(items: int, device: torch.device) -> int:
    """Rows whose logits over so many items are computed together."""
    return max(FEWEST, LOGITS.get(device.type, MORE) // max(items, 1))


def linear_cross_entropy(states: Tensor, items: Tensor, answers: Tensor, rows: int | None = None) -> Tensor:
    """The mean over rows of -log softmax(items · state)[answer], in float32 at least; 0 without rows.

    Args:
        states: (P, D). items: (V, D). answers: (P,) int64, the row of the right item in ``items``.
        rows: of a chunk, by default by the number of items and the device.

    Returns:
        A scalar. Its gradient cannot be differentiated again.
    """
    dtype = torch.promote_types(states.dtype, torch.float32)
    rows = rows or chunk_rows(len(items), states.device)
    with torch.autocast(states.device.type, enabled=False):
        loss: Tensor = _LinearCrossEntropy.apply(states.to(dtype), items.to(dtype), answers, rows)  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, items: Tensor, answers: Tensor, rows: int) -> Tensor:
        wants = ctx.needs_input_grad[:2]
        of_states = torch.empty_like(states) if wants[0] else None
        of_items = torch.zeros_like(items) if wants[1] else None
        total = states.new_zeros((), dtype=torch.float64 if states.is_cpu else states.dtype)
        buffer = states.new_empty(min(rows, len(states)), len(items))
        for start in range(0, len(states), rows):
            some, right = states[start : start + rows], answers[start : start + rows].unsqueeze(1)
            logits = torch.mm(some, items.T, out=buffer[: len(some)])
            torch.log_softmax(logits, 1, out=logits)
            total -= logits.gather(1, right).sum()
            if not any(wants):
                continue
            logits.exp_().scatter_add_(1, right, logits.new_full((len(some), 1), -1.0))
            if of_states is not None:
                torch.mm(logits, items, out=of_states[start : start + rows])
            if of_items is not None:
                of_items.addmm_(logits.T, some)
        ctx.save_for_backward(of_states, of_items)
        ctx.count = max(len(states), 1)
        mean: Tensor = (total / ctx.count).to(states.dtype)
        return mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        factor = grad / ctx.count
        return *(None if found is None else found * factor for found in ctx.saved_tensors), None, None
