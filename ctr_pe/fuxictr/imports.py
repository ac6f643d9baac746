"""Imports FuxiCTR without what its models never use: ray, pandas and scikit-learn, two seconds of start-up.

``fuxictr.pytorch.models`` imports a package whose ``__init__`` reads CSV files with ray, for one function of one of its
modules, and scikit-learn's metrics, which our models do not call. Both are imported when they are used.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

LATER: dict[str, tuple[str, ...]] = {"fuxictr.preprocess": (), "fuxictr.metrics": ("evaluate_metrics",)}
"""Module -> functions that others import by name."""


def import_later() -> None:
    """From now on, put off the content of these modules, unless they have been imported already."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname in LATER else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Later(spec.loader, LATER[fullname])
        return spec


class _Later(Loader):
    """A module whose content is there from the first use of it on, or from a call of one of ``functions``; modules
    inside it can be imported before."""

    def __init__(self, loader: Loader, functions: tuple[str, ...]) -> None:
        self.loader, self.functions = loader, functions

    def exec_module(self, module: ModuleType) -> None:
        def load() -> None:
            if module.__dict__.pop("__getattr__", None) is not None:
                self.loader.exec_module(module)

        def use(attribute: str) -> Any:
            if attribute.startswith("__") and attribute != "__all__":  # Python asks for these when it imports
                raise AttributeError(f"module '{module.__name__}' has no attribute '{attribute}'")
            load()
            return getattr(module, attribute)

        def stand_in(function: str) -> Any:
            def call(*arguments: Any, **named: Any) -> Any:
                load()
                return getattr(module, function)(*arguments, **named)

            return call

        for function in self.functions:
            setattr(module, function, stand_in(function))
        module.__dict__["__getattr__"] = use
