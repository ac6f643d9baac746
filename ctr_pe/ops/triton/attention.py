"""Attention with contextual positions in Triton: one pass over the pairs each way, nothing of their size is kept.

A program takes heads (of a row of the batch) one after the other, and a tile of queries × keys at a time. The backward
computes logits, gates and positions again from the sum of each query's gates.

B rows of the batch, H heads, Q queries, L keys, D width of the queries, P that of the table, T its rows, R those that
positions can reach. Arrays are dense.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ctr_pe.ops.triton.mask import keeps
from ctr_pe.ops.triton.tiles import (
    add_to_rows,
    add_vectors,
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

SIZES = ["rows", "H", "Q", "L", "D", "P", "R", "T", "least"]


@triton.jit
def counted_gates(gate, gate_weights, key, newest, L, STEPPED: tl.constexpr):
    """Gates times gate_weights (L,); the newest counts in full."""
    if STEPPED:
        step = tl.load(gate_weights + key, mask=key < L, other=0.0).to(tl.float32)[None, :]
        step = tl.where(key[None, :] == newest[:, None], 1.0, tl.maximum(step, 0.0))
        return gate * step, step
    else:
        return gate, 1.0


@triton.jit
def shares(seed, at, key, least, factor, DROPS: tl.constexpr):
    """What dropout makes of weights: a factor for each."""
    if DROPS:
        return tl.where(keeps(tl.load(seed), at[:, None] + key[None, :], least), factor, 0.0)
    else:
        return 1.0


@triton.jit(do_not_specialize=SIZES)
def attend(query, key, value, weight, bias, table, gate_weights, allowed, seed, out, made, scratch,
           sign, scale, product, factor, least, rows, H, Q, L, D, P, R,
           GATED: tl.constexpr, STEPPED: tl.constexpr, DROPS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
           ROWS: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """-> ``out`` (B, Q, H, D) and ``made`` (B, H, Q, 2): the logarithm of the softmax's sum, and the sum of gates."""
    program, line = tl.program_id(0), tl.arange(0, QUERIES)
    scores = scratch + program.to(tl.int64) * QUERIES * (R + 1)
    tiles = tl.cdiv(Q, QUERIES)
    for item in range(program, rows * H * tiles, tl.num_programs(0)):
        head = tl.cast(item // tiles, tl.int64)
        row, own = head // H, head % H
        index = item % tiles * QUERIES + line
        present = index < Q
        at_query = ((row * Q + index) * H + own) * D
        t = vectors(query, at_query, present, D, WIDTH)
        _z, moved_query = moved(t, weight, bias, scale, D, P, GATED, WIDTH, PLACES, PRECISION)
        score_rows(moved_query, table, scores, line, R, P, ROWS, PLACES, PRECISION)
        at_allowed, at_pairs = (row * Q + index) * L, (head * Q + index) * L
        newest = tl.full([QUERIES], -1, tl.int32)
        if STEPPED:
            newest = newest_allowed(allowed, at_allowed, present, L, KEYS)
        largest, total = tl.full([QUERIES], float("-inf"), tl.float32), tl.zeros([QUERIES], tl.float32)
        newer, pooled = tl.zeros([QUERIES], tl.float32), tl.zeros([QUERIES, WIDTH], tl.float32)
        for tile in range(tl.cdiv(L, KEYS)):  # from the newest on
            at = (tl.cdiv(L, KEYS) - 1 - tile) * KEYS + tl.arange(0, KEYS)
            pairs = present[:, None] & (at < L)[None, :]
            ok = tl.load(allowed + at_allowed[:, None] + at[None, :], mask=pairs, other=0) != 0
            if tl.max(ok.to(tl.int32)) > 0:
                at_key = ((row * L + at) * H + own) * D
                k = vectors(key, at_key, at < L, D, WIDTH)
                logits = product * tl.dot(t, tl.trans(k), input_precision=PRECISION)
                gate = open_gates(logits, ok, sign)
                counted, _ = counted_gates(gate, gate_weights + head * L if STEPPED else None, at, newest, L, STEPPED)
                position = newer[:, None] + tl.cumsum(counted, 1, reverse=True)
                newer += tl.sum(counted, 1)
                added, _ = look_up(scores, line, tl.where(position > R - 1, R - 1.0, position), R)
                logits = tl.where(ok, logits + added, float("-inf"))
                before, largest = largest, tl.maximum(largest, tl.max(logits, 1))
                base = tl.where(largest == float("-inf"), 0.0, largest)
                shrink, part = tl.exp(before - base), tl.exp(logits - base[:, None])
                total = total * shrink + tl.sum(part, 1)
                part *= shares(seed, at_pairs, at, least, factor, DROPS)
                v = vectors(value, at_key, at < L, D, WIDTH)
                pooled = pooled * shrink[:, None] + tl.dot(part, v, input_precision=PRECISION)
        some = total != 0
        store_vectors(out, at_query, present, D, tl.where(some, 1.0 / total, 0.0)[:, None] * pooled, WIDTH)
        norm = tl.where(some, largest + tl.log(total), 0.0)
        at_made = made + (head * Q + index) * 2
        tl.store(at_made, norm, mask=present)
        tl.store(at_made + 1, newer, mask=present)
        tl.debug_barrier()  # the scores have been read


@triton.jit(do_not_specialize=SIZES)
def attend_backward(grad, out, made, query, key, value, weight, bias, table, gate_weights, allowed, seed,
                    of_query, of_key, of_value, of_gate_weights, scratch, sums,
                    sign, scale, product, factor, least, rows, H, Q, L, D, P, R, T,
                    GATED: tl.constexpr, STEPPED: tl.constexpr, DROPS: tl.constexpr, QUERIES: tl.constexpr,
                    KEYS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr,
                    PRECISION: tl.constexpr):  # fmt: skip
    """-> the gradients of queries, keys, values and gate weights, and per program the sums of those of table, W, b."""
    program, line = tl.program_id(0).to(tl.int64), tl.arange(0, QUERIES)
    scores = scratch + program * (2 * QUERIES * (R + 1) + L * (2 * D + 1))
    of_scores = scores + QUERIES * (R + 1)
    of_keys = of_scores + QUERIES * (R + 1)
    of_values, of_pauses = of_keys + L * D, of_keys + 2 * L * D
    of_table = sums + program * (T * P + (P * D + P if GATED else 0))
    of_weight, of_bias = of_table + T * P, of_table + T * P + P * D
    clear(of_table, T * P + (P * D + P if GATED else 0), 1024)
    for item in range(tl.program_id(0), rows * H, tl.num_programs(0)):
        head = tl.cast(item, tl.int64)
        row, own = head // H, head % H
        clear(of_keys, L * (2 * D + 1), 1024)
        for start in range(0, Q, QUERIES):
            index = start + line
            present = index < Q
            at_query = ((row * Q + index) * H + own) * D
            at_allowed, at_pairs = (row * Q + index) * L, (head * Q + index) * L
            t, of_out = vectors(query, at_query, present, D, WIDTH), vectors(grad, at_query, present, D, WIDTH)
            z, moved_query = moved(t, weight, bias, scale, D, P, GATED, WIDTH, PLACES, PRECISION)
            clear(of_scores, QUERIES * (R + 1), 1024)
            score_rows(moved_query, table, scores, line, R, P, ROWS, PLACES, PRECISION)
            newest = tl.full([QUERIES], -1, tl.int32)
            if STEPPED:
                newest = newest_allowed(allowed, at_allowed, present, L, KEYS)
            mean = tl.sum(of_out * vectors(out, at_query, present, D, WIDTH), 1)
            norm = tl.load(made + at_pairs // L * 2, mask=present, other=0.0)
            newer = tl.load(made + at_pairs // L * 2 + 1, mask=present, other=0.0)
            of_t, of_older = tl.zeros([QUERIES, WIDTH], tl.float32), tl.zeros([QUERIES], tl.float32)
            for first in range(0, L, KEYS):  # from the oldest on
                at = first + tl.arange(0, KEYS)
                pairs = present[:, None] & (at < L)[None, :]
                ok = tl.load(allowed + at_allowed[:, None] + at[None, :], mask=pairs, other=0) != 0
                if tl.max(ok.to(tl.int32)) > 0:
                    at_key = ((row * L + at) * H + own) * D
                    k, v = vectors(key, at_key, at < L, D, WIDTH), vectors(value, at_key, at < L, D, WIDTH)
                    logits = product * tl.dot(t, tl.trans(k), input_precision=PRECISION)
                    gate = open_gates(logits, ok, sign)
                    counted, step = counted_gates(
                        gate, gate_weights + head * L if STEPPED else None, at, newest, L, STEPPED
                    )
                    newer = tl.maximum(newer - tl.sum(counted, 1), 0.0)
                    position = newer[:, None] + tl.cumsum(counted, 1, reverse=True)
                    position = tl.where(position > R - 1, R - 1.0, position)
                    added, slope = look_up(scores, line, position, R)
                    part = tl.where(ok, tl.exp(logits + added - norm[:, None]), 0.0)
                    share = shares(seed, at_pairs, at, least, factor, DROPS)
                    of_part = share * tl.dot(of_out, tl.trans(v), input_precision=PRECISION)
                    of_logits = part * (of_part - mean[:, None])
                    add_to_rows(of_scores, line, position, newer, of_logits, R, KEYS)
                    of_position = of_logits * slope
                    of_counted = of_older[:, None] + tl.cumsum(of_position, 1)
                    of_older += tl.sum(of_position, 1)
                    of_logits += tl.where(ok, of_counted * step * sign * gate * (1.0 - gate), 0.0)
                    if STEPPED:
                        own_step = ok & (at[None, :] != newest[:, None])
                        grads = tl.sum(tl.where(own_step, of_counted * gate, 0.0), 0)
                        before = tl.load(of_pauses + at, mask=at < L, other=0.0)
                        tl.store(of_pauses + at, before + grads, mask=at < L)
                    of_logits *= product
                    kept = tl.trans(part * share)
                    of_t += tl.dot(of_logits, k, input_precision=PRECISION)
                    of_k = tl.dot(tl.trans(of_logits), t, input_precision=PRECISION)
                    add_vectors(of_keys, at * D, at < L, D, of_k, WIDTH)
                    add_vectors(of_values, at * D, at < L, D, tl.dot(kept, of_out, input_precision=PRECISION), WIDTH)
            of_moved_query = to_query(of_scores, table, moved_query, of_table, line, R, P, ROWS, PLACES, PRECISION)
            of_t += through_gate(
                of_moved_query, z, t, weight, of_weight, of_bias, scale, D, P, GATED, WIDTH, PLACES, PRECISION
            )
            store_vectors(of_query, at_query, present, D, of_t, WIDTH)
            tl.debug_barrier()  # what the next queries write has been read
        for first in range(0, L, KEYS):
            at = first + tl.arange(0, KEYS)
            at_key = ((row * L + at) * H + own) * D
            store_vectors(of_key, at_key, at < L, D, vectors(of_keys, at * D, at < L, D, WIDTH), WIDTH)
            store_vectors(of_value, at_key, at < L, D, vectors(of_values, at * D, at < L, D, WIDTH), WIDTH)
            if STEPPED:
                pause = tl.load(of_pauses + at, mask=at < L, other=0.0)
                tl.store(of_gate_weights + head * L + at, pause.to(of_gate_weights.dtype.element_ty), mask=at < L)
        tl.debug_barrier()
