"""Histories in which every slot counts as an item: no size depends on what the tensors hold.

So the models can be exported and compiled, and units work under ``torch.func.vmap``. It is the record of
:mod:`ctr_pe.sequence.positions` in another form, for the same units and encodings, and costs what its slots cost.

B batch, L history slots. "Packed" are all slots, (B L, ...).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ctr_pe.sequence.jagged import Blocks
from ctr_pe.sequence.positions import Positions
from ctr_pe.utils.lazy_property import lazy_property


class Dense(Positions):
    """Positions of histories whose newest item is in the last slot, at least one slot wide; their one block is they
    themselves. Packing is a view, and padding is zero where it is unpacked.

    Made by ``Dense.from_mask(mask, age)``; :func:`align` brings histories with padding elsewhere into this form.
    """

    dense = True

    def pack(self, padded: Tensor) -> Tensor:
        return padded.flatten(0, 1)

    def unpack(self, packed: Tensor) -> Tensor:
        padding = ~self.mask.view(*self.mask.shape, *[1] * (packed.dim() - 1))
        return self._by_row(packed).masked_fill(padding, 0)

    @lazy_property
    def items(self) -> Tensor:
        return torch.arange(self.mask.numel(), device=self.mask.device)

    @lazy_property
    def item_rows(self) -> Tensor:
        return self.real_pairs()[0]

    def real_pairs(self, queries: int = 1) -> tuple[Tensor, ...]:
        rows, slots = self.mask.shape
        axes = [torch.arange(size, device=self.mask.device) for size in (rows, queries, slots)]
        return tuple(index.flatten() for index in torch.meshgrid(*axes, indexing="ij"))

    def distinct_lengths(self) -> tuple[Tensor, Tensor]:
        return self.lengths, self.rows

    @lazy_property
    def newest(self) -> Tensor:
        return self.rows * self.mask.shape[1] + self.mask.shape[1] - 1

    def append(self, packed: Tensor, last: Tensor) -> Tensor:
        return torch.cat([self._by_row(packed), last.unsqueeze(1)], 1).flatten(0, 1)

    def drop_last(self, packed: Tensor) -> Tensor:
        return self._by_row(packed)[:, :-1].flatten(0, 1)

    @property
    def no_row_is_empty(self) -> bool:
        return False

    def newest_of(self, packed: Tensor) -> Tensor:
        return self.unpack(packed)[:, -1]

    def total(self, packed: Tensor) -> Tensor:
        return self.unpack(packed).sum(1)

    def in_last(self, packed: Tensor, slots: int) -> Tensor:
        padded = self.unpack(packed)
        return torch.cat([padded.new_zeros(padded.shape[0], slots, *padded.shape[2:]), padded], 1)[:, -slots:]

    @lazy_property
    def whole(self) -> Blocks:
        return Blocks([self])

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
        padded: (B, L, …) each.
        longest: items kept of a history, the newest; None for all.

    Returns:
        The new mask, and the others in its order; what their padding holds is not defined.
    """
    newer = mask.sum(1, keepdim=True) - mask.cumsum(1)
    slot = torch.where(mask, mask.shape[1] - 1 - newer, (~mask).cumsum(1) - 1)
    distance = torch.arange(mask.shape[1], 0, -1, device=mask.device)
    kept = distance <= mask.sum(1, keepdim=True)
    if longest is not None:
        kept = kept & (distance <= longest)
    into = (slot.view(*slot.shape, *[1] * (values.dim() - 2)).expand_as(values) for values in padded)
    return kept, *(torch.zeros_like(values).scatter(1, at, values) for at, values in zip(into, padded, strict=True))


__all__ = ["Dense", "align"]
