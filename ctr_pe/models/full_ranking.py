"""The rank of the right item among all, and the first k, in chunks of rows.

Ties: of items with equal scores the one with the smaller number comes first, which is the one that more training rows
have. So a model that gives all items one score ranks them by popularity.

B rows, V items, D width, K places of a list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

SCORES = {"cpu": 2**20}
"""Scores computed together, by device: on a CPU about what a core's own cache holds."""
PART = {"cpu": 2**17}
"""Scores that are compared together: so few that there is room for the outcome beside them."""
FEWEST, MORE = 32, 2**26
"""Rows that a chunk has all the same, for products of fewer take longer, as long as there are no more scores in it."""

GROUPS = 100
"""For each place of a list. From 64 on torch finds the first of a row by a heap of as many as are wanted."""


class Ranking(NamedTuple):
    """``ranks`` (B,) float64 of the answers, from 1; infinite for an answer of -1, NaN where scores are not finite.
    ``first`` (B, K): the items with the highest scores, the best first; -1 where fewer may be recommended. ``scores``
    (B, K): theirs."""

    ranks: Tensor
    first: Tensor
    scores: Tensor


def rank_items(
    states: Tensor,
    items: Tensor,
    answers: Tensor | None = None,
    seen: tuple[Tensor, Tensor] | None = None,
    count: int = 0,
) -> Ranking:
    """Rank all items by items · state.

    Args:
        states: (B, D). items: (V, D).
        answers: (B,) int64, the right item of each row, or -1 for one that is none of them.
        seen: row and item, (n,) int64 each, of what must not be recommended; a row's answer is ranked all the same.
        count: K.
    """
    rows = _chunk_rows(max(len(items), 1), states.device.type)
    count, parts = min(count, len(items)), []
    owner = None if seen is None else seen[0].sort(stable=True)
    for start in range(0, len(states), rows):
        scores = states[start : start + rows] @ items.T
        right = None if answers is None else answers[start : start + rows]
        kept = None if right is None else scores.gather(1, right.clamp(min=0).unsqueeze(1))
        finite = scores.sum(1).isfinite()  # in a tenth of the time of looking at each
        if seen is not None and owner is not None:
            ends = torch.tensor([start, start + len(scores)], device=states.device)
            low, high = torch.searchsorted(owner.values, ends).tolist()
            at = owner.indices[low:high]
            scores[seen[0][at] - start, seen[1][at]] = -torch.inf
        ranks = _ranks(scores, right, kept, finite) if right is not None and kept is not None else scores.new_empty(0)
        parts.append((ranks, *_first(scores, count)))
    if not parts:
        return Ranking(states.new_empty(0, dtype=torch.float64), *_first(states @ items.T, count))
    return Ranking(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _chunk_rows(items: int, device: str) -> int:
    return max(1, min(max(FEWEST, SCORES.get(device, MORE) // items), MORE // items))


def _ranks(scores: Tensor, right: Tensor, kept: Tensor, finite: Tensor) -> Tensor:
    known = right >= 0
    place = right.clamp(min=0).unsqueeze(1)
    scores.scatter_(1, place, torch.where(known.unsqueeze(1), kept, scores.gather(1, place)))
    better = _count(torch.gt, scores, kept)
    ranks, tied = 1 + better, _count(torch.ge, scores, kept) > better + 1
    if tied.any():
        smaller = torch.arange(scores.shape[1], device=scores.device) < place[tied]
        ranks[tied] += ((scores[tied] == kept[tied]) & smaller).sum(1)
    found = ranks.double().masked_fill(~known, torch.inf)
    return found.masked_fill(~finite, torch.nan)


def _count(compare: Callable[..., Tensor], scores: Tensor, edge: Tensor) -> Tensor:
    """(B,) of how many scores (B, V) it holds, a part after the other: what is true of a part is added up in the cache,
    and numbers several times as fast as truth values."""
    width = max(1, PART.get(scores.device.type, MORE) // max(1, len(scores)))
    holds = scores.new_empty(len(scores) * min(width, scores.shape[1]), dtype=torch.float32)
    total = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
    for part in torch.split(scores, width, 1):
        total += compare(part, edge, out=holds[: part.numel()].view(part.shape)).sum(1).long()
    return total


def _first(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The K best of each row (B, K), ties by number, and their scores."""
    if not count:
        return scores.new_empty(len(scores), 0, dtype=torch.int64), scores.new_empty(len(scores), 0)
    index, several = _best(scores, count)  # torch chooses any of those that tie with the last one
    if several.any():
        index[several] = scores[several].sort(dim=1, descending=True, stable=True).indices[:, :count]
    index = index.sort(1).values
    best, order = scores.gather(1, index).sort(dim=1, descending=True, stable=True)
    index = index.gather(1, order)
    return index.masked_fill(best == -torch.inf, -1), best


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Where the K best of each row are (B, K), in any order, and whether others tie with the last of them (B,).

    On a CPU a row of many items is cut into groups, of which the K with the highest maxima have the K best scores.
    """
    items, groups = scores.shape[1], GROUPS * count
    if not scores.is_cpu or items < 2 * groups:
        best, index = scores.topk(count, sorted=False)
        return index, _count(torch.ge, scores, best.amin(1, keepdim=True)) > count
    each, rest = divmod(items, groups)
    # Item i is in group i mod groups, so that maxima are those of long vectors.
    highest = torch.unflatten(scores[:, : each * groups], 1, (each, groups)).amax(1)
    highest[:, :rest] = torch.maximum(highest[:, :rest], scores[:, each * groups :])
    within = torch.arange(each + 1).unsqueeze(1) * groups
    place = (highest.topk(count, sorted=False).indices.unsqueeze(1) + within).flatten(1)
    found = scores.gather(1, place.clamp(max=items - 1)).masked_fill(place >= items, -torch.inf)
    best, at = found.topk(count, sorted=False)
    edge = best.amin(1, keepdim=True)
    several = ((highest >= edge).sum(1) > count) | ((found >= edge).sum(1) > count)
    return place.gather(1, at), several
