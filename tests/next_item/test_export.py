"""A next-item model as a graph and as a file: the items and scores of ``recommend``, whatever the histories are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor, nn

from ctr_pe import CTRRanker, NextItemRanker
from ctr_pe.cli import main
from ctr_pe.data.dataset import Dataset
from ctr_pe.model_zoo.next_item import NEXT_ITEM_MODELS
from ctr_pe.models.sections import model_class
from ctr_pe.ops import native
from ctr_pe.pe import available_pes
from ctr_pe.serving.export import check, export_graph, export_scorer
from ctr_pe.serving.model_folder import read_model, scorer_of, write_model
from ctr_pe.serving.next_item_graph import NextItemGraph
from ctr_pe.serving.request_graph import random_request, requests
from ctr_pe.training import Outcome
from ctr_pe.training.source import DataSource
from ctr_pe.utils.errors import UserError
from tests.support.next_item import built, categories, dataset, events, random_histories, run_of

MAX_LEN, ITEMS = 6, 12
NO_ATTENTION = ("GRU4Rec", "Popularity")
PAIRS = [
    (name, "none" if name in NO_ATTENTION else pe) for name, pe in zip(NEXT_ITEM_MODELS, available_pes(), strict=False)
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("next") / "log"
    return dataset(folder, events(random_histories()), categories(), max_len=MAX_LEN)


def model_of(data: Dataset, name: str, pe: str, **params: Any) -> Any:
    """With parameters far from their initial values, and an item that no row has."""
    model = built(data, pe, model_class(name, "next-item"), item_fields=None, **params)
    draw = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=draw)
    model.set_catalogue({"cate_id": model.item_ids % 3 + 1}, torch.arange(len(model.item_ids), 0, -1).float())
    return model


def same(model: Any, k: int, filter_seen: bool) -> None:
    graph = NextItemGraph(model, k, filter_seen)

    def run(given: Any) -> Any:
        with native.portable(), torch.inference_mode():
            return graph(given)

    check(graph, run, "the padded form")


@pytest.mark.parametrize(("name", "pe"), PAIRS)
def test_graph_of_every_model(data: Dataset, name: str, pe: str) -> None:
    model = model_of(data, name, pe)
    for k, filter_seen in ((4, True), (99, False), (99, True)):
        same(model, k, filter_seen)


@pytest.mark.parametrize("name", NEXT_ITEM_MODELS)
def test_a_folder_has_the_model_that_was_written(data: Dataset, name: str, tmp_path: Path) -> None:
    """Whatever a model makes of its encoding, the folder says what it was built with."""
    cls, nothing = model_class(name, "next-item"), Outcome({}, 1, 0.0, np.zeros(0, np.float32), 1)
    for pe in ("none",) if name in NO_ATTENTION else ("none", "rope"):
        model = model_of(data, name, pe)
        run = run_of(data, pe, cls, item_fields=None)
        write_model(tmp_path / pe, scorer_of(model, run, DataSource.of(data), nothing))
        again = read_model(tmp_path / pe, task="next-item").model
        assert [group.encoding for group in again.groups] == [pe]
        assert {key: x.tolist() for key, x in again.state_dict().items()} == {
            key: x.tolist() for key, x in model.state_dict().items()
        }


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NEXT_ITEM_MODELS if name not in NO_ATTENTION])
def test_graph_of_every_model_and_encoding(data: Dataset, name: str) -> None:
    for pe in ("native", *available_pes()):
        same(model_of(data, name, pe), 5, True)


def test_an_empty_history_is_followed_by_the_most_frequent_items(data: Dataset) -> None:
    """All scores are equal there: the tie is broken as in ``recommend``."""
    model = model_of(data, "SASRec", "cape")
    graph = NextItemGraph(model, 7, True)
    items, scores = graph({"item_history": torch.zeros(2, 1).long(), "cate_history": torch.zeros(2, 1).long(),
                           "item_history_length": torch.zeros(2).long()})  # fmt: skip
    assert items.tolist() == [model.item_ids[:7].tolist()] * 2
    assert not scores.any()


def test_ties_between_others_that_are_equal(data: Dataset) -> None:
    """Items of equal vectors, of scores above and below zero, large and small."""
    model = model_of(data, "SASRec", "none")
    graph, given = NextItemGraph(model, 12, False), random_request(model, 4, 8, 1)
    for size in (1e-30, 1.0, 1e6):
        graph.vectors.copy_(graph.vectors[torch.tensor([0, 1, 2] * 4)] / graph.vectors.abs().max() * size)
        with native.portable(), torch.inference_mode():
            items, scores = graph(given)
        order = torch.stack([scores.double().neg(), items.double()])
        for row in range(4):
            assert np.lexsort(order[:, row].flip(0).numpy()).tolist() == [*range(12)]


def test_a_wrong_file_is_not_written(data: Dataset) -> None:
    graph = NextItemGraph(model_of(data, "SASRec", "rope"), 3, True)

    def wrong(given: Any) -> tuple[Tensor, Tensor]:
        items, scores = graph(given)
        return items.flip(1), scores

    with pytest.raises(UserError, match=r"f: not written: scores of 1 requests differ from the model's by up to"):
        check(graph, wrong, "f")
    assert any((one["item_history_length"] == 0).any() for one in requests(graph.model))


FAST: dict[str, Any] = {
    "epochs": 2,
    "embedding_dim": 8,
    "batch_size": 16,
    "num_blocks": 1,
    "max_len": MAX_LEN,
    "learning_rate": 0.02,
}


@pytest.fixture(scope="module")
def ranker() -> NextItemRanker:
    log = events({f"u{user}": [f"i{item}" for item in items] for user, items in random_histories().items()})
    items = categories().with_columns(item_id=pl.format("i{}", "item_id"))
    return NextItemRanker("SASRecF", "cape", **FAST).fit(log, items=items)


def test_what_a_click_model_has_not(tmp_path: Path, ranker: NextItemRanker) -> None:
    log = pl.DataFrame({"user_id": [1, 1, 1, 2, 2, 2] * 3, "item_id": [*range(6)] * 3, "timestamp": [*range(18)]})
    scorer = CTRRanker("DIN", "none", epochs=1, batch_size=4).fit(log).scorer_
    with pytest.raises(UserError, match="filter_seen: of next-item models; the file of a click model scores"):
        export_scorer(scorer, "onnx", tmp_path / "f", filter_seen=True)
    with pytest.raises(UserError, match="k=0: the number of items to recommend"):
        ranker.export(tmp_path / "f", k=0)


@pytest.mark.slow
def test_a_file_recommends_what_the_ranker_does(ranker: NextItemRanker, tmp_path: Path) -> None:
    """From raw ids: empty histories, one item, longer ones than max_len, unseen ids; one row and many."""
    import onnxruntime

    ranker.save(tmp_path / "model")
    file = tmp_path / "model.onnx"
    command = ["export", "--model", str(tmp_path / "model"), "--format", "onnx", "--output", str(file)]
    assert main([*command, "--k", "5", "--filter-seen"]) == 0
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    about = json.loads(session.get_modelmeta().custom_metadata_map["ctr_pe"])
    assert (about["model"], about["k"], about["filter_seen"]) == ("SASRecF", 5, True)
    raw = {id_: item for item, id_ in about["vocabularies"][about["outputs"]["items"]["ids"]].items()}
    histories = {"a": [], "b": ["i3"], "c": [f"i{1 + i % 12}" for i in range(9)], "d": ["new", "i4", "other"]}

    def answers(users: list[str]) -> list[tuple[str, str, float]]:
        longest = max(1, *(len(histories[user]) for user in users))
        feed: dict[str, Any] = {}
        for name, field in about["inputs"].items():
            if field["of"] == "length":
                feed[name] = np.array([len(histories[user]) for user in users])
                continue
            ids = about["vocabularies"][field["ids"]]
            known = [[ids.get(item, field["unknown"]) for item in histories[user]] for user in users]
            feed[name] = np.array([row + [0] * (longest - len(row)) for row in known])
        items, scores = session.run(None, feed)
        return [(user, raw[item], float(score)) for row, user in enumerate(users)
                for item, score in zip(items[row], scores[row], strict=True)]  # fmt: skip

    history = events(histories)
    wanted = [row[:3] for row in ranker.recommend([*histories], k=5, history=history).rows()]
    for found in (answers([*histories]), [row for user in histories for row in answers([user])]):
        assert [row[:2] for row in found] == [row[:2] for row in wanted]
        np.testing.assert_allclose([row[2] for row in found], [row[2] for row in wanted], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pe"), [pair for pair in PAIRS if not pair[0].startswith("SASRec")])
def test_onnx_of_every_model(data: Dataset, name: str, pe: str, tmp_path: Path) -> None:
    """``export_graph`` compares what the file finds."""
    model = model_of(data, name, pe, **({} if name in NO_ATTENTION else {"num_blocks": 1}))
    export_graph(NextItemGraph(model, 4, True), {}, "onnx", tmp_path / "f.onnx")


@pytest.mark.slow
def test_a_program_of_torch(ranker: NextItemRanker, tmp_path: Path) -> None:
    ranker.export(tmp_path / "f.pt2", "torch", k=3)
