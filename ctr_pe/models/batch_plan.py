"""What a model takes of a batch, made where the batch is: a step on an accelerator has no size left to ask for.

B rows, N items of a group's histories.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ctr_pe.fuxictr import padded
from ctr_pe.models.groups import SizedGroup
from ctr_pe.sequence.batch import newest
from ctr_pe.sequence.jagged import Layout
from ctr_pe.sequence.positions import Positions
from ctr_pe.sequence.transfer import PinnedTransfer


@dataclass(frozen=True)
class Histories:
    """Those of a field group: ``positions``, and by history field the ids (N,). ``ids_cpu``: the same on the CPU, and
    those of the group's negative fields."""

    positions: Positions
    ids: Mapping[str, Tensor]
    ids_cpu: Mapping[str, Tensor]
    stays_on_cpu: ClassVar[tuple[str, ...]] = ("ids_cpu",)

    @classmethod
    def of(cls, model: Any, batch: Mapping[str, Tensor], group: SizedGroup) -> Histories:
        """The newest ``max_len`` items of each history; in training with the negative fields."""
        others = [*(group.negative if model.training else ()), *([group.age] if group.age else [])]
        lengths, values = padded.history(batch, group.history, others)
        if model.max_len is not None and len(lengths) and int(lengths.max()) > model.max_len:
            kept, lengths = newest(lengths, model.max_len), lengths.clamp(max=model.max_len)
            values = {name: column[kept] for name, column in values.items()}
        age = values.pop(group.age) if group.age else None
        positions = Positions.from_lengths(lengths, age, Layout.on(model.device))
        here = {name: column.cpu() for name, column in values.items()}
        return cls(positions, {name: values[name] for name in group.history}, here)


@dataclass(frozen=True)
class Plan:
    """``fields``: by name, all that are no history. ``label``, ``weight`` (B,), or None without.
    ``histories``: per field group."""

    fields: dict[str, Tensor]
    label: Tensor | None
    histories: list[Histories]
    weight: Tensor | None = None

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
        self._transfer = PinnedTransfer(plan, device)

    @cached_property
    def plan(self) -> Plan:
        return self._transfer.unpack()
