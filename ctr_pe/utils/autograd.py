"""Functions with a gradient of their own."""

from __future__ import annotations

from typing import Any

import torch


def apply(function: type[torch.autograd.Function], *given: Any) -> Any:
    """``function.apply``, of one whose ``forward`` takes no context; in inference mode ``forward`` alone, because torch
    inspects its signature at every call, which takes longer than what a small request computes. Not where a graph is
    compiled: the compiler cannot ask for the mode."""
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
        return function.forward(*given)
    return function.apply(*given)  # type: ignore[no-untyped-call]
