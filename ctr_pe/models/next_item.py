"""The auxiliary loss of DIEN and DMIN: from the state at an item, which item comes next?

B batch, L history slots, N real items of the batch, P pairs of consecutive items, S state dim, D item dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ctr_pe.fuxictr.adapter import MLP
from ctr_pe.models.rank_model import RankModel
from ctr_pe.ops import step_seeds
from ctr_pe.pe.base import Losses
from ctr_pe.sequence.filled import Filled
from ctr_pe.sequence.positions import Items, Positions
from ctr_pe.sequence.transfer import to_device
from ctr_pe.units.batch_norm import through
from ctr_pe.utils import distributed
from ctr_pe.utils.random_generators import RandomGenerators


def with_sum(interest: Tensor, target: Items, history: Items, positions: Positions) -> Tensor:
    """[interest; s; target ⊙ s], s (B, D) the sum of the packed history (N, D): FuxiCTR's ``enable_sum_pooling``.

    K targets of a history (B, K, D) have interests (B, K, …).
    """
    vectors, total = target.embedding, positions.total(history.embedding)
    total = total.view(vectors.shape[0], *[1] * (vectors.dim() - 2), -1).expand_as(vectors)
    return torch.cat([interest, total, vectors * total], dim=-1)


class NextItemLoss(MLP):
    """-1/P · sum over pairs of log σ(net[b_t; e_{t+1}]) + log(1 - σ(net[b_t; e⁻_{t+1}])) (DIEN, equation 6).

    An MLP of FuxiCTR, which moves weights to and from its ``aux_net``; the σ is part of the loss.
    """

    masked = True

    def forward(self, states: Tensor, following: Tensor, others: Tensor, real: Tensor | None = None) -> Tensor:
        """states b_t (P, S), the items that followed (P, D), items that did not (P, D) -> scalar, 0 without pairs.

        Of several processes each has its own pairs, and P is their average. ``real`` (P,) bool: the pairs that there
        are, None for all.
        """
        if not len(states) and distributed.processes() == 1:
            return states.new_zeros(())
        pairs = torch.cat([torch.cat([states, items], -1) for items in (following, others)])
        there = None if real is None else torch.cat([real, real])
        logits = through(self.mlp, pairs, there).squeeze(-1)
        followed = (torch.arange(len(pairs), device=logits.device) < len(states)).to(logits.dtype)
        if there is not None:
            weight = there.to(logits.dtype)
            total = nn.functional.binary_cross_entropy_with_logits(logits, followed, weight, reduction="sum")
            return 2 * total / weight.sum().clamp(min=1)
        total = nn.functional.binary_cross_entropy_with_logits(logits, followed, reduction="sum")
        return 2 * total / max(distributed.average(float(len(pairs))), 1.0)


class NextItemModel(RankModel):
    """A backbone with states per item that also learn which item comes next.

    ``__init__`` calls ``build_next_item_losses`` before ``build_tower``; ``interest`` calls ``next_item_loss``. The
    items that did not come next are those of ``neg_seq_field``; without it, drawn uniformly from the batch's other
    items (``generators``).
    """

    _weight = 0.0

    def build_next_item_losses(
        self, weight: Any, state_dims: Iterable[int], hidden_units: Sequence[int], activation: str, **mlp: Any
    ) -> None:
        """One loss per group for states of ``state_dims``; nothing with weight 0. ``mlp``: FuxiCTR's MLP_Block."""
        self._weight = float(weight)
        self.generators = RandomGenerators(torch.initial_seed())
        if self._weight > 0:
            self.aux_net = nn.ModuleList(
                NextItemLoss(dim + group.dim, hidden_units, activation, fast_dropout=False, output_dim=1, **mlp)
                for group, dim in zip(self.groups, state_dims, strict=True)
            )

    def next_item_loss(self, index: int, states: Tensor, history: Items, positions: Positions) -> Losses:
        """Group ``index``'s loss in training: packed states (N, S) of the items of the history."""
        if not (self.training and self._weight > 0):
            return {}
        if isinstance(positions, Filled):
            return {"next item": self._weight * self._filled_loss(index, states, history, positions)}
        # Which items are meant is found on the CPU: an accelerator would have to be waited for.
        first = positions.lengths_cpu.cumsum(0) - positions.lengths_cpu  # of each row, among the N items
        following = torch.ones(len(history.embedding), dtype=torch.bool)
        following = following.index_fill(0, first[positions.lengths_cpu > 0], False).nonzero().squeeze(1)
        if self.groups[index].negative:
            following, others = self._given(self.groups[index].negative, history, following)
        else:
            drawn = self._drawn([history.all_ids[field] for field in self.groups[index].history], following)
            following = following[: len(drawn)]
            others = history.embedding.index_select(0, positions.to_device(drawn))
        now, after = positions.to_device(torch.stack([following - 1, following]))
        loss = self.aux_net[index](states.index_select(0, now), history.embedding.index_select(0, after), others)
        return {"next item": self._weight * loss}

    def _filled_loss(self, index: int, states: Tensor, history: Items, positions: Filled) -> Tensor:
        """The same without a size that depends on lengths: of all neighbours, (N - 1,), some are pairs."""
        assert positions.real is not None
        rows, group = positions.item_rows, self.groups[index]
        pairs = (rows[1:] == rows[:-1]) & positions.real[1:]
        if group.negative:
            ids = {field: history.all_ids[field][1:] for field in group.negative}
            embedded = self.embedding_layer(ids)
            others = torch.cat([embedded[field] for field in ids], -1)
            pairs = pairs & (ids[group.negative[0]] != 0)
        else:
            fields = [history.all_ids[field] for field in group.history]
            drawn, several = self._drawn_filled(fields, positions.real)
            others, pairs = history.embedding.index_select(0, drawn[1:]), pairs & several
        loss: Tensor = self.aux_net[index](states[:-1], history.embedding[1:], others, pairs)
        return loss

    def _drawn_filled(self, fields: Sequence[Tensor], real: Tensor) -> tuple[Tensor, Tensor]:
        """For each packed item one of the batch's other items: indices (N,); and whether there is any, () bool."""
        kind = (~real).long()  # those that only fill up are the last kind of all
        for ids in fields:
            order = ids.argsort(stable=True)
            order = order[kind[order].argsort(stable=True)]
            pair = torch.stack([kind, ids])[:, order]
            begins = nn.functional.pad((pair[:, 1:] != pair[:, :-1]).any(0).long(), (1, 0))
            kind = torch.empty_like(kind).scatter(0, order, begins.cumsum(0))
        example = torch.zeros_like(kind).scatter(0, kind, torch.arange(len(kind), device=kind.device))
        kinds = torch.where(real, kind, -1).max() + 1
        seeds = step_seeds.active()
        seed = torch.tensor([self.generators.next().initial_seed()]).to(kind.device) if seeds is None else seeds.next()
        draw = step_seeds.below(kinds - 1, seed, len(kind))
        draw = draw + (draw >= kind).long()  # any kind but the one there
        return example.gather(0, draw.minimum(kinds - 1).clamp(min=0)), kinds > 1

    def _given(self, fields: Sequence[str], history: Items, at: Tensor) -> tuple[Tensor, Tensor]:
        """The items of ``neg_seq_field``: those of the places ``at`` (P,) that have one, and their embeddings."""
        ids = {field: history.all_ids[field][at] for field in fields}
        present = ids[fields[0]] != 0
        of_present = {field: to_device(values[present], self.device) for field, values in ids.items()}
        embedded = self.embedding_layer(of_present)
        return at[present], torch.cat([embedded[field] for field in fields], -1)

    def _drawn(self, fields: Sequence[Tensor], at: Tensor) -> Tensor:
        """``fields``: ids (N,). For each place ``at`` (P,) an item of the batch other than the one there: indices
        (P,) among the N packed ones. None, (0,), if all items are the same."""
        kind = at.new_zeros(len(fields[0]))  # (N,), equal for equal items: 0 .. kinds - 1
        for ids in fields:
            kind = torch.unique(kind * (ids.max() + 1) + ids, return_inverse=True)[1] if len(ids) else kind
        kinds = int(kind.max()) + 1 if len(kind) else 0
        if kinds < 2:
            return at[:0]
        example = torch.zeros(kinds, dtype=torch.int64)
        example[kind] = torch.arange(len(kind))
        draw = torch.randint(kinds - 1, at.shape, generator=self.generators.next())
        draw += draw >= kind[at]  # any kind but the one there
        return example[draw]
