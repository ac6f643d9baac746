"""Settings for a log in a small budget: successive halving on validation rows.

All settings are trained for a quarter of the epochs, the better half of them for half of the epochs; the best of these
is the answer. So N settings cost about N / 2 trainings. The first setting is the one that was given. It is always in
the better half, so a search never answers with one that was worse on the validation rows at half of the epochs.
``CTRRanker(tune=)`` and ``ctr-pe benchmark --tune`` both search by :func:`rungs`.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ctr_pe.evaluation.metrics import monitor_mode, monitored
from ctr_pe.study.estimate import measure
from ctr_pe.study.rendering import between
from ctr_pe.training import Outcome, Run, train
from ctr_pe.utils.errors import Diverged, UserError, counted, option

log = logging.getLogger(__name__)
Setting = Mapping[str, Any]
Rungs = Generator[Sequence[Setting], Sequence[float], Setting]
"""Asks for trainings with each of several settings, is sent how good they were, and returns the chosen setting."""
QUICK = 6
NEAR = ((1, 1), (3, 1), (1, 3), (3, 3), (1 / 3, 1), (1, 1 / 3), (3, 1 / 3), (1 / 3, 3))
"""Factors of the learning rate and of the embeddings' regularisation, the most promising first."""
FEWEST = 1e-4
"""What regularisation is multiplied from if there is none."""
SHARES = (4, 2)
"""Rungs: what part of the epochs their trainings have."""
SEARCHED = ("learning_rate", "embedding_regularizer", "net_dropout")


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
        raise UserError(f"{option('tune', value)}: how many settings to try, at least 2, or 'quick' for {QUICK}")
    return int(value)


def settings(params: Setting, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """``count`` settings, of which the first is that of ``params`` itself; after the near ones, at random within a
    factor of 10, with dropout in the tower."""
    found: list[dict[str, Any]] = [_scaled(params, *factors) for factors in NEAR[:count]]
    draw = np.random.default_rng(seed)
    while len(found) < count:
        rate, decay = 10 ** draw.uniform(-1, 1, 2)
        found.append(_scaled(params, rate, decay) | {"net_dropout": float(draw.choice([0.0, 0.1, 0.2]))})
    return found


def _scaled(params: Setting, rate: float, decay: float) -> dict[str, Any]:
    """Learning rate and regularisation of the embeddings times these factors."""
    found = {key: params[key] for key in SEARCHED[:2] if key in params}
    if rate != 1:
        found["learning_rate"] = _times(params.get("learning_rate") or 1e-3, rate)
    if decay != 1:
        found["embedding_regularizer"] = _times(params.get("embedding_regularizer") or FEWEST, decay)
    return found


def _times(value: Any, factor: float) -> float | str:
    """To three digits; of FuxiCTR's ``l1_l2(x,y)`` each number."""
    if isinstance(value, str) and "(" in value:
        return re.sub(r"(?<=[(,])[^(),]+", lambda one: str(_times(one[0], factor)), value)
    return float(f"{float(value) * factor:.3g}")


def rungs(params: Setting, count: int, seed: int = 0) -> Rungs:
    """The search around ``params``: asks for :func:`settings` with their ``epochs``, the better half of them then with
    more; more is better, and minus infinity a training without an answer.

    Raises:
        UserError: no training has an answer.
    """
    epochs, tried = int(params.get("epochs", 10)), settings(params, count, seed)
    given = tried[0]
    for share in SHARES:
        goodness = yield [{**one, "epochs": max(1, epochs // share)} for one in tried]
        order = sorted(range(len(tried)), key=lambda place: (-goodness[place], place))
        if goodness[order[0]] == -math.inf:
            raise UserError("tune: the training of every setting diverged")
        ranked = [tried[place] for place in order]
        half = ranked[: max(1, -(-len(ranked) // 2))]
        tried = half if given in half else [*half[:-1], given]
    return ranked[0]


def search(run: Run, count: int, trained: Callable[[Run], Outcome] = train) -> dict[str, Any]:
    """The best of ``count`` settings for a run, as hyper-parameters that replace its own; the time is told before.

    Raises:
        UserError: as :func:`~ctr_pe.training.train`; every training diverged.
    """
    search = rungs(run.params, count, run.seed)
    tried, seconds = next(search), measure(run).seconds
    log.info("tune: %s, about %s", counted(count, "setting"), between(*(part * count / 2 for part in seconds)))
    while True:
        try:
            tried = search.send([_trained(replace(run, params={**run.params, **one}), trained) for one in tried])
        except StopIteration as end:
            log.info("tune: %s", ", ".join(f"{key} {value}" for key, value in end.value.items()))
            return dict(end.value)


def _trained(run: Run, trained: Callable[[Run], Outcome]) -> float:
    try:
        return goodness(run.params, trained(run).valid)
    except Diverged:
        return -math.inf


def goodness(params: Setting, metrics: Mapping[str, float]) -> float:
    """The monitor of a training, more being better; minus infinity if it has no number."""
    monitor = params.get("monitor", "AUC")
    value = monitored(monitor, metrics)
    return (-value if monitor_mode(monitor) == "min" else value) if math.isfinite(value) else -math.inf
