"""What a model takes from its feature map: the sizes of its field groups, and the tower's fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ctr_pe.config.field_groups import Group, nested_fields, paired, per_group
from ctr_pe.utils.errors import UserError, nearest


@dataclass(frozen=True)
class SizedGroup(Group):
    """A field group as a model sees it, with the encoding of its attention.

    ``dims``: width of each field's embedding; an item's has them side by side.
    ``sizes``: ids of each field, 0 for one of vectors or of several categories.
    ``negative``: fields that hold, slot by slot of the history, an item that was not chosen; () without.
    ``chosen``: whether the user chose the items of the history.
    """

    encoding: str = "none"
    dims: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    max_len: int = 0
    negative: tuple[str, ...] = ()
    chosen: bool = True

    @property
    def dim(self) -> int:
        """Item dim D."""
        return sum(self.dims)


def sized_groups(
    features: Mapping[str, Any],
    embedding_dim: int,
    max_len: int | None,
    target_field: Any,
    sequence_field: Any,
    neg_seq_field: Any,
    age_field: Any,
    encoding: Any,
) -> list[SizedGroup]:
    """The groups that the keys of a model name, with what its feature map says about their fields.

    Raises UserError: a key is missing or ambiguous, the data lack a field, or groups do not fit together.
    """
    groups = paired(target_field, sequence_field, age_field)
    negatives = nested_fields("neg_seq_field", neg_seq_field) if neg_seq_field else [()] * len(groups)
    if len(negatives) != len(groups):
        raise UserError(f"target_field has {len(groups)} groups, neg_seq_field has {len(negatives)}")
    encodings, sized = per_group("position_encoding", encoding, len(groups)), []
    for group, negative, name in zip(groups, negatives, encodings, strict=True):
        target, history, age = group.target, group.history, group.age
        for field in (*target, *history, *negative, *([age] if age else [])):
            if field not in features:
                raise UserError(f"feature_map: no field '{field}': {nearest(field, features)}")
        dims = [field_dim(features[field], embedding_dim) for field in target]
        for what, fields in (("their history", history), ("neg_seq_field", negative)):
            found = [field_dim(features[field], embedding_dim) for field in fields]
            if fields and found != dims:
                raise UserError(f"fields {list(target)} have dims {dims}, {what} {list(fields)} has {found}")
            for field in fields:
                kind = features[field]["type"]
                if kind != "sequence":
                    raise UserError(f"feature_map: history field '{field}' is of type {kind}, not sequence")
        slots = [features[field]["max_len"] for field in history]
        longest = max(slots) if max_len is None else min(max(slots), max_len)
        sizes = tuple(_size(features[field]) for field in target)
        chosen = features[history[0]].get("chosen", True)
        sized.append(SizedGroup(target, history, age, name, tuple(dims), sizes, longest, negative, chosen))
    return sized


def other_fields(
    features: Mapping[str, Any], encoders: Mapping[str, nn.Module], histories: Collection[str]
) -> list[str]:
    """The fields of the tower. Raises UserError if a history is pooled by an encoder, or another sequence is not."""
    for field, encoder in encoders.items():
        if field in histories and not isinstance(encoder, nn.Linear) and "values" not in features[field]:
            raise UserError(f"feature_map: history field '{field}' is pooled: set its feature_encoder to null")
    others = [name for name, spec in features.items() if spec["type"] != "meta" and name not in histories]
    for name in others:
        if features[name]["type"] == "sequence" and name not in encoders:
            raise UserError(
                f"feature_map: sequence '{name}' is in no sequence_field and has no pooling feature_encoder "
                "(layers.MaskedAveragePooling())"
            )
    return others


def field_dim(spec: Mapping[str, Any], embedding_dim: int) -> int:
    """Width of a field's embedding."""
    return int(spec.get("emb_output_dim", spec.get("embedding_dim", embedding_dim)))


def _size(spec: Mapping[str, Any]) -> int:
    return (
        0
        if spec["type"] == "numeric" or "pretrained_emb" in spec or "values" in spec
        else int(spec.get("vocab_size", 0))
    )
