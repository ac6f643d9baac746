"""Attention whose logits are products and a bias that does not depend on them: torch's fused one, on an accelerator.

On a CPU torch's is no faster than a product, a softmax and a product. B batch, H heads, Q queries, L keys, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ctr_pe.ops import native


def takes(x: Tensor) -> bool:
    """Whether attention on the device of a tensor should be fused."""
    return not x.is_cpu and not native.seen_into()


def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, product: float, rate: float) -> Tensor:
    """Σ_j w_ij value_j, w the softmax of product · query · key + bias, less what dropout drops at a rate.

    Args:
        query: (B, H, Q, D). key, value: (B, H, L, D).
        bias: (B or 1, H or 1, Q or 1, L), the lowest finite number where a key is not allowed.

    Returns:
        (B, H, Q, D); where no key is allowed, some mean of all values.
    """
    # A quarter of the lowest number is out of reach too, and still finite in the kernels, which multiply by log2(e).
    mask = bias.clamp(min=torch.finfo(query.dtype).min / 4).to(query.dtype)
    mask = mask.expand(*query.shape[:-1], key.shape[-2])
    pooled: Tensor = scaled_dot_product_attention(query, key, value, mask, rate, scale=product)
    return pooled
