"""Position encodings for target-attention CTR models.

These names are the public API, with ``ctr_pe.evaluation``, ``ctr_pe.model_zoo`` and ``ctr_pe.testing``. Each is
imported at first use, so that ``import ctr_pe`` costs nothing: torch alone takes a second.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctr_pe import units
    from ctr_pe.pe import available_pes, build_pe
    from ctr_pe.pe.base import Chain, PositionEncoding
    from ctr_pe.sequence.positions import Positions
    from ctr_pe.serving.next_item_ranker import NextItemRanker
    from ctr_pe.serving.ranker import CTRRanker, load

__version__ = "0.2.0"
__all__ = [
    "CTRRanker",
    "Chain",
    "NextItemRanker",
    "PositionEncoding",
    "Positions",
    "__version__",
    "available_pes",
    "build_pe",
    "load",
    "units",
]

_HOME = {
    "CTRRanker": "ctr_pe.serving.ranker",
    "Chain": "ctr_pe.pe.base",
    "NextItemRanker": "ctr_pe.serving.next_item_ranker",
    "PositionEncoding": "ctr_pe.pe.base",
    "Positions": "ctr_pe.sequence.positions",
    "available_pes": "ctr_pe.pe",
    "build_pe": "ctr_pe.pe",
    "load": "ctr_pe.serving.ranker",
}


def __getattr__(name: str) -> Any:
    if name == "units":
        return importlib.import_module("ctr_pe.units")
    if name not in _HOME:
        raise AttributeError(f"module 'ctr_pe' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
