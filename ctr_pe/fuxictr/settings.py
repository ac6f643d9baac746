"""What a FuxiCTR model was told about its training, which ``BaseModel`` keeps in private attributes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_GRADIENT_NORM = 10.0
"""FuxiCTR's default, which its ``fit`` sets."""


@dataclass(frozen=True)
class TrainingSettings:
    """Keys of a model's config that the training loop follows; ``monitor``: a weight per metric.

    FuxiCTR's own models know neither ``learning_rate_schedule`` nor ``weight_average`` and have their defaults.
    """

    monitor: Mapping[str, float]
    early_stop_patience: int
    eval_steps: int | None
    save_best_only: bool
    reduce_lr_on_plateau: bool
    verbose: int
    learning_rate_schedule: str
    weight_average: float | None


def training_settings(model: Any) -> TrainingSettings:
    """The settings of any FuxiCTR model. One that has no ``max_gradient_norm`` yet gets FuxiCTR's default."""
    if not hasattr(model, "_max_gradient_norm"):
        model._max_gradient_norm = MAX_GRADIENT_NORM
    return TrainingSettings(
        monitor=model._monitor.kv_pairs,
        early_stop_patience=model._early_stop_patience,
        eval_steps=model._eval_steps,
        save_best_only=model._save_best_only,
        reduce_lr_on_plateau=model._reduce_lr_on_plateau,
        verbose=model._verbose,
        learning_rate_schedule=getattr(model, "learning_rate_schedule", "constant"),
        weight_average=getattr(model, "weight_average", None),
    )
