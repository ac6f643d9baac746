"""The bias by time of the kernel is that of the reference, gradients too, at every edge."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ctr_pe.ops import native
from ctr_pe.ops.time_decay import time_decay_bias
from tests.support.comparing import compare, needs_kernels, threads
from tests.support.fenced import Fenced


def ages(rows: int, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """Pauses of a second to years, events of one second, and in the last row clocks that disagree."""
    pauses = torch.exp(torch.rand(rows, 1, keys, dtype=torch.float64) * math.log(1e8)).long()
    key = (pauses * (torch.rand(pauses.shape) < 0.8)).flip(-1).cumsum(-1).flip(-1)
    key[-1:] = torch.randint(-(10**10), 10**10, key[-1:].shape)
    return key[..., torch.randint(0, keys, (queries,))] if keys else key.new_zeros(rows, 1, queries), key


def learned(heads: int) -> list[Tensor]:
    """amount, decay, table"""
    return [torch.randn(heads), torch.rand(heads) + 0.1, torch.randn(32, heads)]


@needs_kernels
@pytest.mark.parametrize("unit", [1.0, 3600.0, 1e9])
@pytest.mark.parametrize(
    "shape", [(3, 2, 4, 27), (2, 1, 1, 16), (1, 3, 5, 5), (4, 2, 1, 1), (0, 2, 3, 4), (2, 2, 3, 0)]
)
def test_equals_the_reference(shape: tuple[int, int, int, int], unit: float) -> None:
    torch.manual_seed(0)
    rows, heads, queries, keys = shape
    query_age, key_age = ages(rows, queries, keys)

    def call(logits: Tensor, amount: Tensor, decay: Tensor, table: Tensor) -> Tensor:
        return time_decay_bias(logits, amount, decay, table, query_age, key_age, unit)

    compare("time_decay", call, torch.randn(shape), *learned(heads))


@needs_kernels
@pytest.mark.parametrize("number", [1, 2, 5])
def test_threads_share_the_work(number: int) -> None:
    with threads(number):
        test_equals_the_reference((3, 2, 4, 27), 60.0)


def found(times: Tensor, amount: float, decay: float, table: Tensor, unit: float, dtype: torch.dtype) -> Tensor:
    """Of one query at 0."""
    logits, zero = torch.zeros(1, 1, 1, len(times), dtype=dtype), torch.zeros(1, 1, 1, dtype=torch.int64)
    heads = torch.tensor([amount], dtype=dtype), torch.tensor([decay], dtype=dtype), table.to(dtype).unsqueeze(1)
    return time_decay_bias(logits, *heads, zero, times[None, None], unit).flatten()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_bucket_begins_at_its_power_of_two(dtype: torch.dtype) -> None:
    times = torch.tensor([0, *(2**k + more for k in range(35) for more in (-1, 0, 1))])
    buckets = found(times, 0.0, 1.0, torch.arange(32.0), 3600.0, dtype)
    assert buckets.tolist() == [min(int(time).bit_length(), 31) for time in times]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decay", [1e-3, 1.0, 40.0, 1e4])
def test_fades_to_nothing(decay: float, dtype: torch.dtype) -> None:
    """However fast, and however long ago."""
    times = torch.tensor([0, 1, 2, 59, 10**4, 10**9, 10**15])
    bias = found(times, 1.0, decay, torch.zeros(32), 60.0, dtype)
    assert torch.allclose(bias.double(), (1 + times.double() / 60) ** -decay, rtol=1e-4, atol=1e-6)


@needs_kernels
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_nan_stays_nan_and_stays_alone(wrong: float) -> None:
    logits, amount = torch.zeros(1, 2, 1, 20), torch.ones(2)
    logits[0, 1, 0, 3] = wrong
    at = torch.zeros(1, 1, 1, dtype=torch.int64), torch.arange(20)[None, None]
    bias = time_decay_bias(logits, amount, amount, torch.zeros(32, 2), *at, 60.0)
    assert (~bias.isfinite()).nonzero().tolist() == [[0, 1, 0, 3]]
    amount[0] = torch.nan
    assert time_decay_bias(logits * 0, amount, amount, torch.zeros(32, 2), *at, 60.0)[0, 0].isnan().all()


@needs_kernels
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("keys", [1, 5, 16, 27])
def test_no_memory_of_others_is_touched(keys: int, at_end: bool) -> None:
    fences: list[Fenced] = []

    def fenced(given: Tensor) -> Tensor:
        fences.append(Fenced(given, at_end))
        return fences[-1].held

    torch.manual_seed(0)
    shape, results = (2, 3, 4, keys), []
    grads, of_heads, table = torch.randn(shape), torch.rand(2, 3), torch.randn(3, 32)
    places = torch.randint(0, 10**6, (2, 1, 4)), torch.randint(0, 10**6, (2, 1, keys))
    for hold in (torch.clone, fenced):
        amount, decay, rows, *at = map(hold, (*of_heads, table, *places))
        out, grad, *into = map(
            hold, (grads * torch.nan, grads, *(of_heads * torch.nan), torch.full((32, 3), torch.nan))
        )
        native.call("time_decay", *shape, 60.0, amount, decay, rows, *at, out)
        native.call("time_decay_backward", *shape, 60.0, grad, amount, decay, *at, *into)
        results.append([part.clone() for part in (out, *into)])
    assert not any(part.isnan().any() for part in results[0])
    assert all(torch.equal(got, want) for got, want in zip(*results, strict=True))
    for fence in fences:
        fence.protect()


@needs_kernels
def test_shapes_that_do_not_match_are_refused() -> None:
    query_age, key_age = ages(2, 3, 5)
    logits, (amount, decay, table) = torch.zeros(2, 4, 3, 5), learned(4)
    for given in (
        (amount[1:], decay, table, query_age, key_age),
        (amount, decay, table[:9], query_age, key_age),
        (amount, decay, table, query_age[..., :2], key_age),
        (amount, decay, table, query_age, key_age.int()),
    ):
        with pytest.raises(ValueError, match=r"match|must be"):
            time_decay_bias(logits, *given, 60.0)
