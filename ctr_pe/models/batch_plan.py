"""What a model takes of a batch, made where the batch is: a step on an accelerator has no size left to ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ctr_pe.sequence.positions import Positions
from ctr_pe.sequence.transfer import PinnedTransfer


@dataclass(frozen=True)
class Plan:
    """``fields``: by name, all that are no history. ``label`` (B,), or None without. ``positions``: per field group.
    ``packed``: per history field the ids of real items (N,) for each group that has it: most slots are padding."""

    fields: dict[str, Tensor]
    label: Tensor | None
    positions: list[Positions]
    packed: dict[str, list[Tensor]]

    def ids(self) -> dict[str, Tensor]:
        """By field, those of the packed items of all groups one after the other."""
        joined = {field: parts[0] if len(parts) == 1 else torch.cat(parts) for field, parts in self.packed.items()}
        return self.fields | joined

    def of_groups(self, field: str, joined: Tensor) -> Sequence[Tensor]:
        """What was made of a history field's ids (N of all groups, ...) -> (N, ...) of each group that has it."""
        sizes = [len(part) for part in self.packed[field]]
        return [joined] if len(sizes) == 1 else torch.split(joined, sizes)


class Planned(dict[str, Tensor]):
    """A batch and its plan, which is sent to the device when it is first read there."""

    def __init__(self, batch: Mapping[str, Tensor], plan: Plan, device: torch.device) -> None:
        super().__init__(batch)
        self._transfer = PinnedTransfer(plan, device)

    @cached_property
    def plan(self) -> Plan:
        return self._transfer.unpack()
