"""Recurrences in Triton: one kernel each way. A program takes ``ROWS`` rows from their first step to their last.

Entries are ordered by step, within a step longest row first; ``sizes`` has the rows of each step, and a 0 at the end.
S state dim, at most ``WIDTH``; ``weight_hh`` has ``PARTS`` S rows: those of u (not for two parts), r and c.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def advance(
    of_items, weights, bias_hh, weight_hh, states, sizes, S, shared,
    PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Item terms (N / shared, PARTS S), attention (N,) -> states (N, S)."""
    first, column = tl.program_id(0) * ROWS, tl.arange(0, WIDTH)
    row = first + tl.arange(0, ROWS)
    state = tl.zeros([ROWS, WIDTH], tl.float32)
    begin, there = tl.load(sizes) * 0, tl.load(sizes)
    while there > first:
        entry = begin + row
        real = (row < there)[:, None] & (column < S)[None, :]
        weight = tl.load(weights + entry, mask=row < there, other=0.0).to(tl.float32)[:, None]
        at_item = of_items + (entry // shared)[:, None] * PARTS * S + column[None, :]
        reset = tl.sigmoid(
            tl.load(at_item + (PARTS - 2) * S, mask=real, other=0.0).to(tl.float32)
            + of_state(state, weight_hh, bias_hh, PARTS - 2, column, S, PRECISION)
        )
        new = tl.load(at_item + (PARTS - 1) * S, mask=real, other=0.0).to(tl.float32)
        new += reset * of_state(state, weight_hh, bias_hh, PARTS - 1, column, S, PRECISION)
        new = 2 * tl.sigmoid(2 * new) - 1  # tanh
        if PARTS == 3:
            update = tl.load(at_item, mask=real, other=0.0).to(tl.float32)
            weight *= tl.sigmoid(update + of_state(state, weight_hh, bias_hh, 0, column, S, PRECISION))
        state += weight * (new - state)
        tl.store(states + entry[:, None] * S + column[None, :], state, mask=real)
        begin += there
        sizes += 1
        there = tl.load(sizes)


@triton.jit
def carry_back(
    grad, keep, slope, weight_hh, found, sizes, S,
    PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``reference.carry_back``: grad, keep (N, S), slope (N, PARTS S) -> (N, S)."""
    first, column = tl.program_id(0) * ROWS, tl.arange(0, WIDTH)
    row = first + tl.arange(0, ROWS)
    end, steps = tl.load(sizes) * 0, 0
    while tl.load(sizes + steps) > first:
        end += tl.load(sizes + steps)
        steps += 1
    carried = tl.zeros([ROWS, WIDTH], tl.float32)
    while steps > 0:
        steps -= 1
        there = tl.load(sizes + steps)
        end -= there
        entry = (end + row)[:, None]
        real = (row < there)[:, None] & (column < S)[None, :]
        own = tl.load(grad + entry * S + column[None, :], mask=real, other=0.0).to(tl.float32) + carried
        tl.store(found + entry * S + column[None, :], own, mask=real)
        carried = own * tl.load(keep + entry * S + column[None, :], mask=real, other=0.0).to(tl.float32)
        for part in tl.static_range(PARTS):
            at_slope = slope + (entry * PARTS + part) * S + column[None, :]
            by_state = own * tl.load(at_slope, mask=real, other=0.0).to(tl.float32)
            carried += tl.dot(by_state, of_part(weight_hh, part, column, S), input_precision=PRECISION)


@triton.jit
def of_state(state, weight_hh, bias_hh, part, column, S, PRECISION: tl.constexpr):
    """U h and its bias."""
    bias = tl.load(bias_hh + part * S + column, mask=column < S, other=0.0).to(tl.float32)
    weight = tl.trans(of_part(weight_hh, part, column, S))
    return tl.dot(state, weight, input_precision=PRECISION) + bias[None, :]


@triton.jit
def of_part(weight_hh, part, column, S):
    """(WIDTH, WIDTH) of U, zeros beyond S. From the cache at each step: all of it is more than the registers hold."""
    inside = (column < S)[:, None] & (column < S)[None, :]
    return tl.load(weight_hh + (part * S + column[:, None]) * S + column[None, :], mask=inside, other=0.0).to(
        tl.float32
    )
