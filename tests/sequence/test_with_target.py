"""In the sequence [history; target] the target is an item of age zero, whatever its items' ages are."""

from __future__ import annotations

import torch

from ctr_pe import Positions


def test_the_target_is_of_age_zero_and_items_keep_theirs() -> None:
    mask = torch.tensor([[True, True, True], [False, True, False], [False, False, False]])
    age = torch.tensor([[900, 500, 7], [11, 60, 13], [5, 6, 7]])
    whole = Positions.from_mask(mask, age).with_target()
    assert whole.age is not None
    assert whole.age.dtype == torch.int64
    assert whole.age.tolist() == [[900, 500, 7, 0], [0, 60, 0, 0], [0, 0, 0, 0]]
    assert whole.mask[:, -1].all()
    assert whole.distance[:, -1].tolist() == [1, 1, 1]  # the newest item of the sequence
