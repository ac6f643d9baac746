"""A chain's auxiliary loss is the sum of its links' losses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ctr_pe.pe.base import Chain, PositionEncoding


class Costs(PositionEncoding):
    """An auxiliary loss of ``cost`` times its one parameter, which is 1."""

    auxiliary = "cost"

    def __init__(self, cost: float) -> None:
        super().__init__(4, 3)
        self.cost, self.weight = cost, nn.Parameter(torch.ones(()))

    def auxiliary_loss(self) -> Tensor:
        return self.cost * self.weight


@pytest.mark.parametrize("costs", [(1.0, 10.0), (10.0, 1.0), (1.0, 10.0, 100.0), (0.0, 5.0)])
def test_every_link_s_loss_counts_and_teaches_its_link(costs: tuple[float, ...]) -> None:
    links = [Costs(cost) for cost in costs]
    loss = Chain(links).auxiliary_loss()
    assert loss.item() == sum(costs)
    loss.backward()
    assert [link.weight.grad.item() for link in links if link.weight.grad is not None] == list(costs)
