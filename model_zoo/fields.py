"""What a model takes from its feature map: the sizes of its field groups, and feature encoders."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fuxictr.pytorch import layers
from torch import nn

from ctr_pe.errors import UserError, nearest
from ctr_pe.fields import Group, nested_fields, paired, per_group


@dataclass(frozen=True)
class SizedGroup(Group):
    """A field group as a model sees it, with the encoding of its attention.

    ``dims``: width of each field's embedding; an item's has them side by side.
    ``sizes``: ids of each field, 0 for a field of vectors.
    ``negative``: fields that hold, slot by slot of the history, an item that was not chosen; () without.
    """

    encoding: str = "none"
    dims: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    max_len: int = 0
    negative: tuple[str, ...] = ()

    @property
    def dim(self) -> int:
        """Item dim D."""
        return sum(self.dims)


def sized_groups(
    feature_map: Any,
    embedding_dim: int,
    target_field: Any,
    sequence_field: Any,
    neg_seq_field: Any,
    age_field: Any,
    encoding: Any,
) -> list[SizedGroup]:
    """The groups that the keys of a model name, with what its feature map says about their fields.

    Raises:
        UserError: a key that is missing or ambiguous, a field that the data lack, groups that do not fit together.
    """
    groups = paired(target_field, sequence_field, age_field)
    negatives = nested_fields("neg_seq_field", neg_seq_field) if neg_seq_field else [()] * len(groups)
    if len(negatives) != len(groups):
        raise UserError(f"target_field has {len(groups)} groups, neg_seq_field has {len(negatives)}")
    encodings = per_group("position_encoding", encoding, len(groups))
    return [_sized(feature_map.features, embedding_dim, *of) for of in zip(groups, negatives, encodings, strict=True)]


def _sized(
    features: Mapping[str, Any], embedding_dim: int, group: Group, negative: tuple[str, ...], encoding: str
) -> SizedGroup:
    target, history, age = group.target, group.history, group.age
    for field in (*target, *history, *negative, *([age] if age else [])):
        if field not in features:
            raise UserError(f"feature_map: no field '{field}': {nearest(field, features)}")
    dims, of_history, of_negative = (
        [field_dim(features[field], embedding_dim) for field in fields] for fields in (target, history, negative)
    )
    if dims != of_history:
        raise UserError(f"fields {list(target)} have dims {dims}, their history {list(history)} has {of_history}")
    if negative and dims != of_negative:
        raise UserError(f"fields {list(target)} have dims {dims}, neg_seq_field {list(negative)} has {of_negative}")
    for field in (*history, *negative):
        if features[field]["type"] != "sequence":
            raise UserError(f"feature_map: history field '{field}' is of type {features[field]['type']}, not sequence")
    max_len = max(features[field]["max_len"] for field in history)
    sizes = tuple(_size(features[field]) for field in target)
    return SizedGroup(target, history, age, encoding, tuple(dims), sizes, max_len, negative)


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
