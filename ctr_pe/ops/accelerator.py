"""Triton's kernels: the one place that says whether they can run.

They take float32, bfloat16 and float16 on CUDA devices where the package ``triton`` is installed, as it is beside
torch's CUDA builds. With ``TRITON_INTERPRET=1`` in the environment they run on the CPU, number by number: for tests.
``CTR_PE_COMPILED=0`` leaves them alone.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ctr_pe.ops import native

USABLE = find_spec("triton") is not None and os.environ.get(native.SWITCH) != "0"
INTERPRETED = USABLE and os.environ.get("TRITON_INTERPRET") == "1"

DEVICES = ("CPU",) if INTERPRETED else ("CUDA",)
"""Where the operators run, as torch's dispatcher calls them."""

QUERIES, KEYS, ROWS, ENTRIES = 16, 16, 32, 256
"""Sizes of tiles: queries, keys, rows of a table, and numbers where there is one axis. Powers of 2, the first three at
least 16, which is what a product of matrices takes. The gradient of positions holds QUERIES · KEYS · 2 KEYS numbers at
once."""
FORWARDS, BACKWARDS = 2048, 512
"""Programs at most, each with memory of its own. A backward's number is the same on every GPU, so that its sums are."""
OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
"""One stage: loads that run ahead would pass the stores that they are to see."""


def description() -> str:
    """``triton`` and its version, or ``torch``."""
    return f"triton {version('triton')}" if USABLE else "torch"


def runs_on(device: torch.device) -> bool:
    """Whether kernels of Triton run on a device."""
    return USABLE and device.type == ("cpu" if INTERPRETED else "cuda") and not native.seen_into()


def takes(*tensors: Tensor | None) -> bool:
    """Whether a kernel of Triton can take these: a float32, bfloat16 or float16 on its device, and not nothing."""
    given = [x for x in tensors if x is not None]
    return all(runs_on(x.device) and x.is_floating_point() and x.itemsize <= 4 and x.numel() > 0 for x in given)


def launch(kernel: Any, programs: int, *given: Tensor | float | None, **constants: Any) -> None:
    """Runs a kernel on the device of its first argument, a tensor."""
    with torch.cuda.device_of(given[0]):  # type: ignore[no-untyped-call]
        kernel[(programs,)](*map(_plain, given), **constants, **OPTIONS)


def _plain(x: Tensor | float | None) -> Tensor | float | None:
    """A bool as a byte: Triton's own has one bit."""
    return x.view(torch.uint8) if isinstance(x, Tensor) and x.dtype == torch.bool else x


def scratch(like: Tensor, *shape: int) -> Tensor:
    """float32 numbers that a kernel fills."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def precision(*tensors: Tensor) -> str:
    """Of products: float32's own, unless torch is told that less will do, or less is given. TF32 holds bfloat16 and
    float16 exactly."""
    exact = torch.get_float32_matmul_precision() == "highest" and any(x.dtype == torch.float32 for x in tensors)
    return "ieee" if exact else "tf32"


def padded(size: int) -> int:
    """The power of 2 that a tile takes for an axis, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def tiles(lines: int) -> int:
    """How many tiles have so many queries."""
    return -(-lines // QUERIES)
