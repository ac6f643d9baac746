"""What a model takes of a batch, made where the batch is: a step on an accelerator has no size left to ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ctr_pe.positions import Positions
from ctr_pe.sending import Parcel


@dataclass(frozen=True)
class Plan:
    """``fields``: by name, all that are no history. ``label`` (B,), or None without. ``positions``: per field group.
    ``packed``: per history field the ids of real items (N,) for each group that has it: most slots are padding."""

    fields: dict[str, Tensor]
    label: Tensor | None
    positions: list[Positions]
    packed: dict[str, list[Tensor]]


class Planned(dict[str, Tensor]):
    """A batch and its plan, which is sent to the device when it is first read there."""

    def __init__(self, batch: Mapping[str, Tensor], plan: Plan, device: torch.device) -> None:
        super().__init__(batch)
        self._parcel = Parcel(plan, device)

    @cached_property
    def plan(self) -> Plan:
        return self._parcel.unpack()
