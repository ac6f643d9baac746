"""A chain's loss is the sum of its links' losses, by name."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from ctr_pe.pe.base import Chain, PositionEncoding
from ctr_pe.pe.vectors import Attended


class Costs(PositionEncoding):
    """A loss of ``cost`` times its one parameter, which is 1."""

    loss_names = ("cost",)

    def __init__(self, cost: float) -> None:
        super().__init__(4, 3)
        self.cost, self.weight = cost, nn.Parameter(torch.ones(()))

    def losses(self, attended: Sequence[Attended]) -> dict[str, Tensor]:
        return {self.loss_names[0]: self.cost * self.weight}


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("costs", [(1.0, 10.0), (10.0, 1.0), (1.0, 10.0, 100.0), (0.0, 5.0)])
def test_every_link_s_loss_counts_and_teaches_its_link(costs: tuple[float, ...], together: bool) -> None:
    links = [Costs(cost) for cost in costs]
    if not together:
        for number, link in enumerate(links):
            link.loss_names = (f"cost {number}",)
    losses = Chain(links).losses([])
    assert len(losses) == (1 if together else len(links))
    loss = torch.stack(list(losses.values())).sum()
    assert loss.item() == sum(costs)
    loss.backward()
    assert [link.weight.grad.item() for link in links if link.weight.grad is not None] == list(costs)
