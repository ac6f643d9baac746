"""PDM's contrastive loss in models: it joins the training loss, under its name, and draws nothing from their stream."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ctr_pe.model_zoo import MODELS
from tests.support.models import batch, build

NAME = "PDM reorder contrast"


@pytest.mark.parametrize("encoding", ["pdm", "cape+pdm"])
@pytest.mark.parametrize("name", MODELS)
def test_it_joins_the_training_loss(name: str, encoding: str, tmp_path: Path) -> None:
    rows, losses, after = batch([3, 0, 6, 1, 5]), [], []
    for weight in (0.0, 0.25):
        model = build(name, tmp_path, position_encoding=encoding, pdm_contrast=weight, dnn_hidden_units=[8]).train()
        torch.manual_seed(3)
        output = model(rows)
        after.append(torch.rand(2))
        losses.append((model.compute_loss(output, model.get_labels(rows)), output["losses"]))
    (plain, without), (total, parts) = losses
    assert NAME not in without
    assert parts[NAME].isfinite()
    assert parts[NAME] > 0
    assert torch.allclose(total, plain + parts[NAME])
    assert torch.equal(*after)


@pytest.mark.parametrize("name", ["DIN", "SASRec"])
def test_padding_does_not_change_it(name: str, tmp_path: Path) -> None:
    losses = []
    for layout in ({}, {"slots": 11}, {"left": True, "slots": 9}):
        model = build(name, tmp_path, position_encoding="pdm", pdm_contrast=1.0, pdm_ratio=0.5).double().train()
        rows = batch([3, 0, 6, 1, 5], **layout)  # type: ignore[arg-type]
        losses.append(model(rows)["losses"][NAME])
    assert torch.allclose(torch.stack(losses), losses[0])


def test_evaluation_has_none(tmp_path: Path) -> None:
    model = build("SASRec", tmp_path, position_encoding="pdm", pdm_contrast=1.0).eval()
    assert model(batch([3, 1])).keys() == {"y_pred"}
