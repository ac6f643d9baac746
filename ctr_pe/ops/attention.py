"""Attention whose logits are products and a bias that does not depend on them: torch's fused one on an accelerator, and
one that computes the weights a second time where a CPU's memory should not hold them.

On a CPU torch's is no faster than a product, a softmax and a product. B batch, H heads, Q queries, L keys, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from ctr_pe.ops import native
from ctr_pe.ops.dropout import factor_of, mask_on

MOST = 2**25
"""Attention weights that training keeps on a CPU, where a second computation is a tenth to a third of the first."""


def takes(x: Tensor, weights: Callable[[], int]) -> bool:
    """Whether :func:`attention` should attend, on the device of ``x``, to a batch with so many attention weights."""
    if not x.is_cpu:
        return not native.seen_into()
    trains = torch.is_grad_enabled() and x.itemsize >= 4 and not torch.is_autocast_enabled("cpu")
    return trains and not native.traced() and weights() > MOST


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    added: Tensor | float,
    product: float,
    dropout: tuple[Tensor | None, float] = (None, 0.0),
) -> Tensor:
    """Σ_j w_ij value_j, w the softmax of product · query · key + added, less what dropout drops.

    Args:
        query: (B, H, Q, D). key, value: (B, H, L, D).
        mask: (B or 1, H or 1, Q or 1, L), 0 where a key is allowed, elsewhere the lowest finite number.
        added: of such a shape, or a number.
        product: factor of the logits, 1 / sqrt(D) as a rule.
        dropout: a seed (1,) int64, which a CPU needs if anything is dropped, and the rate.

    Returns:
        (B, H, Q, D); where no key is allowed, some mean of all values.
    """
    seed, rate = dropout
    if query.is_cpu:
        pooled: Tensor = _Recomputed.apply(query, key, value, mask, added, product, seed, rate)  # type: ignore[no-untyped-call]
        return pooled
    return fused(query, key, value, mask + added, product, rate)


def fused(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, product: float, rate: float) -> Tensor:
    """:func:`attention` by torch's operator; ``bias``: mask and what is added."""
    # A quarter of the lowest number is out of reach too, and still finite in the kernels, which multiply by log2(e).
    mask = bias.clamp(min=torch.finfo(query.dtype).min / 4).to(query.dtype)
    mask = mask.expand(*query.shape[:-1], key.shape[-2])
    pooled: Tensor = scaled_dot_product_attention(query, key, value, mask, rate, scale=product)
    return pooled


class _Recomputed(torch.autograd.Function):
    """Training keeps the vectors, mask and bias alone: gradients take the weights of all pairs computed again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        added: Tensor | float,
        product: float,
        seed: Tensor | None,
        rate: float,
    ) -> Tensor:
        weights = _weights(query * product, key, mask, added)
        if seed is not None:
            weights *= mask_on(weights.device, seed, weights.shape, rate)
        pooled: Tensor = (weights @ value).mul_(factor_of(rate))
        ctx.save_for_backward(query, key, value, mask, pooled, seed, *[added] * isinstance(added, Tensor))
        ctx.added, ctx.product, ctx.rate = None if isinstance(added, Tensor) else added, product, rate
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, pooled, seed, *learned = ctx.saved_tensors
        query = query * ctx.product
        weights = _weights(query, key, mask, learned[0] if learned else ctx.added)
        mean = (grad * pooled).sum(-1, keepdim=True)
        grad = grad * factor_of(ctx.rate)
        of_logits = grad @ value.mT
        if seed is None:
            of_value = weights.mT @ grad
        else:
            kept = mask_on(weights.device, seed, weights.shape, ctx.rate)
            of_value = (weights * kept).mT @ grad
            of_logits *= kept
        of_logits.sub_(mean).mul_(weights)
        of_added = of_logits.sum_to_size(learned[0].shape) if ctx.needs_input_grad[4] else None
        return (of_logits @ key).mul_(ctx.product), of_logits.mT @ query, of_value, None, of_added, None, None, None


def _weights(query: Tensor, key: Tensor, mask: Tensor, added: Tensor | float) -> Tensor:
    """(B, H, Q, L) of queries that are scaled."""
    logits = query @ key.mT
    logits += added
    logits += mask
    return torch.softmax(logits, -1, out=logits)
