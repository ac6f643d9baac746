"""One user, many candidates: what a model computes of a history is computed once, whatever targets are scored with it.

B histories, K targets of each, L history slots, N real items, D item dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ctr_pe.fuxictr.embeddings import look_up
from ctr_pe.sequence.jagged import repeated
from ctr_pe.sequence.positions import Items, Positions
from ctr_pe.sequence.transfer import PinnedTransfer

if TYPE_CHECKING:
    from ctr_pe.models.batch_plan import Histories
    from ctr_pe.models.rank_model import RankModel

PAIRS = 2**14
"""(target, item) pairs that are scored at once where each needs vectors of its own."""


@dataclass(frozen=True)
class Encoded:
    """Histories as a model needs them, per field group: positions, packed items (N, D), and what the backbone makes of
    them (``RankModel.encode_history``)."""

    positions: list[Positions]
    histories: list[Items]
    states: list[Any]


def encode(model: RankModel, inputs: Mapping[str, Tensor]) -> Encoded:
    """``inputs``: history fields and ages, as in a batch; other fields are not read."""
    return encode_histories(model, PinnedTransfer(model.read_histories(inputs), model.device).unpack())


def encode_histories(model: RankModel, histories: Sequence[Histories]) -> Encoded:
    """``histories``: per field group."""
    found = Encoded([], [], [])
    for index, given in enumerate(histories):
        embedded, _ = look_up(model.embedding_layer, given.ids)
        history = Items(torch.cat([embedded[field] for field in given.ids], dim=-1), tuple(given.ids.values()))
        found.positions.append(given.positions)
        found.histories.append(history)
        with model.precision():
            found.states.append(model.encode_history(index, history, given.positions))
    return found


def score(model: RankModel, encoded: Encoded, inputs: Mapping[str, Tensor]) -> Tensor:
    """Click probabilities (B, K).

    ``inputs``: every field outside the histories, with one axis more than in a batch where each target has its own
    value, such as an id (B, K); else as in a batch, one value for all targets of a history.
    """
    given = model.get_inputs({field: inputs[field] for field in model.other_fields})
    per_target = {field for field, values in given.items() if values.dim() > model.input_dims(field)}
    count = max((given[field].shape[1] for field in per_target), default=1)
    for field in {field for group in model.groups for field in group.target} - per_target:
        given[field] = given[field].unsqueeze(1).expand(-1, count, *given[field].shape[1:])
        per_target.add(field)
    longest = max((at.mask.shape[1] for at in encoded.positions), default=0)
    size = max(1, model.pairs_at_once // max(1, len(next(iter(given.values()))) * (longest + 1)))
    shared, _ = look_up(model.embedding_layer, {field: x for field, x in given.items() if field not in per_target})
    scores = []
    for start in range(0, count, size):
        of_targets = {field: given[field][:, start : start + size] for field in per_target}
        scores.append(score_at_once(model, encoded, of_targets, shared))
    return torch.cat(scores, 1)


def score_at_once(
    model: RankModel, encoded: Encoded, of_targets: Mapping[str, Tensor], shared: Mapping[str, Tensor]
) -> Tensor:
    """(B, K): ``of_targets``: fields of which each target has a value, (B, K), those of items among them; ``shared``:
    embeddings (B, D) of the others."""
    rows, count = next(iter(of_targets.values())).shape[:2]
    flat, _ = look_up(model.embedding_layer, {field: values.flatten(0, 1) for field, values in of_targets.items()})
    embedded = {field: vectors.view(rows, count, -1) for field, vectors in flat.items()}
    embedded |= {field: vectors.view(rows, 1, -1).expand(-1, count, -1) for field, vectors in shared.items()}
    features = [embedded[field] for field in model.other_fields]
    for index, group in enumerate(model.groups):
        target = torch.cat([embedded[field] for field in group.target], dim=-1)
        targets = Items(target, tuple(of_targets[field] for field in group.target))
        of_group = encoded.histories[index], encoded.states[index], encoded.positions[index]
        with model.precision():
            interests = model.of_candidates(index, targets, *of_group)
        features.append(interests.to(target.dtype))
    probabilities: Tensor = model.dnn(torch.cat(features, dim=-1).flatten(0, 1))
    return probabilities.view(rows, count)


def row_by_row(model: RankModel, index: int, target: Items, history: Items, positions: Positions) -> Tensor:
    """Interests (B, K, any width) of targets (B, K, D), each with a copy of its history (N, D): for backbones in which
    the states of the items depend on the target."""
    each, copies, at, _ = copied(target, history, positions)
    return model.interest(index, each, copies, at)[0].view(*target.embedding.shape[:2], -1)


def copied(
    target: Items, history: Items, positions: Positions, others: Sequence[Tensor] = ()
) -> tuple[Items, Items, Positions, list[Tensor]]:
    """For each target (B, K, D) a copy of its history (N, D) and of ``others`` (N, any), of its items: the targets
    (B K, D), the histories, their positions, and the copies."""
    count = target.embedding.shape[1]
    age = None if positions.age is None else repeated(positions.age, count)
    at = positions.from_mask(repeated(positions.mask, count), age)
    embedding, *copies = (
        at.pack(repeated(positions.unpack(packed), count)) for packed in (history.embedding, *history.ids, *others)
    )
    ids, more = tuple(copies[: len(history.ids)]), copies[len(history.ids) :]
    flat = Items(target.embedding.flatten(0, 1), tuple(field.flatten(0, 1) for field in target.ids))
    return flat, Items(embedding, ids), at, more
