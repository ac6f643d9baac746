"""Activations by name, and Dice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ctr_pe.config.schema import Activation, valid
from ctr_pe.ops.dice import dice
from ctr_pe.units.batch_norm import keep_running, moments, normed, over_processes
from ctr_pe.utils import distributed


class Dice(nn.Module):
    """f(x) = p x + (1 - p) α x with p = σ of the batch-normalised x (DIN, equation 3); α starts at 0.

    A batch of one or no row has no variance: it uses the running statistics.
    """

    maskable: ClassVar[bool] = True

    def __init__(self, units: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(units, affine=False, eps=1e-9, momentum=0.01)
        self.alpha = nn.Parameter(torch.zeros(units))

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """(N, units) -> (N, units). ``real`` (N,) bool: the rows that there are, None for all."""
        single = x.float() if x.itemsize < 4 else x
        if self.training and real is not None:
            return self._gated(single, normed(self.bn, single, real)).to(x.dtype)
        own, alone = self.uses_own_statistics(x.shape[0]), distributed.processes() == 1
        if alone and not x.is_cpu:
            return self._gated(single, self.normed(single)).to(x.dtype)
        mean = variance = single.new_zeros(())
        if own:
            with torch.no_grad() if alone else nullcontext():
                mean, variance = moments(single)
        factor, shift = self.norm(x.shape[0], mean, variance)
        y = dice(single, factor, shift, self.alpha.to(single.dtype), mean if own and alone else None)
        return y.to(x.dtype)

    def _gated(self, x: Tensor, normed: Tensor) -> Tensor:
        y: Tensor = _Gate.apply(x, normed, self.alpha.to(x.dtype))[0]  # type: ignore[no-untyped-call]
        return y

    def normed(self, x: Tensor) -> Tensor:
        """(N, units) -> (N, units) by torch's batch norm, one kernel each way."""
        own, bn = self.uses_own_statistics(x.shape[0]), self.bn
        if own and bn.num_batches_tracked is not None:
            bn.num_batches_tracked += 1
        return nn.functional.batch_norm(
            x, bn.running_mean, bn.running_var, training=own, momentum=bn.momentum or 0.0, eps=bn.eps
        )

    def uses_own_statistics(self, rows: int) -> bool:
        """Whether a batch of so many rows is normed by its own mean and variance and those of other processes."""
        return self.training and (rows > 1 or distributed.processes() > 1)

    def norm(self, rows: int, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Factor and shift (units,) that norm so many rows by this mean and variance, which enter the running ones, or
        by the running ones."""
        if self.uses_own_statistics(rows):
            rows, mean, variance = over_processes(rows, mean, variance)
            keep_running(self.bn, rows, mean, variance)
        if not self.training or rows < 2:
            assert self.bn.running_mean is not None
            assert self.bn.running_var is not None
            mean, variance = self.bn.running_mean, self.bn.running_var
        factor = (variance + self.bn.eps).rsqrt()
        return factor, -mean * factor


class _Gate(torch.autograd.Function):
    """x (p + (1 - p) α) with p = σ(normed), by hand: half the kernels. x and normed (N, units), α (units,)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, normed: Tensor, alpha: Tensor) -> tuple[Tensor, ...]:
        share = normed.sigmoid()
        slope = torch.addcmul(alpha, 1 - alpha, share)
        return x * slope, share, slope

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs[0], inputs[2], *output[1:])

    @staticmethod
    def backward(ctx: Any, of_y: Tensor, *none: Tensor) -> tuple[Tensor, ...]:
        x, alpha, share, slope = ctx.saved_tensors
        of_slope = of_y * x
        of_normed = torch.ops.aten.sigmoid_backward(of_slope * (1 - alpha), share)
        return of_y * slope, of_normed, torch.addcmul(of_slope, of_slope, share, value=-1).sum(0)


def make_activation(name: str, units: int) -> nn.Module:
    """An activation by name.

    Raises:
        UserError: none of :data:`ctr_pe.config.schema.ACTIVATIONS`.
    """
    name = valid("activation", Activation, name)
    learned: dict[str, Callable[[], nn.Module]] = {
        "Dice": lambda: Dice(units),
        "PReLU": lambda: nn.PReLU(units, init=0.1),
    }
    made: nn.Module = (learned.get(name) or getattr(nn, name))()
    return made
