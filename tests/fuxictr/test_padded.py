"""FuxiCTR's padded batch becomes values and lengths: a slot is an item from the first to the last with any value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ctr_pe.fuxictr.padded import history
from ctr_pe.sequence.batch import JaggedBatch
from ctr_pe.utils.errors import UserError


def rows(*of: list[int]) -> Tensor:
    return torch.tensor(of)


def test_padding_on_either_side_goes_and_an_item_with_any_value_stays() -> None:
    batch = {
        "items": rows([0, 2, 3, 0], [5, 0, 0, 7], [0, 0, 0, 0], [0, 0, 8, 0], [1, 2, 3, 4]),
        "kinds": rows([4, 5, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 9, 9], [0, 2, 3, 0]),
        "ages": rows([9, 8, 7, 6], [5, 4, 3, 2], [1, 1, 1, 1], [4, 3, 2, 1], [8, 7, 6, 5]),
    }
    lengths, values = history(batch, ("items", "kinds"), ["ages"])
    assert lengths.tolist() == [3, 4, 0, 2, 4]
    assert values["items"].tolist() == [0, 2, 3, 5, 0, 0, 7, 8, 0, 1, 2, 3, 4]
    assert values["kinds"].tolist() == [4, 5, 0, 0, 0, 0, 0, 9, 9, 0, 2, 3, 0]
    assert values["ages"].tolist() == [9, 8, 7, 5, 4, 3, 2, 2, 1, 8, 7, 6, 5]


@pytest.mark.parametrize("slots", [0, 3])
def test_no_items(slots: int) -> None:
    lengths, values = history({"items": torch.zeros(2, slots, dtype=torch.int64)}, ["items"])
    assert lengths.tolist() == [0, 0]
    assert values["items"].shape == (0,)


def test_columns_of_one_history_have_as_many_slots() -> None:
    with pytest.raises(UserError, match="length: 'kinds' has 1 slots, 'items' has 2"):
        history({"items": rows([1, 2]), "kinds": rows([1])}, ["items", "kinds"])


def test_lengths_that_are_known_are_not_guessed() -> None:
    lengths, items = torch.tensor([2, 0, 3]), torch.tensor([0, 5, 0, 0, 0])
    batch = JaggedBatch({}, {"items": items, "kinds": items}, {"items": lengths, "kinds": lengths.clone()})
    found, values = history(batch, ["items", "kinds"])
    assert found.tolist() == [2, 0, 3]
    assert values["items"] is items
    assert {name: column.tolist() for name, column in batch.items()}["items"] == [[0, 5, 0], [0, 0, 0], [0, 0, 0]]
    batch.lengths["kinds"][1:] = torch.tensor([1, 2])
    with pytest.raises(UserError, match=r"in row 1 of a batch 'items' has 0 items, 'kinds' 1$"):
        history(batch, ["items", "kinds"])


def test_columns_that_fuxictr_padded_are_read_together() -> None:
    """As a loader gives them: each column without the slots in which no column of this width has a value."""
    lengths = torch.tensor([3, 2])
    given = {"items": torch.tensor([1, 2, 0, 0, 4]), "kinds": torch.tensor([0, 2, 3, 0, 0])}
    batch = JaggedBatch({}, given, dict.fromkeys(given, lengths), frozenset(given))
    found, values = history(batch, ["items", "kinds"])
    assert found.tolist() == [3, 1]
    assert values["items"].tolist() == [1, 2, 0, 4]
    assert values["kinds"].tolist() == [0, 2, 3, 0]
    found, values = history(batch, ["kinds"])
    assert (found.tolist(), values["kinds"].tolist()) == ([2, 0], [2, 3])
