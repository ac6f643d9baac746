"""Trainings that cannot succeed stop, and say where."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ctr_pe.training.divergence import DivergenceDetector, Gradients
from ctr_pe.utils.errors import Diverged
from tests.support.models import Rows, batch
from tests.support.models import build as build_model

build = partial(build_model, "DIN")
FOUR = Rows(*(batch([3, 2, 5, 1], seed=seed) for seed in range(4)))


def fit(model: Any, epochs: int = 3) -> str:
    """What the error says."""
    with pytest.raises(Diverged) as error:
        model.fit(FOUR, epochs=epochs, validation_data=Rows())
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("tables", [None, "lazy_adam"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite(value: float, tables: str | None, tmp_path: Path) -> None:
    model, steps = build(tmp_path, table_optimizer=tables), list[int]()
    compute = model.compute_loss

    def compute_loss(*given: Any) -> Tensor:
        steps.append(len(steps))
        return compute(*given) * (value if len(steps) == 7 else 1.0)

    model.compute_loss = compute_loss
    said = fit(model)
    assert said.startswith(f"diverged in epoch 2, batch 3: the loss is {value}; gradients not finite: ")
    assert said.endswith(": try a lower learning_rate")
    assert len(steps) == 7


@pytest.mark.parametrize("tables", [None, "lazy_adam"])
def test_a_gradient_that_is_not_finite(tables: str | None, tmp_path: Path) -> None:
    model = build(tmp_path, table_optimizer=tables)
    model.dnn.mlp[0].bias.register_hook(lambda gradient: gradient * math.inf)
    name = next(name for name, one in model.named_parameters() if one is model.dnn.mlp[0].bias)
    assert fit(model) == f"diverged in epoch 1, batch 1: gradients not finite: {name}: try a lower learning_rate"


def test_running_statistics_that_are_not_finite(tmp_path: Path) -> None:
    model = build(tmp_path, batch_norm=True)
    model.dnn.register_buffer("seen", torch.tensor(math.inf))
    assert "epoch 1, batch 4: not finite: dnn.seen: " in fit(model)


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_loss_that_stays_above_a_constant_s(epochs: int, tmp_path: Path) -> None:
    model = build(tmp_path, learning_rate=1e3, embedding_init=1.0)
    with pytest.raises(Diverged) as error:
        model.fit(Rows(*FOUR.batches * 6), epochs=epochs, validation_data=Rows())
    said = str(error.value)
    assert f"epoch {min(2, epochs)}, batch 24: each loss of the epoch is " in said
    assert "that of a constant 0.6931" in said
    assert "largest gradient: " in said


class Stub:
    """What the guard reads of a model: here the gradients of the last step."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.gradients: Gradients | None = None

    def get_labels(self, rows: dict[str, Tensor]) -> Tensor:
        return rows["label"].view(-1, 1)


def guarded(losses: list[list[float]], rate: float = 0.5, every: int = 1) -> str:
    """What a guard says of the losses of each epoch; nothing if it lets them pass."""
    guard = DivergenceDetector(Stub())
    guard.every = every
    rows = {"label": (torch.arange(100) < 100 * rate).float()}
    try:
        for number, epoch in enumerate(losses, 1):
            for index, loss in enumerate(epoch, 1):
                guard.step(number, index, torch.tensor(loss), rows)
            guard.end_epoch(number, len(epoch), last=number == len(losses))
    except Diverged as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("losses", "rate", "diverged"),
    [
        ([[0.7, 5.0, 6.0], [7.0, 5.0, 8.0]], 0.5, True),
        ([[0.7, 5.0, 6.0], [7.0, 0.7, 8.0]], 0.5, False),  # one batch is better
        ([[0.7, 5.0, 6.0], [0.6, 0.6, 0.6], [7.0, 5.0, 8.0]], 0.5, False),  # not twice in a row
        ([[0.7, 0.6, 0.5]], 0.1, False),  # slow: a constant would give 0.325
        ([[0.7, 0.75, 0.72], [0.71, 0.72, 0.73]], 0.5, False),  # noise
        ([[0.2, 0.5, 0.6], [0.4, 0.5, 0.6]], 0.5, False),  # of weights that were trained before
        ([[3.0, 2.0, 2.5], [2.0, 2.5, 2.4]], 0.5, False),  # with regularisation from the start
        ([[0.7]], 0.5, False),
        ([[0.7, 9.0]], 0.5, True),
    ],
)
def test_what_stays_above(losses: list[list[float]], rate: float, diverged: bool) -> None:
    many = [[*epoch, *epoch[1:] * 20] for epoch in losses]
    assert bool(guarded(many, rate)) == diverged
    assert not guarded(losses, rate)  # so few may be noise


def test_steps_that_are_looked_at_together_are_told_apart() -> None:
    losses = [[0.7] * 9, [0.7, 0.7, math.nan, 0.7, math.nan, 0.7]]
    assert "epoch 2, batch 3: the loss is nan" in guarded(losses, every=5)
    assert guarded(losses, every=100) == guarded(losses)


def test_a_gpu_is_not_waited_for_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(
        DivergenceDetector, "look", lambda guard: looks.append(len(guard.unseen)) or guard.unseen.clear()
    )
    model = Stub()
    model.device = torch.device("cuda")
    monkeypatch.setattr(torch, "zeros", lambda shape, device: torch.tensor(0.0))
    guard = DivergenceDetector(model)
    for step in range(1, 251):
        guard.step(1, step, torch.tensor(0.7), {"label": torch.ones(2)})
    assert looks == [100, 100]


def test_gradients_are_named(tmp_path: Path) -> None:
    model = build(tmp_path)
    model.train().train_step(FOUR.batches[0])
    norms = model.gradients.norms
    assert norms.keys() == {name for name, one in model.named_parameters() if one.grad is not None}
    assert torch.stack(list(norms.values())).norm() == pytest.approx(model.gradients.norm.item())


def test_strong_regularisation_of_a_model_that_learns_is_no_divergence(tmp_path: Path) -> None:
    """The loss of the rows falls while the penalty of growing embeddings lifts the sum above a constant's loss."""
    model = build(tmp_path)
    model.get_labels = lambda rows: torch.tensor([[0.0], [1.0]])
    detector = DivergenceDetector(model)
    for passed in (1, 2, 3):
        for number in range(1, 31):
            model.penalty = torch.tensor(0.01 if passed == 1 else 1.0)  # of embeddings that have grown
            detector.step(passed, number, torch.tensor(0.69 / passed) + model.penalty, {})
        detector.end_epoch(passed, 30, last=passed == 3)
    model.penalty = 0.0

    def epoch(number: int) -> None:
        for place in range(1, 31):
            detector.step(number, place, torch.tensor(0.9), {})
        detector.end_epoch(number, 30, last=False)

    epoch(4)
    with pytest.raises(Diverged, match="each loss of the epoch is"):
        epoch(5)
