"""GRUs whose steps are gated by attention, over rows of different lengths.

On an accelerator, what does not follow from the step before is computed for all steps at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from ctr_pe.ops import accelerator, native
from ctr_pe.ops.recurrence import gpu, reference
from ctr_pe.ops.recurrence.reference import Step, attention_step, recur


class Recurrence(torch.autograd.Function):
    """``reference.recur`` by one kernel each way where Triton has it, else in torch, a few calls per step."""

    @staticmethod
    def forward(
        ctx: Any,
        step: Step,
        of_items: Tensor,
        weights: Tensor,
        sizes: list[int],
        weight_hh: Tensor,
        bias_hh: Tensor,
    ) -> Tensor:
        with torch.autocast(of_items.device.type, enabled=False):
            if gpu.takes(of_items, weight_hh):
                states = gpu.recur(of_items, weights, sizes, weight_hh, bias_hh)
            else:
                states = reference.recur(step, of_items, weights, sizes, weight_hh, bias_hh)
        ctx.save_for_backward(of_items, weights, weight_hh, bias_hh, states)
        ctx.step, ctx.sizes = step, sizes
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """A state depends on the one before number by number, but for U h: derivatives by this are taken of all steps
        together, and only the gradients of the states follow from each other."""
        of_items, weights, weight_hh, bias_hh, states = ctx.saved_tensors
        own = torch.split(states, ctx.sizes)
        before = torch.cat([torch.zeros_like(own[0]), *(x[:rows] for x, rows in zip(own, ctx.sizes[1:], strict=False))])
        given = (of_items, linear(before, weight_hh, bias_hh), before, weights)
        of_items, of_states, before, weights = (x.detach().requires_grad_() for x in given)
        with torch.enable_grad():
            after = ctx.step(of_items, of_states, before, weights)
        keep, slope = torch.autograd.grad(after, (before, of_states), torch.ones_like(after), retain_graph=True)
        back = gpu.carry_back if gpu.takes(of_items, weight_hh) else reference.carry_back
        found = back(grad, keep, slope, weight_hh, ctx.sizes)
        by_item, by_weight, by_state = torch.autograd.grad(after, (of_items, weights, of_states), found)
        by_state, before = by_state.flatten(0, -2), before.detach().flatten(0, -2)
        return None, by_item, by_weight, None, by_state.T @ before, by_state.sum(0)


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
