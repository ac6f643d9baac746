"""evaluate(): equal to FuxiCTR's metrics, defined at the edges, refuses what it cannot measure."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ctr_pe.evaluation import evaluate
from ctr_pe.utils.errors import UserError

Table = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.int64]]


def random_table(seed: int, rows: int = 400, groups: int = 60, decimals: int = 1) -> Table:
    """Rows with many ties, one-class groups and one-row groups, in random order."""
    random = np.random.default_rng(seed)
    users = np.concatenate([random.integers(0, groups, rows - 10), np.arange(groups, groups + 10)])
    labels = (random.random(rows) < random.random(groups + 10)[users] ** 3).astype(np.int64)
    scores = random.random(rows).round(decimals)
    order = random.permutation(rows)
    return labels[order], scores[order], users[order] * 7919 - 5000


@pytest.mark.parametrize("seed", range(4))
def test_equal_to_fuxictr(seed: int) -> None:
    from fuxictr.metrics import evaluate_metrics

    labels, scores, users = random_table(seed, decimals=1 if seed % 2 else 12)
    scores[:3] = 0.0, 1.0, 1.0  # logloss must clip the same way
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn renames an argument
        expected = evaluate_metrics(labels, scores, ["gAUC", "AUC", "logloss"], users)
    found = evaluate(labels, scores, users)
    assert list(found) == ["gAUC", "AUC", "logloss"]
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=0, abs=1e-12)


RANKED = ["MRR", "NDCG(k=1)", "NDCG(k=5)", "NDCG(k=1000)", "NDCG(3)", "NDCG()"]


@pytest.mark.parametrize("seed", range(4))
def test_every_metric_is_fuxictrs(seed: int) -> None:
    """Also in ties, in groups of one row or one class, and in one group larger than all others together."""
    from fuxictr.metrics import evaluate_metrics

    labels, scores, users = random_table(seed, decimals=1 if seed % 2 else 12)
    users[::3] = -1
    names = ["avgAUC", *RANKED, "binary_crossentropy", "gAUC", "logloss", "AUC"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = evaluate_metrics(labels.astype(float), scores, names, users)
    found = evaluate(labels, scores, users, names)
    assert list(found) == names
    assert found == pytest.approx(dict(expected), rel=0, abs=1e-12)
    for name, same in {
        "NDCG@5": "NDCG(k=5)",
        "NDCG(k = 5)": "NDCG(k=5)",
        "NDCG@1": "NDCG()",
        "MRR@1000": "MRR",
    }.items():
        assert evaluate(labels, scores, users, name)[name] == found[same]


def test_metrics_of_ranks_by_hand() -> None:
    labels = [0, 1, 1, 0, 1, 0, 0, 1]
    scores = [0.9, 0.8, 0.1, 0.5, 0.3, 0.7, 0.2, 0.4]
    users = ["a", "a", "a", "a", "b", "b", "c", "d"]  # clicked ranks: a 2 and 4 of 4, b 2 of 2, c none, d 1 of 1
    found = evaluate(labels, scores, users, ["MRR", "MRR@2", "HR@1", "HR@2", "HitRate(k=2)", "NDCG@2"])
    assert found["MRR"] == pytest.approx(((1 / 2 + 1 / 4) / 2 + 1 / 2 + 0 + 1) / 4)
    assert found["MRR@2"] == pytest.approx((1 / 2 / 2 + 1 / 2 + 0 + 1) / 4)
    assert (found["HR@1"], found["HR@2"], found["HitRate(k=2)"]) == (0.25, 0.75, 0.75)
    gain = 1 / math.log2(3)
    assert found["NDCG@2"] == pytest.approx((gain / (1 + gain) + gain + 0 + 1) / 4)


def test_gauc_by_hand() -> None:
    labels = [1, 0, 0, 1, 0, 1, 1]
    scores = [0.9, 0.1, 0.9, 0.3, 0.5, 0.2, 0.8]
    users = ["a", "a", "a", "b", "b", "c", "c"]  # a: pairs 1 and 1/2 of 2; b: 0 of 1; c: clicks only
    assert evaluate(labels, scores, users, ["gAUC"])["gAUC"] == pytest.approx((3 * 0.75 + 2 * 0.0) / 5)


def test_independent_of_row_order_and_group_names() -> None:
    labels, scores, users = random_table(5)
    order = np.random.default_rng(0).permutation(len(labels))
    expected = evaluate(labels, scores, users)
    assert evaluate(labels[order], scores[order], users[order]) == pytest.approx(expected, abs=1e-13)
    for names in (users.astype(str), users.astype(str).astype(object), users.astype(np.int32), -users):
        # Users may come in another order, and so may the terms of the sum.
        assert evaluate(labels, scores, names)["gAUC"] == pytest.approx(expected["gAUC"], abs=1e-13)


def test_accepts_tensors_of_any_precision() -> None:
    labels, scores, users = random_table(6)
    expected = evaluate(labels, scores, users)
    tensors = torch.tensor(scores, requires_grad=True), torch.tensor(users)
    assert evaluate(torch.tensor(labels), *tensors) == expected
    half = torch.tensor(scores).bfloat16()
    expected = evaluate(labels, half.double(), users)
    assert evaluate(torch.tensor(labels).bool()[:, None], half[:, None], users) == expected


def test_one_class_is_nan_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = evaluate([1, 1, 1], [0.1, 0.5, 0.2], [0, 0, 1])
        assert math.isnan(found["gAUC"])
        assert math.isnan(evaluate([1, 1, 1], [0.1, 0.5, 0.2], [0, 0, 1], "avgAUC")["avgAUC"])
        assert math.isnan(found["AUC"])
        assert math.isfinite(found["logloss"])
        found = evaluate([1, 1, 0], [0.1, 0.5, 0.2], [0, 0, 1])
        assert math.isnan(found["gAUC"])
        assert found["AUC"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 1], [0.1, float("nan")], [0, 0]), "scores must be finite: 1 of 2"),
        (([0, 2], [0.1, 0.2], [0, 0]), "labels must be 0 or 1: 1 of 2"),
        (([0, float("nan")], [0.1, 0.2], [0, 0]), "labels must be 0 or 1"),
        (([0, 1, 1], [0.1, 0.2], [0, 0]), "labels have 3 rows, scores 2"),
        (([0, 1], [0.1, 0.2], [0]), "group_id has 1 rows, labels 2"),
        (([], [], []), "empty"),
        (([0, 1], [0.1, 0.2]), "gAUC needs group_id"),
        (([0, 1], [0.1, 0.2], [0, 0], ["AUC", "log_loss"]), "unknown metric 'log_loss': did you mean 'logloss'?"),
        (([0, 1], [0.1, 0.2], [0, 0], "NDGC@7"), "unknown metric 'NDGC@7': did you mean 'NDCG@7'?"),
        (([0, 1], [0.1, 0.2], [0, 0], "NDCG@0"), "unknown metric 'NDCG@0': did you mean"),
        (([0, 1], [0.1, 0.2], [0, 0], "MRR()"), "unknown metric 'MRR()': did you mean 'MRR'?"),
        (([0, 1], [0.1, 0.2], None, ["AUC", "HR@3"]), "HR@3 needs group_id"),
        (([0, 1], [0.1, 1.2], [0, 0]), "logloss needs probabilities: 1 of 2"),
        (([0, 1], [0.1, 0.2], [0.5, 0.5]), "group_id must be integers or strings"),
        (([0, 1], [0.1, 0.2], ["a", None]), "group_id must be all integers or all strings"),
        (([0, 1], [[0.1, 0.2], [0.1, 0.2]], [0, 0]), "scores must have one dimension"),
        (([0, 1], [[0.1, 0.2], [0.1]], [0, 0]), "scores must be one column"),
        ((["0", "1"], [0.1, 0.2], [0, 0]), "labels must be numbers"),
    ],
)
def test_refuses_in_one_line(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(UserError) as error:
        evaluate(*arguments)  # type: ignore[arg-type]
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_auc_accepts_scores_that_are_not_probabilities() -> None:
    assert evaluate([0, 1, 1], [-3.0, 7.0, 1.0], metrics="AUC") == {"AUC": 1.0}


def test_imports_numpy_only() -> None:
    code = "import sys, ctr_pe.evaluation; assert not {'torch', 'sklearn', 'fuxictr', 'polars'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
