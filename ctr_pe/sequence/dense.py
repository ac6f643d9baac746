"""Histories in which every slot counts as an item: no size depends on what the tensors hold.

So the models can be exported and compiled, and units work under ``torch.func.vmap``. It is the record of
:mod:`ctr_pe.sequence.positions` in another form, for the same units and encodings, and costs what its slots cost.

B batch, L history slots. "Packed" are all slots, (B L, ...).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ctr_pe.sequence.jagged import Blocks, OneBlock, Padded, Whole
from ctr_pe.sequence.positions import Positions
from ctr_pe.utils.lazy_property import lazy_property


class EverySlot(Padded):
    """Packing is a view. Real items fill the last slots of each row, and padding is zero where it is unpacked."""

    every_slot = True

    def pack(self, padded: Tensor) -> Tensor:
        return padded.flatten(0, 1)

    def unpack(self, packed: Tensor) -> Tensor:
        rows, slots = self.mask.shape
        padding = ~self.mask.view(rows, slots, *[1] * (packed.dim() - 1))
        return packed.view(rows, slots, *packed.shape[1:]).masked_fill(padding, 0)

    def places(self, queries: int = 1) -> tuple[Tensor, ...]:
        rows, slots = self.mask.shape
        axes = [torch.arange(size, device=self.mask.device) for size in (rows, queries, slots)]
        return tuple(index.flatten() for index in torch.meshgrid(*axes, indexing="ij"))

    def lengths(self) -> tuple[Tensor, Tensor]:
        return self.count, torch.arange(self.mask.shape[0], device=self.mask.device)


class PaddedBlock(EverySlot, Whole):
    """All rows."""


@dataclass(frozen=True, eq=False)
class PaddedPositions(EverySlot, Positions):
    """Positions of histories whose newest item is in the last slot. There is at least one slot.

    Made by ``PaddedPositions.from_mask(mask, age)``; :func:`align` brings histories with padding elsewhere into this
    form.
    """

    @lazy_property
    def real(self) -> tuple[Tensor, Tensor]:
        rows, _, slots = self.places()
        return rows, slots

    @lazy_property
    def newest(self) -> Tensor:
        rows, slots = self.mask.shape
        return torch.arange(rows, device=self.mask.device) * slots + slots - 1

    def append(self, packed: Tensor, last: Tensor) -> Tensor:
        return torch.cat([self._by_row(packed), last.unsqueeze(1)], 1).flatten(0, 1)

    def drop_last(self, packed: Tensor) -> Tensor:
        return self._by_row(packed)[:, :-1].flatten(0, 1)

    def newest_of(self, packed: Tensor) -> Tensor:
        return self.unpack(packed)[:, -1]

    def total(self, packed: Tensor) -> Tensor:
        return self.unpack(packed).sum(1)

    def in_last(self, packed: Tensor, slots: int) -> Tensor:
        padded = self.unpack(packed)
        return torch.cat([padded.new_zeros(padded.shape[0], slots, *padded.shape[2:]), padded], 1)[:, -slots:]

    @lazy_property
    def whole(self) -> Blocks:
        rows, slots = self.mask.shape
        device = self.mask.device
        return OneBlock(
            [PaddedBlock(self.mask, torch.arange(rows, device=device), torch.arange(rows * slots, device=device))]
        )

    @property
    def blocks(self) -> Blocks:
        return self.whole

    @property
    def newest_blocks(self) -> Blocks:
        return self.whole

    def _by_row(self, packed: Tensor) -> Tensor:
        return packed.view(*self.mask.shape, *packed.shape[1:])


def align(mask: Tensor, *padded: Tensor, longest: int | None = None) -> tuple[Tensor, ...]:
    """Move the real items of each row to the last slots, in their order.

    Args:
        mask: (B, L) bool, padding anywhere.
        padded: (B, L) each.
        longest: items kept of a history, the newest; None for all.

    Returns:
        The new mask, and the others in its order; what their padding holds is not defined.
    """
    newer = mask.sum(1, keepdim=True) - mask.cumsum(1)
    place = torch.where(mask, mask.shape[1] - 1 - newer, (~mask).cumsum(1) - 1)
    distance = torch.arange(mask.shape[1], 0, -1, device=mask.device)
    kept = distance <= mask.sum(1, keepdim=True)
    if longest is not None:
        kept = kept & (distance <= longest)
    return kept, *(torch.zeros_like(values).scatter(1, place, values) for values in padded)


__all__ = ["PaddedPositions", "align"]
