"""Epochs, early stopping and checkpoints: FuxiCTR's rules, without the places where it goes wrong unnoticed."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from fuxictr.pytorch.models import BaseModel
from torch import Tensor, nn

from ctr_pe.pe.base import PositionEncoding
from ctr_pe.pe.vectors import Attended
from ctr_pe.training import fit, save, score
from ctr_pe.utils.errors import UserError
from tests.support.models import Rows, batch, weights_of
from tests.support.models import build as build_model

build = partial(build_model, "DIN")


def with_results(model: Any, *values: float | dict[str, float]) -> Any:
    """The model, whose evaluations give these values."""
    results = iter(values)

    def evaluate(*_: Any, **__: Any) -> dict[str, float]:
        value = next(results)
        return value if isinstance(value, dict) else {"AUC": value}

    model.evaluate = evaluate
    return model


def test_fit_keeps_the_best_epoch(tmp_path: Path) -> None:
    model, states = with_results(build(tmp_path), 0.6, 0.9, 0.7, 0.7), []
    evaluate = model.evaluate
    model.evaluate = lambda *args, **options: states.append(weights_of(model)) or evaluate()
    fitted = model.fit(Rows(), epochs=9, validation_data=Rows())
    assert [epoch.metrics["AUC"] for epoch in fitted.history] == [0.6, 0.9, 0.7, 0.7]  # stopped after two without gain
    assert fitted.best is fitted.history[1]
    assert all(torch.equal(value, states[1][key]) for key, value in model.state_dict().items())


def test_without_save_best_only_the_last_weights_stay(tmp_path: Path) -> None:
    model = with_results(build(tmp_path, save_best_only=False), 0.6, 0.9, 0.7)
    assert model.fit(Rows(), epochs=3, validation_data=Rows()).best.number == 3


@pytest.mark.parametrize("changes", [{}, {"eval_steps": 3}, {"monitor": {"AUC": 2, "logloss": -1}, "shuffle": False}])
def test_the_epochs_are_fuxictrs_own(changes: dict[str, Any], tmp_path: Path) -> None:
    """The same weights, number for number, as BaseModel.fit ends with."""
    rows, valid = Rows(*(batch([3, 2, 5, 1], seed=seed) for seed in range(4))), Rows()
    ours, theirs = (build(tmp_path, learning_rate=0.05, **changes) for _ in range(2))
    history = ours.fit(rows, epochs=6, validation_data=valid).history
    BaseModel.fit(theirs, rows, epochs=6, validation_data=valid)
    assert len(history) > 2
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in ours.state_dict().items())
    assert ours.optimizer.param_groups[0]["lr"] == theirs.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("changes", [{}, {"eval_steps": 1}])
def test_fit_can_be_called_again(changes: dict[str, Any], tmp_path: Path) -> None:
    """With data of another length: no evaluation at steps that nobody asked for, no best value of an earlier one."""
    long = Rows(*(batch([3, 2], seed=seed) for seed in range(5)))
    model, short = build(tmp_path, **changes), Rows(batch([3, 2]))
    first = model.fit(long, epochs=2, validation_data=Rows())
    again = model.fit(short, epochs=3, validation_data=Rows())
    every = model._eval_steps or 5
    assert [epoch.steps for epoch in first.history] == [every * n for n in range(1, 11)][: len(first.history)]
    assert [epoch.steps for epoch in again.history] == [1, 2, 3][: len(again.history)]
    assert again.history[0].number == 1
    assert again.best in again.history


def test_a_step_needs_no_fit_and_clips_by_the_models_own_norm(tmp_path: Path) -> None:
    models = [build(tmp_path, **given) for given in ({}, {"max_gradient_norm": 10}, {"max_gradient_norm": 1e-3})]
    for model in models:
        nn.init.normal_(model.dnn.mlp[0].weight)
        model.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        torch.manual_seed(0)
    before = weights_of(models[2])
    for model in models:
        model.load_state_dict(before)
        model.train().train_step(batch([3, 2, 5]))
    moved = [
        torch.cat([(value - before[key]).flatten() for key, value in model.named_parameters()]).norm().item()
        for model in models
    ]
    assert moved[0] == moved[1] > 1e-2
    assert moved[2] == pytest.approx(1e-3, rel=1e-2)


def test_fit_takes_all_parameters_as_fuxictrs_script_gives_them(tmp_path: Path) -> None:
    params = {"epochs": 2, "max_gradient_norm": 1.0, "learning_rate": 0.1, "model": "DIN", "dnn_hidden_units": [8]}
    model = build(tmp_path)
    assert len(model.fit(Rows(), validation_data=Rows(), **params).history) == 2
    assert model._max_gradient_norm == 1.0
    with pytest.raises(UserError, match="did you mean 'epochs'"):
        model.fit(Rows(), validation_data=Rows(), epoch=2)


def test_a_stale_checkpoint_is_never_loaded(tmp_path: Path) -> None:
    build(tmp_path).fit(Rows(), epochs=1, validation_data=Rows())
    with pytest.raises(UserError, match="eval_steps=1000, but training has 2 steps"):
        build(tmp_path, eval_steps=1000).fit(Rows(), epochs=1, validation_data=Rows())
    with pytest.raises(UserError, match="training has 0 steps: none would be evaluated"):
        build(tmp_path).fit(Rows(), epochs=0, validation_data=Rows())
    model = with_results(build(tmp_path), 0.6)
    model.fit(Rows(), epochs=1, validation_data=Rows())
    stopped = with_results(build(tmp_path), math.nan)
    with pytest.raises(UserError, match="NaN"):
        stopped.fit(Rows(), epochs=1, validation_data=Rows())
    assert not Path(stopped.checkpoint).exists()


def test_the_history_says_what_each_epoch_gave(tmp_path: Path) -> None:
    model, losses = build(tmp_path, eval_steps=3), []
    step = model.train_step

    def train_step(rows: dict[str, Tensor]) -> Tensor:
        losses.append(step(rows))
        return losses[-1]

    model.train_step = train_step
    rows, states = Rows(*(batch([3, 2, 5], seed=seed) for seed in range(4))), []
    history = fit(model, rows, Rows(), epochs=2, progress=states.append).history
    assert [(epoch.number, epoch.steps) for epoch in history] == [(1, 3), (2, 6)]
    means = [torch.stack(losses[:3]).mean(), torch.stack(losses[3:6]).mean()]
    assert [epoch.loss for epoch in history] == pytest.approx([mean.item() for mean in means], abs=1e-6)
    assert all(epoch.seconds > 0 for epoch in history)
    assert [state["valid"] for state in states if "valid" in state] == [epoch.metrics for epoch in history]
    assert [state["batch"] for state in states if "batch" in state] == [0, 1, 2, 3] * 2


def test_nan_monitor_is_an_error_at_first_and_no_improvement_later(tmp_path: Path) -> None:
    one_class = batch([3, 2])
    one_class["label"] = torch.ones(2)
    with pytest.raises(UserError, match=r"monitor \{'AUC': 1\} is NaN on the validation data: labels of one class"):
        build(tmp_path).fit(Rows(), epochs=1, validation_data=Rows(one_class))
    for monitor, values in (("AUC", [0.6, math.nan, 0.5]), ("logloss", [0.6, math.nan, 0.7])):
        model = with_results(build(tmp_path, monitor=monitor), *({monitor: value} for value in values))
        assert model.fit(Rows(), epochs=3, validation_data=Rows()).best.number == 1


def test_a_weighted_monitor_with_nan_is_no_improvement(tmp_path: Path) -> None:
    model = build(tmp_path, monitor={"logloss": -1, "AUC": 1})
    results = [{"AUC": 0.6, "logloss": 0.5}, {"AUC": math.nan, "logloss": 0.1}, {"AUC": 0.5, "logloss": 0.5}]
    assert with_results(model, *results).fit(Rows(), epochs=3, validation_data=Rows()).best.number == 1


def test_a_missing_monitor_metric_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="monitor 'AUCC' is unknown: did you mean 'AUC'"):
        build(tmp_path, monitor={"AUCC": 1})
    model = with_results(build(tmp_path, monitor="logloss"), 0.5)
    with pytest.raises(UserError, match="monitor 'logloss' is not among the metrics"):
        model.fit(Rows(), validation_data=Rows())


def test_no_validation_data(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="fit needs validation_data"):
        build(tmp_path).fit(Rows(), epochs=1)


def test_scores_that_are_not_finite_give_nan_metrics(tmp_path: Path) -> None:
    model = build(tmp_path)
    nn.init.constant_(model.dnn.mlp[0].weight, math.nan)
    assert all(math.isnan(value) for value in model.evaluate(Rows()).values())


def test_weights_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, file = build(tmp_path), tmp_path / "weights"
    save(model, file)
    before = file.read_bytes()

    def broken(tensors: Any, path: str) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "disk full")

    monkeypatch.setattr(safetensors.torch, "save_file", broken)
    with pytest.raises(UserError, match="weights: disk full"):
        save(model, file)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.glob("weights*")] == ["weights"]


def test_auxiliary_losses_are_told_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Small(PositionEncoding):
        loss_names = ("smallness",)

        def losses(self, attended: Sequence[Attended]) -> dict[str, Tensor]:
            return {"smallness": sum(0.0 * one.logits.sum() for one in attended) + torch.tensor(2.0)}

    model = build(tmp_path)
    model.attentions[0].pe = Small(model.attentions[0].pe.dim, 6)
    with caplog.at_level(logging.INFO):
        history = model.fit(Rows(), epochs=2, validation_data=Rows()).history
    assert [epoch.auxiliary for epoch in history] == [{"smallness": 2.0}] * 2
    assert sum(line.endswith("of which smallness 2.000000") for line in caplog.messages) == 2


def test_scores_come_in_the_order_of_the_data(tmp_path: Path) -> None:
    model, rows = build(tmp_path), Rows()
    labels, scores, groups, _ = score(model, rows)
    assert labels.tolist() == [0, 1, 0, 1] * 2
    assert groups is not None
    assert groups.tolist() == [0, 0, 0, 1] * 2
    assert torch.allclose(torch.from_numpy(scores[4:]).float(), model(rows.batches[1])["y_pred"].view(-1))
    assert (model.predict(rows) == scores).all()
    with pytest.raises(UserError, match="no rows"):
        score(model, [])
