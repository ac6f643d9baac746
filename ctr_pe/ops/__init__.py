"""Operators: what encodings and units compute in one call, by a compiled kernel where there is one, else in torch.

Each folder is one operator: its public function with the equation, ``reference.py``, the mathematics in torch, and
``cpu.py``, the kernel, registered with ``torch.library`` in the namespace ``ctr_pe``. Callers do not know which one
runs: the kernel takes float32 tensors on a CPU, the reference all others. ``recurrence`` is in torch on a CPU and has
kernels of Triton for GPUs.
"""

from __future__ import annotations

from ctr_pe.ops import native

NAMES = ("contextual_attention", "contextual_bias", "dice", "dropout", "time_decay")


def kernels() -> dict[str, str]:
    """What runs on this machine for float32 tensors on a CPU, by operator: ``compiled (avx512)``, ``compiled (avx2)``,
    ``compiled``, or ``torch``."""
    return dict.fromkeys(NAMES, native.description())
