"""Full ranking and its metrics against a slow reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ctr_pe.evaluation.ranking import list_lengths, parts_of, ranking_metrics, row_values
from ctr_pe.models import full_ranking
from ctr_pe.models.full_ranking import rank_items
from ctr_pe.utils.errors import UserError

B, V, D = 31, 19, 3


def slow(scores: list[float], banned: set[int], answer: int) -> list[int]:
    """Items best first, ties by number, without those that are banned; the answer always among them."""
    return sorted((item for item in range(V) if item == answer or item not in banned), key=lambda i: (-scores[i], i))


@pytest.mark.parametrize("chunk", [1, 50, 10_000])
@pytest.mark.parametrize("filter_seen", [False, True])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("count", "groups"), [(5, 100), (5, 1), (2, 2), (1, 9)])
def test_ranks_and_lists(
    chunk: int, filter_seen: bool, ties: bool, count: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``groups`` for each place of a list: of all items, or of 5, 4 and 9 groups."""
    monkeypatch.setattr(full_ranking, "GROUPS", groups)
    monkeypatch.setitem(full_ranking.SCORES, "cpu", chunk)
    monkeypatch.setitem(full_ranking.PART, "cpu", chunk)
    monkeypatch.setattr(full_ranking, "FEWEST", 1)
    draw = torch.Generator().manual_seed(0)
    if ties:
        states, items = (torch.randint(-1, 2, (n, D), generator=draw).double() for n in (B, V))
    else:
        states, items = (torch.randn(n, D, generator=draw, dtype=torch.float64) for n in (B, V))
    answers = torch.randint(-1, V, (B,), generator=draw)
    rows = torch.randint(B, (200,), generator=draw)
    seen = rows, torch.randint(V, (200,), generator=draw)
    found = rank_items(states, items, answers, seen if filter_seen else None, count)
    for row, scores in enumerate((states @ items.T).tolist()):
        banned = set(seen[1][rows == row].tolist()) if filter_seen else set()
        wanted = slow(scores, banned, int(answers[row]))
        rank = wanted.index(int(answers[row])) + 1 if answers[row] >= 0 else math.inf
        assert found.ranks[row] == rank
        assert found.first[row].tolist() == (wanted + [-1] * count)[:count]


@pytest.mark.parametrize(("items", "rows"), [(1, 2**20), (12_101, 86), (10**6, 32), (10**7, 6), (10**9, 1)])
def test_a_chunk_has_some_rows_but_no_more_scores_than_memory_holds(items: int, rows: int) -> None:
    assert full_ranking._chunk_rows(items, "cpu") == rows


def test_scores_that_are_not_finite_give_no_rank() -> None:
    states = torch.tensor([[1.0], [math.nan], [math.inf]])
    ranks = rank_items(states, torch.ones(4, 1), torch.tensor([2, 2, 2])).ranks
    assert ranks[0] == 3
    assert ranks[1:].isnan().all()
    assert math.isnan(ranking_metrics(ranks.numpy(), ["NDCG@10"], {})["NDCG@10"])


@pytest.mark.parametrize("count", [1, 10])
def test_the_list_of_many_items(count: int) -> None:
    """Those that a stable sort has first, with ties within a list and at its end."""
    draw = torch.Generator().manual_seed(0)
    states = torch.eye(40)
    items = torch.randn(3001, 40, generator=draw)
    items[:, 20:] = items[:, 20:].round(decimals=1)
    items[:, 39] = -torch.inf
    wanted = items.T.sort(dim=1, descending=True, stable=True).indices[:, :count]
    found = full_ranking._first(items.T.contiguous(), count)[0]
    assert torch.equal(found[:39], wanted[:39])
    assert (found[39] == -1).all()
    assert torch.equal(rank_items(states[:39, :39], items[:, :39], count=count).first, wanted[:39])


def test_without_rows_or_answers() -> None:
    assert rank_items(torch.zeros(0, 2), torch.ones(4, 2), torch.zeros(0, dtype=torch.int64), None, 3).first.shape == (
        0,
        3,
    )
    assert rank_items(torch.zeros(2, 2), torch.ones(4, 2), None, None, 9).first.tolist() == [[0, 1, 2, 3]] * 2
    with pytest.raises(UserError, match="no rows to evaluate"):
        ranking_metrics([], ["MRR"], {})


def test_metrics() -> None:
    ranks = np.array([1, 3, 10, 11, math.inf])
    found = ranking_metrics(ranks, ["Recall@10", "HR@3", "NDCG@10", "MRR", "MRR@10", "COV@5"], {5: 0.25})
    assert found == pytest.approx(
        {
            "Recall@10": 0.6,
            "HR@3": 0.4,
            "NDCG@10": (1 + 1 / 2 + 1 / math.log2(11)) / 5,
            "MRR": (1 + 1 / 3 + 1 / 10 + 1 / 11) / 5,
            "MRR@10": (1 + 1 / 3 + 1 / 10) / 5,
            "COV@5": 0.25,
        }
    )
    assert row_values(ranks, "NDCG@10").tolist() == pytest.approx([1, 0.5, 1 / math.log2(11), 0, 0])
    assert list_lengths(["COV@10", "NDCG@5", "COV@1"]) == [1, 10]


@pytest.mark.parametrize(("name", "near"), [("Recall", "Recall@10"), ("recall@7", "Recall@7"), ("gAUC", "MRR")])
def test_unknown_metrics(name: str, near: str) -> None:
    with pytest.raises(UserError, match=f"'{name}' is no metric of next-item ranking: .*{near}"):
        parts_of(name)
