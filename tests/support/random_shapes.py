"""Runs every kernel over random shapes, empty and odd ones too, with the library that is given: for the sanitizers."""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor

from ctr_pe.ops import native
from ctr_pe.ops.contextual import contextual_attention, contextual_bias
from ctr_pe.ops.dice import dice, dice_backward
from ctr_pe.ops.dropout import keep_mask
from ctr_pe.ops.time_decay import time_decay_bias

RUNS = 60


def size(least: int, most: int) -> int:
    return int(torch.randint(least, most + 1, ()))


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def backward(y: Tensor) -> None:
    torch.autograd.backward(y.sum())


def once() -> None:
    rows, heads, queries = size(0, 3), size(1, 3), size(0, 9)
    keys, width, table_rows = size(1, 40), size(1, 35), size(1, 50)
    gated, stepped, dim = size(0, 1), size(0, 1), width
    if gated:
        dim = size(1, 35)
    gate, steps = (leaf(width, dim), leaf(width)) if gated else None, leaf(rows, heads, keys) if stepped else None
    allowed, table = torch.rand(rows, 1, queries, keys) < (0.1, 0.7)[size(0, 1)], leaf(table_rows, width)
    logits, query, sign = leaf(rows, heads, queries, keys), leaf(rows, heads, queries, dim), 1.0 - 2 * size(0, 1)
    backward(contextual_bias(logits, query, table, allowed, gate, steps, sign=sign, among_items=bool(size(0, 1))))
    vectors = leaf(rows, queries, heads, dim), leaf(rows, keys, heads, dim), leaf(rows, keys, heads, dim)
    dropout = (torch.tensor([size(0, 9)]), 0.4) if size(0, 1) else None
    pooled = contextual_attention(*vectors, table, allowed, gate, steps, sign=-1.0, product=0.5, dropout=dropout)
    backward(pooled)

    x, factor, shift, alpha = leaf(rows * queries, width), leaf(width), leaf(width), leaf(width)
    mask = (torch.rand(x.shape) < 0.6).short() if size(0, 1) else None
    backward(dice(x, factor, shift, alpha, kept=mask, kept_factor=1.6))
    x, factor, shift, alpha = x.detach(), factor.detach(), shift.detach(), alpha.detach()
    dice_backward(x, x, factor, shift, alpha, mask, 1.6)
    keep_mask(torch.tensor([size(0, 9)]), torch.Size([size(0, 200)]), 0.3)

    ages = torch.randint(-(10**9), 10**9, (rows, 1, queries)), torch.randint(0, 10**9, (rows, 1, keys))
    backward(time_decay_bias(logits, leaf(heads), leaf(heads), leaf(32, heads), *ages, 60.0))


if __name__ == "__main__":
    native.LIBRARY = ctypes.CDLL(sys.argv[1])
    for lanes in (16, 8, 4):
        native.LIBRARY.use_lanes(ctypes.c_int64(lanes))
        for run in range(RUNS):
            torch.manual_seed(run)
            torch.set_num_threads(1 + run % 3)
            once()
    print("done")
