"""Settings for a log in a small budget: successive halving on validation rows.

All settings are trained for a quarter of the epochs, the better half of them for half of the epochs; the best of these
is the answer. So N settings cost about N / 2 trainings. The first setting is the one that was given, so a search never
answers with one that was worse on the validation rows at half of the epochs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ctr_pe.evaluation.metrics import monitor_mode, monitored
from ctr_pe.study.estimate import measure
from ctr_pe.study.rendering import between
from ctr_pe.training import Outcome, Run, train
from ctr_pe.utils.errors import Diverged, UserError, counted

log = logging.getLogger(__name__)
QUICK = 6
NEAR = ((1, 1), (3, 1), (1, 3), (3, 3), (1 / 3, 1), (1, 1 / 3), (3, 1 / 3), (1 / 3, 3))
"""Factors of the learning rate and of the embeddings' regularisation, the most promising first."""
FEWEST = 1e-4
"""What regularisation is multiplied from if there is none."""


def budget(value: Any) -> int:
    """The number of settings that ``tune`` asks for: 0 for None, ``quick``, or a number from 2 on.

    Raises:
        UserError: anything else.
    """
    if value is None:
        return 0
    if value == "quick":
        return QUICK
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 2:
        raise UserError(f"tune={value!r}: how many settings to try, at least 2, or 'quick' for {QUICK}")
    return int(value)


def settings(params: Mapping[str, Any], count: int, seed: int = 0) -> list[dict[str, Any]]:
    """``count`` settings, of which the first is that of ``params`` itself; after the near ones, at random within a
    factor of 10, with dropout in the tower."""
    rate, decay = float(params.get("learning_rate", 1e-3)), params.get("embedding_regularizer") or FEWEST
    found = [{"learning_rate": rate * one, **_regularizer(decay, other)} for one, other in NEAR[:count]]
    draw = np.random.default_rng(seed)
    while len(found) < count:
        one, other = 10 ** draw.uniform(-1, 1, 2)
        dropout = {"net_dropout": float(draw.choice([0.0, 0.1, 0.2]))}
        found.append({"learning_rate": rate * float(one), **_regularizer(decay, float(other)), **dropout})
    return found


def _regularizer(decay: Any, factor: float) -> dict[str, Any]:
    return {"embedding_regularizer": decay * factor} if isinstance(decay, (int, float)) else {}


def search(run: Run, count: int, trained: Callable[[Run], Outcome] = train) -> dict[str, Any]:
    """The best of ``count`` settings for a run, as hyper-parameters that replace its own; the time is told before.

    Raises:
        UserError: as :func:`~ctr_pe.training.train`; every training diverged.
    """
    epochs = int(run.params.get("epochs", 10))
    tried = settings(run.params, count, run.seed)
    seconds = measure(run).seconds
    log.info("tune: %s, about %s", counted(count, "setting"), between(*(part * count / 2 for part in seconds)))
    for share in (4, 2):
        goodness = [_goodness(replace(run, params={**run.params, **one, "epochs": max(1, epochs // share)}), trained)
                    for one in tried]  # fmt: skip
        order = sorted(range(len(tried)), key=lambda place: (-goodness[place], place))
        if goodness[order[0]] == -math.inf:
            raise UserError("tune: the training of every setting diverged")
        tried = [tried[place] for place in order[: max(1, -(-len(tried) // 2))]]
    log.info("tune: %s", ", ".join(f"{key} {value:g}" for key, value in tried[0].items()))
    return tried[0]


def _goodness(run: Run, trained: Callable[[Run], Outcome]) -> float:
    """The monitor on the validation rows, more being better; minus infinity for a training that diverged."""
    monitor = run.params.get("monitor", "AUC")
    try:
        value = monitored(monitor, trained(run).valid)
    except Diverged:
        return -math.inf
    return -value if monitor_mode(monitor) == "min" else value
