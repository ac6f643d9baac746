"""Every test runs with the code for each kind of processor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ctr_pe import compiled


@pytest.fixture(autouse=True, params=[16, 8, 4])
def _vectors(request: pytest.FixtureRequest) -> Iterator[None]:
    """The code for processors with wide vectors, with narrower ones, and for any; a lesser one if this has not."""
    code = compiled.library()
    if code is not None:
        code.use(request.param)
    yield
    if code is not None:
        code.use(16)


@pytest.fixture(autouse=True)
def _new_memory_is_no_number() -> Iterator[None]:
    """So that what the code should have written and did not shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
