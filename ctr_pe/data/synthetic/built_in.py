"""The built-in data sets, generated at first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ctr_pe.data.root import data_root
from ctr_pe.utils.errors import progress

if TYPE_CHECKING:
    from pathlib import Path

    from ctr_pe.data.dataset import Dataset

BUILT_IN: dict[str, tuple[str, dict[str, Any]]] = {
    "synthetic_context": ("ctr_pe.data.synthetic.context", {}),
    "synthetic": ("ctr_pe.data.synthetic.bursts", {}),
    "synthetic_time": ("ctr_pe.data.synthetic.bursts", {"timed": True}),
    "synthetic_shuffled": ("ctr_pe.data.synthetic.bursts", {"shuffled": True}),
}
"""Name -> module, and arguments of its ``generate``."""

DEFAULT = "synthetic_context"
"""The data set of commands where none is named."""


def generate_built_in(path: Path) -> Dataset:
    """Generate the built-in set that ``path`` is named after."""
    module, given = BUILT_IN[path.name]
    dataset: Dataset = import_module(module).generate(path, **given)
    return dataset


def open_or_generate(name: str, root: Path | None = None) -> Dataset:
    """Open a data set as :func:`ctr_pe.data.dataset.open_dataset` does; a built-in one is generated at first use."""
    from ctr_pe.data.dataset import open_dataset

    path = data_root(root) / name
    if name in BUILT_IN and not path.exists():
        progress(f"generating the built-in data set in {path}")
        return generate_built_in(path)
    return open_dataset(name, root)
