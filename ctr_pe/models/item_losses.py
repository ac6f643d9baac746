"""Losses of next-item models: which of V items comes after a state?

softmax           -log of the item's share in the softmax over all items, see :mod:`ctr_pe.ops.linear_cross_entropy`
sampled_softmax   as softmax over the item and M drawn ones, each for 1 / (M q) items, q its probability (logQ
                  correction, Bengio & Senécal 2008): the sum over them is in the mean that over all others
gbce              generalised binary cross-entropy (Petrov & Macdonald 2023, gSASRec, equations 8 to 10): with k drawn
                  of V - 1 others and α = k / (V - 1), the item counts log σ^β, β = α (t (1 - 1 / α) + 1 / α)
binary            the same with β = 1, SASRec's own with one drawn item

P states, V items, M drawn items, k of each state, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ctr_pe.ops.linear_cross_entropy import linear_cross_entropy

ItemLoss = Literal["softmax", "sampled_softmax", "gbce", "binary"]
Negatives = Literal["uniform", "popularity"]
Vectors = Callable[[Tensor], Tensor]
"""Numbers of items, any shape, 0 … V - 1 -> their vectors (..., D)."""


def sampling_weights(negatives: Negatives, frequency: Tensor) -> Tensor | None:
    """(V,) probabilities of drawn items: in proportion to how often they are answers, and once more; None for all
    alike."""
    if negatives == "uniform":
        return None
    counts = frequency.double() + 1
    return counts / counts.sum()


def softmax_loss(states: Tensor, items: Tensor, answers: Tensor) -> Tensor:
    """states (P, D), items (V, D), answers (P,) -> the mean loss."""
    return linear_cross_entropy(states, items, answers)


def sampled_softmax_loss(
    states: Tensor, vectors: Vectors, answers: Tensor, drawn: Tensor, probabilities: Tensor | None, items: int
) -> Tensor:
    """states (P, D), answers (P,), ``drawn`` (M,) shared by all states, with ``probabilities`` (V,) or all alike -> the
    mean loss. A drawn item that is a state's answer does not count for it."""
    q = drawn.new_full(drawn.shape, 1 / items, dtype=torch.float64) if probabilities is None else probabilities[drawn]
    right = (states * vectors(answers)).sum(-1, keepdim=True)
    others = states @ vectors(drawn).T - (q * len(drawn)).log().to(states.dtype)
    others = others.masked_fill(drawn == answers.unsqueeze(1), -torch.inf)
    both = torch.cat([right, others], 1)
    return (both.logsumexp(1) - right.squeeze(1)).mean()


def binary_loss(states: Tensor, vectors: Vectors, answers: Tensor, drawn: Tensor, beta: float = 1.0) -> Tensor:
    """states (P, D), answers (P,), ``drawn`` (P, k), each state's own -> the mean loss over items and states. A drawn
    item that is the answer does not count."""
    both = vectors(torch.cat([answers.unsqueeze(1), drawn], 1))
    scores = (both @ states.unsqueeze(-1)).squeeze(-1)
    right, others = scores[:, 0], logsigmoid(-scores[:, 1:]).masked_fill(drawn == answers.unsqueeze(1), 0.0)
    return -(beta * logsigmoid(right) + others.sum(1)).mean() / (1 + drawn.shape[1])


def gbce_beta(count: int, items: int, calibration: float) -> float:
    """β of gBCE, for ``count`` drawn of the other items and the calibration t: 1 with t = 0, α with t = 1."""
    alpha = min(1.0, count / max(items - 1, 1))
    return alpha * (calibration * (1 - 1 / alpha) + 1 / alpha)


def draw_items(shape: tuple[int, ...], items: int, weights: Tensor | None, generator: torch.Generator) -> Tensor:
    """Numbers of items of any shape, on the CPU, with repetition, by ``weights`` (V,) or all alike."""
    if weights is None:
        return torch.randint(items, shape, generator=generator)
    ends = weights.cpu().cumsum(0)
    drawn = torch.rand(shape, generator=generator, dtype=torch.float64) * ends[-1]
    return torch.searchsorted(ends, drawn).clamp(max=items - 1)
