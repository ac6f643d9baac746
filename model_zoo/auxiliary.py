"""The auxiliary loss of DIEN and DMIN: from the state at an item, which item comes next?

B batch, L history slots, N real items of the batch, P pairs of consecutive items, S state dim, D item dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from fuxictr.pytorch import layers
from torch import Tensor, nn

from ctr_pe import ranks
from ctr_pe.errors import UserError
from ctr_pe.model_zoo.base import RankModel, dice_layers, summed
from ctr_pe.positions import Positions


def with_sum(interest: Tensor, target: Tensor, history: Tensor, positions: Positions) -> Tensor:
    """[interest; s; target ⊙ s], s (B, D) the sum of the packed history (N, D): FuxiCTR's ``enable_sum_pooling``.

    K targets of a history (B, K, D) have interests (B, K, …).
    """
    total = summed(history, positions).view(target.shape[0], *[1] * (target.dim() - 2), -1).expand_as(target)
    return torch.cat([interest, total, target * total], dim=-1)


class NextItemLoss(layers.MLP_Block):  # type: ignore[misc]
    """-1/P · sum over pairs of log σ(net[b_t; e_{t+1}]) + log(1 - σ(net[b_t; e⁻_{t+1}])) (DIEN, equation 6).

    An MLP of FuxiCTR, which moves weights to and from its ``aux_net``; the σ is part of the loss.
    """

    def forward(self, states: Tensor, following: Tensor, others: Tensor) -> Tensor:
        """states b_t (P, S), the items that followed (P, D), items that did not (P, D) -> scalar, 0 without pairs.

        Of several processes each has its own pairs, and P is their average.
        """
        if not len(states) and ranks.processes() == 1:
            return states.new_zeros(())
        pairs = torch.cat([torch.cat([states, items], -1) for items in (following, others)])
        logits = super().forward(pairs).squeeze(-1)
        followed = (torch.arange(len(pairs), device=logits.device) < len(states)).to(logits.dtype)
        total = nn.functional.binary_cross_entropy_with_logits(logits, followed, reduction="sum")
        return 2 * total / max(ranks.average(float(len(pairs))), 1.0)


class NextItemModel(RankModel):
    """A backbone with states per item that also learn which item comes next.

    ``__init__`` calls ``build_next_item_losses`` before ``build_tower``; ``interest`` calls ``learn_next_item``. The
    items that did not come next are those of ``neg_seq_field``; without it, drawn uniformly from the batch's other
    items, by a generator of its own, so that other draws of training stay the same.
    """

    _weight = 0.0

    def build_next_item_losses(
        self, weight: Any, state_dims: Iterable[int], hidden_units: Sequence[int], activation: str, **mlp: Any
    ) -> None:
        """One loss per group for states of ``state_dims``; nothing with weight 0. ``mlp``: FuxiCTR's MLP_Block."""
        self._weight = float(weight)
        self._seed = torch.initial_seed()
        if self._weight > 0:
            mlp = dice_layers({**mlp, "hidden_units": list(hidden_units), "hidden_activations": activation})
            self.aux_net = nn.ModuleList(
                NextItemLoss(dim + group.dim, output_dim=1, **mlp)
                for group, dim in zip(self.groups, state_dims, strict=True)
            )

    def learn_next_item(self, index: int, states: Tensor, items: Tensor, positions: Positions) -> None:
        """Add group ``index``'s loss: packed states (N, S) and item embeddings (N, D), both of the same real items.

        Raises UserError if neg_seq_field has not the shape of the history.
        """
        if not (self.training and self._weight > 0):
            return
        rows, _ = positions.real
        now = (rows[1:] == rows[:-1]).nonzero().squeeze(1)
        if self.groups[index].negative:
            others, known = self._given(index, positions, now + 1)
        else:
            others, known = self._drawn(items, positions, now + 1)
        now = now[known]
        loss = self.aux_net[index](states[now], items[now + 1], others[known])
        positions.add_losses({"next item": self._weight * loss})

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        if not self.training:  # nothing is kept: threads may score at once
            return super().forward(inputs)
        self._inputs = inputs
        outputs = super().forward(inputs)
        del self._inputs
        return outputs

    def _given(self, index: int, positions: Positions, at: Tensor) -> tuple[Tensor, Tensor]:
        """The items of ``neg_seq_field`` in the places ``at`` (P,): embeddings (P, D), and where there is one (P,)."""
        fields, history = self.groups[index].negative, self._inputs[self.groups[index].history[0]].to(self.device)
        slots = Positions.from_mask(history != 0)
        read = slots.mask & (slots.distance <= positions.count.unsqueeze(1))  # a long history lost its oldest items
        for field in fields:
            here, there = (values.shape[1] for values in (history, self._inputs[field]))
            if there != here:
                one = f"neg_seq_field '{field}' has {there} slots, the history has {here}"
                raise UserError(f"{one}: it must hold one item per history item")
        ids = {field: self._inputs[field].to(self.device)[read][at] for field in fields}
        embedded = self.embedding_layer(ids)
        return torch.cat([embedded[field] for field in fields], -1), ids[fields[0]] != 0

    def _drawn(self, items: Tensor, positions: Positions, at: Tensor) -> tuple[Tensor, Tensor]:
        """For each place ``at`` (P,) one of the batch's items (N, D) other than the one there, and if there is one."""
        assert positions.items is not None
        kind = torch.zeros_like(items[:, 0], dtype=torch.int64)  # (N,), equal for equal items: 0 .. kinds - 1
        for ids in positions.items.ids:
            kind = torch.unique(kind * (ids.max() + 1) + ids, return_inverse=True)[1] if len(ids) else kind
        kinds = int(kind.max()) + 1 if len(kind) else 0
        if kinds < 2:
            return items[at], torch.zeros_like(at, dtype=torch.bool)
        example = torch.zeros(kinds, dtype=torch.int64, device=kind.device)
        example[kind] = torch.arange(len(kind), device=kind.device)
        self._seed = (self._seed + 1) % 2**63
        # On the CPU whatever the device: all devices draw the same.
        draw = torch.randint(kinds - 1, at.shape, generator=torch.Generator().manual_seed(self._seed)).to(at.device)
        draw += draw >= kind[at]  # any kind but the one there
        return items[example[draw]], torch.ones_like(at, dtype=torch.bool)
