"""A model as one graph of torch's own operators: histories and targets in, scores out, sizes free.

B requests, L history slots, K targets of a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ctr_pe.model_zoo.candidates import encode_packed, score_at_once
from ctr_pe.model_zoo.tables import look_up
from ctr_pe.padded import PaddedPositions, align
from ctr_pe.pe.base import PositionEncoding
from ctr_pe.positions import Positions

SHARED = ("user", "context")
"""Sources of fields that have one value for all targets of a request."""


class RequestGraph(nn.Module):
    """The scores (B, K) of K targets of each history, as ``score_candidates`` gives them, from padded histories.

    ``inputs``: what each input is, in their order: ``history``, ``age`` (B, L), ``target`` (B, K), or ``request`` (B,);
    a field that is a list or a vector has one axis more.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.eval()
        self.inputs = inputs_of(model)

    def forward(self, given: Mapping[str, Tensor]) -> Tensor:
        model = self.model
        positions: list[Positions] = []
        packed: dict[str, list[Tensor]] = {}
        for group in model.groups:
            timed = group.age in self.inputs
            mask, *aligned = align(
                given[group.history[0]] != 0,
                *(given[field] for field in (*group.history, *([group.age] if timed else []))),
                longest=model.max_len,
            )
            at = PaddedPositions.from_mask(mask, aligned[-1] if timed else None)
            positions.append(at)
            for field, ids in zip(group.history, aligned, strict=False):
                packed.setdefault(field, []).append(at.pack(ids.masked_fill(~mask, 0)))
        encoded = encode_packed(model, positions, packed)
        fields = {kind: [f for f in model.other_fields if self.inputs[f] == kind] for kind in ("target", "request")}
        shared, _ = look_up(model.embedding_layer, {field: given[field] for field in fields["request"]})
        return score_at_once(model, encoded, {field: given[field] for field in fields["target"]}, shared)


def inputs_of(model: Any) -> dict[str, str]:
    """Input -> ``history``, ``age``, ``target`` or ``request``."""
    needs_age = any(module.about.needs_age for module in model.modules() if isinstance(module, PositionEncoding))
    found: dict[str, str] = {}
    for group in model.groups:
        found |= dict.fromkeys(group.history, "history")
        if group.age is not None and needs_age:
            found[group.age] = "age"
    targets = {field for group in model.groups for field in group.target}
    for field in model.other_fields:
        of_request = field not in targets and model.feature_map.features[field].get("source") in SHARED
        found[field] = "request" if of_request else "target"
    return found
