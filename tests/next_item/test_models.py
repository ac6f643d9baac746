"""Next-item models: every encoding, what is learned, full ranking, odd histories, and resuming bit for bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ctr_pe.data.dataset import Dataset
from ctr_pe.model_zoo.din import DIN
from ctr_pe.model_zoo.next_item.gru4rec import GRU4Rec
from ctr_pe.model_zoo.next_item.popularity import Popularity
from ctr_pe.pe import available_pes
from ctr_pe.training import DataSource, train
from ctr_pe.utils.errors import UserError
from tests.support.next_item import (
    SMALL,
    batch_of,
    built,
    categories,
    dataset,
    events,
    random_histories,
    run_of,
    states_of,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("next") / "log"
    return dataset(folder, events(random_histories()), categories(), max_len=6)


@pytest.mark.parametrize("pe", available_pes())
def test_every_encoding_keeps_causality(data: Dataset, pe: str) -> None:
    """The state at an item is that of the history that ends with it."""
    model = built(data, pe).double().eval()
    draw = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=draw)
    model.embedding_layer.double()
    found: list[Tensor] = []
    for items in ([3, 1, 2, 2, 5, 4], [3, 1, 2, 2], [3]):
        batch = batch_of([items, [7]], [1, 1], cate=True)
        batch.histories["age_history"] = torch.tensor([100 * k for k in range(len(items), 0, -1)] + [5])
        found.append(states_of(model, batch)[0])
    torch.testing.assert_close(found[0][:4], found[1][:4])
    torch.testing.assert_close(found[0][:1], found[2][:1])


@pytest.mark.parametrize(
    ("pe", "given"), [("naive", {"position_index": "distance"}), ("kernel", {"kernel_anchor": "end"})]
)
def test_an_encoding_that_counts_from_the_end_is_refused(data: Dataset, pe: str, given: Mapping[str, Any]) -> None:
    with pytest.raises(
        UserError, match=f"position encoding '{pe}' does not keep causality: the state at an item changes"
    ):
        built(data, pe, **given)


@pytest.mark.parametrize("item_table", ["tied", "untied"])
@pytest.mark.parametrize("fields", [None, ["item_id"]])
def test_training_asks_after_every_item(data: Dataset, item_table: str, fields: list[str] | None) -> None:
    """The loss is the mean over all items of all histories of the cross-entropy of the item that came next."""
    model = built(data, item_table=item_table, item_fields=fields, max_len=6)
    model.train()
    histories, targets = [[1, 2, 3], [4], [5, 5, 5, 6, 7, 8, 9, 1]], [4, 5, 2]
    found = model.forward(batch_of(histories, targets, cate=True))["loss"]
    losses = []
    for history, target in zip(histories, targets, strict=True):
        row = [*history[-6:], target]  # the newest max_len
        for place in range(1, len(row)):
            model.eval()
            state = model.forward(batch_of([row[:place]], [row[place]], cate=True))["y_pred"]
            answer = model.item_numbers[row[place]].unsqueeze(0)
            losses.append(cross_entropy(state @ model.vectors().T, answer))
    torch.testing.assert_close(found, torch.stack(losses).mean(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("loss", "norm"),
    [
        ("softmax", "post"),
        *(
            pytest.param(loss, "pre", marks=pytest.mark.slow)
            for loss in ("softmax", "sampled_softmax", "gbce", "binary")
        ),
    ],
)
def test_it_learns(data: Dataset, loss: str, norm: str) -> None:
    """Items follow each other in the order of their numbers, four times in five."""
    changed: dict[str, Any] = {"layer_norm": norm, "item_loss": loss, "num_negatives": 8, "epochs": 60}
    outcome = train(run_of(data, "rope", num_blocks=1, **changed))
    assert outcome.metrics["NDCG@10"] > 0.6  # 0.43 by chance
    assert outcome.history[-1].loss < 0.8 * outcome.history[0].loss


def test_sixteen_blocks(data: Dataset) -> None:
    model = built(data, "cape", num_blocks=16)
    assert math.isfinite(model.train_step(batch_of([[1, 2, 3]], [4], cate=True)).item())


@pytest.mark.parametrize("model", [GRU4Rec, Popularity])
def test_baselines(data: Dataset, model: type) -> None:
    outcome = train(run_of(data, "none", model, epochs=20 if model is GRU4Rec else 1, learning_rate=0.05))
    assert outcome.metrics["NDCG@10"] > (0.6 if model is GRU4Rec else 0.2)
    with pytest.raises(UserError, match=f"{model.__name__}: position encoding 'rope': it has no attention"):
        built(data, "rope", model)


def test_popularity_has_no_vectors_to_tie(data: Dataset) -> None:
    with pytest.raises(UserError, match="Popularity: item_table 'tied': it has no vectors of items: untied"):
        built(data, "none", Popularity, item_table="tied")


def test_popularity_ranks_by_the_answers_of_training_rows(data: Dataset) -> None:
    model = built(data, "none", Popularity)
    answers = np.zeros(len(model.item_ids), np.int64)
    for batch in DataSource.of(data).batches(model.feature_map, ["train"], SMALL):
        lengths, values = batch.history(["item_history"])
        first = lengths.cumsum(0) - lengths
        later = values["item_history"][~torch.isin(torch.arange(len(values["item_history"])), first)]
        np.add.at(answers, model.item_numbers[torch.cat([later, batch["item_id"]])].numpy(), 1)
    assert model.frequency.tolist() == answers.tolist()
    model.eval()
    ranking = model.rank(batch_of([[1], [2, 3]], [1, 1], cate=True), model.vectors(), len(answers))
    assert ranking.first[0].tolist() == ranking.first[1].tolist() == np.argsort(-answers, kind="stable").tolist()


def test_empty_unseen_and_long_histories(data: Dataset) -> None:
    """An empty history ranks items by their numbers, the most frequent first; an answer that no training row has is in
    no ranking; of a long history the newest items count."""
    model = built(data, item_fields=["item_id"], max_len=6).eval()
    unseen = len(model.item_ids) + 1
    batch = batch_of([[], [1, 2, unseen, 0, 3], [9, 9, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]], [1, unseen, 2, 2])
    ranking = model.rank(batch, model.vectors(), 3)
    assert ranking.first[0].tolist() == [0, 1, 2]
    assert ranking.ranks[:2].tolist() == [1, math.inf]
    torch.testing.assert_close(ranking.scores[2], ranking.scores[3])
    measured = model.measure([batch], ["Recall@3"])
    assert dict(measured.counts) == {"empty histories": 1, "rows": 4, "answers without a training row": 1}
    assert measured.ranks.dtype == np.float32


@pytest.mark.parametrize("filter_seen", [False, True])
def test_seen_items_are_kept_or_left_out_but_for_the_answer(data: Dataset, filter_seen: bool) -> None:
    model = built(data, item_fields=["item_id"], filter_seen=filter_seen).eval()
    everything = [int(item) for item in model.item_ids]
    batch = batch_of([everything[2:] + everything[2:4]], [everything[5]])
    ranking = model.rank(batch, model.vectors(), len(everything))
    listed = {int(item) for item in ranking.first[0]} - {-1}
    assert listed == ({0, 1, 5} if filter_seen else set(range(len(everything))))


def test_an_interrupted_training_goes_on_bit_for_bit(data: Dataset, tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    def stop(state: Mapping[str, Any]) -> None:
        if state["epoch"] == 3 and "batch" in state:
            raise Stopped

    run = run_of(data, "cape", item_loss="sampled_softmax", num_negatives=4, hidden_dropout=0.2, epochs=4)
    whole = train(run)
    interrupted = run_of(data, "cape", **run.params)
    object.__setattr__(interrupted, "resume", tmp_path / "state.safetensors")
    with pytest.raises(Stopped):
        train(interrupted, stop)
    again = train(interrupted)
    assert again.metrics == whole.metrics
    assert [epoch.loss for epoch in again.history] == [epoch.loss for epoch in whole.history]
    assert again.scores.tolist() == whole.scores.tolist()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"item_fields": ["brand"]}, "item_fields: items have no 'brand'"),
        ({"item_fields": ["cate_id"]}, "item_fields: the item's id 'item_id' is missing"),
        ({"item_loss": "hinge"}, "item_loss must be"),
        ({"metrics": ["gAUC"]}, "'gAUC' is no metric of next-item ranking"),
        ({"monitor": "AUC"}, "'AUC' is no metric of next-item ranking"),
        ({"num_heads": 3, "item_fields": ["item_id"]}, "num_heads=3 does not divide 8"),
        ({"layer_norm": "middle"}, "layer_norm 'middle' is unknown"),
        ({"class_weight": "balanced"}, "class_weight: a next-item model has no labels to weigh"),
        ({"item_table": "own"}, "item_table 'own' is unknown"),
    ],
)
def test_bad_values(data: Dataset, given: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        built(data, **given)


def test_models_and_data_sets_of_different_tasks(data: Dataset, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"its rows ask which item comes next, DIN answers whether an item is clicked"):
        built(data, "none", DIN)
    clicks = dataset(tmp_path, events(random_histories()), protocol="din")
    with pytest.raises(UserError, match=r"its rows ask whether an item is clicked, SASRec answers which item"):
        built(clicks)
    with pytest.raises(UserError, match="metric 'Recall@10' is of another task"):
        built(clicks, "none", DIN, metrics=["Recall@10"])
