"""Embedding tables: shared look-ups and regularisation give what FuxiCTR's give, values and gradients."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from fuxictr.pytorch.models import BaseModel
from torch import nn

from ctr_pe.fuxictr import embeddings
from ctr_pe.fuxictr.embeddings import look_up
from ctr_pe.training.steps import clip
from tests.support.models import batch, build


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {
        name: torch.zeros_like(values) if values.grad is None else values.grad
        for name, values in model.named_parameters()
    }
    model.zero_grad()
    return found


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0], [0, 0], [1]])
@pytest.mark.parametrize("regularizer", [None, 0.5, "l1(0.2)", "l1_l2(0.1,0.3)"])
def test_look_up_gives_what_fuxictr_s_layer_gives(counts: list[int], regularizer: Any, tmp_path: Path) -> None:
    """Vectors, and one gradient of these and the regularisation; rows of padding have that of the latter alone."""
    model = build("DIN", tmp_path, embedding_regularizer=regularizer)
    layer, ids = model.embedding_layer, model.get_inputs(batch(counts))
    for table in layer.parameters():
        nn.init.normal_(table)
    embedded, penalties = look_up(layer, ids, regularizer)
    assert set(penalties) == set(layer.parameters())
    results = []
    for found, penalty in ((embedded, sum(penalties.values())), (layer(ids), BaseModel.regularization_loss(model))):
        assert set(found) == set(ids)
        total = sum((found[field] * torch.arange(1, 1 + found[field].numel()).view_as(found[field])).sum()
                    for field in ids)  # fmt: skip
        (total + 2 * penalty).backward()
        results.append((found, float(torch.as_tensor(penalty).detach()), gradients(model)))
    (ours, our_penalty, of_ours), (theirs, their_penalty, of_theirs) = results
    for field in ids:
        assert torch.equal(ours[field], theirs[field])
    assert our_penalty == pytest.approx(their_penalty, rel=1e-5)
    for name in of_ours:
        assert torch.allclose(of_ours[name], of_theirs[name], rtol=1e-4, atol=1e-4), name
    assert any(values.any() for values in of_ours.values())


@pytest.mark.parametrize("vectors", [False, True])
@pytest.mark.parametrize("regularizer", [None, 0.5])
@pytest.mark.parametrize("padding", [None, 0, 3])
@pytest.mark.parametrize("in_order", [True, False])
def test_either_result_of_a_look_up_may_go_unused(
    vectors: bool, regularizer: Any, padding: int | None, in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "_in_order", lambda x: in_order)  # a GPU's way is taken on the CPU too
    table, rows = nn.Embedding(5, 4, padding_idx=padding), torch.tensor([3, 0, 3, 1])
    layer = MagicMock(embedding_layers={"item": table}, feature_encoders={}, return_value={})
    embedded, penalties = look_up(layer, {"item": rows}, regularizer)
    (embedded["item"].sum() if vectors else penalties[table.weight]).backward()
    want = torch.zeros(5, 4)
    if vectors:
        for row in rows.tolist():
            want[row] += float(row != padding)
    elif regularizer:
        want = regularizer * table.weight.detach()
    assert torch.allclose(table.weight.grad, want)


def test_nothing_is_kept_of_tables_that_do_not_learn(tmp_path: Path) -> None:
    model = build("DIN", tmp_path, embedding_regularizer=0.5)
    layer, ids = model.embedding_layer, model.get_inputs(batch([3, 1]))
    with torch.no_grad():
        assert not look_up(layer, ids, 0.5)[1]
    frozen = layer.embedding_layers["item_id"].weight.requires_grad_(False)
    embedded, penalties = look_up(layer, ids, 0.5)
    assert frozen not in penalties
    assert penalties
    assert not embedded["item_id"].requires_grad


@pytest.mark.parametrize("most", [1e-3, 10.0, 1e6])
@pytest.mark.parametrize("value", [1.0, math.nan, math.inf])
def test_clipping_is_torch_s(most: float, value: float) -> None:
    ours, theirs = ([nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(2))] for _ in range(2))
    for parameters in (ours, theirs):
        parameters[0].grad = torch.arange(12.0).view(3, 4)
        parameters[0].grad[1, 1] *= value
    clip({"first": ours[0], "second": ours[1]}, most)
    nn.utils.clip_grad_norm_(theirs, most)
    assert torch.equal(ours[0].grad.nan_to_num(7.0), theirs[0].grad.nan_to_num(7.0))
    assert ours[1].grad is None


def test_fields_of_one_table_are_looked_up_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, looked_up = build("DIN", tmp_path), list[torch.Tensor]()
    plain = nn.functional.embedding
    monkeypatch.setattr(
        nn.functional, "embedding", lambda rows, table, *args: looked_up.append(table) or plain(rows, table, *args)
    )
    model(batch([3, 1]))
    fields = {field for group in model.groups for field in (*group.target, *group.history)}
    assert len(set(looked_up)) == len(looked_up) < len(fields)


@pytest.mark.parametrize("embedding", [None, 0.5, "l1(0.2)", "l1_l2(0.1,0.3)"])
@pytest.mark.parametrize("network", [None, 0.25, "l1(0.1)"])
def test_regularisation_is_fuxictr_s(embedding: Any, network: Any, tmp_path: Path) -> None:
    model = build("DIN", tmp_path, position_encoding="cape", embedding_regularizer=embedding, net_regularizer=network)
    for values in model.parameters():
        nn.init.normal_(values)
    next(model.dnn.parameters()).requires_grad_(False)
    losses, found = [], []
    for loss in (model.regularization_loss(), BaseModel.regularization_loss(model)):
        losses.append(float(loss))
        if isinstance(loss, torch.Tensor):
            loss.backward()
        found.append(gradients(model))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert (losses[0] > 0) == (embedding is not None or network is not None)
    for name in found[0]:
        assert torch.allclose(found[0][name], found[1][name], atol=1e-6), name


@pytest.mark.parametrize("table_optimizer", [None, "lazy_adam"])
def test_regularisation_is_in_the_loss_once(table_optimizer: str | None, tmp_path: Path) -> None:
    model = build("DIN", tmp_path, embedding_regularizer=0.5, net_regularizer=0.25, table_optimizer=table_optimizer)
    rows = batch([3, 0, 5])
    found, labels = model.train()(rows), model.get_labels(rows)
    want = BaseModel.regularization_loss(model)
    if table_optimizer is not None:  # which adds that of tables to their gradients
        want -= sum(table.square().sum() / 4 for table in model.embedding_layer.parameters())
    loss = model.compute_loss(found, labels)
    assert torch.allclose(loss, model.add_loss(found, labels) + want, rtol=1e-5)
    assert model.eval()(rows).keys() == {"y_pred"}


@pytest.mark.parametrize("optimizer", ["adam", "AdamW", "SGD", "Adagrad", "RMSprop"])
def test_one_pass_optimisers_make_the_same_steps(optimizer: str, tmp_path: Path) -> None:
    models = [build("DIN", tmp_path, optimizer=optimizer, learning_rate=1e-2).train() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for group in models[1].optimizer.param_groups:
        group["fused"] = None
    fused = [group.get("fused") for group in models[0].optimizer.param_groups]
    assert fused == [None if optimizer == "RMSprop" else True]
    for model in models:
        model._max_gradient_norm = 10.0
        for counts in ([3, 1], [2, 5]):
            torch.manual_seed(0)
            model.train_step(batch(counts))
    for ours, plain in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(ours, plain, rtol=1e-4, atol=1e-6)
