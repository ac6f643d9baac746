from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ctr_pe import Positions


def mask(*rows: str) -> Tensor:
    return torch.tensor([[c == "x" for c in row] for row in rows])


def test_distance_counts_from_the_newest_real_item_whatever_the_padding() -> None:
    positions = Positions.from_mask(mask("xxx...", "...xxx", ".x.x.x", "......", ".x....", "xxxxxx"))
    want = [[3, 2, 1, 0, 0, 0], [0, 0, 0, 3, 2, 1], [0, 3, 0, 2, 0, 1], [0] * 6, [0, 1, 0, 0, 0, 0], [6, 5, 4, 3, 2, 1]]
    assert positions.distance.tolist() == want
    assert positions.distance.dtype == torch.int64
    assert positions.count.tolist() == [3, 3, 3, 0, 1, 6]


def test_rank_counts_from_the_oldest() -> None:
    positions = Positions.from_mask(mask("xxx.", ".x.x", "...."))
    assert positions.rank.tolist() == [[1, 2, 3, 0], [0, 1, 0, 2], [0] * 4]


def test_no_slots_and_no_rows() -> None:
    assert Positions.from_mask(torch.zeros(2, 0, dtype=torch.bool)).distance.shape == (2, 0)
    assert Positions.from_mask(torch.zeros(0, 3, dtype=torch.bool)).distance.shape == (0, 3)


def test_age_stays_an_exact_integer_and_padding_has_none() -> None:
    age = torch.tensor([[2**53 + 1, 7, 123]])
    positions = Positions.from_mask(mask("xx."), age)
    assert positions.age is not None
    assert positions.age.tolist() == [[2**53 + 1, 7, 0]]


@pytest.mark.parametrize(
    ("bad_mask", "age"),
    [
        (torch.ones(2, 3), None),
        (torch.ones(3, dtype=torch.bool), None),
        (torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 3)),
        (torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 2, dtype=torch.int64)),
        (torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 3, dtype=torch.bool)),
    ],
)
def test_bad_input(bad_mask: Tensor, age: Tensor | None) -> None:
    with pytest.raises(ValueError, match="must be"):
        Positions.from_mask(bad_mask, age)


def test_pairs_of_a_target() -> None:
    pairs = Positions.from_mask(mask("xx.", "...")).from_target()
    assert pairs.allowed.tolist() == [[[[True, True, False]]], [[[False] * 3]]]
    assert pairs.offset.tolist() == [[[[2, 1, 0]]], [[[0, 0, 0]]]]


def test_pairs_of_items() -> None:
    positions = Positions.from_mask(mask(".xx"))
    both, causal = positions.from_items(False), positions.from_items(True)
    assert both.allowed[0, 0].tolist() == [[False] * 3, [False, True, True], [False, True, True]]
    assert causal.allowed[0, 0].tolist() == [[False] * 3, [False, True, False], [False, True, True]]
    assert both.offset[0, 0, 1:, 1:].tolist() == [[0, -1], [1, 0]]  # places that the key lies before the query
