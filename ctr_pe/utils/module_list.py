"""torch's containers with the types of what they hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import nn

Held = TypeVar("Held", bound=nn.Module)


class ModuleList(nn.ModuleList, Generic[Held]):
    """``nn.ModuleList`` of modules of one class, which a type checker then knows."""

    if TYPE_CHECKING:

        def __init__(self, modules: Iterable[Held]) -> None: ...

        def __getitem__(self, index: int) -> Held: ...  # type: ignore[override]

        def __iter__(self) -> Iterator[Held]: ...
