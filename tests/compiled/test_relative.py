"""Scores by offset from the compiled code equal those of torch, gradients too, at every edge."""

from __future__ import annotations

import ctypes

import pytest
import torch
from comparing import compare, needs_code
from fenced import Fenced
from torch import Tensor, nn

from ctr_pe import Positions, compiled
from ctr_pe.pe import xlnet
from ctr_pe.pe.xlnet import XLNet
from ctr_pe.units import SelfAttention, TargetAttention

LENGTHS = [7, 0, 1, 30, 2, 70, 3]
HEADS = 3


def batch() -> Positions:
    return Positions.from_mask(torch.arange(73) < torch.tensor(LENGTHS)[:, None])


def layer_of(head_dim: int, causal: bool) -> SelfAttention:
    torch.manual_seed(1)
    pe = XLNet(HEADS * head_dim, 8, HEADS)
    for parameter in pe.parameters():
        nn.init.normal_(parameter, std=0.3)
    return SelfAttention(HEADS * head_dim, HEADS, pe, causal)


@needs_code
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [1, 7, 16, 20, 32])
def test_equals_torch(monkeypatch: pytest.MonkeyPatch, head_dim: int, causal: bool) -> None:
    positions, layer = batch(), layer_of(head_dim, causal)
    items, blocks = torch.randn(sum(LENGTHS), HEADS * head_dim), len(positions.blocks)
    assert blocks > 1
    compare(monkeypatch, "relative", blocks, lambda x: layer(x, positions), items, module=layer)


@needs_code
@pytest.mark.parametrize("causal", [True, False])
def test_equals_torch_for_the_newest_item(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    positions, layer = batch().with_target(), layer_of(16, causal)
    items = torch.randn(sum(LENGTHS) + len(LENGTHS), HEADS * 16)
    blocks = len(positions.newest_blocks)
    compare(monkeypatch, "relative", blocks, lambda x: layer.newest(x, positions), items, module=layer)


@needs_code
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_share_the_work(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        test_equals_torch(monkeypatch, 7, True)
    finally:
        torch.set_num_threads(before)


@needs_code
def test_leaves_what_it_does_not_suit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide heads, for which torch's products are faster, and target attention."""
    monkeypatch.setattr(compiled, "run", lambda *_: pytest.fail("asked"))
    positions, layer = batch(), layer_of(xlnet.NARROW + 1, causal=True)
    layer(torch.randn(sum(LENGTHS), layer.query.in_features), positions)
    TargetAttention(8, "dot", XLNet(8, 8))(torch.randn(len(LENGTHS), 8), torch.randn(sum(LENGTHS), 8), positions)


@needs_code
def test_what_is_no_number_stays_none_and_stays_alone() -> None:
    logits, query = torch.zeros(1, 1, 5, 5), torch.ones(1, 1, 5, 4)
    query[0, 0, 3, 2] = torch.nan
    given = logits, query, torch.ones(1, 1, 5, 4), torch.ones(1, 4), torch.ones(1, 4), torch.ones(1, 4, 6)
    found = xlnet._Compiled.apply(True, *given)
    assert found.isnan().nonzero().tolist() == [[0, 0, 3, key] for key in range(4)]  # of earlier keys and itself


@needs_code
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("queries", "keys", "dim"), [(1, 1, 1), (5, 5, 3), (16, 16, 16), (3, 70, 20), (1, 33, 32)])
def test_no_memory_of_others_is_touched(queries: int, keys: int, dim: int, causal: bool, at_end: bool) -> None:
    fences: list[Fenced] = []

    def fenced(given: Tensor) -> Tensor:
        fences.append(Fenced(given, at_end))
        return fences[-1].held

    torch.manual_seed(0)
    shape, offsets = (2, 3, queries, keys), keys + (1 if causal else queries)
    logits, grads, query = torch.randn(shape), torch.randn(shape), torch.randn(2, 3, queries, dim)
    key, u, v, table = torch.randn(2, 3, keys, dim), *torch.randn(2, 3, dim), torch.randn(3, dim, offsets)
    before, results = torch.get_num_threads(), []
    torch.set_num_threads(1)
    for hold in (torch.clone, fenced):
        given = [hold(part) for part in (logits, query, key, u, v, table)]
        call, room = xlnet._input(causal, logits.shape, offsets, *given), hold(torch.zeros(1, keys))
        out, grad, sums = hold(logits * torch.nan), hold(grads), hold(torch.zeros(3, 2 + offsets, dim))
        into = hold(query * torch.nan), hold(key * torch.nan)
        compiled.run("relative_forward", ctypes.byref(call), out.data_ptr(), room.data_ptr())
        call.offsets = compiled.address(by_row := hold(table.mT.contiguous()))
        gradients = ctypes.byref(xlnet._Gradients(*map(compiled.address, (*into, sums))))
        compiled.run("relative_backward", ctypes.byref(call), grad.data_ptr(), gradients, room.data_ptr())
        results.append([part.clone() for part in (out, *into, sums, by_row)])
    torch.set_num_threads(before)
    assert not any(part.isnan().any() for part in results[0])
    assert all(torch.equal(got, want) for got, want in zip(*results, strict=True))
    for fence in fences:
        fence.protect()
