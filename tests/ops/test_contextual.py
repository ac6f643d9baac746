"""Contextual positions: the kernel gives what the reference gives, and this what the equations say, at every edge."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ctr_pe.ops import native
from ctr_pe.ops.contextual import contextual_attention, contextual_bias, cpu
from tests.support.comparing import calls, compare, needs_kernels, threads
from tests.support.fenced import Fenced

Given = list[Tensor]


def bias_of(allowed: Tensor, gated: bool, stepped: bool, **options: Any) -> Callable[..., Tensor]:
    """logits, query, table[, W, b][, steps] -> the biased logits, zero where not allowed: these are never read."""

    def call(logits: Tensor, query: Tensor, table: Tensor, *others: Tensor) -> Tensor:
        gate = (others[0], others[1]) if gated else None
        steps = others[-1] if stepped else None
        return contextual_bias(logits, query, table, allowed, gate, steps, **options) * allowed

    return call


def attention_of(allowed: Tensor, gated: bool, stepped: bool, **options: Any) -> Callable[..., Tensor]:
    """query, key, value, table[, W, b][, steps] -> what is pooled."""

    def call(query: Tensor, key: Tensor, value: Tensor, table: Tensor, *others: Tensor) -> Tensor:
        gate = (others[0], others[1]) if gated else None
        steps = others[-1] if stepped else None
        return contextual_attention(query, key, value, table, allowed, gate, steps, **options)

    return call


def learned(gated: bool, stepped: bool, width: int, dim: int, rows: int, heads: int, keys: int, places: int) -> Given:
    """table[, W, b][, steps]"""
    given = [torch.randn(places, width)]
    given += [torch.randn(width, dim) / dim**0.5 / 2, torch.randn(width) / 4] if gated else []
    return given + ([torch.rand(rows, heads, keys)] if stepped else [])


def sizes(seed: int) -> tuple[int, ...]:
    """rows, heads, queries, keys, width and rows of the table, width of queries where they are projected"""
    torch.manual_seed(seed)
    rows, heads, queries, keys, width, places, dim = (
        int(torch.randint(1, top, ())) for top in (4, 4, 9, 60, 40, 70, 40)
    )
    return rows, heads, queries, keys, width, places, dim if seed % 3 else width


@needs_kernels
@pytest.mark.parametrize("among_items", [False, True])
@pytest.mark.parametrize("seed", range(16))
def test_bias_equals_the_reference_over_random_shapes_and_masks(seed: int, among_items: bool) -> None:
    rows, heads, queries, keys, width, places, dim = sizes(seed)
    allowed = torch.rand(rows, 1, queries, keys) < 0.7  # holes in it, too
    gated, stepped = seed % 3 > 0, seed % 4 > 1
    options = {"sign": 1.0 - 2 * (seed % 2), "scale": 0.7, "among_items": among_items}
    given = 4 * torch.randn(rows, heads, queries, keys), torch.randn(rows, heads, queries, dim)
    call = bias_of(allowed, gated, stepped, **options)
    compare("contextual_bias", call, *given, *learned(gated, stepped, width, dim, rows, heads, keys, places))


@needs_kernels
@pytest.mark.parametrize("sign", [-1.0, 0.0, 1.0])
def test_gates_of_a_likeness_of_their_own_equal_the_reference(sign: float) -> None:
    torch.manual_seed(5)
    allowed, given = torch.rand(3, 1, 4, 30) < 0.7, (torch.randn(3, 2, 4, 30), torch.randn(3, 2, 4, 8))

    def call(logits: Tensor, query: Tensor, likeness: Tensor, table: Tensor, *gate: Tensor) -> Tensor:
        return contextual_bias(logits, query, table, allowed, gate, gate_logits=likeness, sign=sign) * allowed  # type: ignore[arg-type]

    compare("contextual_bias", call, *given, 3 * torch.randn(3, 1, 4, 30), *learned(True, False, 5, 8, 3, 2, 30, 31))


@needs_kernels
@pytest.mark.parametrize("rate", [None, 0.4, 1.0])
@pytest.mark.parametrize("seed", range(16))
def test_attention_equals_the_reference_over_random_shapes_and_masks(seed: int, rate: float | None) -> None:
    rows, heads, queries, keys, width, places, dim = sizes(seed)
    queries += 1
    allowed = torch.rand(rows, 1, queries, keys) < (0.6, 0.1)[seed % 2]
    allowed[0, :, 0] = False
    gated, stepped = seed % 3 > 0, seed % 4 > 1
    dropout = None if rate is None else (torch.tensor([seed]), rate)
    options = {"sign": 1.0 - 2 * (seed % 2), "scale": 0.5, "product": 0.7, "dropout": dropout}
    given = torch.randn(rows, queries, heads, dim), *(torch.randn(rows, keys, heads, dim) for _ in "kv")
    call = attention_of(allowed, gated, stepped, **options)
    compare("contextual_attention", call, *given, *learned(gated, stepped, width, dim, rows, heads, keys, places))
    assert (call(*given, *learned(gated, stepped, width, dim, rows, heads, keys, places))[0, 0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("among_items", [False, True])
def test_bias_is_what_the_equations_say(among_items: bool, dtype: torch.dtype) -> None:
    """Number by number."""
    torch.manual_seed(2)
    logits, query, table = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 2, 3), torch.randn(3, 3)
    allowed = torch.tensor([[[[1, 1, 0, 1], [0, 1, 1, 0]]]], dtype=torch.bool)
    steps = torch.rand(1, 1, 4)
    logits, query, table, steps = (x.to(dtype) for x in (logits, query, table, steps))
    found = contextual_bias(logits, query, table, allowed, None, steps, sign=-1.0, scale=0.5, among_items=among_items)
    for i in range(2):
        seen = [j for j in range(4) if allowed[0, 0, i, j]]
        for j in seen:
            p = 0.0
            for k in seen:
                step = 1.0 if among_items and k == seen[-1] else float(steps[0, 0, k])
                p += step * torch.sigmoid(-logits[0, 0, i, k]).item() * (k >= j)
            low = min(int(p), 2)
            row = torch.lerp(table[low], table[min(low + 1, 2)], p - low if low < 2 else 0.0)
            want = logits[0, 0, i, j] + 0.5 * query[0, 0, i] @ row
            assert abs(found[0, 0, i, j] - want) < 1e-5


def test_between_sums_gates_from_the_key_to_the_query() -> None:
    """The bias is the position itself: a table of the row numbers, and a query of one."""
    logits, allowed = torch.randn(1, 1, 3, 3).double(), torch.ones(1, 1, 3, 3, dtype=torch.bool)
    query, table = torch.ones(1, 1, 3, 1).double(), torch.arange(4.0).double().unsqueeze(1)
    options = {"sign": 1.0, "among_items": True, "between": True}
    found = contextual_bias(logits, query, table, allowed, **options) - logits
    gates = logits.sigmoid()[0, 0]
    wanted = [[gates[i, min(i, j) : max(i, j) + 1].sum() for j in range(3)] for i in range(3)]
    assert torch.allclose(found[0, 0], torch.tensor(wanted).double())
    steps = torch.tensor([[[0.5, 0.25, 0.125]]]).double()  # after items 0, 1, 2
    found = contextual_bias(logits, query, table, allowed, None, steps, **options) - logits
    towards = torch.tensor([[1, 0.5, 0.25], [0.5, 1, 0.25], [0.5, 0.25, 1]]).double() * gates
    wanted = [[towards[i, min(i, j) : max(i, j) + 1].sum() for j in range(3)] for i in range(3)]
    assert torch.allclose(found[0, 0], torch.tensor(wanted).double())


def test_gates_need_not_be_made_of_the_logits() -> None:
    """The bias is the position itself."""
    logits, likeness = torch.randn(2, 2, 1, 1, 5).double()
    query, table = torch.ones(2, 1, 1, 1).double(), torch.arange(6.0).double().unsqueeze(1)
    given = query, table, torch.ones(2, 1, 1, 5, dtype=torch.bool)
    found = contextual_bias(logits, *given, gate_logits=likeness, sign=-1.0) - logits
    assert torch.allclose(found, torch.sigmoid(-likeness).flip(-1).cumsum(-1).flip(-1))
    constant = contextual_bias(logits, *given, sign=0.0) - logits
    assert torch.allclose(constant, torch.tensor([2.5, 2.0, 1.5, 1.0, 0.5]).double())


@needs_kernels
@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("rows", [1, 3])
def test_threads_share_the_work(rows: int, number: int) -> None:
    torch.manual_seed(0)
    allowed = torch.ones(rows, 1, 3, 12, dtype=torch.bool).tril()
    others = learned(True, True, 16, 5, rows, 1, 12, 9)
    dropout = torch.tensor([5]), 0.3
    with threads(number):
        given = torch.randn(rows, 1, 3, 12), torch.randn(rows, 1, 3, 5)
        compare("contextual_bias", bias_of(allowed, True, True, sign=1.0), *given, *others)
        vectors = torch.randn(rows, 3, 1, 5), torch.randn(rows, 12, 1, 5), torch.randn(rows, 12, 1, 5)
        call = attention_of(allowed, True, True, sign=1.0, product=1.0, dropout=dropout)
        compare("contextual_attention", call, *vectors, *others)


@needs_kernels
def test_a_long_history() -> None:
    """Positions go to thousands, of which float32 has three digits after the point."""
    table, allowed = torch.randn(5000, 16) * 0.01, torch.ones(1, 1, 1, 20_000, dtype=torch.bool)
    given = torch.randn(1, 1, 1, 20_000), torch.randn(1, 1, 1, 16), table
    call = bias_of(allowed, False, False, sign=-1.0)
    assert (call(*given) - call(*(x.double() for x in given))).abs().max() < 1e-4


@needs_kernels
def test_logits_without_bounds() -> None:
    logits = torch.tensor([[[[-1e30, 1e30, -200.0, 200.0, 0.0, -88.0, 88.0, 1e-30]]]])
    given, call = (
        (torch.randn(1, 1, 1, 4), torch.randn(9, 4)),
        bias_of(torch.ones(1, 1, 1, 8).bool(), False, False, sign=-1.0),
    )
    assert (call(logits, *given) - logits).isfinite().all()
    compare("contextual_bias", call, logits.clamp(-120, 120), *given)


@needs_kernels
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_nan_stays_in_its_row(wrong: float) -> None:
    logits, query, table = torch.zeros(2, 1, 1, 30), torch.ones(2, 1, 1, 16), torch.randn(40, 16)
    logits[0, 0, 0, 7] = wrong
    leaves = [x.requires_grad_() for x in (logits, query, table)]
    allowed = torch.ones(2, 1, 1, 30, dtype=torch.bool)
    values = contextual_bias(leaves[0], leaves[1], leaves[2], allowed, sign=-1.0)
    gradient, of_query, of_table = torch.autograd.grad(values.sum(), leaves)
    assert not values[0, 0, 0, 7].isfinite()
    assert values[1].isfinite().all()
    assert gradient[1].isfinite().all()
    if math.isnan(wrong):  # all of the row: it would be wrong to rank by a part of it
        assert values[0].isnan().all()
        assert gradient[0].isnan().all()
        assert of_query[0].isnan().all()
        alone = contextual_bias(logits[1:], query[1:], table, allowed[1:], sign=-1.0)
        assert torch.equal(of_table, torch.autograd.grad(alone.sum(), table)[0])


@needs_kernels
@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize(("items", "item", "row"), [(20, 4, 0), (3, 0, 1), (3, 2, 1)])
def test_nan_stays_in_its_row_and_head(which: str, wrong: float, items: int, item: int, row: int) -> None:
    """And in what looks at it: an item of a row's second head."""
    torch.manual_seed(0)
    call = attention_of(torch.ones(2, 1, items, items).bool().tril(), False, False, sign=-1.0, product=1.0)
    table, given = torch.randn(9, 4), {name: torch.randn(2, items, 3, 4) for name in ("query", "key", "value")}
    before = call(*given.values(), table)
    given[which][row, item, 1] = wrong
    leaves = [x.requires_grad_() for x in given.values()]
    pooled = call(*leaves, table)
    gradients = torch.autograd.grad(pooled.sum(), leaves)
    same, own = torch.ones(2, items, 3, dtype=torch.bool), slice(item, item + 1 if which == "query" else None)
    same[row, own, 1] = False
    elsewhere = torch.ones(2, items, 3, dtype=torch.bool)
    elsewhere[row, :, 1] = False
    assert torch.equal(pooled[elsewhere], before[elsewhere])
    if item % 4 == 0 or which == "query":  # four queries share their keys, and nothing times NaN is NaN
        assert torch.equal(pooled[same], before[same])
    assert all(gradient[elsewhere].isfinite().all() for gradient in gradients)
    if math.isnan(wrong):
        assert pooled[~same].isnan().all()
        if which != "value":
            assert all(gradient[row, item, 1].isnan().all() for gradient in gradients)


@needs_kernels
def test_gradients_where_no_query_is_allowed() -> None:
    """Those of steps are zero there, those of logits go through."""
    logits, steps = torch.rand(2, 1, 3, 9, requires_grad=True), torch.rand(2, 1, 9, requires_grad=True)
    allowed = torch.zeros(2, 1, 3, 9, dtype=torch.bool)
    allowed[:, :, :2, 3:6] = True
    out = contextual_bias(logits, torch.randn(2, 1, 3, 4), torch.randn(9, 4), allowed, None, steps, sign=1.0)
    of_logits, of_steps = torch.autograd.grad(out.sum(), [logits, steps])
    assert torch.equal(of_logits[~allowed], torch.ones(int((~allowed).sum())))
    masked = ~allowed[:, 0].any(1)
    assert torch.equal(of_steps[:, 0][masked], torch.zeros(int(masked.sum())))
    assert (of_steps[:, 0][~masked] != 0).any()


@needs_kernels
def test_tensors_that_are_not_contiguous() -> None:
    allowed = torch.ones(2, 1, 5, 8, dtype=torch.bool).tril()

    def call(logits: Tensor, query: Tensor, table: Tensor) -> Tensor:
        out = contextual_bias(logits.permute(3, 2, 1, 0), query.mT, table.T, allowed, sign=1.0)
        return (out * allowed).transpose(1, 3)  # the gradient, too

    compare("contextual_bias", call, torch.randn(8, 5, 3, 2), torch.randn(2, 3, 4, 5), torch.randn(4, 9))


@needs_kernels
@pytest.mark.parametrize("step", [-1.0, -math.inf, math.inf, math.nan, 1e9])
def test_steps_out_of_range_read_no_row_past_the_table(step: float) -> None:
    logits, steps = torch.randn(1, 2, 3, 40, requires_grad=True), torch.rand(1, 2, 40)
    steps[0, 0, 9:20] = steps[0, 0, 30:] = step
    given = torch.randn(1, 2, 3, 4), torch.randn(90, 4), torch.ones(1, 1, 3, 40, dtype=torch.bool)
    values = contextual_bias(logits, *given, None, steps, sign=1.0)
    values.sum().backward()
    assert values[0, 1].isfinite().all()


@needs_kernels
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("keys", [1, 5, 16, 27])
def test_no_memory_of_others_is_touched(keys: int, attention: bool, at_end: bool) -> None:
    """Inputs and outputs are between protected pages; values are the same as elsewhere."""
    torch.manual_seed(keys)
    fences: list[Fenced] = []

    def fenced(given: Tensor) -> Tensor:
        fences.append(Fenced(given, at_end))
        return fences[-1].held

    allowed, kept = torch.rand(2, 1, 3, keys) < 0.8, (torch.rand(2, 2, 3, keys) < 0.8).short()
    vectors = [torch.randn(2, 2, 3, keys), torch.randn(2, 2, 3, 5)]
    if attention:
        vectors = [torch.randn(2, 3, 2, 5), *torch.randn(2, 2, keys, 2, 5)]
    parameters = torch.randn(4, 5), torch.randn(4), torch.randn(9, 4), torch.rand(2, 2, keys)
    more = [kept, torch.full((2, 2, 3, 2), torch.nan)] if attention else []
    name = "contextual_attention" if attention else "contextual_bias"
    numbers = (2, 2, 3, keys, 5, 4, 9, *((-1.0, 1.0, 0.4, 1.25) if attention else (1, -1.0, 1.0)))
    results = []
    for hold in (torch.clone, fenced):
        given = [hold(x) for x in (*vectors, *parameters, allowed, *more)]
        out, grad = hold(vectors[0] * torch.nan), hold(torch.linspace(-1, 1, vectors[0].numel()))
        into = [hold(x * torch.nan) for x in (*vectors, *parameters)]
        native.call(name, *numbers, *given, out)
        native.call(f"{name}_backward", *numbers, *given, grad, *into)
        results.append([x.clone() for x in (out, *into)])
    assert not any(x.isnan().any() for x in results[0])
    assert all(torch.equal(got, want) for got, want in zip(*results, strict=True))
    for fence in fences:
        fence.protect()


SHAPES = {
    "query": (2, 5, 3, 6),
    "key": (2, 8, 3, 6),
    "value": (2, 8, 3, 6),
    "weight": (4, 6),
    "bias": (4,),
    "gate_weights": (2, 3, 8),
    "allowed": (2, 1, 5, 8),
}


@needs_kernels
@pytest.mark.parametrize("which", SHAPES)
@pytest.mark.parametrize("attention", [False, True])
def test_shapes_that_do_not_match_are_refused(attention: bool, which: str) -> None:
    shapes = SHAPES | {which: (*SHAPES[which][:-1], SHAPES[which][-1] + 1)}
    given = {name: torch.ones(shape) for name, shape in shapes.items()}
    allowed, gate = given["allowed"].bool(), (given["weight"], given["bias"])
    others = torch.ones(9, 4), allowed, gate, given["gate_weights"]
    query, vectors = given["query"], (given["query"], given["key"], given["value"])
    if attention or which in ("key", "value"):
        with pytest.raises(ValueError, match="does not match"):
            contextual_attention(*vectors, *others, sign=1.0, product=1.0)
    else:
        with pytest.raises(ValueError, match="does not match"):
            contextual_bias(torch.ones(2, 3, 5, 8), query.transpose(1, 2), *others, sign=1.0)


@needs_kernels
def test_a_mask_of_dropout_that_does_not_match_is_refused() -> None:
    query, key = torch.ones(2, 5, 3, 4), torch.ones(2, 8, 3, 4)
    learned = None, None, torch.ones(9, 4), None, torch.ones(2, 1, 5, 8, dtype=torch.bool)
    for kept in (torch.ones(2, 3, 5, 9).short(), torch.ones(2, 3, 5, 8)):
        with pytest.raises(ValueError, match=r"kept .* does not match"):
            cpu.contextual_attention(query, key, key, *learned, kept, 1.0, 1.0, 1.0, 1.0)


@needs_kernels
def test_a_mask_that_is_not_bool_is_refused() -> None:
    given = torch.ones(2, 1, 5, 8), torch.ones(2, 1, 5, 4), torch.ones(9, 4)
    with pytest.raises(ValueError, match=r"allowed .* torch.float32 does not match .* torch.bool"):
        contextual_bias(*given, torch.ones(2, 1, 5, 8), sign=1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    allowed, logits, query = torch.ones(2, 1, 3, 9).bool(), torch.randn(2, 2, 3, 9), torch.randn(2, 2, 3, 4)
    table = torch.randn(5, 4)
    found = contextual_bias(logits.to(dtype), query.to(dtype), table.to(dtype), allowed, sign=1.0)
    assert found.dtype == torch.float32


@needs_kernels
def test_the_reference_takes_the_kernel_of_the_bias_where_it_can() -> None:
    """Vectors in half precision, a table that is not."""
    query, key, value = (torch.randn(2, n, 2, 4).bfloat16() for n in (3, 9, 9))
    table, allowed = torch.randn(5, 4), torch.ones(2, 1, 3, 9).bool()
    with calls() as seen:
        pooled = contextual_attention(query, key, value, table, allowed, sign=1.0, product=0.5)
    assert seen == ["contextual_bias"]
    assert pooled.dtype == torch.bfloat16
