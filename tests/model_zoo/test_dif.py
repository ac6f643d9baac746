"""DIF in models: its sources are the attributes' embeddings, its predictors learn from the batch's own ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ctr_pe.pe.dif import DIF
from tests.support.models import CATEGORIES, ITEMS, batch, build


def encodings_of(model: Any) -> list[DIF]:
    return [module for module in model.modules() if isinstance(module, DIF)]


def recorded(model: Any) -> tuple[list[DIF], list[Tensor]]:
    """The encodings, with query projections drawn, and a list of what each call adds to the logits."""
    added: list[Tensor] = []
    encodings = encodings_of(model)
    draw = torch.Generator().manual_seed(0)
    for pe in encodings:
        nn.init.normal_(pe.sources["1"].query.weight, generator=draw)

        def bias(logits: Tensor, vectors: Any, pairs: Any, plain: Any = pe.bias) -> Tensor:
            fused: Tensor = plain(logits, vectors, pairs)
            added.append((fused - logits).detach())
            return fused

        pe.bias = bias  # type: ignore[method-assign]
    for table in model.embedding_layer.parameters():
        nn.init.normal_(table, generator=draw)
    return encodings, added


@pytest.mark.parametrize(("name", "heads", "calls"), [("DIN", 1, 1), ("SASRec", 2, 3)])
def test_attribute_scores_come_from_the_category_alone(name: str, heads: int, calls: int, tmp_path: Path) -> None:
    """In SASRec in all three blocks: never updated by what lies between."""
    model = build(name, tmp_path, position_encoding="dif", dif_positions=False).double().eval()
    encodings, added = recorded(model)
    rows = batch([4])
    tables = {len(table): table for table in model.embedding_layer.parameters()}
    items, categories = tables[ITEMS], tables[CATEGORIES]
    model(rows)
    first = list(added)
    assert len(first) == calls == len(encodings)

    history, target = rows["cate_history"][0], rows["cate_id"]
    keys = categories[history if name == "DIN" else torch.cat([history, target])]
    queries = categories[target] if name == "DIN" else keys
    for pe, scores in zip(encodings, first, strict=True):
        for head in range(heads):
            query, key = (
                weight.chunk(heads)[head] for weight in (pe.sources["1"].query.weight, pe.sources["1"].key.weight)
            )
            want = (queries @ query.T) @ (keys @ key.T).T / (8 / heads) ** 0.5
            last = scores.shape[-2]  # the last block's only query is the target
            assert torch.allclose(scores[0, head], want[-last:], atol=1e-12)

    for table, same in ((items, True), (categories, False)):
        added.clear()
        with torch.no_grad():
            table.add_(1.0)
        model(rows)
        assert all(torch.allclose(a, b, atol=1e-9) == same for a, b in zip(added, first, strict=True))


@pytest.mark.parametrize(("name", "predicts"), [("DIN", True), ("SASRec", True), ("DMIN", True), ("BST", False)])
def test_predictors_learn_in_training_where_attention_sees_no_answer(name: str, predicts: bool, tmp_path: Path) -> None:
    model = build(name, tmp_path, position_encoding="dif", dif_predict=5.0).train()
    rows = batch([3, 0, 6, 1])
    losses = model(rows)["losses"]
    assert ("attribute predictors" in losses) == predicts
    if predicts:
        assert losses["attribute predictors"] > 0
        losses["attribute predictors"].backward()
        for pe in encodings_of(model):
            assert list(pe.predictors) == ["1"]
            assert pe.predictors["1"].weight.shape == (CATEGORIES, 8)
            assert all(p.grad is not None and p.grad.abs().max() > 0 for p in pe.predictors.parameters())


def test_a_target_that_was_not_clicked_is_not_predicted(tmp_path: Path) -> None:
    model = build("DIN", tmp_path, position_encoding="dif", dif_predict=5.0).train()
    rows = batch([3, 2, 6, 1])
    assert model(rows | {"label": torch.zeros(4)})["losses"]["attribute predictors"] == 0
    assert model(rows)["losses"]["attribute predictors"] > 0


@pytest.mark.parametrize("chosen", [True, False])
def test_items_that_were_not_chosen_are_not_predicted(chosen: bool, tmp_path: Path) -> None:
    """As in the second history that `ctr-pe data build --negatives` makes."""
    marked = {name: {"chosen": chosen} for name in ("item_history", "cate_history")}
    model = build("SASRec", tmp_path, marked, position_encoding="dif", dif_predict=5.0).train()
    rows = batch([3, 2, 6, 1]) | {"label": torch.zeros(4)}  # the targets were not chosen either
    assert (model(rows)["losses"]["attribute predictors"] > 0) == chosen


def test_one_field_has_positions_only(tmp_path: Path) -> None:
    fields = {"target_field": [["item_id"]], "sequence_field": [["item_history"]]}
    unused = {"cate_history": {"type": "meta"}}
    (pe,) = encodings_of(build("DIN", tmp_path, unused, position_encoding="dif", dif_predict=5.0, **fields))
    assert [key for key, _ in pe.named_parameters()] == ["table", "position.query.weight", "position.key.weight"]


@pytest.mark.parametrize("fusion", ["concat", "gate"])
@pytest.mark.parametrize("name", ["DIN", "SASRec"])
def test_every_parameter_of_a_fusion_learns_within_five_steps(name: str, fusion: str, tmp_path: Path) -> None:
    options = {"position_encoding": "dif", "dif_fusion": fusion, "dif_predict": 5.0, "learning_rate": 0.05}
    model = build(name, tmp_path, **options).train()
    model._max_gradient_norm = 10.0
    parameters = {f"{i}.{key}": p for i, pe in enumerate(encodings_of(model)) for key, p in pe.named_parameters()}
    learns = set()
    for step in range(5):
        model.train_step(batch([3, 0, 6, 1, 5, 4], seed=step))
        learns |= {key for key, p in parameters.items() if p.grad is not None and p.grad.abs().max() > 0}
    assert learns == parameters.keys()
