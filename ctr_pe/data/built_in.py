"""The built-in data sets, generated at first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from ctr_pe.data.dataset import Dataset

BUILT_IN = {"synthetic": {}, "synthetic_time": {"timed": True}, "synthetic_shuffled": {"shuffled": True}}
"""Name -> arguments of :func:`~ctr_pe.data.synthetic.generate`."""


def generate_built_in(path: Path) -> Dataset:
    """Generate the built-in set that ``path`` is named after."""
    from ctr_pe.data.synthetic import generate

    return generate(path, **BUILT_IN[path.name])
