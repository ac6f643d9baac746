"""Registers operators with torch: ``torch.compile``, ``torch.export`` and autocast then see each as one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_LIBRARY: Any = torch.library.Library("ctr_pe", "DEF")  # type: ignore[no-untyped-call]


def operator(
    schema: str,
    forward: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., None] | None = None,
    learned: str = "",
    devices: Sequence[str] = ("CPU",),
    first_made: int = 1,
) -> Callable[..., Any]:
    """The operator ``ctr_pe::<schema>``, and with ``backward`` the operator ``ctr_pe::<name>_backward``.

    The backward's arguments are the gradient of the first output, the outputs from ``first_made`` on, and the arguments
    of the forward. It gives one gradient per learned argument, an empty one for None. It has no derivative of its own.

    Args:
        schema: of the forward, as ``torch.library`` takes it.
        forward: its outputs, from contiguous tensors.
        fake: the same from tensors without values.
        backward: ``backward(into, *arguments)`` writes the gradients. ``into``: a tensor of its size for each learned
            argument, or None where this is None. The arguments are contiguous.
        learned: names of the arguments that get a gradient.
        devices: where these run, as torch's dispatcher calls them.
        first_made: 1 if the forward makes all other outputs for the backward alone, 0 if this takes the first one too.
    """
    found = _register(schema, forward, fake, devices)
    if backward is None:
        return found
    inputs, outputs = found._schema.arguments, found._schema.returns  # type: ignore[attr-defined]
    names, extra = [argument.name for argument in inputs], len(outputs) - first_made
    where = [names.index(name) for name in learned.split()]

    def empty(grad: Tensor, *given: Any) -> tuple[Tensor, ...]:
        wanted = (given[extra:][k] for k in where)
        return tuple(grad.new_empty(0) if x is None else x.new_empty(x.shape) for x in wanted)

    def written(grad: Tensor, *given: Any) -> tuple[Tensor, ...]:
        gradients = empty(grad, *given)
        into = [None if given[extra:][k] is None else own for k, own in zip(where, gradients, strict=True)]
        backward(into, grad, *given)
        return gradients

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.options = [None if isinstance(x, Tensor) else x for x in inputs]
        tensors = (x if isinstance(x, Tensor) else None for x in inputs)
        ctx.save_for_backward(*(output[first_made:] if extra else ()), *tensors)

    def gradients(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        made, tensors = ctx.saved_tensors[:extra], ctx.saved_tensors[extra:]
        given = [option if x is None else x for x, option in zip(tensors, ctx.options, strict=True)]
        by_index = dict(zip(where, of(grad, *made, *given), strict=True))
        return tuple(None if x is None else by_index.get(k) for k, x in enumerate(given))

    name, _, rest = schema.partition("(")
    parts = ["Tensor grad", *(f"Tensor made_{k}" for k in range(extra)), rest.rpartition(") ->")[0]]
    returns = ", ".join(["Tensor"] * len(where))
    of = _register(f"{name}_backward({', '.join(parts)}) -> ({returns})", written, empty, devices)
    torch.library.register_autograd(f"ctr_pe::{name}", gradients, setup_context=save, lib=_LIBRARY)
    torch.library.register_autograd(f"ctr_pe::{name}_backward", _no_derivative, lib=_LIBRARY)
    return found


def _register(
    schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], devices: Sequence[str]
) -> Callable[..., Any]:
    def run(*given: Any) -> Any:
        return kernel(*(x.contiguous() if isinstance(x, Tensor) else x for x in given))

    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in devices:
        _LIBRARY.impl(name, run, device)
    torch.library.register_fake(f"ctr_pe::{name}", fake, lib=_LIBRARY)
    found: Callable[..., Any] = getattr(torch.ops.ctr_pe, name).default
    return found


def _no_derivative(ctx: Any, *gradients: Any) -> Any:
    raise NotImplementedError("the backward of a ctr_pe operator has no derivative of its own")
