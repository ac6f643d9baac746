"""What a model says about rows it is not trained on, and how good that is."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ctr_pe.evaluation import evaluate
from ctr_pe.training.source import prefetch_plans
from ctr_pe.utils import distributed
from ctr_pe.utils.errors import UserError

Floats = npt.NDArray[np.float64]


class Scored(NamedTuple):
    """(N,) each, in the order of the data: labels, click probabilities, and group ids, or None without groups;
    weights, or None where metrics are not weighted."""

    labels: Floats
    scores: Floats
    groups: npt.NDArray[Any] | None
    weights: Floats | None = None

    def metrics(self, names: Sequence[str]) -> dict[str, float]:
        """The metrics of these names, as :func:`ctr_pe.evaluation.evaluate`; NaN if a score is not finite."""
        if not np.isfinite(self.scores).all():
            return dict.fromkeys(names, math.nan)
        return evaluate(self.labels, self.scores, self.groups, names, self.weights)


@torch.inference_mode()
def score(model: Any, batches: Iterable[Mapping[str, Tensor]]) -> Scored:
    """Score all rows with a FuxiCTR model, which is in evaluation mode then. Raises UserError if there are none.

    Several processes score every ``share``-th batch each, and all of them get the scores of all: gAUC needs the rows of
    a user side by side, and each decides by the metrics how to go on.
    """
    model.eval()
    own = [_scored(model, batch) for batch in prefetch_plans(model, batches)]
    if getattr(batches, "is_shared", False):
        own = [part for part in chain.from_iterable(zip_longest(*distributed.all_gather(own))) if part is not None]
    if not own:
        raise UserError("no rows to evaluate")
    labels, scores, *others = zip(*own, strict=True)
    groups, weights = (None if parts[0] is None else np.concatenate(parts) for parts in others)
    return Scored(np.concatenate(labels), np.concatenate(scores), groups, weights)


def evaluated(model: Any, batches: Iterable[Mapping[str, Tensor]], metrics: Sequence[str]) -> dict[str, float]:
    """Metrics of all rows, which are logged."""
    found = score(model, batches).metrics(metrics)
    logging.info("[Metrics] %s", " - ".join(f"{name}: {value:.6f}" for name, value in found.items()))
    return found


def _scored(model: Any, batch: Mapping[str, Tensor]) -> Scored:
    scores = model.forward(batch)["y_pred"].view(-1).double().cpu().numpy()
    labels, groups = model.get_labels(batch).view(-1).double().cpu().numpy(), None
    if model.feature_map.group_id is not None:
        groups = model.get_group_id(batch).view(-1).long().cpu().numpy()  # of npz files: floats
    weights = None
    if getattr(model, "weighted_metrics", False):
        weights = batch[model.weight_field].view(-1).double().cpu().numpy()
    return Scored(labels, scores, groups, weights)
