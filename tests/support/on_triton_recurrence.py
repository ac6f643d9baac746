"""Triton's kernels of recurrences give what torch gives in float64: through its interpreter, or on a GPU.

Run by ``test_recurrence.py``, in a process that has ``TRITON_INTERPRET=1``, and by ``test_gpu.py`` without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ctr_pe import Positions
from ctr_pe.ops import accelerator
from ctr_pe.ops.recurrence import gpu
from ctr_pe.units import AttentionGRU
from ctr_pe.units.gru import GATES, last_state
from tests.support.comparing import outcome
from tests.support.recurrences import CASES, Case

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}

DEVICE = "cpu" if accelerator.INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Which kernels are launched, and how often. New memory is NaN: what a kernel should have written shows."""
    seen, launch = Counter[str](), gpu._launch

    def noting(kernel: Any, *given: Any, **options: Any) -> None:
        seen[kernel.__name__] += 1
        launch(kernel, *given, **options)

    monkeypatch.setattr(gpu, "_launch", noting)
    torch.use_deterministic_algorithms(True, warn_only=DEVICE == "cuda")
    with torch.device(DEVICE):
        yield seen
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case: Case, dtype: torch.dtype, launched: Counter[str]) -> None:
    given = case.operands(dtype)
    found = outcome(case.whole, *given)
    assert launched == {"advance": 1, "carry_back": 1}
    for got, want in zip(found, outcome(case.by_loop, *(x.double() for x in given)), strict=True):
        assert got.dtype == dtype
        assert float((got - want).abs().max()) <= TOLERANCE[dtype] * max(1.0, float(want.abs().max()))


def test_a_thousand_steps() -> None:
    case = Case(3, 3, (2,) * 10 + (1,) * 990)
    given = case.operands(torch.float32)
    for got, want in zip(outcome(case.whole, *given), outcome(case.by_loop, *(x.double() for x in given)), strict=True):
        assert float((got - want).abs().max()) <= 1e-5 * max(1.0, float(want.abs().max()))


@pytest.mark.skipif(DEVICE == "cuda", reason="test_gpu.py trains whole models")
@pytest.mark.parametrize("targets", [None, 3])
@pytest.mark.parametrize("gate", GATES)
def test_units(gate: str, targets: int | None, launched: Counter[str]) -> None:
    """With empty histories, in half precision around them too: states stay in float32."""
    torch.manual_seed(0)
    unit = AttentionGRU(6, 5, gate)
    positions = Positions.from_mask(torch.arange(7) < torch.tensor([3, 0, 7, 1, 0])[:, None])
    items, weights = torch.randn(11, 6), torch.rand(11, *([] if targets is None else [targets]))
    states = last_state(unit(items, weights, positions), positions)
    assert launched["advance"] == 1
    wanted = last_state(unit.double()(items.double(), weights.double(), positions), positions)
    assert launched["advance"] == 1
    assert torch.allclose(states, wanted.float(), rtol=0, atol=1e-6)
    with torch.autocast(DEVICE, torch.bfloat16):
        half = last_state(unit.float()(items, weights, positions), positions)
    assert half.dtype == torch.float32
    assert torch.allclose(half, states, rtol=0, atol=0.02)


@pytest.mark.skipif(DEVICE == "cuda", reason="test_gpu.py trains whole models")
def test_no_items() -> None:
    unit, positions = AttentionGRU(6, 5), Positions.from_mask(torch.zeros(2, 3, dtype=torch.bool))
    states = unit(torch.zeros(0, 6, requires_grad=True), torch.zeros(0), positions)
    states.sum().backward()
    assert states.shape == (0, 5)
