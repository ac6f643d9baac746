"""Attention with contextual positions: CoPE (Golovneva et al. 2024) and CAPE (Yuan et al. 2025, equations 1 to 5).

B batch, H heads, Q queries, L keys, D width of the queries, T rows of the table, P its width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ctr_pe.ops import accelerator, native
from ctr_pe.ops.contextual import cpu, gpu, reference
from ctr_pe.ops.contextual.reference import widen
from ctr_pe.ops.dropout import factor_of, mask_on
from ctr_pe.sequence.transfer import to_device


def contextual_bias(
    logits: Tensor,
    query: Tensor,
    table: Tensor,
    allowed: Tensor,
    gate: tuple[Tensor, Tensor] | None = None,
    gate_weights: Tensor | None = None,
    gate_logits: Tensor | None = None,
    additive_mask: Tensor | None = None,
    *,
    sign: float,
    scale: float = 1.0,
    among_items: bool = False,
    between: bool = False,
) -> Tensor:
    """logits + t' · e[p] with p_ij = Σ g_ik over the keys k from j to the newest allowed one.

    Gates are g = σ(sign · gate_logits) · gate_weights, 0 where not allowed. e between two rows of the table is
    interpolated. t' = SiLU(W t + b), or scale · t without a gate.

    Args:
        logits: (B, H, Q, L), keys in time order. query: t (B, H, Q, D). table: e (T, P); past its end the last row.
        allowed: (B, 1, Q, L) bool.
        gate: W (P, D) and b (P,), or None, then P is D.
        gate_weights: (B, H, L) in [0, 1], or None for ones.
        gate_logits: (B, H or 1, Q, L), or None for the logits.
        additive_mask: of allowed, if the caller has it (:func:`~ctr_pe.ops.contextual.reference.additive_mask`).
        among_items: self-attention, whose queries are the last Q of the L items; then the newest allowed key's gate
            counts in full, whatever its step. Otherwise queries come after all keys.
        between: sum the gates from the key to the query itself, in both directions. It differs in self-attention that
            is not causal only, and is always computed in torch: leave it off elsewhere.

    Returns:
        (B, H, Q, L), float32 at least. What stands where a key is not allowed is undefined.

    Raises:
        ValueError: shapes or types that do not match.
    """
    logits, (weight, bias) = widen(logits), gate or (None, None)
    if not between and accelerator.takes(logits, query, table, weight, bias, gate_weights, gate_logits):
        expanded = None if gate_logits is None else gate_logits.expand_as(logits)
        learned = logits, query, weight, bias, table, gate_weights, allowed, expanded
        added: Tensor = gpu.contextual_bias(*learned, among_items, float(sign), float(scale))
        return added
    gating = logits if gate_logits is None else gate_logits.to(logits.dtype).expand_as(logits)
    if not between and query.itemsize <= 4 and native.takes(logits, gating, table, weight, bias, gate_weights):
        given = gating, query.float(), weight, bias, table, gate_weights, allowed
        out: Tensor = cpu.contextual_bias(*given, among_items, float(sign), float(scale))
        return out if gate_logits is None else logits + (out - gating)
    options = (
        sign,
        scale,
        among_items,
        between,
        reference.additive_mask(allowed) if additive_mask is None else additive_mask,
    )
    return reference.contextual_bias(logits, query, table, allowed, gate, gate_weights, gating, *options)


def takes(*tensors: Tensor | None) -> bool:
    """Whether a kernel computes :func:`contextual_attention` of these; in torch its parts one by one are no slower."""
    return accelerator.takes(*tensors) or native.takes(*tensors)


def contextual_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    allowed: Tensor,
    gate: tuple[Tensor, Tensor] | None = None,
    gate_weights: Tensor | None = None,
    *,
    sign: float,
    scale: float = 1.0,
    product: float,
    dropout: tuple[Tensor, float] | None = None,
) -> Tensor:
    """Σ_j w_ij value_j, w the softmax over allowed keys of :func:`contextual_bias` of product · query · key.

    Self-attention: queries are the last Q of the L items.

    Args:
        query: (B, Q, H, D). key, value: (B, L, H, D).
        product: factor of the logits, 1 / sqrt(D) as a rule.
        dropout: of the attention weights: a seed (1,) int64 on the CPU, and the rate.
        table, allowed, gate, gate_weights, sign, scale: as in :func:`contextual_bias`.

    Returns:
        (B, Q, H, D); zeros where nothing is allowed.

    Raises:
        ValueError: shapes or types that do not match.
    """
    (weight, bias), (B, Q, H, _), L = gate or (None, None), query.shape, key.shape[1]
    if accelerator.takes(query, key, value, table, weight, bias, gate_weights):
        seed, rate = (None, 0.0) if dropout is None else (to_device(dropout[0], query.device), dropout[1])
        learned = query, key, value, weight, bias, table, gate_weights, allowed, seed
        return gpu.contextual_attention(*learned, float(sign), float(scale), float(product), rate)[0]  # type: ignore[no-any-return]
    kept, factor = None, 1.0
    if dropout is not None:
        seed, rate = dropout
        kept, factor = mask_on(query.device, seed, torch.Size((B, H, Q, L)), rate), factor_of(rate)
    if native.takes(query, key, value, table, weight, bias, gate_weights):
        given = query, key, value, weight, bias, table, gate_weights, allowed, kept
        pooled: Tensor = cpu.contextual_attention(*given, float(sign), float(scale), float(product), float(factor))[0]
        return pooled
    query, key, value = (x.transpose(1, 2).contiguous() for x in (query, key, value))  # (B, H, L, D)
    logits = (query * product) @ key.transpose(-1, -2)  # not the products: there are more of them
    logits = contextual_bias(
        logits, query, table, allowed, gate, gate_weights, sign=sign, scale=scale, among_items=True
    )
    return reference.pool(logits, value, allowed, kept, factor).transpose(1, 2)


__all__ = ["contextual_attention", "contextual_bias", "takes"]
