"""The compiled bias by time gives what torch gives, gradients too, at every edge."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from comparing import compare, needs_code
from fenced import Fenced
from torch import Tensor, nn

from ctr_pe import Positions, compiled
from ctr_pe.pe import time_bias
from ctr_pe.pe.time_bias import TimeBias
from ctr_pe.units import SelfAttention, TargetAttention

LENGTHS = [7, 0, 1, 30, 2, 11, 3]
D, HEADS = 12, 3


def batch() -> Positions:
    """Pauses of a second to years, events of one second, and clocks that disagree."""
    torch.manual_seed(0)
    mask = torch.arange(33) < torch.tensor(LENGTHS)[:, None]
    pauses = torch.exp(torch.rand(mask.shape, dtype=torch.float64) * math.log(1e8)).long()
    ages = (pauses * (torch.rand(mask.shape) < 0.8)).flip(1).cumsum(1).flip(1)
    ages[5] = torch.randint(-(10**10), 10**10, (33,))
    return Positions.from_mask(mask, ages)


def learned(heads: int, unit: float) -> TimeBias:
    pe = TimeBias(D, 8, heads, time_unit=unit)
    torch.manual_seed(1)
    for parameter in pe.parameters():
        nn.init.normal_(parameter)
    return pe


@needs_code
@pytest.mark.parametrize("unit", [1.0, 3600.0, 1e9])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [1, 3])
def test_equals_torch_in_self_attention(monkeypatch: pytest.MonkeyPatch, heads: int, causal: bool, unit: float) -> None:
    positions, items = batch(), torch.randn(sum(LENGTHS), D)
    layer = SelfAttention(D, heads, learned(heads, unit), causal)
    blocks = len(positions.blocks)
    assert blocks > 1
    compare(monkeypatch, "fade", blocks, lambda x: layer(x, positions), items, module=layer)


@needs_code
def test_equals_torch_for_the_newest_item(monkeypatch: pytest.MonkeyPatch) -> None:
    positions = batch().with_target()
    layer = SelfAttention(D, HEADS, learned(HEADS, 60.0), True)
    items = torch.randn(sum(LENGTHS) + len(LENGTHS), D)
    blocks = len(positions.newest_blocks)
    compare(monkeypatch, "fade", blocks, lambda x: layer.newest(x, positions), items, module=layer)


@needs_code
def test_equals_torch_in_target_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    positions, unit = batch(), TargetAttention(D, "dot", learned(1, 60.0))
    target, history = torch.randn(len(LENGTHS), D), torch.randn(sum(LENGTHS), D)
    compare(monkeypatch, "fade", 1, lambda *given: unit(*given, positions)[0], target, history, module=unit)


@needs_code
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_share_the_work(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        test_equals_torch_in_self_attention(monkeypatch, 3, True, 60.0)
    finally:
        torch.set_num_threads(before)


@needs_code
def test_every_bucket_begins_at_its_power_of_two() -> None:
    times = torch.tensor([0, *(2**k + more for k in range(35) for more in (-1, 0, 1))])
    pe = TimeBias(4, 8)
    pe.table.data[:, 0] = torch.arange(32.0)
    logits, at = torch.zeros(1, 1, 1, len(times)), [torch.zeros(1, 1, 1, dtype=torch.int64), times[None, None]]
    found = time_bias._Faded.apply(logits, pe.amount, nn.functional.softplus(pe.decay), pe.table.T, *at, 3600.0)
    assert found.flatten().tolist() == [min(int(time).bit_length(), 31) for time in times]


@needs_code
@pytest.mark.parametrize("decay", [1e-3, 1.0, 40.0, 1e4])
def test_fades_to_nothing(decay: float) -> None:
    """However fast, and however long ago."""
    times = torch.tensor([0, 1, 2, 59, 10**4, 10**9, 10**15])
    logits, at = torch.zeros(1, 1, 1, 7), [torch.zeros(1, 1, 1, dtype=torch.int64), times[None, None]]
    found = time_bias._Faded.apply(logits, torch.ones(1), torch.full((1,), decay), torch.zeros(1, 32), *at, 60.0)
    assert torch.allclose(found.flatten().double(), (1 + times.double() / 60) ** -decay, rtol=1e-4, atol=1e-6)


@needs_code
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_none_and_stays_alone(wrong: float) -> None:
    logits, amount = torch.zeros(1, 2, 1, 20), torch.ones(2)
    logits[0, 1, 0, 3] = wrong
    at = torch.zeros(1, 1, 1, dtype=torch.int64), torch.arange(20)[None, None]
    found = time_bias._Faded.apply(logits, amount, amount, torch.zeros(2, 32), *at, 60.0)
    assert (~found.isfinite()).nonzero().tolist() == [[0, 1, 0, 3]]
    amount[0] = torch.nan
    found = time_bias._Faded.apply(logits * 0, amount, amount, torch.zeros(2, 32), *at, 60.0)
    assert found[0, 0].isnan().all()


@needs_code
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("keys", [1, 5, 16, 27])
def test_no_memory_of_others_is_touched(keys: int, at_end: bool) -> None:
    fences: list[Fenced] = []

    def fenced(given: Tensor) -> Tensor:
        fences.append(Fenced(given, at_end))
        return fences[-1].held

    torch.manual_seed(0)
    shape = (2, 3, 4, keys)
    logits, grads, of_heads, table = torch.randn(2, *shape), torch.randn(shape), torch.rand(2, 3), torch.randn(3, 32)
    query, key = torch.randint(0, 10**6, (2, 1, 4)), torch.randint(0, 10**6, (2, 1, keys))
    before, results = torch.get_num_threads(), []
    torch.set_num_threads(1)
    for hold in (torch.clone, fenced):
        given = [hold(part) for part in (logits[0], *of_heads, table, query, key)]
        call = ctypes.byref(time_bias._input(torch.Size(shape), *given, 60.0))
        out, grad, sums = hold(logits[0] * torch.nan), hold(grads), hold(torch.zeros(3, 34, 16))
        room = hold(torch.zeros(2, -(-keys // 16) * 16))
        compiled.run("fade_forward", call, out.data_ptr(), room.data_ptr())
        compiled.run("fade_backward", call, *map(compiled.address, (grad, sums, room)))
        results.append([out.clone(), sums.clone()])
    torch.set_num_threads(before)
    assert not any(part.isnan().any() for part in results[0])
    assert all(torch.equal(got, want) for got, want in zip(*results, strict=True))
    for fence in fences:
        fence.protect()
