"""Seeds of a training step, which the device has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ctr_pe.ops import step_seeds
from ctr_pe.units.dropout import Dropout


def step(number: int) -> Tensor:
    return torch.tensor([number])


def test_each_of_a_step_is_another_and_a_step_has_the_same_again() -> None:
    drawn = []
    for number in (1, 2, 1):
        with step_seeds.of_step(step(number)) as seeds:
            drawn.append([int(seeds.next()) for _ in range(150)])
    assert step_seeds.active() is None
    assert drawn[0] == drawn[2]
    assert len({*drawn[0], *drawn[1]}) == 300


@pytest.mark.parametrize("fast", [True, False])
def test_dropout_follows_the_number_of_the_step_and_nothing_else(fast: bool) -> None:
    """A tensor that is written between the calls, as between those of a CUDA graph."""
    dropout, number, x, found = Dropout(0.4, fast), step(1), torch.ones(1000), []
    for value in (1, 2, 1):
        number.fill_(value)
        torch.manual_seed(len(found))
        with step_seeds.of_step(number):
            found.append(torch.stack([dropout(x), dropout(x)]))
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(*found[0])
    assert 0.55 < (found[0] > 0).float().mean() < 0.65
    assert torch.allclose(found[0].unique(), torch.tensor([0, 1 / 0.6]), atol=1e-4)


def test_modules_that_are_computed_as_one_drop_different_entries() -> None:
    dropout = nn.Sequential(Dropout(0.5))
    with step_seeds.of_step(step(3)) as seeds:

        def call(number: Tensor, x: Tensor) -> Tensor:
            with seeds.of_module(number):
                y: Tensor = dropout(x)
                return y

        first, second = torch.func.vmap(call)(torch.arange(2), torch.ones(2, 2000))
    assert 0.4 < (first == second).float().mean() < 0.6


def test_numbers_below_a_tensor() -> None:
    drawn = step_seeds.below(torch.tensor(3), step(5), 3000).bincount()
    assert (drawn - 1000).abs().max() < 120
    assert step_seeds.below(torch.tensor(0), step(5), 4).tolist() == [0] * 4
