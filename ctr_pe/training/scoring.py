"""What a model says about rows it is not trained on, and how good that is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ctr_pe.errors import UserError
from ctr_pe.evaluation import evaluate
from ctr_pe.training.source import with_plans

Floats = npt.NDArray[np.float64]


class Scored(NamedTuple):
    """(N,) each, in the order of the data: labels, click probabilities, and group ids, or None without groups."""

    labels: Floats
    scores: Floats
    groups: npt.NDArray[Any] | None

    def metrics(self, names: Sequence[str]) -> dict[str, float]:
        """The metrics of these names, as :func:`ctr_pe.evaluation.evaluate`; NaN if a score is not finite."""
        if not np.isfinite(self.scores).all():
            return dict.fromkeys(names, math.nan)
        return evaluate(self.labels, self.scores, self.groups, names)


@torch.inference_mode()
def score(model: Any, batches: Iterable[Mapping[str, Tensor]]) -> Scored:
    """Score all rows with a FuxiCTR model, which is in evaluation mode then. Raises UserError if there are none."""
    model.eval()
    labels, scores, groups = [], [], []
    for batch in with_plans(model, batches):
        scores.append(model.forward(batch)["y_pred"].view(-1).double().cpu().numpy())
        labels.append(model.get_labels(batch).view(-1).double().cpu().numpy())
        if model.feature_map.group_id is not None:
            groups.append(model.get_group_id(batch).view(-1).long().cpu().numpy())  # of npz files: floats
    if not scores:
        raise UserError("no rows to evaluate")
    return Scored(np.concatenate(labels), np.concatenate(scores), np.concatenate(groups) if groups else None)
