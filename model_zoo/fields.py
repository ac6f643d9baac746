"""Field groups: which fields of a data set make the target, and which a history."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fuxictr.pytorch import layers
from torch import nn

from ctr_pe.errors import UserError, nearest


@dataclass(frozen=True)
class Group:
    """Target fields and the history fields they are compared with, and the encoding of their attention.

    ``dims``: width of each field's embedding; an item's has them side by side.
    ``sizes``: ids of each field, 0 for a field of vectors.
    ``negative``: fields that hold, slot by slot of the history, an item that was not chosen; () without.
    """

    target: tuple[str, ...]
    history: tuple[str, ...]
    age: str | None
    encoding: str
    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    max_len: int
    negative: tuple[str, ...] = ()

    @property
    def dim(self) -> int:
        """Item dim D."""
        return sum(self.dims)


def field_groups(
    feature_map: Any,
    embedding_dim: int,
    target_field: Any,
    sequence_field: Any,
    neg_seq_field: Any,
    age_field: Any,
    encoding: Any,
) -> list[Group]:
    """The groups that the keys of a model name.

    Raises:
        UserError: a key that is missing or ambiguous, a field that the data lack, groups that do not fit together.
    """
    targets, histories = nested_fields("target_field", target_field), nested_fields("sequence_field", sequence_field)
    if len(targets) != len(histories):
        raise UserError(f"target_field has {len(targets)} groups, sequence_field has {len(histories)}")
    negatives = nested_fields("neg_seq_field", neg_seq_field) if neg_seq_field else [()] * len(targets)
    if len(negatives) != len(targets):
        raise UserError(f"target_field has {len(targets)} groups, neg_seq_field has {len(negatives)}")
    ages = _per_group("age_field", age_field, len(targets))
    encodings = _per_group("position_encoding", encoding, len(targets))
    groups = []
    for target, history, negative, age, name in zip(targets, histories, negatives, ages, encodings, strict=True):
        for field in (*target, *history, *negative, *([age] if age else [])):
            if field not in feature_map.features:
                raise UserError(f"feature_map: no field '{field}': {nearest(field, feature_map.features)}")
        dims, of_history, of_negative = (
            [field_dim(feature_map.features[field], embedding_dim) for field in fields]
            for fields in (target, history, negative)
        )
        if dims != of_history:
            raise UserError(f"fields {list(target)} have dims {dims}, their history {list(history)} has {of_history}")
        if negative and dims != of_negative:
            raise UserError(f"fields {list(target)} have dims {dims}, neg_seq_field {list(negative)} has {of_negative}")
        for field in (*history, *negative):
            spec = feature_map.features[field]
            if spec["type"] != "sequence":
                raise UserError(f"feature_map: history field '{field}' is of type {spec['type']}, not sequence")
        max_len = max(feature_map.features[field]["max_len"] for field in history)
        sizes = tuple(_size(feature_map.features[field]) for field in target)
        groups.append(Group(target, history, age, name, tuple(dims), sizes, max_len, negative))
    return groups


def nested_fields(key: str, value: Any) -> list[tuple[str, ...]]:
    """Groups of fields from what a config may hold: a name, one tuple, or a list of names, tuples and lists."""
    if not value:
        raise UserError(f"{key} is missing: write {key}: [[item_id, cate_id]] with the fields of your data")
    if isinstance(value, str):
        return [(value,)]
    if isinstance(value, tuple) and all(isinstance(field, str) for field in value):
        return [value]
    if isinstance(value, list) and len(value) > 1 and all(isinstance(field, str) for field in value):
        raise UserError(
            f"{key}: [{', '.join(value)}] can mean two things: write [[{', '.join(value)}]] for one attention over all "
            f"fields, [{', '.join(f'[{field}]' for field in value)}] for one attention each"
        )
    return [(group,) if isinstance(group, str) else tuple(group) for group in value]


def _per_group(key: str, value: Any, groups: int) -> list[Any]:
    if value is None or isinstance(value, str):
        return [value] * groups
    if len(value) != groups:
        raise UserError(f"{key} has {len(value)} entries for {groups} field groups")
    return list(value)


def field_dim(spec: Mapping[str, Any], embedding_dim: int) -> int:
    """Width of a field's embedding."""
    return int(spec.get("emb_output_dim", spec.get("embedding_dim", embedding_dim)))


def _size(spec: Mapping[str, Any]) -> int:
    return 0 if spec["type"] == "numeric" or "pretrained_emb" in spec else int(spec.get("vocab_size", 0))


def take_encoders(feature_map: Any) -> tuple[Any, dict[str, nn.Module]]:
    """A copy of the feature map without feature encoders, and the encoders: FuxiCTR would run their text as code."""
    feature_map = copy.deepcopy(feature_map)
    encoders: dict[str, nn.Module] = {}
    for field, spec in feature_map.features.items():
        text = spec.get("feature_encoder")
        if isinstance(text, list) and len(text) == 1:  # FuxiCTR takes a list for a sequence of encoders
            text = text[0]
        if text is None:
            continue
        linear = re.fullmatch(r"nn\.Linear\((\d+), *(\d+)(?:, *bias *= *(True|False))?\)", str(text))
        if linear:
            encoders[field] = nn.Linear(int(linear[1]), int(linear[2]), bias=linear[3] != "False")
        elif text in ("layers.MaskedAveragePooling()", "layers.MaskedSumPooling()"):
            encoders[field] = getattr(layers, text[len("layers.") : -2])()
        else:
            raise UserError(
                f"feature_map: feature_encoder '{text}' of '{field}' is none of nn.Linear(a, b, bias=False), "
                "layers.MaskedAveragePooling(), layers.MaskedSumPooling(), null"
            )
        spec["feature_encoder"] = None
    return feature_map, encoders
