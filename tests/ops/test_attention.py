"""Attention in one call is the softmax, and finite where no key is allowed."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from ctr_pe.ops import attention as module
from ctr_pe.ops.attention import MOST, attention, fused, takes
from ctr_pe.ops.dropout import factor_of, keep_mask
from ctr_pe.ops.native import portable
from ctr_pe.pe import available_pes, build_pe
from ctr_pe.sequence.positions import Positions
from ctr_pe.testing import Batch
from ctr_pe.units import SelfAttention
from tests.support.comparing import outcome
from tests.support.encoding_cases import known
from tests.support.models import randomised

LOWEST = torch.finfo(torch.float32).min


def drawn(dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """query, key, value and a bias; and which pairs are allowed."""
    torch.manual_seed(0)
    vectors = [torch.randn(3, 2, queries, 5).to(dtype) for queries in (4, 6, 6)]
    allowed = torch.rand(3, 1, 4, 6) < 0.6
    allowed[1, :, 2] = False
    return [*vectors, torch.randn(2, 4, 6)], allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_fused_one_equals_the_softmax(dtype: torch.dtype) -> None:
    given, allowed = drawn(dtype)

    def ours(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        barrier = torch.where(allowed, 0.0, LOWEST)
        return fused(query, key, value, barrier + bias, 0.4, 0.0) * allowed.any(-1, keepdim=True)

    def plain(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        logits = (0.4 * query @ key.mT + bias).masked_fill(~allowed, -torch.inf)
        return logits.softmax(-1).nan_to_num() @ value

    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 5e-3}[dtype]
    for got, want in zip(outcome(ours, *given), outcome(plain, *(x.double() for x in given)), strict=True):
        assert (got - want).abs().max() <= tolerance * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("shape", [(2, 4, 6), (1, 4, 6), (3, 1, 1, 6), ()])
def test_the_recomputed_one_equals_the_softmax(shape: tuple[int, ...], rate: float) -> None:
    """With the same dropout, and a bias that heads, rows or queries share."""
    (query, key, value, _), allowed = drawn(torch.float64)
    seed = torch.tensor([5]) if rate else None

    def ours(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        barrier = torch.where(allowed, 0.0, LOWEST)
        return attention(query, key, value, barrier, bias, 0.4, (seed, rate)) * allowed.any(-1, keepdim=True)

    def plain(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        logits = (0.4 * query @ key.mT + bias).masked_fill(~allowed, -torch.inf)
        weights = logits.softmax(-1).nan_to_num()
        return (weights if seed is None else weights * keep_mask(seed, weights.shape, rate) * factor_of(rate)) @ value

    given = query, key, value, torch.randn(shape, dtype=torch.float64)
    for got, want in zip(outcome(ours, *given), outcome(plain, *given), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_number_may_be_added() -> None:
    (query, key, value, _), allowed = drawn(torch.float64)
    barrier = torch.where(allowed, 0.0, LOWEST)
    one, other = (attention(query, key, value, barrier, added, 0.4) for added in (0.0, 2.0))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("dtype", "by_torch"),
    [(torch.float32, True), (torch.bfloat16, True), (torch.float16, True), (torch.float32, False)],
)
def test_no_key_is_no_nan(dtype: torch.dtype, by_torch: bool) -> None:
    """The bias stays in reach of a kernel that multiplies it by log2(e)."""
    query, key, value = leaves = [x.requires_grad_() for x in drawn(dtype)[0][:3]]
    mask = torch.full((3, 1, 4, 6), LOWEST)
    pooled = fused(query, key, value, mask, 0.4, 0.0) if by_torch else attention(query, key, value, mask, -1.0, 0.4)
    assert (pooled <= value.amax(-2, keepdim=True) + 0.01).all()
    assert (pooled >= value.amin(-2, keepdim=True) - 0.01).all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(pooled.sum(), leaves))


@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_dropout_drops_weights(rate: float) -> None:
    torch.manual_seed(0)
    query, items = torch.zeros(50, 1, 8, 4), torch.ones(50, 1, 1000, 4)
    pooled = fused(query, items, items, torch.zeros(1, 1, 1, 1000), 1.0, rate)
    assert abs(pooled.mean() - float(rate < 1)) < 0.01


def test_a_cpu_keeps_few_weights() -> None:
    one = torch.ones(1)
    assert not takes(one, lambda: MOST)
    assert takes(one, lambda: MOST + 1)
    assert not takes(one.bfloat16(), lambda: MOST + 1)
    with torch.no_grad():
        assert not takes(one, lambda: MOST + 1)
    with torch.autocast("cpu"):
        assert not takes(one, lambda: MOST + 1)
    with portable():
        assert not takes(one, pytest.fail)
    assert takes(torch.ones(1, device="meta"), pytest.fail)


def unit(pe: str) -> SelfAttention:
    torch.manual_seed(0)
    return randomised(SelfAttention(8, 2, build_pe(pe, 8, 7, 2), causal=True, dropout=0.3)).train()


def attended(pe: str, most: int) -> tuple[list[Tensor], int]:
    """States and gradients over several blocks, with empty histories and those longer than the table; and the bytes
    that training keeps."""
    self_attention, kept = unit(pe), dict[int, int]()
    batch = Batch.random([3, 0, 9, 1, 12, 6, 40, 35], torch.float32)
    positions = Positions.from_mask(batch.mask, batch.age)
    items = batch.history[batch.mask].requires_grad_()

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    torch.manual_seed(1)
    with mock.patch.object(module, "MOST", most), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        states, _ = self_attention.attend(items, positions, positions.item_pairs(True, known(items.detach())))
    states.square().sum().backward()
    found = [x.grad for x in (items, *self_attention.parameters()) if x.grad is not None]
    return [states.detach(), *found], sum(kept.values())


@pytest.mark.parametrize("pe", available_pes())
def test_it_changes_no_encoding(pe: str) -> None:
    (wanted, _), (found, _) = (attended(pe, most) for most in (MOST, 0))
    assert len(found) == len(wanted)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pe", ["none", "naive", "rope", "time_rope", "sinusoidal", "alibi", "t5"])
def test_training_keeps_less(pe: str) -> None:
    (_, all_of_it), (_, kept) = (attended(pe, most) for most in (MOST, 0))
    assert kept < 0.6 * all_of_it, (kept, all_of_it)


def test_one_query_of_each_row_has_few_weights() -> None:
    positions = Positions.from_mask(torch.ones(3, 50, dtype=torch.bool))
    items = known(torch.zeros(150, 8))
    assert [pairs.of_all_blocks for pairs in positions.newest_pairs(True, items)] == [150]
    assert [pairs.of_all_blocks for pairs in positions.item_pairs(True, items)] == [7500]
