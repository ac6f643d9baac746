"""Steps of the kernels of contextual positions, on tiles of queries × keys; in torch:
``../contextual/reference.py``.

All numbers are float32. R rows of the table can be reached. The scores of a tile's queries against them, and their
gradients, are in memory of the program's own: a line per query, R + 1 numbers, the last row twice.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def vectors(source, at, present, width, WIDTH: tl.constexpr):
    """(rows, WIDTH): vectors that begin at ``at``, zero past their width and where none is present."""
    column = tl.arange(0, WIDTH)[None, :]
    return tl.load(source + at[:, None] + column, mask=present[:, None] & (column < width), other=0.0).to(tl.float32)


@triton.jit
def store_vectors(target, at, present, width, x, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)[None, :]
    mask = present[:, None] & (column < width)
    tl.store(target + at[:, None] + column, x.to(target.dtype.element_ty), mask=mask)


@triton.jit
def add_vectors(sums, at, present, width, x, WIDTH: tl.constexpr):
    """No other program adds there: the order of additions is fixed."""
    store_vectors(sums, at, present, width, vectors(sums, at, present, width, WIDTH) + x, WIDTH)


@triton.jit
def clear(sums, count, ENTRIES: tl.constexpr):
    for start in range(0, count, ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        tl.store(sums + entry, tl.zeros([ENTRIES], tl.float32), mask=entry < count)


@triton.jit
def moved(query, weight, bias, scale, D, P, GATED: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr,
          PRECISION: tl.constexpr):  # fmt: skip
    """z = W t + b and t' = SiLU(z), or the query twice, the second time scaled."""
    if GATED:
        place = tl.arange(0, PLACES)
        matrix = vectors(weight, place * D, place < P, D, WIDTH)
        z = tl.dot(query, tl.trans(matrix), input_precision=PRECISION)
        z += tl.load(bias + place, mask=place < P, other=0.0).to(tl.float32)[None, :]
        return z, z * tl.sigmoid(z)
    else:
        return query, query * scale


@triton.jit
def score_rows(query, table, scores, line, R, P, ROWS: tl.constexpr, PLACES: tl.constexpr, PRECISION: tl.constexpr):
    """t' (queries, PLACES) against the rows of the table -> ``scores``."""
    for start in range(0, R + 1, ROWS):
        row = start + tl.arange(0, ROWS)
        rows = vectors(table, tl.minimum(row, R - 1) * P, row <= R, P, PLACES)
        score = tl.dot(query, tl.trans(rows), input_precision=PRECISION)
        tl.store(scores + line[:, None] * (R + 1) + row[None, :], score, mask=(row <= R)[None, :])
    tl.debug_barrier()  # other threads read them


@triton.jit
def open_gates(gate_logits, allowed, sign):
    return tl.where(allowed, tl.sigmoid(sign * gate_logits), 0.0)


@triton.jit
def newest_allowed(allowed, at, present, L, KEYS: tl.constexpr):
    """(queries,): the newest key that each may attend to, -1 for none."""
    found = tl.full(at.shape, -1, tl.int32)
    for start in range(0, L, KEYS):
        key = start + tl.arange(0, KEYS)[None, :]
        ok = tl.load(allowed + at[:, None] + key, mask=present[:, None] & (key < L), other=0) != 0
        found = tl.maximum(found, tl.max(tl.where(ok, key, -1), 1))
    return found


@triton.jit
def look_up(scores, line, position, R):
    """Scores of positions between rows, and their slopes. A position that is NaN stays NaN."""
    low = tl.minimum(tl.maximum(position.to(tl.int32), 0), R - 1)
    at = scores + line[:, None] * (R + 1) + low
    value = tl.load(at)
    slope = tl.load(at + 1) - value
    return value + slope * (position - low.to(tl.float32)), slope


@triton.jit
def add_to_rows(of_scores, line, position, oldest, grad, R, KEYS: tl.constexpr):
    """The gradients of scores from those of what was looked up, ``oldest`` (queries,) the least of the positions. A
    gate is at most 1, so that the keys of a tile reach KEYS + 2 rows."""
    first = tl.minimum(tl.maximum(oldest.to(tl.int32), 0), R - 1)
    row = first[:, None] + tl.arange(0, 2 * KEYS)[None, :]
    share = tl.maximum(1.0 - tl.abs(position[:, :, None] - row[:, None, :].to(tl.float32)), 0.0)
    at, within = of_scores + line[:, None] * (R + 1) + row, row < R
    sums = tl.load(at, mask=within, other=0.0) + tl.sum(grad[:, :, None] * share, 1)
    tl.store(at, sums, mask=within)
    tl.debug_barrier()  # the next keys reach the same rows


@triton.jit
def to_query(of_scores, table, query, of_table, line, R, P, ROWS: tl.constexpr, PLACES: tl.constexpr,
             PRECISION: tl.constexpr):  # fmt: skip
    """The gradient of t' from those of its scores; that of the table is added to the program's sums."""
    of_query = tl.zeros(query.shape, tl.float32)
    for start in range(0, R, ROWS):
        row = start + tl.arange(0, ROWS)
        grad = tl.load(of_scores + line[:, None] * (R + 1) + row[None, :], mask=(row < R)[None, :], other=0.0)
        rows = vectors(table, row * P, row < R, P, PLACES)
        of_query += tl.dot(grad, rows, input_precision=PRECISION)
        add_vectors(of_table, row * P, row < R, P, tl.dot(tl.trans(grad), query, input_precision=PRECISION), PLACES)
    return of_query


@triton.jit
def through_gate(of_moved, z, query, weight, of_weight, of_bias, scale, D, P, GATED: tl.constexpr,
                 WIDTH: tl.constexpr, PLACES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The gradient of the query from that of t'; those of W and b are added to the program's sums."""
    if GATED:
        place, open_ = tl.arange(0, PLACES), tl.sigmoid(z)
        of_z = of_moved * open_ * (1.0 + z * (1.0 - open_))
        matrix = vectors(weight, place * D, place < P, D, WIDTH)
        add_vectors(of_weight, place * D, place < P, D, tl.dot(tl.trans(of_z), query, input_precision=PRECISION), WIDTH)
        sums = tl.load(of_bias + place, mask=place < P, other=0.0) + tl.sum(of_z, 0)
        tl.store(of_bias + place, sums, mask=place < P)
        return tl.dot(of_z, matrix, input_precision=PRECISION)
    else:
        return of_moved * scale


@triton.jit(do_not_specialize=["programs", "table_size", "weight_size", "size"])
def total(sums, of_table, of_weight, of_bias, programs, table_size, weight_size, size, ENTRIES: tl.constexpr):
    """The gradients of table, W and b: the sums of all programs, one after the other."""
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    found = tl.zeros([ENTRIES], tl.float32)
    for program in range(programs):
        found += tl.load(sums + program * size + entry, mask=entry < size, other=0.0)
    tl.store(of_table + entry, found.to(of_table.dtype.element_ty), mask=entry < table_size)
    if of_weight is not None:
        entry -= table_size
        tl.store(of_weight + entry, found.to(of_weight.dtype.element_ty), mask=(entry >= 0) & (entry < weight_size))
        entry -= weight_size
        last = (entry >= 0) & (entry < size - table_size - weight_size)
        tl.store(of_bias + entry, found.to(of_bias.dtype.element_ty), mask=last)
