"""The auxiliary loss of DIEN and DMIN: from the state at an item, which item comes next?

B batch, L history slots, N real items of the batch, P pairs of consecutive items, S state dim, D item dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ctr_pe.fuxictr.adapter import MLP
from ctr_pe.models.rank_model import RankModel, summed
from ctr_pe.sequence.positions import Positions
from ctr_pe.sequence.transfer import to_device
from ctr_pe.utils import distributed
from ctr_pe.utils.random_generators import Draws


def with_sum(interest: Tensor, target: Tensor, history: Tensor, positions: Positions) -> Tensor:
    """[interest; s; target ⊙ s], s (B, D) the sum of the packed history (N, D): FuxiCTR's ``enable_sum_pooling``.

    K targets of a history (B, K, D) have interests (B, K, …).
    """
    total = summed(history, positions).view(target.shape[0], *[1] * (target.dim() - 2), -1).expand_as(target)
    return torch.cat([interest, total, target * total], dim=-1)


class NextItemLoss(MLP):
    """-1/P · sum over pairs of log σ(net[b_t; e_{t+1}]) + log(1 - σ(net[b_t; e⁻_{t+1}])) (DIEN, equation 6).

    An MLP of FuxiCTR, which moves weights to and from its ``aux_net``; the σ is part of the loss.
    """

    def forward(self, states: Tensor, following: Tensor, others: Tensor) -> Tensor:
        """states b_t (P, S), the items that followed (P, D), items that did not (P, D) -> scalar, 0 without pairs.

        Of several processes each has its own pairs, and P is their average.
        """
        if not len(states) and distributed.processes() == 1:
            return states.new_zeros(())
        pairs = torch.cat([torch.cat([states, items], -1) for items in (following, others)])
        logits: Tensor = super().forward(pairs).squeeze(-1)
        followed = (torch.arange(len(pairs), device=logits.device) < len(states)).to(logits.dtype)
        total = nn.functional.binary_cross_entropy_with_logits(logits, followed, reduction="sum")
        return 2 * total / max(distributed.average(float(len(pairs))), 1.0)


class NextItemModel(RankModel):
    """A backbone with states per item that also learn which item comes next.

    ``__init__`` calls ``build_next_item_losses`` before ``build_tower``; ``interest`` calls ``learn_next_item``. The
    items that did not come next are those of ``neg_seq_field``; without it, drawn uniformly from the batch's other
    items (``draws``).
    """

    _weight = 0.0

    def build_next_item_losses(
        self, weight: Any, state_dims: Iterable[int], hidden_units: Sequence[int], activation: str, **mlp: Any
    ) -> None:
        """One loss per group for states of ``state_dims``; nothing with weight 0. ``mlp``: FuxiCTR's MLP_Block."""
        self._weight = float(weight)
        self.draws = Draws(torch.initial_seed())
        if self._weight > 0:
            self.aux_net = nn.ModuleList(
                NextItemLoss(dim + group.dim, hidden_units, activation, fast_dropout=False, output_dim=1, **mlp)
                for group, dim in zip(self.groups, state_dims, strict=True)
            )

    def learn_next_item(self, index: int, states: Tensor, items: Tensor, positions: Positions) -> None:
        """Add group ``index``'s loss: packed states (N, S) and item embeddings (N, D), both of the same real items."""
        if not (self.training and self._weight > 0):
            return
        # Which items are meant is found on the CPU: an accelerator would have to be waited for.
        rows, _ = positions.mask_here.nonzero(as_tuple=True)
        following = (rows[1:] == rows[:-1]).nonzero().squeeze(1) + 1
        if self.groups[index].negative:
            following, others = self._given(index, following)
        else:
            drawn = self._drawn(index, following)
            following = following[: len(drawn)]
            others = items.index_select(0, positions.to_device(drawn))
        now, after = positions.to_device(torch.stack([following - 1, following]))
        loss = self.aux_net[index](states.index_select(0, now), items.index_select(0, after), others)
        positions.add_losses({"next item": self._weight * loss})

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        if not self.training:  # nothing is kept: threads may score at once
            return super().forward(inputs)
        planned = self.planned(inputs)
        self._histories = planned.plan.histories
        outputs = super().forward(planned)
        del self._histories
        return outputs

    def _given(self, index: int, at: Tensor) -> tuple[Tensor, Tensor]:
        """The items of ``neg_seq_field``: those of the places ``at`` (P,) that have one, and their embeddings."""
        fields, given = self.groups[index].negative, self._histories[index].ids_here
        ids = {field: given[field][at] for field in fields}
        known = ids[fields[0]] != 0
        embedded = self.embedding_layer({field: to_device(values[known], self.device) for field, values in ids.items()})
        return at[known], torch.cat([embedded[field] for field in fields], -1)

    def _drawn(self, index: int, at: Tensor) -> Tensor:
        """For each place ``at`` (P,) one of the batch's items, another than the one there: indices (P,) among the N
        packed ones. None, (0,), if all items are the same."""
        given = [self._histories[index].ids_here[field] for field in self.groups[index].history]
        kind = at.new_zeros(len(given[0]))  # (N,), equal for equal items: 0 .. kinds - 1
        for ids in given:
            kind = torch.unique(kind * (ids.max() + 1) + ids, return_inverse=True)[1] if len(ids) else kind
        kinds = int(kind.max()) + 1 if len(kind) else 0
        if kinds < 2:
            return at[:0]
        example = torch.zeros(kinds, dtype=torch.int64)
        example[kind] = torch.arange(len(kind))
        draw = torch.randint(kinds - 1, at.shape, generator=self.draws.next())
        draw += draw >= kind[at]  # any kind but the one there
        return example[draw]
