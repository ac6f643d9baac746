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
    new = {key: value for key, value in params.items() if key not in KEYS}
    keys: dict[str, Any] = {}
    own = params.get("use_position_emb", True) if str(params.get("model")) == "BST" else False
    new.pop("use_position_emb", None)
    keys["position_encoding"] = "cape" if params.get("use_cope") else "native" if own else "none"
    if "embedding_dim" not in params:
        keys["embedding_dim"] = 10
    if params.get("use_cope") and params.get("position_dim") is None:
        keys["position_dim"] = int(params.get("embedding_dim", 10)) * _fields(params)
    if params.get("max_sequence_length") is not None:
        keys["max_position"] = params["max_sequence_length"]
    keys = {key: value for key, value in keys.items() if new.get(key) is None}
    written = ", ".join(f"{key}: {value}" for key, value in keys.items())
    replaced = ", ".join(key for key in (*KEYS, "use_position_emb") if key in params)
    line = f"a config for the released CAPE code: {replaced} is now written {written}"
    if params.get("use_cope") and own:
        line += " (cape takes the place of BST's own position vectors)"
    return new | keys, line


def _fields(params: Mapping[str, Any]) -> int:
    """Number of target fields: the released code concatenated those in one tuple."""
    target = params.get(f"{str(params.get('model')).lower()}_target_field", params.get("target_field"))
    if isinstance(target, list) and target:
        target = target[0]
    return len(target) if isinstance(target, (tuple, list)) else 1
