"""Operators: what encodings and units compute in one call, by a compiled kernel where there is one, else in torch.

A module is one operator: its public function with the equation, the mathematics in torch, and the kernels for CPU and
CUDA devices, registered with ``torch.library`` in the namespace ``ctr_pe``; the larger ones are folders, with
``reference.py``, ``cpu.py`` and ``gpu.py``. ``csrc`` and ``triton`` have the code of the kernels, ``native.py`` and
``accelerator.py`` call it. Callers do not know which one runs: a kernel takes what it can, torch all others.
"""

from __future__ import annotations

from ctr_pe.ops import native

NAMES = ("contextual_attention", "contextual_bias", "dice", "dropout", "time_decay")


def kernels() -> dict[str, str]:
    """What runs on this machine for float32 tensors on a CPU, by operator: ``compiled (avx512)``, ``compiled (avx2)``,
    ``compiled``, or ``torch``."""
    return dict.fromkeys(NAMES, native.description())
