"""A batch of rows: values per field and, of histories, lengths. So it is from the file to attention.

B rows, N items of a history column, L items of the batch's longest history.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ctr_pe.sequence.transfer import PinnedTransfer
from ctr_pe.utils.errors import UserError


@dataclass(frozen=True, eq=False)
class JaggedBatch(Mapping[str, Tensor]):
    """B rows. As a mapping it has every column in FuxiCTR's form: histories as (B, L), padded with 0 after the newest
    item, with one slot at least.

    Attributes:
        rows: columns of one value or vector per row, (B,) or (B, dim); labels too.
        histories: columns of histories, (N,): the items of all rows one after the other, the oldest of a row first. An
            id is 0 where the item has none. A field of several categories is (N, values), with 0 after the last.
        lengths: of each of ``histories``, (B,) int64; columns of one history share the tensor.
        padded: of ``histories`` those that FuxiCTR padded: at either end of a row there may be padding, which
            :func:`ctr_pe.fuxictr.padded.history` tells from items.
    """

    rows: dict[str, Tensor]
    histories: dict[str, Tensor]
    lengths: dict[str, Tensor]
    padded: frozenset[str] = frozenset()

    def __getitem__(self, name: str) -> Tensor:
        return self.rows[name] if name in self.rows else pad(self.histories[name], self.lengths[name])

    def __iter__(self) -> Iterator[str]:
        yield from self.rows
        yield from self.histories

    def __len__(self) -> int:
        """Columns, as of a dict."""
        return len(self.rows) + len(self.histories)

    def __contains__(self, name: object) -> bool:
        return name in self.rows or name in self.histories

    def history(self, columns: Sequence[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """Lengths (B,) and values (N,) of the columns of one history. Raises UserError if their lengths differ."""
        first, *others = columns
        lengths = self.lengths[first]
        for name in others:
            other = self.lengths[name]
            if other is not lengths and not torch.equal(other, lengths):
                row = int((other != lengths).nonzero()[0])
                found = f"'{first}' has {int(lengths[row])} items, '{name}' {int(other[row])}"
                raise UserError(f"columns of one history differ in length: in row {row} of a batch {found}")
        return lengths, {name: self.histories[name] for name in columns}

    def to(self, device: torch.device) -> JaggedBatch:
        """On a device, in one copy per dtype."""
        return PinnedTransfer(self, device).unpack()


def pad(values: Tensor, lengths: Tensor) -> Tensor:
    """(N, …) -> (B, L, …): 0 after the items of each row, one slot at least."""
    width = max(1, int(lengths.max()) if len(lengths) else 0)
    padded = values.new_zeros(len(lengths), width, *values.shape[1:])
    padded[torch.arange(width, device=lengths.device) < lengths.unsqueeze(1)] = values
    return padded


def newest(lengths: Tensor, most: int) -> Tensor:
    """(N,) bool: True for the last ``most`` items of each row."""
    item = torch.arange(int(lengths.sum()), device=lengths.device)
    return item >= (lengths.cumsum(0) - most).repeat_interleave(lengths)
