"""Requests that share a history share its encoding, and have the scores that they have alone."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl
import pytest
from torch import Tensor

from ctr_pe import CTRRanker
from ctr_pe.serving import request_graph
from ctr_pe.serving import scorer as of_scorer
from ctr_pe.serving.request_graph import CUDAGraphs
from ctr_pe.serving.scorer import Scorer
from ctr_pe.utils import cuda_graphs
from tests.support.fuzz.small_log import SMALL


@pytest.fixture(scope="module")
def timed(clicks: pl.DataFrame, items: pl.DataFrame) -> CTRRanker:
    return CTRRanker("BST", "time_bias", **SMALL).fit(clicks, items=items)


@pytest.fixture(scope="module")
def requests(clicks: pl.DataFrame) -> pl.DataFrame:
    """Users with one to forty requests at few times, some of users without a history, in any order."""
    draw = np.random.default_rng(5)
    user = np.repeat(np.arange(100, 175), draw.geometric(0.1, 75).clip(1, 40))
    low, high = clicks["timestamp"].min(), clicks["timestamp"].max()
    time = draw.choice(np.linspace(low, high, 4).astype(np.int64), len(user))  # type: ignore[arg-type]
    item = [f"item {i}" for i in draw.integers(0, 50, len(user))]
    table = pl.DataFrame({"user_id": user, "item_id": item, "timestamp": time})
    return table.sample(fraction=1.0, shuffle=True, seed=1)


@pytest.fixture(params=["ranker", "timed"])
def scorer(request: pytest.FixtureRequest) -> Scorer:
    found: Scorer = request.getfixturevalue(request.param).scorer_
    return found


@pytest.mark.parametrize("at_times", [True, False])
def test_shared_histories_give_the_scores_of_requests_alone(
    scorer: Scorer, at_times: bool, requests: pl.DataFrame, clicks: pl.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests if at_times else requests.drop("timestamp")
    monkeypatch.setattr(of_scorer, "SHARED", 10**6)
    alone = scorer.score_requests(clicks, asked)
    encoded: list[int] = []
    encode = scorer.model.encode

    def counted(batch: dict[str, Any]) -> Any:
        encoded.append(len(batch["item_history"]))
        return encode(batch)

    monkeypatch.setattr(scorer.model, "encode", counted)
    for least, tile in ((2, 64), (2, 7), (5, 1000)):
        monkeypatch.setattr(of_scorer, "SHARED", least)
        monkeypatch.setattr(of_scorer, "TILE", tile)
        encoded.clear()
        np.testing.assert_allclose(scorer.score_requests(clicks, asked), alone, atol=1e-5)
        assert 0 < sum(encoded) < len(requests) / 2


def test_every_request_is_in_one_tile_with_those_of_its_history(
    ranker: CTRRanker, requests: pl.DataFrame, clicks: pl.DataFrame
) -> None:
    encoder = ranker.scorer_.encoder
    encoded = encoder.requests(requests, encoder.events(clicks))
    lists = encoded.lists[0]
    tiles, alone = encoded.tiles(ages=False, size=50, least=3)
    found = [*alone, *(row for tile in tiles for row in np.unique(tile))]
    assert sorted(found) == list(range(requests.height))
    seen = [(int(lists.begin[row]), int(lists.end[row])) for row in range(requests.height)]
    groups = [{seen[row] for row in rows} for tile in tiles for rows in tile]
    assert all(len(group) == 1 for group in groups)
    shared = set().union(*groups)
    assert len(shared) == len(groups)
    assert not shared & {seen[row] for row in alone}
    assert all(seen.count(seen[row]) < 3 for row in alone)
    with_time = encoded.tiles(ages=True, size=50, least=1)[0]
    assert encoded.now is not None
    assert all(len(set(encoded.now[rows])) == 1 for tile in with_time for rows in tile)
    # what is computed for repeated columns is less than what is asked
    assert sum(tile.size for tile in with_time) < 2 * requests.height


def test_a_log_in_a_file_is_encoded_as_one_in_memory(ranker: CTRRanker, clicks: pl.DataFrame, tmp_path: Any) -> None:
    encoder = ranker.scorer_.encoder
    clicks.sample(fraction=1.0, shuffle=True, seed=3).write_parquet(tmp_path / "log.parquet", row_group_size=50)
    one, other = encoder.events(clicks), encoder.events(pl.scan_parquet(tmp_path / "log.parquet"))
    assert (one.newest, one.unknown) == (other.newest, other.unknown)
    for user in clicks["user_id"].unique():
        events = []
        for log in (one, other):
            number = log.users.find(pl.Series([user]))[0]
            line = log.groups[0]
            begin, end = line.first[number], line.first[number + 1]
            events.append([values[begin:end].tolist() for values in (line.time, *line.ids.values())])  # type: ignore[index]
        assert events[0] == events[1]


class WithoutGPU(CUDAGraphs):
    """Scores padded requests without a GPU, and counts them."""

    asked = 0

    def _capture(self, padded: Mapping[str, Tensor]) -> Any:
        def score(given: Mapping[str, Tensor]) -> Tensor:
            self.asked += 1
            assert {name: x.shape for name, x in given.items()} == {name: x.shape for name, x in padded.items()}
            return self.graph(given)

        return score


def test_small_requests_on_a_gpu_are_padded_to_few_sizes_and_keep_their_scores(
    scorer: Scorer, requests: pl.DataFrame, clicks: pl.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = scorer.score_requests(clicks, requests)
    small = WithoutGPU(scorer.model)
    monkeypatch.setitem(vars(scorer), "cuda_graphs", small)
    monkeypatch.setattr(of_scorer, "SHARED", 8)
    monkeypatch.setattr(of_scorer, "TILE", 20)
    for largest in (0, 200, request_graph.LARGEST):
        monkeypatch.setattr(request_graph, "LARGEST", largest)
        before = small.asked
        np.testing.assert_allclose(scorer.score_requests(clicks, requests), wanted, atol=1e-5)
        assert (small.asked > before) == (largest > 0)
    assert 2 <= len(small._graphs) < 30
    assert {size & (size - 1) for rows, _, targets in small._graphs for size in (rows, targets)} == {0}


def test_on_a_cpu_there_are_no_cuda_graphs(ranker: CTRRanker) -> None:
    assert ranker.scorer_.cuda_graphs is None


def test_garbage_waits_while_any_thread_captures() -> None:
    """The first that ends does not turn the collector on for another."""
    seen: list[bool] = []

    def record() -> None:
        with cuda_graphs._without_garbage_collection():
            seen.append(gc.isenabled())
            time.sleep(0.02)
            seen.append(gc.isenabled())

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
        time.sleep(0.005)
    for thread in threads:
        thread.join()
    assert seen == [False] * 8
    assert gc.isenabled()


def test_requests_scored_together_have_the_scores_that_they_have_alone(scorer: Scorer) -> None:
    draw = np.random.default_rng(3)
    parts = []
    for history, candidates in [(0, 1), (5, 1), (30, 9), (0, 8), (1, 20), (12, 3), (30, 40), (7, 20)]:
        past, wanted = ([f"item {i}" for i in draw.integers(0, 50, size)] for size in (history, candidates))
        times = np.sort(draw.integers(0, 10**6, history)).tolist() if history else None
        parts.append(scorer.encoder.one(past, wanted, times, 2 * 10**6 if history else None))
    together = scorer.score_together(parts)
    assert [len(scores) for scores in together] == [part.rows for part in parts]
    for part, scores in zip(parts, together, strict=True):
        np.testing.assert_allclose(scores, scorer.score_together([part])[0], atol=1e-6)
        np.testing.assert_allclose(scores, scorer.score(part), atol=1e-6)
