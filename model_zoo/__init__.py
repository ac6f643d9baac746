"""Backbones on FuxiCTR, one file each, listed here: ``from ctr_pe.model_zoo import DIN``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctr_pe.model_zoo.bst import BST
    from ctr_pe.model_zoo.dien import DIEN
    from ctr_pe.model_zoo.din import DIN
    from ctr_pe.model_zoo.dmin import DMIN
    from ctr_pe.model_zoo.sasrec import SASRec
    from ctr_pe.model_zoo.tin import TIN

MODELS = {name: f"ctr_pe.model_zoo.{name.lower()}:{name}" for name in ("DIN", "DIEN", "BST", "DMIN", "TIN", "SASRec")}

__all__ = ["BST", "DIEN", "DIN", "DMIN", "MODELS", "TIN", "SASRec"]


def __getattr__(name: str) -> Any:  # FuxiCTR takes seconds to import: only when a model is used
    if name not in MODELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, cls = MODELS[name].partition(":")
    return getattr(importlib.import_module(module), cls)
