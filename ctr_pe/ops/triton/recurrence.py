"""Recurrences in Triton: one kernel each way. A program takes ``ROWS`` rows from their first step to their last.

Entries are ordered by step, within a step longest row first; ``sizes`` has the rows of each step, and a 0 at the end.
S state dim, at most ``WIDTH``; U has ``PARTS`` S rows: those of u (not for two parts), r and c. Products with it take
``COLUMNS`` of its columns at a time, and read the states of the step before again, so that all fits the registers.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def advance(
    of_items, weights, bias_hh, weight_hh, states, sizes, S, shared,
    PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Item terms (N / shared, PARTS S), attention (N,) -> states (N, S)."""
    first, column = tl.program_id(0) * ROWS, tl.arange(0, WIDTH)
    row = first + tl.arange(0, ROWS)
    state = tl.zeros([ROWS, WIDTH], tl.float32)
    there = tl.load(sizes)
    before, begin = there * 0, there * 0
    while there > first:
        entry = begin + row
        zero, bias = tl.zeros([ROWS, WIDTH], tl.float32), bias_hh + column
        of_reset = zero + numbers(bias + (PARTS - 2) * S, column < S)[None, :]
        of_new = zero + numbers(bias + (PARTS - 1) * S, column < S)[None, :]
        of_update = zero + numbers(bias, column < S)[None, :]
        for start in range(0, S, COLUMNS):
            inner = start + tl.arange(0, COLUMNS)
            known = (row < tl.where(begin > 0, there, 0))[:, None] & (inner < S)[None, :]
            h = numbers(states + (before + row)[:, None] * S + inner[None, :], known)
            at = weight_hh + column[None, :] * S + inner[:, None]
            inside = (column < S)[None, :] & (inner < S)[:, None]
            of_reset = tl.dot(h, numbers(at + (PARTS - 2) * S * S, inside), of_reset, input_precision=PRECISION)
            of_new = tl.dot(h, numbers(at + (PARTS - 1) * S * S, inside), of_new, input_precision=PRECISION)
            if PARTS == 3:
                of_update = tl.dot(h, numbers(at, inside), of_update, input_precision=PRECISION)
        real = (row < there)[:, None] & (column < S)[None, :]
        at_item = of_items + (entry // shared)[:, None] * PARTS * S + column[None, :]
        reset = tl.sigmoid(numbers(at_item + (PARTS - 2) * S, real) + of_reset)
        new = 2 * tl.sigmoid(2 * (numbers(at_item + (PARTS - 1) * S, real) + reset * of_new)) - 1  # tanh
        weight = numbers(weights + entry, row < there)[:, None]
        if PARTS == 3:
            weight *= tl.sigmoid(numbers(at_item, real) + of_update)
        state += weight * (new - state)
        tl.store(states + entry[:, None] * S + column[None, :], state, mask=real)
        tl.debug_barrier()  # the next step reads it
        before = begin
        begin += there
        sizes += 1
        there = tl.load(sizes)


@triton.jit
def carry_back(
    grad, keep, slope, weight_hh, found, sizes, S,
    PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
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
        own = numbers(grad + entry * S + column[None, :], real) + carried
        tl.store(found + entry * S + column[None, :], own, mask=real)
        tl.debug_barrier()  # read again below
        carried = own * numbers(keep + entry * S + column[None, :], real)
        for start in range(0, PARTS * S, COLUMNS):
            inner = start + tl.arange(0, COLUMNS)
            known = (row < there)[:, None] & (inner < PARTS * S)[None, :]
            g = numbers(found + entry * S + inner[None, :] % S, known)
            g *= numbers(slope + entry * PARTS * S + inner[None, :], known)
            inside = (column < S)[None, :] & (inner < PARTS * S)[:, None]
            weight = numbers(weight_hh + inner[:, None] * S + column[None, :], inside)
            carried = tl.dot(g, weight, carried, input_precision=PRECISION)


@triton.jit
def numbers(at, there):
    """float32, 0 where there are none."""
    return tl.load(at, mask=there, other=0.0).to(tl.float32)
