"""What a model takes of a batch, made where the batch is: a step on an accelerator has no size left to ask for.

B rows, N items of a group's histories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ctr_pe.fuxictr import padded
from ctr_pe.models.groups import SizedGroup
from ctr_pe.sequence.batch import newest
from ctr_pe.sequence.filled import Filled, Parts, filling, like_length, rounded, rows_to_fill
from ctr_pe.sequence.jagged import Layout
from ctr_pe.sequence.positions import Positions
from ctr_pe.sequence.transfer import PinnedTransfer, ZeroPadded


@dataclass(frozen=True)
class Histories:
    """Those of a field group: ``positions``, and by history field the ids (N,). ``all_ids``: the same on the CPU, and
    those of the group's negative fields."""

    positions: Positions
    ids: Mapping[str, Tensor]
    all_ids: Mapping[str, Tensor]
    stays_on_cpu: ClassVar[tuple[str, ...]] = ("all_ids",)

    @classmethod
    def of(cls, model: Any, batch: Mapping[str, Tensor], group: SizedGroup) -> Histories:
        """The newest ``max_len`` items of each history; in training with the negative fields."""
        lengths, values = newest_items(model, batch, group)
        age = values.pop(group.age) if group.age else None
        positions = Positions.from_lengths(lengths, age, Layout.on(model.device))
        here = {name: column.cpu() for name, column in values.items()}
        return cls(positions, {name: values[name] for name in group.history}, here)


def newest_items(model: Any, batch: Mapping[str, Tensor], group: SizedGroup) -> tuple[Tensor, dict[str, Tensor]]:
    """Lengths (B,) of a group's histories and, by column, values (N,) of the newest ``max_len`` items of each; in
    training with the negative fields."""
    others = [*(group.negative if model.training else ()), *([group.age] if group.age else [])]
    lengths, values = padded.history(batch, group.history, others)
    if model.max_len is not None and len(lengths) and int(lengths.max()) > model.max_len:
        kept, lengths = newest(lengths, model.max_len), lengths.clamp(max=model.max_len)
        values = {name: column[kept] for name, column in values.items()}
    return lengths, values


@dataclass(frozen=True)
class FilledHistories:
    """Those of a field group in a filled batch (:mod:`ctr_pe.sequence.filled`): ``lengths`` (B,), and of N ``items``
    with at most ``slots`` per row ``age``, and ids as :class:`Histories` has them. ``parts``: of the blocks of
    self-attention."""

    lengths: Tensor
    items: int
    slots: int
    real_rows: int
    age: Tensor | None
    ids: Mapping[str, Tensor]
    all_ids: Mapping[str, Tensor]
    parts: Parts = ()
    stays_on_cpu: ClassVar[tuple[str, ...]] = ("parts",)

    @property
    def positions(self) -> Filled:
        """New ones each time: what they compute must be part of the step, which a CUDA graph may have."""
        return Filled.of(self.lengths, self.items, self.slots, self.age, self.real_rows, self.parts)


def fill(model: Any, batch: Mapping[str, Tensor]) -> tuple[int, list[FilledHistories]]:
    """How many rows only fill a training batch up, and the histories of each group with them."""
    given = [newest_items(model, batch, group) for group in model.groups]
    slots = []
    for group, (lengths, _) in zip(model.groups, given, strict=True):
        longest = int(lengths.max()) if len(lengths) else 0
        slots.append(max(1, min(rounded(longest), max(group.max_len, longest))))
    real = [int(lengths.sum()) for lengths, _ in given]
    items = [rounded(max(1, count)) for count in real]
    rows, found = max(map(rows_to_fill, items, slots)), []
    for group, (lengths, values), wide, count, most in zip(model.groups, given, slots, real, items, strict=True):
        missing = most - count
        lengths = torch.cat([lengths, filling(missing, rows, wide)])
        padded_values: dict[str, Any] = {name: ZeroPadded(column, missing) for name, column in values.items()}
        age = padded_values.pop(group.age) if group.age else None
        ids = {name: padded_values[name] for name in group.history}
        before = model.parts_before.setdefault((len(lengths), wide), [])
        parts = like_length(lengths, wide, before) if model.attends_to_itself else ()
        found.append(FilledHistories(lengths, most, wide, len(lengths) - rows, age, ids, padded_values, parts))
    return rows, found


@dataclass(frozen=True)
class Plan:
    """``fields``: by name, all that are no history. ``label``, ``weight`` (B,), or None without.
    ``histories``: per field group. ``rows``: of a filled batch those that do not only fill up, the first; of these
    alone are label and weight."""

    fields: dict[str, Tensor]
    label: Tensor | None
    histories: Sequence[Histories | FilledHistories]
    weight: Tensor | None = None
    rows: int | None = None

    @classmethod
    def filled(cls, model: Any, batch: Mapping[str, Tensor], plan: Plan) -> Plan:
        """``plan`` of a training batch, with which it has ``fields``, label and weight, filled up."""
        more, histories = fill(model, batch)
        fields: dict[str, Any] = {name: ZeroPadded(column.cpu(), more) for name, column in plan.fields.items()}
        label, weight = (None if x is None else x.cpu() for x in (plan.label, plan.weight))
        return cls(fields, label, histories, weight, histories[0].real_rows)

    @property
    def sizes(self) -> tuple[Any, ...]:
        """What of a filled batch decides sizes and is in no tensor."""
        filled = [group for group in self.histories if isinstance(group, FilledHistories)]
        return (self.rows, *((group.items, group.slots, group.parts) for group in filled))

    def ids(self) -> dict[str, Tensor]:
        """By field, of a history those of all groups that have it, one after the other."""
        parts: dict[str, list[Tensor]] = {}
        for group in self.histories:
            for field, ids in group.ids.items():
                parts.setdefault(field, []).append(ids)
        return self.fields | {field: some[0] if len(some) == 1 else torch.cat(some) for field, some in parts.items()}

    def items(self, embedded: Mapping[str, Tensor]) -> list[Tensor]:
        """What :meth:`ids` are embedded as -> the items (N, D) of each group, fields side by side."""
        sizes: dict[str, list[int]] = {}
        for group in self.histories:
            for field, ids in group.ids.items():
                sizes.setdefault(field, []).append(len(ids))
        parts = {  # one part is the whole, whose slice would be a launch more in the backward
            field: iter([embedded[field]] if len(of_groups) == 1 else torch.split(embedded[field], of_groups))
            for field, of_groups in sizes.items()
        }
        return [torch.cat([next(parts[field]) for field in group.ids], dim=-1) for group in self.histories]


class Planned(dict[str, Tensor]):
    """A batch's columns of one value per row, and its plan, which is sent to the device when it is first read there."""

    def __init__(self, rows: Mapping[str, Tensor], plan: Plan, device: torch.device) -> None:
        super().__init__(rows)
        self.transfer = PinnedTransfer(plan, device)

    @cached_property
    def plan(self) -> Plan:
        return self.transfer.unpack()

    def stay(self) -> None:
        """The step is done: what is still asked for, such as labels, need not be sent."""
        self.plan = self.transfer.content
