"""Settings by successive halving: in half as many trainings, never worse than those that were given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctr_pe import CTRRanker
from ctr_pe.models.sections import check_params
from ctr_pe.study import halving
from ctr_pe.study.estimate import Estimate
from ctr_pe.training import Outcome, Run
from ctr_pe.utils.errors import Diverged, UserError
from tests.data.logs.test_columns import tables

PARAMS = {"learning_rate": 1e-3, "embedding_regularizer": 1e-4, "epochs": 8, "monitor": "gAUC"}


def outcome(value: float) -> Outcome:
    return Outcome({}, 1, 0.0, np.zeros(0, np.float32), 0, valid={"gAUC": value, "logloss": -value})


@pytest.fixture(autouse=True)
def _unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halving, "measure", lambda run: Estimate(0.1, 0.1, (1, 1), (1, 1)))


@pytest.mark.parametrize("monitor", ["gAUC", "logloss"])
def test_the_best_at_half_of_the_epochs_is_the_answer(monitor: str) -> None:
    asked: list[tuple[float, int]] = []

    def train(run: Run) -> Outcome:
        asked.append((run.params["learning_rate"], run.params["epochs"]))
        return outcome(-abs(run.params["learning_rate"] - 3e-3))

    params = {**PARAMS, "monitor": monitor}
    found = halving.search(Run("DIN", Path("x"), "cape", 0, params=params), 8, train)
    assert found["learning_rate"] == pytest.approx(3e-3)
    assert [epochs for _, epochs in asked] == [2] * 8 + [4] * 4


def test_the_given_setting_is_compared_with_the_best_at_half_of_the_epochs() -> None:
    """One that only needs more epochs than the others is not lost in the first rung."""

    def train(run: Run) -> Outcome:
        given = run.params["learning_rate"] == 1e-3 and run.params["embedding_regularizer"] == 1e-4
        return outcome((0.9 if run.params["epochs"] == 4 else 0.1) if given else 0.5)

    assert halving.search(Run("DIN", Path("x"), "cape", 0, params=PARAMS), 6, train) == halving.settings(PARAMS, 1)[0]


def test_trainings_that_diverge_are_no_answer() -> None:
    def train(run: Run) -> Outcome:
        if run.params["learning_rate"] > 1e-3:
            raise Diverged("not finite")
        return outcome(run.params["learning_rate"])

    assert halving.search(Run("DIN", Path("x"), "cape", 0, params=PARAMS), 4, train)["learning_rate"] == 1e-3
    with pytest.raises(UserError, match="the training of every setting diverged"):
        halving.search(Run("DIN", Path("x"), "cape", 0, params={**PARAMS, "learning_rate": 1.0}), 4, train)


def test_the_first_setting_is_the_given_one_and_more_are_drawn() -> None:
    found = halving.settings(PARAMS, 20)
    assert found[0] == {key: PARAMS[key] for key in ("learning_rate", "embedding_regularizer")}
    for given in ({}, {"embedding_regularizer": None}, {"embedding_regularizer": "l1_l2(1e-5, 1e-4)"}):
        others = halving.settings({"learning_rate": 1e-3, **given}, 8)
        assert others[0] == {"learning_rate": 1e-3, **given}
        assert len({str(one) for one in others}) == 8
        check_params("DIN", others[2])
    assert len({str(one) for one in found}) == 20
    assert halving.settings(PARAMS, 20) == found


@pytest.mark.parametrize("wrong", [1, 0, -3, "fast", 2.5, True])
def test_a_budget_is_a_number_from_two_on_or_quick(wrong: Any) -> None:
    with pytest.raises(UserError, match="how many settings to try, at least 2, or 'quick'"):
        halving.budget(wrong)
    assert (halving.budget(None), halving.budget("quick"), halving.budget(np.int64(3))) == (0, 6, 3)


@pytest.mark.slow
def test_the_estimator_trains_with_what_it_found(caplog: pytest.LogCaptureFixture) -> None:
    given = tables()
    with caplog.at_level("INFO"):
        ranker = CTRRanker("DIN", "cape", epochs=2, embedding_dim=4, tune="quick").fit(given["interactions"])
    assert ranker.tuned_.keys() == {"learning_rate", "embedding_regularizer"}
    assert ranker.scorer_.config["params"]["learning_rate"] == ranker.tuned_["learning_rate"]
    assert ranker.scorer_.config["params"]["epochs"] == 2
    assert any(record.getMessage().startswith("tune: 6 settings, about ") for record in caplog.records)
