"""Evaluation: seconds for scores as many as Amazon Electronics' test split has, and gAUC against FuxiCTR's."""

from __future__ import annotations

import statistics
import time

import numpy as np
import numpy.typing as npt

from benchmark.speed.cases import Settings
from benchmark.speed.timing import Figure, alternate, say
from ctr_pe.evaluation import evaluate

Array = npt.NDArray[np.generic]


def seconds(settings: Settings) -> Figure:
    """All three metrics of 400,000 rows in 190,000 groups."""
    rows, groups = settings.size(400_000, 40_000), settings.size(190_000, 19_000)
    labels, scores, group = table(rows, groups)
    say(f"gAUC, AUC and logloss of {rows:,} rows in {groups:,} groups")
    evaluate(labels, scores, group)
    taken = []
    for _ in range(settings.repeats):
        start = time.perf_counter()
        evaluate(labels, scores, group)
        taken.append(time.perf_counter() - start)
    return Figure(taken, ours=statistics.median(taken), unit="s", details={"rows": rows, "groups": groups})


def fuxictr(settings: Settings) -> Figure:
    """FuxiCTR's gAUC over ours: 40,000 users with two rows and a few more, as the test split has."""
    from fuxictr.metrics import evaluate_metrics

    groups = settings.size(40_000, 300)
    rows = groups * 21 // 10
    labels, scores, group = table(rows, groups)

    def ours() -> float:
        return evaluate(labels, scores, group, ["gAUC"])["gAUC"]

    def theirs() -> float:
        return float(evaluate_metrics(labels, scores, ["gAUC"], group)["gAUC"])

    say(f"gAUC of {rows:,} rows in {groups:,} groups")
    difference = abs(ours() - theirs())
    if not difference < 1e-9:
        raise ValueError(f"the two gAUC differ by {difference}")
    timed = alternate(lambda _: ours(), lambda _: theirs(), settings.repeats, warm_up=0)  # both are warm
    return timed.speedup("FuxiCTR's evaluate_metrics", rows=rows, groups=groups, difference=difference)


def table(rows: int, groups: int) -> tuple[Array, Array, Array]:
    """Labels, scores with ties, and groups, each at least once."""
    random = np.random.default_rng(0)
    group = np.concatenate([np.arange(groups), random.integers(0, groups, rows - groups)])
    return random.integers(0, 2, rows), random.random(rows).round(3), random.permutation(group)
