"""Configs written for the code released with the CAPE paper, in which ``use_cope`` names CAPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEYS = ("use_cope", "max_sequence_length")


def is_legacy(params: Mapping[str, Any]) -> bool:
    """Whether the hyper-parameters were written for the released code."""
    return any(key in params for key in KEYS)


def translate(params: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The same model under the current keys, and one line that names them.

    ``use_cope`` switches CAPE on. The default of ``position_dim`` was the dim of the target: that of all fields in its
    tuple. ``max_sequence_length`` was the number of table rows; larger positions used the last row, as they do beyond
    ``max_position``. The default of ``embedding_dim`` was 10. BST's ``use_position_emb`` (on by default) is ``native``,
    which CAPE replaces. The current keys win if both are given.
    """
    old = (*KEYS, "use_position_emb")
    new = {key: value for key, value in params.items() if key not in old}
    cape, own = params.get("use_cope"), params.get("model") == "BST" and params.get("use_position_emb", True)
    keys = {
        "position_encoding": "cape" if cape else "native" if own else "none",
        "embedding_dim": 10,
        "position_dim": _width(params) * _fields(params) if cape else None,
        "max_position": params.get("max_sequence_length"),
    }
    keys = {key: value for key, value in keys.items() if value is not None and new.get(key) is None}
    written = ", ".join(f"{key}: {value}" for key, value in keys.items())
    replaced = ", ".join(key for key in old if key in params)
    line = f"a config for the released CAPE code: {replaced} is now written {written}"
    if cape and own:
        line += " (cape takes the place of BST's own position vectors)"
    return new | keys, line


def _width(params: Mapping[str, Any]) -> int:
    width = params.get("embedding_dim")
    return width if isinstance(width, int) and width > 0 else 10  # another value is refused later


def _fields(params: Mapping[str, Any]) -> int:
    """Number of target fields: the released code concatenated those in one tuple."""
    target = params.get(f"{str(params.get('model')).lower()}_target_field", params.get("target_field"))
    target = target[0] if isinstance(target, list) and target else target
    return len(target) if isinstance(target, (tuple, list)) else 1
