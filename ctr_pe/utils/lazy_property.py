"""Attributes that are computed when they are first read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class lazy_property(Generic[Value]):
    """As ``functools.cached_property``, without the lock that it has up to Python 3.11, which ``torch.compile`` cannot
    see through."""

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self.compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Value:
        found: Value | None = instance.__dict__.get(self.name)
        if found is None:
            found = instance.__dict__[self.name] = self.compute(instance)
        return found
