"""Attention-gated recurrences by Triton's kernels, as operators: one launch each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ctr_pe.ops import accelerator
from ctr_pe.ops.recurrence import reference
from ctr_pe.sequence.transfer import to_device

ROWS, COLUMNS, LARGEST = 16, 32, 256
"""Rows of a program, columns of U that it takes at a time, and the largest state dim that fits its registers."""


def takes(of_items: Tensor, weight_hh: Tensor) -> bool:
    """Whether the kernels can take these."""
    return accelerator.takes(of_items, weight_hh) and weight_hh.shape[1] <= LARGEST


def recur(of_items: Tensor, weights: Tensor, sizes: list[int], weight_hh: Tensor, bias_hh: Tensor) -> Tensor:
    """``reference.recur`` of the step that is meant by 2 S or 3 S rows of ``weight_hh``."""
    targets = weights[0].numel()
    shared = targets if of_items[0].numel() == len(weight_hh) else 1
    entries = [targets * rows for rows in sizes]
    states: Tensor = _recurrence(of_items, weights, weight_hh, bias_hh, entries, shared)
    return states.view(*weights.shape[:-1], -1)


def carry_back(grad: Tensor, keep: Tensor, slope: Tensor, weight_hh: Tensor, sizes: list[int]) -> Tensor:
    """``reference.carry_back``."""
    targets = grad[0].numel() // grad.shape[-1]
    found: Tensor = _recurrence_back(grad, keep, slope, weight_hh, [targets * rows for rows in sizes])
    return found


@torch.library.custom_op("ctr_pe::recurrence", mutates_args=())
def _recurrence(
    of_items: Tensor, weights: Tensor, weight_hh: Tensor, bias_hh: Tensor, sizes: list[int], shared: int
) -> Tensor:
    """``shared``: so many entries that follow each other have the same item."""
    if not accelerator.takes(of_items):  # on a device that is not there
        of_items, step = of_items.flatten(0, -2).repeat_interleave(shared, 0), reference.attention_step(weight_hh)
        return reference.recur(step, of_items, weights.view(-1, 1), sizes, weight_hh, bias_hh)
    from ctr_pe.ops.triton import recurrence

    states = weight_hh.new_empty(weights.numel(), weight_hh.shape[1])
    _launch(recurrence.advance, sizes, of_items, weights, bias_hh, weight_hh, states, shared=shared)
    return states


@torch.library.custom_op("ctr_pe::recurrence_back", mutates_args=())
def _recurrence_back(grad: Tensor, keep: Tensor, slope: Tensor, weight_hh: Tensor, sizes: list[int]) -> Tensor:
    if not accelerator.takes(grad):
        flat = [x.flatten(0, -2) for x in (grad, keep, slope)]
        return reference.carry_back(flat[0], flat[1], flat[2], weight_hh, sizes).view_as(grad)
    from ctr_pe.ops.triton import recurrence

    found = torch.empty_like(grad, memory_format=torch.contiguous_format)
    _launch(recurrence.carry_back, sizes, grad, keep, slope, weight_hh, found)
    return found


def _launch(kernel: Any, sizes: list[int], *tensors: Tensor, **numbers: int) -> None:
    """``tensors``: the last two are U and what the kernel fills."""
    weight_hh, filled = tensors[-2:]
    ends = to_device(torch.tensor([*sizes, 0]), filled.device)
    given = *(x.contiguous() for x in tensors), ends, weight_hh.shape[1]
    with torch.cuda.device(filled.device if filled.is_cuda else -1):
        kernel[(-(-sizes[0] // ROWS),)](*given, **numbers, **options(weight_hh))


def options(weight_hh: Tensor) -> dict[str, Any]:
    """Sizes of tiles, and how the kernels are compiled. Products are near to float32's, by three in TF32, unless torch
    is told that less will do or U is in half."""
    state_dim, width = weight_hh.shape[1], accelerator.padded(weight_hh.shape[1])
    exact = torch.get_float32_matmul_precision() == "highest" and weight_hh.dtype == torch.float32
    return {
        "PARTS": len(weight_hh) // state_dim,
        "ROWS": ROWS,
        "WIDTH": width,
        "COLUMNS": min(COLUMNS, width),
        "PRECISION": "tf32x3" if exact else "tf32",
        "num_warps": 4 if width <= 32 else 8,
        "num_stages": 1,
        "enable_fp_fusion": True,
    }
