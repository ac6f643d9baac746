"""FuxiCTR's batch: histories (B, L), padded with 0 on either side, so that an item without an id looks like padding.

It enters here and nowhere else. FuxiCTR stores no lengths: a slot is an item if it lies between the first and the last
slot that has a value in any field of the history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ctr_pe.sequence.batch import JaggedBatch
from ctr_pe.utils.errors import UserError


def history(
    batch: Mapping[str, Tensor], fields: Sequence[str], others: Sequence[str] = ()
) -> tuple[Tensor, dict[str, Tensor]]:
    """One history of a batch: lengths (B,) and, by column, values (N,), the oldest item of a row first.

    ``fields``: columns of ids; ``others``: columns with one value per item, such as ages. Raises UserError if the
    columns differ in their slots or lengths.
    """
    columns = [*fields, *others]
    if isinstance(batch, JaggedBatch) and not batch.padded.intersection(columns):
        return batch.history(columns)
    given = {name: batch[name] for name in columns}
    if isinstance(batch, JaggedBatch):  # a column is as wide as its own longest history
        width = max(values.shape[1] for values in given.values())
        given = {name: nn.functional.pad(values, (0, width - values.shape[1])) for name, values in given.items()}
    slots = given[fields[0]].shape[1]
    for name, values in given.items():
        if values.shape[1] != slots:
            one = f"'{name}' has {values.shape[1]} slots, '{fields[0]}' has {slots}"
            raise UserError(f"columns of one history differ in length: {one}")
    real = torch.stack([given[name] != 0 for name in fields]).any(0)
    # From the first real slot to the last: where the count has begun and is not over.
    items = (real.cummax(1)[0] & real.flip(1).cummax(1)[0].flip(1)) if slots else real
    return items.sum(1), {name: values[items] for name, values in given.items()}
