"""The CPU, GPU or other accelerator that a model is trained on."""

from __future__ import annotations

import contextlib
import platform

import torch

from ctr_pe.utils.errors import UserError, option


def name_of(device: torch.device) -> str:
    """The name of a processor, such as "NVIDIA H100"; empty where the system does not tell.

    Another kind of processor rounds products of matrices differently.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def check_gpu(gpu: int) -> torch.device:
    """The CPU for -1, else torch's accelerator of this number: of CUDA, ROCm or another.

    Raises UserError if there is none; FuxiCTR would take the CPU without a word.
    """
    if gpu < 0:
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type == "mps":  # Apple's has no float64
        raise UserError(f"gpu {gpu}: there is no GPU here ({option('gpu', -1)} for the CPU)")
    there = range(torch.accelerator.device_count())
    if gpu not in there:
        choices = f"{option('gpu')}: {', '.join(map(str, there))}, -1: CPU"
        raise UserError(f"gpu {gpu}: there is none of this number ({choices})")
    return torch.device(kind.type, gpu)
