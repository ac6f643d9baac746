"""Registers operators with torch, which ``torch.compile``, ``torch.export``, autocast and functorch then see as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY: Any = torch.library.Library("ctr_pe", "DEF")  # type: ignore[no-untyped-call]


def operator(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup: Callable[..., None] | None = None,
) -> Callable[..., Any]:
    """The operator ``ctr_pe::<schema>``: ``kernel`` for CPU tensors, ``fake`` for shapes alone.

    ``backward(ctx, *gradients)`` gives the gradients of all arguments from what ``setup(ctx, inputs, output)`` saved.
    Without one a gradient through the operator is an error.
    """
    name = f"ctr_pe::{schema.partition('(')[0]}"
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CPU")
    torch.library.register_fake(name, fake, lib=_LIBRARY)
    if "!" not in schema:  # torch has no autograd for operators that write to their arguments
        torch.library.register_autograd(name, backward or _no_gradient, setup_context=setup, lib=_LIBRARY)
    found: Callable[..., Any] = getattr(torch.ops.ctr_pe, name.partition("::")[2]).default
    return found


def _no_gradient(ctx: Any, *gradients: Any) -> Any:
    raise NotImplementedError("the backward of a ctr_pe operator has no derivative of its own")
