"""A function with a gradient of its own, called without its signature being inspected where no gradient is wanted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ctr_pe.pe.rotation import Turn, rotate_planes
from ctr_pe.sequence.jagged import gather_rows, scatter_rows


def test_inference_gives_the_same_bits_without_looking_at_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    x, index, angle = torch.randn(5, 4), torch.tensor([3, 0, 1, 4, 2]), torch.randn(2)
    calls = {
        "gather": lambda: gather_rows(x, index),
        "scatter": lambda: scatter_rows(x, index, 6),
        "rotation": lambda: rotate_planes(x, Turn.of(angle)),
    }
    wanted = {name: call() for name, call in calls.items()}

    def looked(*given: Any) -> None:
        raise AssertionError("a signature was inspected")

    monkeypatch.setattr("torch.autograd.function.inspect.signature", looked)
    with torch.inference_mode():
        for name, call in calls.items():
            assert torch.equal(call(), wanted[name])
