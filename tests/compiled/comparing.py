"""What is compiled against torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ctr_pe import compiled

needs_code = pytest.mark.skipif(compiled.library() is None, reason="no compiled code: no compiler at installation")


def compare(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    times: int,
    call: Callable[..., Tensor],
    *given: Tensor,
    module: nn.Module | None = None,
) -> None:
    """In float32, compiled, against float64, for which there is nothing but torch: values, and all gradients of what
    is given and of the module's parameters. ``name`` is asked so many times, there and back."""
    asked: list[str] = []
    run = compiled.run
    monkeypatch.setattr(compiled, "run", lambda what, *rest: asked.append(what) or run(what, *rest))

    def found(dtype: torch.dtype) -> list[Tensor]:
        parameters = [] if module is None else list(module.to(dtype).parameters())
        inputs = [x.to(dtype).requires_grad_() for x in given]
        values = call(*inputs)
        slope = torch.linspace(-1, 1, values.numel(), dtype=dtype).view_as(values)
        gradients = torch.autograd.grad((values * slope).sum(), [*inputs, *parameters], allow_unused=True)
        return [values.detach(), *(x for x in gradients if x is not None)]

    ours = found(torch.float32)
    assert asked.count(f"{name}_forward") == asked.count(f"{name}_backward") == times
    asked.clear()
    wanted = found(torch.float64)
    assert not asked
    for got, want in zip(ours, wanted, strict=True):
        assert got.shape == want.shape
        assert not want.numel() or (got - want).abs().max() <= 1e-5 * max(1.0, float(want.abs().max()))
