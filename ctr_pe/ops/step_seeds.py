"""Random numbers of a training step from a counter on the device: a CUDA graph of the step has new ones each time.

A seed that the host draws would be part of the recording. Here the host writes one number per step into a tensor, and
all seeds of the step are a hash of it and of how many were asked for before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

CHUNK = 64
"""Seeds that are computed at once."""
BETWEEN_MODULES = 0xD1342543DE82EF95 - 2**64
"""What the seeds of modules that are computed as one differ by."""


class StepSeeds:
    """The seeds of one step. ``step`` (1,) int64: a number that no other step of the training has."""

    def __init__(self, step: Tensor) -> None:
        self.step, self.drawn = step, 0
        self.module: Tensor | None = None
        self._made: list[Tensor] = []

    def next(self) -> Tensor:
        """(1,) int64, on the device of ``step``."""
        chunk, place = divmod(self.drawn, CHUNK)
        if chunk == len(self._made):
            self._made.append(mixed(self.step, CHUNK, chunk * CHUNK))
        self.drawn += 1
        seed = self._made[chunk][place : place + 1]
        return seed if self.module is None else seed + self.module * BETWEEN_MODULES

    @contextmanager
    def of_module(self, number: Tensor) -> Iterator[None]:
        """Seeds of one of several modules under ``torch.func.vmap``; ``number`` () int64 tells which."""
        self.module = number
        try:
            yield
        finally:
            self.module = None


_active: ContextVar[StepSeeds | None] = ContextVar("step seeds", default=None)


def active() -> StepSeeds | None:
    """Those of the step that is computed, None where the host draws seeds."""
    return _active.get()


@contextmanager
def of_step(step: Tensor) -> Iterator[StepSeeds]:
    """In the block dropout and other draws take their seeds from ``step`` (1,) int64."""
    token = _active.set(seeds := StepSeeds(step))
    try:
        yield seeds
    finally:
        _active.reset(token)


def mixed(seed: Tensor, count: int, first: int = 0) -> Tensor:
    """Random numbers (count,) int64 from the ``first`` on: SplitMix64 (Steele et al. 2014). seed (1,) int64."""
    index = torch.arange(first + 1, first + count + 1, device=seed.device)
    found = index * (0x9E3779B97F4A7C15 - 2**64) + seed
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1)):
        high = (found >> shift) & (2 ** (64 - shift) - 1)
        found = (found ^ high) * factor
    return found


def below(most: Tensor, seed: Tensor, count: int) -> Tensor:
    """(count,) int64, random numbers from 0 to ``most`` - 1, () int64; 0 where that is 0 or less."""
    return (mixed(seed, count) & (2**63 - 1)) % most.clamp(min=1)
