"""Learning rates that fall to zero, averaged weights, and the start of embedding tables."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ctr_pe.utils.errors import UserError
from tests.support.models import Rows, batch, weights_of
from tests.support.models import build as build_model

build = partial(build_model, "DIN")
FOUR = Rows(*(batch([3, 2, 5, 1], seed=seed) for seed in range(4)))


def rates(model: Any, epochs: int) -> list[float]:
    """Of each step of a fit."""
    seen: list[float] = []
    step = type(model).train_step

    def watched(given: dict[str, Tensor]) -> Tensor:
        seen.append(model.optimizer.param_groups[-1]["lr"])
        return step(model, given)

    model.train_step = watched
    model.fit(FOUR, epochs=epochs, validation_data=Rows())
    return seen


@pytest.mark.parametrize("tables", [None, "lazy_adam"])
@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("constant", [0.1] * 8),
        ("linear", [0.1 * (1 - step / 8) for step in range(8)]),
        ("cosine", [0.05 * (1 + math.cos(math.pi * step / 8)) for step in range(8)]),
    ],
)
def test_the_learning_rate_of_every_step(name: str, wanted: list[float], tables: str | None, tmp_path: Path) -> None:
    """It reaches zero with the last step, and a second training begins anew."""
    patient = {"early_stop_patience": 9, "learning_rate": 0.1, "table_optimizer": tables}
    patient |= {"reduce_lr_on_plateau": name != "constant"}  # the schedule decides where there is one
    model = build(tmp_path, learning_rate_schedule=name, **patient)
    assert rates(model, epochs=2) == pytest.approx(wanted)
    assert model.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 if name == "constant" else 0.0, abs=1e-12)
    assert rates(model, epochs=2) == pytest.approx(wanted)


@pytest.mark.parametrize("changes", [{}, {"batch_norm": True, "dnn_activations": "Dice"}])
def test_averaged_weights_are_evaluated_and_kept(changes: dict[str, Any], tmp_path: Path) -> None:
    """As computed here from the weights after every step; the training itself does not see them."""
    changes = changes | {"early_stop_patience": 9, "reduce_lr_on_plateau": False, "learning_rate": 0.05}
    plain, averaged = (build(tmp_path, **changes, **given) for given in ({}, {"weight_average": 0.25}))
    trained: dict[Any, list[dict[str, Tensor]]] = {plain: [], averaged: []}

    def watched(model: Any, given: dict[str, Tensor]) -> Tensor:
        loss: Tensor = type(model).train_step(model, given)
        trained[model].append(weights_of(model))
        return loss

    evaluated: list[dict[str, Tensor]] = []
    for model in (plain, averaged):
        model.train_step = partial(watched, model)
    score = averaged.evaluate
    averaged.evaluate = lambda *args, **options: (evaluated.append(weights_of(averaged)), score(*args, **options))[1]
    torch.manual_seed(0)
    plain.fit(FOUR, epochs=3, validation_data=Rows())
    torch.manual_seed(0)
    fitted = averaged.fit(FOUR, epochs=3, validation_data=Rows())
    mean = {}
    means = []
    for step, weights in enumerate(trained[averaged], 1):
        share = 1 / min(3, step)  # a quarter of 12 steps
        for key, value in weights.items():
            mean[key] = value if step == 1 or not value.is_floating_point() else mean[key].lerp(value, share)
        means.append(dict(mean))
    for before, after in zip(trained[plain], trained[averaged], strict=True):
        assert all(torch.equal(value, after[key]) for key, value in before.items())
    for epoch, found in enumerate(evaluated, 1):
        for key, value in means[4 * epoch - 1].items():
            torch.testing.assert_close(found[key], value)
    for key, value in means[4 * fitted.best.number - 1].items():
        torch.testing.assert_close(averaged.state_dict()[key], value)


def test_embedding_tables_start_as_wide_as_asked(tmp_path: Path) -> None:
    small, wide = (build(tmp_path, **given).embedding_layer for given in ({}, {"embedding_init": 0.05}))
    ours, theirs = (layer.embedding_layers["item_id"].weight for layer in (wide, small))
    assert not ours[0].any()
    torch.testing.assert_close(ours, theirs * 500)
    assert theirs[1:].std().item() == pytest.approx(1e-4, rel=0.3)


def test_linear_layers_start_as_wide_as_asked(tmp_path: Path) -> None:
    """Those of encodings stay as they are; so do their other weights."""
    plain, given = (
        build(tmp_path, position_encoding="cape", dnn_hidden_units=[64], **key).named_parameters()
        for key in ({}, {"linear_init": 0.3})
    )
    changed = {
        name: weight.std().item()
        for (name, weight), (_, other) in zip(given, plain, strict=True)
        if not weight.equal(other)
    }
    assert not any(".pe." in name or "embedding" in name for name in changed)
    assert changed["dnn.mlp.0.weight"] == pytest.approx(0.3, rel=0.1)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("learning_rate_schedule", "linea", "learning_rate_schedule 'linea' is unknown: did you mean 'linear'"),
        ("weight_average", 0, "weight_average must be a positive number or None, got 0"),
        ("weight_average", "much", "weight_average must be a positive number or None, got 'much'"),
        ("embedding_init", -1, "embedding_init must be a positive number, got -1"),
        ("linear_init", 0, "linear_init must be a positive number or None, got 0"),
        ("embedding_init", math.nan, "embedding_init must be a positive number, got nan"),
    ],
)
def test_values_that_mean_nothing_are_one_line(key: str, value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        build(tmp_path, **{key: value})
