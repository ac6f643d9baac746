"""Every test runs with the kernels for each kind of processor."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from ctr_pe.ops import native


def _use(lanes: int) -> None:
    if native.LIBRARY is not None:
        native.LIBRARY.use_lanes(ctypes.c_int64(lanes))


@pytest.fixture(autouse=True, params=[16, 8, 4])
def _vectors(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels for processors with wide vectors, with narrower ones, and for any; lesser ones if this has no such."""
    _use(request.param)
    yield
    _use(16)


@pytest.fixture(autouse=True)
def _new_memory_is_nan() -> Iterator[None]:
    """So that what a kernel should have written and did not shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
