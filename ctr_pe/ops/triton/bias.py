"""The bias of contextual positions in Triton, one pass over the pairs forwards and two backwards.

A program takes tiles of lines one after the other; a line is the keys of one query.

N = B H Q lines, B batch, H heads, Q queries, L keys, D width of the queries, P that of the table, T its rows, R those
that positions can reach. Arrays are dense.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ctr_pe.ops.triton.tiles import (
    add_to_rows,
    clear,
    look_up,
    moved,
    newest_allowed,
    open_gates,
    score_rows,
    store_vectors,
    through_gate,
    to_query,
    vectors,
)

SIZES = ["N", "H", "Q", "L", "D", "P", "R", "T"]


@triton.jit
def gates_of(gate_logits, gate_weights, allowed, at_line, at_allowed, at_steps, present, key, newest, sign, L,
             STEPPED: tl.constexpr):  # fmt: skip
    """Of a tile: which keys are allowed, open gates, and what these count."""
    pairs = present[:, None] & (key < L)[None, :]
    ok = tl.load(allowed + at_allowed[:, None] + key[None, :], mask=pairs, other=0) != 0
    x = tl.load(gate_logits + at_line[:, None] + key[None, :], mask=pairs, other=0.0).to(tl.float32)
    gate = open_gates(x, ok, sign)
    if STEPPED:
        step = tl.load(gate_weights + at_steps[:, None] + key[None, :], mask=pairs, other=0.0).to(tl.float32)
        step = tl.where(key[None, :] == newest[:, None], 1.0, tl.maximum(step, 0.0))
        return pairs, ok, gate, step, gate * step
    else:
        return pairs, ok, gate, 1.0, gate


@triton.jit
def newest_of(allowed, at_allowed, present, L, AMONG: tl.constexpr, KEYS: tl.constexpr):
    """The keys whose gates count in full: among items the newest allowed ones, else none."""
    if AMONG:
        return newest_allowed(allowed, at_allowed, present, L, KEYS)
    else:
        return tl.full(at_allowed.shape, -1, tl.int32)


@triton.jit(do_not_specialize=SIZES)
def add_bias(logits, query, weight, bias, table, gate_weights, allowed, gate_logits, out, scratch, sign, scale,
             N, H, Q, L, D, P, R,
             GATED: tl.constexpr, STEPPED: tl.constexpr, AMONG: tl.constexpr, QUERIES: tl.constexpr,
             KEYS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr,
             PRECISION: tl.constexpr):  # fmt: skip
    """-> ``out`` (B, H, Q, L)."""
    program, line = tl.program_id(0), tl.arange(0, QUERIES)
    scores = scratch + program.to(tl.int64) * QUERIES * (R + 1)
    for item in range(program, tl.cdiv(N, QUERIES), tl.num_programs(0)):
        index = tl.cast(item, tl.int64) * QUERIES + line
        present = index < N
        t = vectors(query, index * D, present, D, WIDTH)
        _z, moved_query = moved(t, weight, bias, scale, D, P, GATED, WIDTH, PLACES, PRECISION)
        score_rows(moved_query, table, scores, line, R, P, ROWS, PLACES, PRECISION)
        at_line, at_steps, at_allowed = index * L, index // Q * L, (index // (H * Q) * Q + index % Q) * L
        newest = newest_of(allowed, at_allowed, present, L, STEPPED and AMONG, KEYS)
        newer = tl.zeros([QUERIES], tl.float32)
        for tile in range(tl.cdiv(L, KEYS)):  # from the newest on
            key = (tl.cdiv(L, KEYS) - 1 - tile) * KEYS + tl.arange(0, KEYS)
            pairs, ok, _, _, counted = gates_of(
                gate_logits,
                gate_weights,
                allowed,
                at_line,
                at_allowed,
                at_steps,
                present,
                key,
                newest,
                sign,
                L,
                STEPPED,
            )
            position = newer[:, None] + tl.cumsum(counted, 1, reverse=True)
            newer += tl.sum(counted, 1)
            added, _ = look_up(scores, line, tl.where(position > R - 1, R - 1.0, position), R)
            at = at_line[:, None] + key[None, :]
            x = tl.load(logits + at, mask=pairs, other=0.0)
            tl.store(out + at, x + tl.where(ok, added, 0.0), mask=pairs)
        tl.debug_barrier()  # the scores have been read


@triton.jit(do_not_specialize=SIZES)
def add_bias_backward(grad, query, weight, bias, table, gate_weights, allowed, gate_logits,
                      of_query, of_gate_weights, of_gate_logits, scratch, sums, sign, scale, N, H, Q, L, D, P, R, T,
                      GATED: tl.constexpr, STEPPED: tl.constexpr, AMONG: tl.constexpr, SEPARATE: tl.constexpr,
                      QUERIES: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
                      PLACES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """-> the gradients of queries, of gate weights per line (N, L), and of the gate logits; that of the logits,
    ``grad``, is added to it unless gate logits are ``SEPARATE``. And per program the sums of those of table, W, b."""
    program, line = tl.program_id(0).to(tl.int64), tl.arange(0, QUERIES)
    scores = scratch + program * 2 * QUERIES * (R + 1)
    of_scores = scores + QUERIES * (R + 1)
    of_table = sums + program * (T * P + (P * D + P if GATED else 0))
    of_weight, of_bias = of_table + T * P, of_table + T * P + P * D
    clear(of_table, T * P + (P * D + P if GATED else 0), 1024)
    for item in range(tl.program_id(0), tl.cdiv(N, QUERIES), tl.num_programs(0)):
        index = tl.cast(item, tl.int64) * QUERIES + line
        present = index < N
        t = vectors(query, index * D, present, D, WIDTH)
        z, moved_query = moved(t, weight, bias, scale, D, P, GATED, WIDTH, PLACES, PRECISION)
        clear(of_scores, QUERIES * (R + 1), 1024)
        score_rows(moved_query, table, scores, line, R, P, ROWS, PLACES, PRECISION)
        at_line, at_steps, at_allowed = index * L, index // Q * L, (index // (H * Q) * Q + index % Q) * L
        newest = newest_of(allowed, at_allowed, present, L, STEPPED and AMONG, KEYS)
        newer, of_older = tl.zeros([QUERIES], tl.float32), tl.zeros([QUERIES], tl.float32)
        for first in range(0, L, KEYS):
            key = first + tl.arange(0, KEYS)
            _, _, _, _, counted = gates_of(
                gate_logits,
                gate_weights,
                allowed,
                at_line,
                at_allowed,
                at_steps,
                present,
                key,
                newest,
                sign,
                L,
                STEPPED,
            )
            newer += tl.sum(counted, 1)
        for first in range(0, L, KEYS):  # from the oldest on
            key = first + tl.arange(0, KEYS)
            pairs, ok, gate, step, counted = gates_of(
                gate_logits,
                gate_weights,
                allowed,
                at_line,
                at_allowed,
                at_steps,
                present,
                key,
                newest,
                sign,
                L,
                STEPPED,
            )
            newer = tl.maximum(newer - tl.sum(counted, 1), 0.0)
            position = newer[:, None] + tl.cumsum(counted, 1, reverse=True)
            position = tl.where(position > R - 1, R - 1.0, position)
            _, slope = look_up(scores, line, position, R)
            at = at_line[:, None] + key[None, :]
            of_out = tl.load(grad + at, mask=pairs, other=0.0)
            of_added = tl.where(ok, of_out, 0.0)
            add_to_rows(of_scores, line, position, newer, of_added, R, KEYS)
            of_position = of_added * slope
            of_counted = of_older[:, None] + tl.cumsum(of_position, 1)
            of_older += tl.sum(of_position, 1)
            of_gates = tl.where(ok, of_counted * step * sign * gate * (1.0 - gate), 0.0)
            tl.store(of_gate_logits + at, of_gates if SEPARATE else of_out + of_gates, mask=pairs)
            if STEPPED:
                own_step = ok & (key[None, :] != newest[:, None])
                tl.store(of_gate_weights + at, tl.where(own_step, of_counted * gate, 0.0), mask=pairs)
        of_moved_query = to_query(of_scores, table, moved_query, of_table, line, R, P, ROWS, PLACES, PRECISION)
        of_t = through_gate(
            of_moved_query, z, t, weight, of_weight, of_bias, scale, D, P, GATED, WIDTH, PLACES, PRECISION
        )
        store_vectors(of_query, index * D, present, D, of_t, WIDTH)
        tl.debug_barrier()  # what the next lines write has been read
