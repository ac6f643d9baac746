"""Embedding tables: shared look-ups and regularisation give what FuxiCTR's give, values and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fuxictr.pytorch.models import BaseModel
from models import batch, build
from torch import nn

from ctr_pe.model_zoo.tables import look_up


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {
        name: torch.zeros_like(values) if values.grad is None else values.grad
        for name, values in model.named_parameters()
    }
    model.zero_grad()
    return found


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0], [0, 0], [1]])
def test_look_up_gives_what_fuxictr_s_layer_gives(counts: list[int], tmp_path: Path) -> None:
    model = build("DIN", tmp_path)
    layer, ids = model.embedding_layer, model.get_inputs(batch(counts))
    results = []
    for embedded in (look_up(layer, ids), layer(ids)):
        assert set(embedded) == set(ids)
        total = sum((embedded[field] * torch.arange(1, 1 + embedded[field].numel()).view_as(embedded[field])).sum()
                    for field in ids)  # fmt: skip
        total.backward()
        results.append((embedded, gradients(model)))
    (ours, of_ours), (theirs, of_theirs) = results
    for field in ids:
        assert torch.equal(ours[field], theirs[field])
    for name in of_ours:
        assert torch.allclose(of_ours[name], of_theirs[name])
    assert any(values.any() for values in of_ours.values())


def test_fields_of_one_table_are_looked_up_together(tmp_path: Path) -> None:
    model = build("DIN", tmp_path)
    calls: list[nn.Module] = []
    for table in set(model.embedding_layer.embedding_layers.values()):
        table.register_forward_hook(lambda module, inputs, output: calls.append(module))
    model(batch([3, 1]))
    assert len(calls) == len(set(calls))
    fields = {field for group in model.groups for field in (*group.target, *group.history)}
    assert len(calls) < len(fields)


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
