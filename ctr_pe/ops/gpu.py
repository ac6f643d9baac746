"""Triton's kernels: the one place that says whether they can run.

They take float32, bfloat16 and float16 on CUDA devices where the package ``triton`` is installed, as it is beside
torch's CUDA builds. With ``TRITON_INTERPRET=1`` in the environment they run on the CPU, number by number: for tests.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from ctr_pe.ops import native

INSTALLED = find_spec("triton") is not None
INTERPRETED = INSTALLED and os.environ.get("TRITON_INTERPRET") == "1"


def runs_on(device: torch.device) -> bool:
    """Whether kernels of Triton run on a device."""
    return INSTALLED and device.type == ("cpu" if INTERPRETED else "cuda") and not native.traced()


def takes(*tensors: Tensor | None) -> bool:
    """Whether a kernel of Triton can take these: a float32, bfloat16 or float16 on its device, and not nothing."""
    given = [x for x in tensors if x is not None]
    return all(runs_on(x.device) and x.is_floating_point() and x.itemsize <= 4 and x.numel() > 0 for x in given)


def padded(size: int) -> int:
    """The power of 2 that a tile takes for an axis, at least 16."""
    return max(16, 1 << (size - 1).bit_length())
