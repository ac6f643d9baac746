"""The name of the processor that a model is trained on: another kind rounds products of matrices differently."""

from __future__ import annotations

import contextlib
import platform

import torch


def name_of(device: torch.device) -> str:
    """Such as "NVIDIA H100" or "Intel(R) Xeon(R) Processor"; empty where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
