"""Keys of older configs: of FuxiCTR since 1.0, and of the code released with the CAPE paper (``use_cope``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctr_pe.config.field_groups import field_value

UNREAD = {
    "attention_activations": "attention_hidden_activations",
    "attention_final_activation": "attention_output_activation",
    "attention_units": "attention_hidden_units",
    "data_block_size": "",
    "data_loader": "",
    "debug": "",
    "dice_alpha": "",
    "din_history_field": "din_sequence_field",
    "din_query_field": "din_target_field",
    "embedding_dropout": "",
    "embedding_initializer": "embedding_init",
    "eval_interval": "eval_steps",
    "every_x_epochs": "eval_steps",
    "feature_config": "",
    "group_index": "group_id",
    "ordered_features": "",
    "partition_block_size": "",
    "patience": "early_stop_patience",
    "pickle_feature_encoder": "",
    "rebuild_dataset": "",
    "split_type": "",
    "test_size": "",
    "use_hdf5": "",
    "valid_size": "",
    "version": "",
    "workers": "num_workers",
}
"""Keys that some version of FuxiCTR took and nothing reads here -> the key that is read instead, if there is one."""

SWITCHES = ("use_position_emb", "use_pos_emb")
"""Of the position vectors of BST and DMIN, which are ``position_encoding: native`` here."""

CAPE_KEYS = ("use_cope", "max_sequence_length")


def translate(params: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """An experiment under the current keys, and one line that says what has changed; empty if nothing has.

    A model's switch of its own position vectors says what ``position_encoding`` is where that is not given.
    """
    new, lines = dict(params), []
    if any(key in params for key in CAPE_KEYS):
        new, line = _of_released_cape(params)
        lines.append(line)
    for key in [key for key in SWITCHES if key in new]:
        if new.get("position_encoding") is not None:
            lines.append(f"{key} without effect: position_encoding is {new['position_encoding']}")
            del new[key]
        elif isinstance(new[key], bool):
            new["position_encoding"] = "native" if new.pop(key) else "none"
    return new, "; ".join(lines)


def _of_released_cape(params: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """``use_cope`` switches CAPE on. The default of ``position_dim`` was the dim of the target: that of all fields in
    its tuple. ``max_sequence_length`` was the number of table rows; larger positions used the last row, as they do
    beyond ``max_position``. The default of ``embedding_dim`` was 10. BST's ``use_position_emb`` (on by default) is
    ``native``, which CAPE replaces. The current keys win if both are given.
    """
    old = (*CAPE_KEYS, "use_position_emb")
    new = {key: value for key, value in params.items() if key not in old}
    cape, own = params.get("use_cope"), params.get("model") == "BST" and params.get("use_position_emb", True)
    width = params.get("embedding_dim")
    width = width if isinstance(width, int) and width > 0 else 10  # another value is refused later
    target = field_value(params, "target_field", [str(params.get("model")).lower()])
    target = target[0] if isinstance(target, list) and target else target
    fields = len(target) if isinstance(target, (tuple, list)) else 1  # the fields of one tuple were concatenated
    keys = {
        "position_encoding": "cape" if cape else "native" if own else "none",
        "embedding_dim": 10,
        "position_dim": width * fields if cape else None,
        "max_position": params.get("max_sequence_length"),
    }
    keys = {key: value for key, value in keys.items() if value is not None and new.get(key) is None}
    written = ", ".join(f"{key}: {value}" for key, value in keys.items())
    replaced = ", ".join(key for key in old if key in params)
    line = f"a config for the released CAPE code: {replaced} is now written {written}"
    if cape and own:
        line += " (cape takes the place of BST's own position vectors)"
    return new | keys, line
