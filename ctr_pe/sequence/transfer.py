"""From the CPU to an accelerator without waiting for it: from pinned memory a copy lines up with the kernels."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Content = TypeVar("Content")


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """On the device."""
    return pinned(x, device).to(device, non_blocking=x.is_cpu)


class PinnedTransfer(Generic[Content]):
    """Many tensors that travel in one copy per dtype: those in ``content``, dataclasses, dicts, lists and tuples of
    them, as far as they are on a CPU. Fields that a class lists in ``stays_on_cpu`` stay there."""

    def __init__(self, content: Content, device: torch.device) -> None:
        self.content, self.device = content, device
        found = {} if device.type == "cpu" else {id(x): x for x in _tensors(content)}
        self.by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for x in found.values():
            self.by_dtype.setdefault(x.dtype, []).append(x)
        self.buffers = [pinned(torch.cat([x.flatten() for x in some]), device) for some in self.by_dtype.values()]

    def unpack(self) -> Content:
        """A copy of the content, on the device."""
        new: dict[int, Any] = {}
        for some, buffer in zip(self.by_dtype.values(), self.buffers, strict=True):
            parts = torch.split(buffer.to(self.device, non_blocking=True), [x.numel() for x in some])
            new |= {id(x): part.view(x.shape) for x, part in zip(some, parts, strict=True)}
        there: Content = _with(self.content, new) if new else self.content
        return there


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a CPU, where it can be copied from without waiting."""
    return x.pin_memory() if x.is_cpu and device.type == "cuda" else x


def _attributes(thing: Any) -> dict[str, Any]:
    """Those that travel."""
    own: dict[str, Any] = getattr(thing, "__dict__", {})
    return {name: value for name, value in own.items() if name not in getattr(thing, "stays_on_cpu", ())}


def _tensors(thing: Any) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield from [thing] if thing.is_cpu else []
        return
    parts = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, (list, tuple)) else ()
    for part in (*parts, *_attributes(thing).values()):
        yield from _tensors(part)


def _with(thing: Any, new: dict[int, Any]) -> Any:
    """A copy with ``new`` tensors by the id of the old ones. What is in it twice is one copy."""
    if id(thing) in new or isinstance(thing, Tensor):
        return new.get(id(thing), thing)
    found: Any = thing
    if isinstance(thing, dict):
        found = {key: _with(value, new) for key, value in thing.items()}
    elif isinstance(thing, tuple):
        found = tuple(_with(value, new) for value in thing)
    elif isinstance(thing, list) or is_dataclass(thing):
        found = copy.copy(thing)
        if isinstance(thing, list):
            found[:] = [_with(value, new) for value in thing]
        for name, value in _attributes(thing).items():
            vars(found)[name] = _with(value, new)
    new[id(thing)] = found
    return found
