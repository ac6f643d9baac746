from __future__ import annotations

"""TEMPORARY shim until the ops branch is merged."""
from types import SimpleNamespace
import torch
from torch import Tensor, nn
from typing import Any

from ctr_pe import compiled
from ctr_pe.pe import fused


def widen(x):
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _suits(*t):
    return compiled.suits(*t)


def contextual_bias(
    logits, query, table, allowed, gate=None, steps=None, *, sign, scale=1.0, among_items=False, between=False
):
    logits = widen(logits)
    if not between and _suits(logits, table, *(gate or ())) and query.dtype != torch.float64:
        rule = fused.Rule(sign, among_items, scale)
        return fused.place(rule, logits, query.float(), table, allowed.expand(len(logits), -1, -1, -1), gate, steps)
    Q, L = logits.shape[-2:]
    off = (torch.arange(Q).unsqueeze(1) + (L - Q if among_items else L) - torch.arange(L)).view(1, 1, Q, L)
    pairs = SimpleNamespace(offset=off, allowed=allowed)
    barrier = (allowed.view(torch.int8).to(torch.float32) - 1) * torch.finfo(torch.float32).max
    gates = torch.sigmoid(barrier - logits if sign < 0 else barrier + logits)
    if steps is not None:
        gates = gates * towards_query(steps.unsqueeze(2), pairs, between)
    p = contextual_positions(gates, pairs, between)
    q = query * scale if gate is None else nn.functional.silu(nn.functional.linear(query, *gate))
    return logits + place_scores(q, table, p)


def contextual_attention(
    query, key, value, table, allowed, gate=None, steps=None, *, sign, scale=1.0, product, dropout=None
):
    kept, factor = dropout or (None, 1.0)
    if query.shape[1] > 1 and _suits(query, key, value, table, *(gate or ())):
        rule = fused.Rule(sign, True, scale, factor=factor, product=product)
        return fused.attend(rule, query, key, value, table, allowed.expand(len(query), -1, -1, -1), gate, steps, kept)
    q, k, v = (x.transpose(1, 2).contiguous() for x in (query, key, value))
    logits = contextual_bias(
        q * product @ k.transpose(-1, -2), q, table, allowed, gate, steps, sign=sign, scale=scale, among_items=True
    )
    barrier = (allowed.view(torch.int8).to(torch.float32) - 1) * torch.finfo(torch.float32).max
    w = (logits + barrier).softmax(-1)
    if kept is not None:
        w = w * kept.to(w.dtype).mul_(factor)
    return (w.to(v.dtype) @ v).transpose(1, 2)


def contextual_positions(gates: Tensor, pairs: Pairs, between: bool) -> Tensor:
    """Sum gates over keys: p_ij = sum of g_ik for k from j to the newest allowed key (CAPE paper, equation 2).

    Args:
        gates: (B, H, Q, L) in [0, 1], zero where not allowed; keys in time order.
        between: sum from j to the query i instead, in either direction. The same under a causal mask and in target
            attention, where the query is the newest.

    Returns:
        (B, H, Q, L) positions in [0, L].
    """
    to_newest: Tensor = _SuffixSum.apply(gates)  # type: ignore[no-untyped-call]
    if not between:
        return to_newest
    own = (pairs.offset == 0) & pairs.allowed
    from_own = (to_newest * own).sum(-1, keepdim=True)
    own_gate = (gates * own).sum(-1, keepdim=True)
    return torch.where(pairs.offset >= 0, to_newest - from_own + own_gate, from_own - to_newest + gates)


def towards_query(steps: Tensor, pairs: Pairs, between: bool) -> Tensor:
    """Steps from each key to the next newer one (B, H, 1, L) -> to the next one towards the query, (B, H, Q, L).

    One where none follows: at the newest key, unless it lies before the query, and ``between`` at the query itself.
    """
    if between:
        before = nn.functional.pad(steps[..., :-1], (1, 0))
        return torch.where(pairs.offset > 0, steps, before).masked_fill(pairs.offset == 0, 1)
    followed = nn.functional.pad(pairs.allowed[..., 1:], (0, 1)) | (pairs.offset > 0)
    return torch.where(followed, steps, 1)


def place_scores(query: Tensor, table: Tensor, position: Tensor) -> Tensor:
    """query · e[p], e interpolated between rows of the table (CAPE paper, equations 3 and 5).

    The query is scored against the rows and the scores are interpolated, which is the same and needs no vector per
    pair. Positions count keys, so rows past their number are not scored.

    Args:
        query: (B, H, Q, P). table: (T, P). position: (B, H, Q, L), at most L.

    Returns:
        (B, H, Q, L), float32 at least.
    """
    rows = table[: position.shape[-1] + 1]
    scores = query @ torch.cat([rows, rows[-1:]]).T
    return _interpolate(widen(scores), position, bounded=len(rows) > position.shape[-1])


def interpolate(table: Tensor, position: Tensor) -> Tensor:
    """Linear interpolation of scores per query.

    Args:
        table: (B, H, Q, T) score of each table row under each query.
        position: (B, H, Q, L) fractional rows; those below 0 or past T - 1 take the first or last row.

    Returns:
        (B, H, Q, L).
    """
    return _interpolate(torch.cat([table, table[..., -1:]], -1), position, bounded=False)


def _interpolate(table: Tensor, position: Tensor, bounded: bool) -> Tensor:
    """table (B, H, Q, T + 1), whose last row is there twice; ``bounded``: no position is below 0 or past T - 1."""
    interpolated: Tensor = _Interpolation.apply(table, position, bounded)  # type: ignore[no-untyped-call]
    return interpolated


# Gradients by hand, because autograd would keep and pass over several times as many tensors of the size of the logits.


class _SuffixSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.flip(-1).cumsum(-1).flip(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.cumsum(-1)


class _Interpolation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, position: Tensor, bounded: bool) -> Tensor:
        clamped = position if bounded else position.clamp(0, table.shape[-1] - 2)
        low = clamped.long()
        fraction = clamped.frac()  # a quarter of the time of clamped - low, whose types differ
        value = table.gather(-1, low)
        step = table[..., 1:].gather(-1, low).sub_(value)  # not to the ceiling, which has no gradient at integers
        result = torch.addcmul(value, step, fraction)
        if not bounded:  # below the table nothing depends on the position; past it the step is 0
            step *= position >= 0
        ctx.save_for_backward(low, fraction, step)
        ctx.rows = table.shape[-1]
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        low, fraction, step = ctx.saved_tensors
        upper = grad * fraction
        table = grad.new_zeros(*grad.shape[:-1], ctx.rows)
        table.scatter_add_(-1, low, grad - upper)
        table[..., 1:].scatter_add_(-1, low, upper)
        return table, grad * step, None
