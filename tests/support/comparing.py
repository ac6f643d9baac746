"""What the kernels are compared with: the same function in float64, for which there is nothing but torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from ctr_pe.ops import native

needs_kernels = pytest.mark.skipif(native.LIBRARY is None, reason="no kernels: no compiler at installation")


@contextmanager
def calls() -> Iterator[list[str]]:
    """The C functions that are called inside."""
    seen: list[str] = []
    call = native.call

    def noting(name: str, *given: Tensor | float | None) -> None:
        seen.append(name)
        call(name, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "call", noting)
        yield seen


def outcome(call: Callable[..., Tensor], *given: Tensor) -> list[Tensor]:
    """Values, and the gradients of a sum of them in which all differ."""
    inputs = [x.detach().requires_grad_() for x in given]
    values = call(*inputs)
    slope = torch.linspace(-1, 1, values.numel(), dtype=values.dtype).view_as(values)
    gradients = torch.autograd.grad((values * slope).sum(), inputs, allow_unused=True)
    pairs = zip(inputs, gradients, strict=True)
    return [values.detach(), *(torch.zeros_like(x) if gradient is None else gradient for x, gradient in pairs)]


def compare(name: str, call: Callable[..., Tensor], *given: Tensor, tolerance: float = 1e-5) -> None:
    """``call`` of float32 tensors runs the kernel ``name`` and its backward, and gives what the reference gives in
    float64, gradients too. Masks of dropout are the same in both."""
    with calls() as seen:
        ours = outcome(call, *given)
    assert {*seen} - {"keep_mask"} == {name, f"{name}_backward"}
    with calls() as seen:
        wanted = outcome(call, *(x.double() for x in given))
    assert not {*seen} - {"keep_mask"}
    for got, want in zip(ours, wanted, strict=True):
        assert got.dtype == torch.float32
        assert got.shape == want.shape
        if want.numel():
            assert float((got - want).abs().max()) <= tolerance * max(1.0, float(want.abs().max()))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)
