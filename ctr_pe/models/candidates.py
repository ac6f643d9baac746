"""One user, many candidates: what a model computes of a history is computed once, whatever targets are scored with it.

B histories, K targets of each, L history slots, N real items, D item dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ctr_pe.models.embeddings import look_up
from ctr_pe.sequence.jagged import repeated
from ctr_pe.sequence.positions import Items, Positions
from ctr_pe.sequence.transfer import Parcel

if TYPE_CHECKING:
    from ctr_pe.models.rank_model import RankModel

PAIRS = 2**14
"""(target, item) pairs that are scored at once where each needs vectors of its own."""


@dataclass(frozen=True)
class Encoded:
    """Histories as a model needs them, per field group: who stands where, the item embeddings (N, D), and what the
    backbone makes of them (``RankModel.encode_history``)."""

    positions: list[Positions]
    histories: list[Tensor]
    states: list[Any]


def encode(model: RankModel, inputs: Mapping[str, Tensor], states: bool = True) -> Encoded:
    """``inputs``: history fields and ages (B, L), as in a batch; other fields are not read. Without ``states`` only
    what the embedding tables give."""
    positions, packed = Parcel(model.read_histories(inputs), model.device).unpack()
    return encode_packed(model, positions, packed, states)


def encode_packed(
    model: RankModel, positions: list[Positions], packed: Mapping[str, list[Tensor]], states: bool = True
) -> Encoded:
    """``packed``: per field the ids (N,) of each group that has it."""
    found, packed = Encoded(positions, [], []), {field: list(parts) for field, parts in packed.items()}
    for index, group in enumerate(model.groups):
        own = {field: packed[field].pop(0) for field in group.history}
        embedded, _ = look_up(model.embedding_layer, own)
        history = torch.cat([embedded[field] for field in group.history], dim=-1)
        positions[index] = positions[index].carrying(Items(history, tuple(own.values())))
        found.histories.append(history)
        with model.precision():
            found.states.append(model.encode_history(index, history, positions[index]) if states else None)
    return found


def extend(model: RankModel, encoded: Encoded, inputs: Mapping[str, Tensor], elapsed: int = 0) -> Encoded:
    """``inputs``: history fields and ages (B, n) of later events; ``elapsed``: seconds since ``encoded`` was made.

    No old item is looked up again, and none is encoded again where the backbone's states of items stay when newer ones
    come (:meth:`RankModel.extends`), every history gets n events, and none becomes too long.
    """
    later = encode(model, inputs, states=False)
    found = Encoded([], [], [])
    for index, states in enumerate(encoded.states):
        old, new = (_Padded.of(some.positions[index], some.histories[index]) for some in (encoded, later))
        both = old.followed_by(new, elapsed)
        fits = model.max_len is None or int(both.mask.sum(1).max()) <= model.max_len
        if not fits:
            both = both.gather(model.newest(both.mask))
        history, at = both.packed()
        with model.precision():
            if fits and bool(new.mask.all()) and model.extends(index):
                for end in range(old.mask.shape[1], both.mask.shape[1]):
                    states = model.extend_history(index, states, both.items[:, end], *both.before(end))
            else:
                states = model.encode_history(index, history, at)
        found.positions.append(at)
        found.histories.append(history)
        found.states.append(states)
    return found


class _Padded(NamedTuple):
    """Histories and what their items are: mask and age (B, L), item embeddings (B, L, D), ids (B, L) per field."""

    mask: Tensor
    age: Tensor | None
    items: Tensor
    ids: tuple[Tensor, ...]

    @classmethod
    def of(cls, positions: Positions, history: Tensor) -> _Padded:
        assert positions.items is not None
        ids = tuple(positions.unpack(field) for field in positions.items.ids)
        return cls(positions.mask, positions.age, positions.unpack(history), ids)

    def packed(self) -> tuple[Tensor, Positions]:
        at = Positions.from_mask(self.mask, self.age)
        items = at.pack(self.items)
        return items, at.carrying(Items(items, tuple(at.pack(field) for field in self.ids)))

    def followed_by(self, new: _Padded, elapsed: int) -> _Padded:
        age = None if self.age is None or new.age is None else torch.cat([self.age + elapsed, new.age], 1)
        ids = tuple(torch.cat(pair, 1) for pair in zip(self.ids, new.ids, strict=True))
        return _Padded(torch.cat([self.mask, new.mask], 1), age, torch.cat([self.items, new.items], 1), ids)

    def gather(self, slots: Tensor) -> _Padded:
        age = None if self.age is None else self.age.gather(1, slots)
        items = self.items.take_along_dim(slots.unsqueeze(-1), 1)
        return _Padded(self.mask.gather(1, slots), age, items, tuple(field.gather(1, slots) for field in self.ids))

    def before(self, slot: int) -> tuple[Tensor, Positions]:
        """Earlier slots, packed, and their positions at the time of this one, whose item is the one target."""
        own = slice(slot, slot + 1)
        age = None if self.age is None else self.age[:, :slot] - self.age[:, own]
        earlier = _Padded(self.mask[:, :slot], age, self.items[:, :slot], tuple(field[:, :slot] for field in self.ids))
        items, at = earlier.packed()
        return items, replace(at, target=Items(self.items[:, own], tuple(field[:, own] for field in self.ids)))


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
        own = {field: given[field][:, start : start + size] for field in per_target}
        scores.append(score_at_once(model, encoded, own, shared))
    return torch.cat(scores, 1)


def score_at_once(
    model: RankModel, encoded: Encoded, own: Mapping[str, Tensor], shared: Mapping[str, Tensor]
) -> Tensor:
    """(B, K): ``own``: fields of which each target has its own values, (B, K), those of items among them; ``shared``:
    embeddings (B, D) of the others."""
    rows, count = next(iter(own.values())).shape[:2]
    flat, _ = look_up(model.embedding_layer, {field: values.flatten(0, 1) for field, values in own.items()})
    embedded = {field: vectors.view(rows, count, -1) for field, vectors in flat.items()}
    embedded |= {field: vectors.view(rows, 1, -1).expand(-1, count, -1) for field, vectors in shared.items()}
    features = [embedded[field] for field in model.other_fields]
    for index, group in enumerate(model.groups):
        target = torch.cat([embedded[field] for field in group.target], dim=-1)
        given = Items(target, tuple(own[field] for field in group.target))
        at = replace(encoded.positions[index], target=given)
        with model.precision():
            interests = model.of_candidates(index, target, encoded.histories[index], encoded.states[index], at)
        features.append(interests.to(target.dtype))
    probabilities: Tensor = model.dnn(torch.cat(features, dim=-1).flatten(0, 1))
    return probabilities.view(rows, count)


def row_by_row(model: RankModel, index: int, target: Tensor, history: Tensor, positions: Positions) -> Tensor:
    """Interests (B, K, any width) of targets (B, K, D), each with a copy of its history (N, D): for backbones in which
    the states of the items depend on the target."""
    each, at, copies = copied(target, positions, history)
    return model.interest(index, each, copies, at).view(*target.shape[:2], -1)


def copied(target: Tensor, positions: Positions, history: Tensor, *others: Tensor) -> tuple[Any, ...]:
    """For each target (B, K, D) a copy of its history (N, D) and of ``others`` of its items (N, any): the targets
    (B K, D), positions, and the copies, packed."""
    count = target.shape[1]
    age = None if positions.age is None else repeated(positions.age, count)
    at = positions.from_mask(repeated(positions.mask, count), age)
    copies, *more = (at.pack(repeated(positions.unpack(packed), count)) for packed in (history, *others))
    assert positions.items is not None
    assert positions.target is not None
    target = target.flatten(0, 1)
    ids = tuple(at.pack(repeated(positions.unpack(field), count)) for field in positions.items.ids)
    own = tuple(field.flatten(0, 1) for field in positions.target.ids)
    return target, at.carrying(Items(copies, ids), Items(target, own)), copies, *more
