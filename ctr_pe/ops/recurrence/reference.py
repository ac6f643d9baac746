"""Recurrences in torch, one call or a few for each step of all rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

Step = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""of_item (n, k S), of_state (n, k S), state (n, S), weight (n, 1) -> state (n, S); with another axis for K targets.
Each number of a state comes from those of the same index."""


def recur(
    step: Step, of_items: Tensor, weights: Tensor, sizes: list[int], weight_hh: Tensor, bias_hh: Tensor
) -> Tensor:
    """Item terms W x (N, k S) and attention (N, 1), ordered by step -> states (N, S) in this order.

    For K targets of one history: item terms (N, K or 1, k S) and attention (N, K, 1) -> states (N, K, S).
    """
    dtype = weight_hh.dtype  # states stay in it under autocast: rounding would add up over the steps
    of_items, weights = of_items.to(dtype), weights.to(dtype)
    if not sizes:
        return of_items[..., : weight_hh.shape[1]] * weights  # no item, but the gradient's graph
    state = of_items.new_zeros(sizes[0], *weights.shape[1:-1], weight_hh.shape[1])
    states = []
    for of_item, weight, rows in zip(torch.split(of_items, sizes), torch.split(weights, sizes), sizes, strict=True):
        state = state[:rows]
        state = step(of_item, linear(state, weight_hh, bias_hh).to(dtype), state, weight)
        states.append(state)
    return torch.cat(states)


def carry_back(grad: Tensor, keep: Tensor, slope: Tensor, weight_hh: Tensor, sizes: list[int]) -> Tensor:
    """The gradients g of all states, from those that reach each of them by other ways than the next state, ``grad``:

    g_t = grad_t + keep_(t+1) ⊙ g_(t+1) + (slope_(t+1) ⊙ g_(t+1)) U.

    Args:
        grad: (..., S). All are ordered by step.
        keep: (..., S), the derivative of a state by the one before, where U h is held.
        slope: (..., k S), that by U h, of the number of the same index.
        weight_hh: U (k S, S).
    """
    found = grad.clone()
    carried = found[:0]
    parts = len(weight_hh) // weight_hh.shape[1]
    for own, kept, by_state in zip(*(torch.split(x, sizes)[::-1] for x in (found, keep, slope)), strict=True):
        own[: len(carried)] += carried
        own_slope = by_state.unflatten(-1, (parts, -1)) * own.unsqueeze(-2)
        carried = torch.addcmul(own_slope.flatten(-2) @ weight_hh, own, kept)
    return found


def attention_step(weight_hh: Tensor) -> Step:
    """AGRU's step if ``weight_hh`` has 2 S rows, AUGRU's if it has 3 S."""
    return agru if len(weight_hh) == 2 * weight_hh.shape[1] else augru


def gru(of_item: Tensor, of_state: Tensor, state: Tensor, weight: Tensor) -> Tensor:
    keep, new = _gate_and_new(of_item, of_state, reset_first=True)
    return torch.lerp(new, state, keep)


def augru(of_item: Tensor, of_state: Tensor, state: Tensor, weight: Tensor) -> Tensor:
    update, new = _gate_and_new(of_item, of_state)
    return torch.lerp(state, new, weight * update)


def agru(of_item: Tensor, of_state: Tensor, state: Tensor, weight: Tensor) -> Tensor:
    (reset, new), (of_reset, of_new) = of_item.chunk(2, -1), of_state.chunk(2, -1)
    new = torch.addcmul(new, torch.sigmoid(reset + of_reset), of_new).tanh()
    return torch.lerp(state, new, weight)


def _gate_and_new(of_item: Tensor, of_state: Tensor, reset_first: bool = False) -> tuple[Tensor, Tensor]:
    widths = [2 * of_item.shape[-1] // 3, of_item.shape[-1] // 3]
    (gates, new), (of_gates, of_new) = torch.split(of_item, widths, -1), torch.split(of_state, widths, -1)
    first, second = torch.sigmoid(gates + of_gates).chunk(2, -1)
    gate, reset = (second, first) if reset_first else (first, second)
    return gate, torch.addcmul(new, reset, of_new).tanh()
