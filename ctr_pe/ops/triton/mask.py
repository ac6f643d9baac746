"""Dropout's mask in Triton: the numbers of ``../dropout.py``, each computed where it is needed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keeps(seed, index, least):
    """Whether dropout keeps the entries of an index (int64): their random numbers reach ``least``."""
    mixed = (index // 4 + 1).to(tl.uint64) * 0x9E3779B97F4A7C15 + seed.to(tl.uint64)
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    mixed = mixed ^ (mixed >> 31)
    return (mixed >> (index % 4 * 16).to(tl.uint64)).to(tl.int16) >= least


@triton.jit(do_not_specialize=["count", "least"])
def keep_mask(seed, kept, count, least, ENTRIES: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    tl.store(kept + index, keeps(tl.load(seed), index, least).to(tl.int16), mask=index < count)
