"""Fused attention is the softmax, and finite where no key is allowed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ctr_pe.ops.attention import attention, takes
from tests.support.comparing import outcome

LOWEST = torch.finfo(torch.float32).min


def drawn(dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """query, key, value and a bias; and which pairs are allowed."""
    torch.manual_seed(0)
    vectors = [torch.randn(3, 2, queries, 5).to(dtype) for queries in (4, 6, 6)]
    allowed = torch.rand(3, 1, 4, 6) < 0.6
    allowed[1, :, 2] = False
    return [*vectors, torch.randn(2, 4, 6)], allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_softmax(dtype: torch.dtype) -> None:
    given, allowed = drawn(dtype)

    def fused(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        barrier = torch.where(allowed, 0.0, LOWEST)
        return attention(query, key, value, barrier + bias, 0.4, 0.0) * allowed.any(-1, keepdim=True)

    def plain(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        logits = (0.4 * query @ key.mT + bias).masked_fill(~allowed, -torch.inf)
        return logits.softmax(-1).nan_to_num() @ value

    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 5e-3}[dtype]
    for got, want in zip(outcome(fused, *given), outcome(plain, *(x.double() for x in given)), strict=True):
        assert (got - want).abs().max() <= tolerance * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_key_is_no_nan(dtype: torch.dtype) -> None:
    """The bias stays in reach of a kernel that multiplies it by log2(e)."""
    query, key, value = leaves = [x.requires_grad_() for x in drawn(dtype)[0][:3]]
    pooled = attention(query, key, value, torch.full((3, 1, 4, 6), LOWEST), 0.4, 0.0)
    assert (pooled <= value.amax(-2, keepdim=True) + 0.01).all()
    assert (pooled >= value.amin(-2, keepdim=True) - 0.01).all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(pooled.sum(), leaves))


@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_dropout_drops_weights(rate: float) -> None:
    torch.manual_seed(0)
    query, items = torch.zeros(50, 1, 8, 4), torch.ones(50, 1, 1000, 4)
    pooled = attention(query, items, items, torch.zeros(1, 1, 1, 1000), 1.0, rate)
    assert abs(pooled.mean() - float(rate < 1)) < 0.01


def test_a_cpu_keeps_its_own() -> None:
    assert not takes(torch.ones(1))
    assert takes(torch.ones(1, device="meta"))
