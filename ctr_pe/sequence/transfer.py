"""From the CPU to an accelerator without waiting for it: from pinned memory a copy lines up with the kernels."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Content = TypeVar("Content")


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """On the device."""
    return pinned(x, device).to(device, non_blocking=x.is_cpu)


@dataclass(frozen=True)
class ZeroPadded:
    """On a CPU a tensor (n, ...) that is sent with so many rows of zeros after it, (n + more, ...): in one pass."""

    x: Tensor
    more: int

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def shape(self) -> torch.Size:
        rows, *others = self.x.shape
        return torch.Size((rows + self.more, *others))

    def numel(self) -> int:
        return self.shape.numel()


class PinnedTransfer(Generic[Content]):
    """Many tensors that travel in one copy per dtype: those in ``content``, dataclasses, dicts, lists and tuples of
    them, as far as they are on a CPU. Fields that a class lists in ``stays_on_cpu`` stay there."""

    def __init__(self, content: Content, device: torch.device) -> None:
        self.content, self.device = content, device
        found = {id(x): x for x in _tensors(content) if isinstance(x, ZeroPadded) or device.type != "cpu"}
        self.by_dtype: dict[torch.dtype, list[Tensor | ZeroPadded]] = {}
        for x in found.values():
            self.by_dtype.setdefault(x.dtype, []).append(x)
        self.buffers = [self._buffer(some) for some in self.by_dtype.values()]

    def _buffer(self, some: list[Tensor | ZeroPadded]) -> Tensor:
        """All of them, one after the other."""
        total, pins = sum(x.numel() for x in some), self.device.type == "cuda"
        into = torch.empty(total, dtype=some[0].dtype, pin_memory=pins)
        parts = [part for x in some for part in _parts(x)]
        return torch.cat(parts, out=into)

    @property
    def sizes(self) -> tuple[Any, ...]:
        """Of the tensors, by dtype."""
        return tuple((dtype, *(x.shape for x in some)) for dtype, some in self.by_dtype.items())

    def unpack(self, there: Sequence[Tensor] | None = None) -> Content:
        """A copy of the content, on the device. ``there``: the ``buffers`` on the device, if they are."""
        there = [x.to(self.device, non_blocking=True) for x in self.buffers] if there is None else there
        new: dict[int, Any] = {}
        for some, buffer in zip(self.by_dtype.values(), there, strict=True):
            parts = torch.split(buffer, [x.numel() for x in some])
            new |= {id(x): part.view(x.shape) for x, part in zip(some, parts, strict=True)}
        content: Content = _with(self.content, new) if new else self.content
        return content


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a CPU, where it can be copied from without waiting."""
    return x.pin_memory() if x.is_cpu and device.type == "cuda" else x


def _attributes(thing: Any) -> dict[str, Any]:
    """Those that travel."""
    own: dict[str, Any] = getattr(thing, "__dict__", {})
    return {name: value for name, value in own.items() if name not in getattr(thing, "stays_on_cpu", ())}


def _parts(x: Tensor | ZeroPadded) -> list[Tensor]:
    """Of one axis."""
    if isinstance(x, Tensor):
        return [x.flatten()]
    return [x.x.flatten(), x.x.new_zeros(x.more * x.x[:0].shape[1:].numel())]


def _tensors(content: Any) -> Iterator[Tensor | ZeroPadded]:
    found = [content]
    for thing in found:  # grows
        if isinstance(thing, ZeroPadded) or (isinstance(thing, Tensor) and thing.is_cpu):
            yield thing
        elif thing is not None and not isinstance(thing, (Tensor, int, str)):
            found += thing.values() if isinstance(thing, dict) else thing if isinstance(thing, (list, tuple)) else ()
            found += _attributes(thing).values()


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
