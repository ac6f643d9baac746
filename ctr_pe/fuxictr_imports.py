"""Imports FuxiCTR without what its models never use: ray, pandas and scikit-learn, two seconds of start-up.

``fuxictr.pytorch.models`` imports a package whose ``__init__`` reads CSV files with ray, for one function of one of its
modules, and scikit-learn's metrics, which our models do not call. Both are imported when they are used.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

LATER: dict[str, tuple[str, ...]] = {"fuxictr.preprocess": (), "fuxictr.metrics": ("evaluate_metrics",)}
"""Module -> functions that others import by name."""


def import_later() -> None:
    """Put off the imports of these modules, unless they have been imported already."""
    for name, functions in LATER.items():
        if name not in sys.modules:
            _defer(name, functions)


def _defer(name: str, functions: tuple[str, ...]) -> None:
    """A module of this name whose content is there from the first use of it on, or from a call of one of ``functions``;
    modules inside it can be imported before."""
    spec = importlib.util.find_spec(name)  # imports what it is in
    if spec is None or spec.loader is None:
        return
    loader, module = spec.loader, importlib.util.module_from_spec(spec)

    def load() -> None:
        if module.__dict__.pop("__getattr__", None) is not None:
            loader.exec_module(module)

    def use(attribute: str) -> Any:
        if attribute.startswith("__") and attribute != "__all__":  # Python asks for these when it imports
            raise AttributeError(f"module '{name}' has no attribute '{attribute}'")
        load()
        return getattr(module, attribute)

    def stand_in(function: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            load()
            return getattr(module, function)(*arguments, **named)

        return call

    for function in functions:
        setattr(module, function, stand_in(function))
    module.__dict__["__getattr__"] = use
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    setattr(sys.modules[parent], child, module)
