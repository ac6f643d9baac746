"""A next-item model as one graph of torch's own operators: histories in, the first k items and their scores out.

An exported file is this graph. Of equal scores the item that training rows have more often comes first, as in
:mod:`ctr_pe.models.full_ranking`.

B requests, L history slots, V items, k places.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ctr_pe.sequence.batch import JaggedBatch, newest
from ctr_pe.serving.request_graph import dense_histories, histories_in, inputs_of
from ctr_pe.utils.errors import UserError


class NextItemGraph(nn.Module):
    """Ids (B, k) of the items that come next, the best first, and their scores (B, k), those of ``model.recommend``.

    Where fewer than k may be recommended, ids are 0 and scores -inf. ``forward`` takes the model's inputs by name, as
    :class:`~ctr_pe.serving.request_graph.RequestGraph` has them, and reads the newest ``max_len`` items of a history.

    Args:
        model: a next-item model.
        k: 1 at least; of more than V the first V.
        filter_seen: leave out the items of the history.

    Raises:
        UserError: k is no number of items.
    """

    outputs = ("items", "scores")
    vectors: Tensor

    def __init__(self, model: Any, k: int, filter_seen: bool) -> None:
        super().__init__()
        check_count(k)
        self.model, self.inputs = model.eval(), inputs_of(model)
        self.k, self.filter_seen = min(k, len(model.item_ids)), filter_seen
        with torch.no_grad():
            self.register_buffer("vectors", model.vectors().float().clone())

    def forward(self, given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """given: each of ``inputs`` -> (B, k) twice."""
        model, group = self.model, self.model.group
        history = dense_histories(group, given, group.max_len)
        scores = model.states_after(history) @ self.vectors.T
        keys = _distinct(scores)
        if self.filter_seen:
            rows, items = scores.shape
            numbers = model.item_numbers[history.ids[group.history[0]]].view(rows, -1)
            seen = scores.new_zeros(rows, items + 1).scatter(1, numbers.where(numbers >= 0, items), 1.0)[:, :-1] > 0
            scores, keys = scores.masked_fill(seen, -torch.inf), keys.masked_fill(seen, -torch.inf)
        first = keys.topk(self.k).indices
        best = scores.gather(1, first)
        return model.item_ids[first].masked_fill(best == -torch.inf, 0), best

    @torch.inference_mode()
    def compare(self, given: Mapping[str, Tensor], found: tuple[Tensor, Tensor]) -> tuple[float, str]:
        """How far scores that a file found, and the model's scores of the items that it found, are from those that the
        model recommends, in parts of the largest if that is above 1; and of what sizes."""
        batch, (items, scores) = self._newest(histories_in(self.model, given)), found
        wanted = self.model.recommend(batch, self.vectors, self.k, self.filter_seen).scores
        numbers = self.model.item_numbers[items]
        every = self.model.forward(batch)["y_pred"] @ self.vectors.T
        of_found = every.gather(1, numbers.clamp(min=0)).masked_fill(numbers < 0, -torch.inf)
        largest = max(1.0, float(every.abs().max()))
        return max(_distance(scores, wanted), _distance(of_found, wanted)) / largest, f"{len(items)} requests"

    def _newest(self, batch: JaggedBatch) -> JaggedBatch:
        """With the newest items that the model reads."""
        most, found = self.model.group.max_len, JaggedBatch({}, {}, {})
        for name, lengths in batch.lengths.items():
            found.histories[name] = batch.histories[name][newest(lengths, most)]
            found.lengths[name] = lengths.clamp(max=most)
        return found


def check_count(k: Any) -> None:
    """Raises UserError for what is no number of items to recommend."""
    if not isinstance(k, (int, np.integer)) or isinstance(k, bool) or k < 1:
        raise UserError(f"k={k!r}: the number of items to recommend, at least 1")


def _distinct(scores: Tensor) -> Tensor:
    """float32 (B, V) -> float64 in their order, of equal ones the item with the smaller number first: each is lowered
    by its number times 2^-51 of it, in all less than the step to the next float32."""
    numbers = torch.arange(scores.shape[1], device=scores.device)
    wide = scores.double()
    return wide - (wide.abs() * 2.0**-51 + 1e-60) * numbers


def _distance(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, 0 where both are -inf."""
    return float((found - wanted).abs().masked_fill(found == wanted, 0).max())
