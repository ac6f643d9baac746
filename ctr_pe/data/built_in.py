"""The built-in data sets, generated at first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from ctr_pe.data.dataset import Dataset

BUILT_IN: dict[str, tuple[str, dict[str, Any]]] = {
    "synthetic_context": ("ctr_pe.data.synthetic_context", {}),
    "synthetic": ("ctr_pe.data.synthetic", {}),
    "synthetic_time": ("ctr_pe.data.synthetic", {"timed": True}),
    "synthetic_shuffled": ("ctr_pe.data.synthetic", {"shuffled": True}),
}
"""Name -> module, and arguments of its ``generate``."""

DEFAULT = "synthetic_context"
"""The data set of commands where none is named."""


def generate_built_in(path: Path) -> Dataset:
    """Generate the built-in set that ``path`` is named after."""
    module, given = BUILT_IN[path.name]
    dataset: Dataset = import_module(module).generate(path, **given)
    return dataset
