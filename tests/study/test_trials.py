"""Trials: every encoding takes its own best settings, chosen on validation rows by equally many trainings."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from ctr_pe.cli import main
from ctr_pe.config.yaml import parse_overrides
from ctr_pe.data.synthetic.bursts import generate
from ctr_pe.study import halving
from ctr_pe.study.benchmark import Request, run
from ctr_pe.study.runner import Job
from ctr_pe.study.store import Store
from ctr_pe.study.suite import Cell, cells, parse_suite
from ctr_pe.study.trials import SEED, Trials, on_validation
from ctr_pe.utils.errors import UserError
from tests.support.fake_training import jobs_of, result_of, train_by_rate
from tests.support.fake_training import train as failing

pytestmark = pytest.mark.usefixtures("worker_threads")
RATES = "learning_rate=[1e-1, 1e-2, 1e-3]"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    generate(folder / "synthetic", users=60, valid_users=30, test_users=40, items=100, categories=10)
    return folder


@pytest.fixture
def request_of(root: Path, tmp_path: Path) -> Callable[..., Request]:
    def request(*tune: str, **changes: Any) -> Request:
        given = {"dataset": "synthetic", "repeats": 2, "out": tmp_path / "out", "jobs": 1, "data_root": root} | changes
        return Request(**{"tune": parse_overrides(tune, "--tune"), **given})

    return request


def rows(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.open()))


def test_each_encoding_takes_what_is_best_for_it_on_validation_rows(
    request_of: Callable[..., Request], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, request = tmp_path / "out", request_of(RATES, "position_dim=[4, 8]")
    assert run(request, train_by_rate) == 0
    shown = capsys.readouterr()
    assert "DIN × none, cape × 2 seeds = 4 runs after 12 trials, 1 at once" in shown.err
    assert "learning_rate, position_dim: of each row the best of 6 combinations on the validation" in shown.out
    assert "trials/table.md" in shown.out
    finished = [line for line in shown.err.splitlines() if "/12] DIN" in line]
    assert len(finished) == 12
    assert all(": validation 0." in line and "AUC" not in line for line in finished)  # no figure on test rows
    tried, found = Store(out / "trials").read(), Store(out).read()
    assert len(tried) == 12
    assert {(key.seed, key.protocol) for key in tried} == {(SEED, "heldout")}
    assert {(key.pe, result.params["learning_rate"]) for key, result in found.items()} == {
        ("none", 1e-2),
        ("cape", 1e-3),
    }
    assert sorted(key.seed for key in found) == [0, 0, 1, 1]
    table = {row["pe"]: row for row in rows(out / "suite.csv")}
    assert {pe: (row["learning_rate"], row["seeds"]) for pe, row in table.items()} == {
        "none": ("0.01", "2"),
        "cape": ("0.001", "2"),
    }
    means = {pe: sum(run.metrics["gAUC"] for key, run in found.items() if key.pe == pe) / 2 for pe in table}
    assert float(table["cape"]["gAUC_minus_none"]) == pytest.approx(means["cape"] - means["none"], abs=1e-12)
    listed = rows(out / "trials" / "table.csv")
    assert len(listed) == 12
    assert [
        (row["encoding"], row["learning_rate"], row["position_dim"]) for row in listed if row["chosen"] == "True"
    ] == [
        ("none", "0.01", "4"),
        ("cape", "0.001", "4"),
    ]
    best = next(row for row in listed if row["encoding"] == "none" and row["learning_rate"] == "0.01")
    assert float(best["validation"]) == pytest.approx(0.9)

    assert run(replace(request, repeats=3), train_by_rate) == 0
    shown = capsys.readouterr()
    assert "4 of 6 runs are there already" in shown.err
    assert len(Store(out / "trials").read()) == 12


@pytest.mark.slow
def test_a_dry_run_counts_the_trials_that_are_missing(
    request_of: Callable[..., Request], capsys: pytest.CaptureFixture[str]
) -> None:
    request = replace(request_of("learning_rate=[1e-2, 1e-3]", dry_run=True), encodings=["none"])
    assert run(request, train_by_rate) == 0
    planned = capsys.readouterr().out
    assert "× 2 seeds = 2 runs after 2 trials" in planned
    assert "for 4 runs" in planned
    assert run(replace(request, dry_run=False), train_by_rate) == 0
    capsys.readouterr()
    assert run(replace(request, repeats=4), train_by_rate) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("DIN ")]
    assert row.split()[1:4] == ["0.01", "none", "2"]


def test_a_trial_that_diverges_is_not_chosen_and_not_tried_again(
    request_of: Callable[..., Request], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = request_of("learning_rate=[1.0, 1e-1]")
    assert run(request, train_by_rate) == 0
    assert {result.params["learning_rate"] for result in Store(tmp_path / "out").read().values()} == {0.1}
    assert (tmp_path / "out" / "trials" / "table.md").read_text().count("✗") == 2
    capsys.readouterr()
    assert run(request, train_by_rate) == 0
    assert "all 4 runs are there already" in capsys.readouterr().err
    with pytest.raises(UserError) as error:
        run(request_of("learning_rate=[1.0, 2.0]"), train_by_rate)
    assert str(error.value).startswith(
        "DIN none synthetic: the training of each of 2 trials failed; the first diverged"
    )


def test_nothing_is_chosen_while_a_trial_is_missing(
    request_of: Callable[..., Request],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "ctr_pe.study.benchmark.check_params", lambda *_: None
    )  # the stand-in's key is no hyper-parameter
    request = request_of(RATES, params={"fail": {"cape": "user"}})
    assert run(request, failing) == 1
    assert "3 of 6 trials failed; repeat the same command to try them again" in capsys.readouterr().err
    assert not Store(tmp_path / "out").read()


def test_published_protocols_choose_on_validation_rows_too(request_of: Callable[..., Request], tmp_path: Path) -> None:
    assert run(request_of(RATES, protocol="paper"), train_by_rate) == 0
    assert {key.protocol for key in Store(tmp_path / "out" / "trials").read()} == {"heldout"}
    assert {key.protocol for key in Store(tmp_path / "out").read()} == {"paper"}


def test_less_is_better_of_a_loss(tmp_path: Path) -> None:
    store, row = Store(tmp_path), Cell("DIN", "made_up", "cape", tune={"epochs": (1, 2, 3)})
    found: dict[Cell, Job] = {}
    losses: list[list[float | None]] = [[0.6, 0.5], [0.4, 0.7], [None, None]]
    for one, of_epochs in zip(row.combinations(), losses, strict=True):
        params = {"monitor": "logloss", **one}
        (job,) = jobs_of(["cape"], 1, **params)
        history = [{"metrics": {"logloss": loss}} for loss in of_epochs]
        store.append(result_of(job.key, params=params, history=history), None)
        found[row.with_chosen(one)] = job
    trials = Trials(store, [row], dict, found.__getitem__)
    assert trials.rungs[row][1].chosen == {"epochs": 2}
    assert [on_validation(store.read()[job.key]) for job in found.values()][:2] == [0.5, 0.4]
    more = Cell("DIN", "made_up", "cape", tune={"epochs": (1, 2, 3, 4)})
    found[more.with_chosen({"epochs": 4})] = cast(Any, SimpleNamespace(key="not there"))
    assert Trials(store, [more], dict, found.__getitem__).rungs[more][1] == more


SUITE: dict[str, Any] = {
    "title": "Tuned",
    "seeds": 1,
    "grids": [
        {
            "models": ["DIN"],
            "encodings": ["none", "cape"],
            "datasets": ["synthetic"],
            "vary": {"max_len": [2, 5]},
            "tune": {"learning_rate": [1e-2, 1e-3], "dnn_hidden_units": [[8], [16, 8]]},
        }
    ],
}


def test_a_suite_tunes_every_cell(request_of: Callable[..., Request], tmp_path: Path) -> None:
    found = cells(parse_suite(SUITE, "x"))
    assert len(found) == 4
    assert found[0].overrides == {"max_len": 2}
    assert found[0].combinations() == [
        {"learning_rate": rate, "dnn_hidden_units": units} for rate in (1e-2, 1e-3) for units in ([8], [16, 8])
    ]
    replaced = cells(parse_suite(SUITE, "x"), extra={"dnn_hidden_units": [4]}, tune={"max_len": [3], "epochs": [1, 2]})
    assert [cell.varied for cell in replaced] == [{}, {}]
    assert dict(replaced[0].tune) == {"learning_rate": [1e-2, 1e-3], "max_len": [3], "epochs": [1, 2]}
    assert len(replaced[0].combinations()) == 4

    file = tmp_path / "mine.yaml"
    file.write_text(yaml.dump(SUITE))
    assert run(request_of(suite=str(file), repeats=None), train_by_rate) == 0
    table = rows(tmp_path / "out" / "suite.csv")
    assert [(row["max_len"], row["pe"], row["learning_rate"]) for row in table] == [
        ("2", "none", "0.01"),
        ("2", "cape", "0.001"),
        ("5", "none", "0.01"),
        ("5", "cape", "0.001"),
    ]
    assert all(row["gAUC_minus_none"] for row in table if row["pe"] == "cape")


@pytest.mark.parametrize(
    ("tune", "message"),
    [
        ("learning_rat=[1]", "'learning_rat' is unknown: did you mean 'learning_rate'?"),
        ("learning_rate=1e-3", "--tune learning_rate: write a list of values, such as [1e-3, 3e-3]"),
        ("learning_rate=[]", "--tune learning_rate: write a list of values"),
        ("learning_rate", "--tune learning_rate: write key=value"),
        ("position_encoding=[cape]", "--tune position_encoding: use --pe"),
        ("position_dim=[0]", "position_dim"),
        ("batch_size=[8]", "--tune batch_size: it is in --set too"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(
    tune: str, message: str, request_of: Callable[..., Request], tmp_path: Path
) -> None:
    with pytest.raises(UserError) as error:
        run(request_of(tune, params={"batch_size": 64}), train_by_rate)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_key_has_one_place_in_a_grid() -> None:
    for part in ("set", "vary"):
        grid = SUITE["grids"][0] | {"vary": {}} | {part: {"learning_rate": [1e-2]}}
        with pytest.raises(UserError, match=f"learning_rate is both in {part} and in tune"):
            parse_suite({**SUITE, "grids": [grid]}, "x")


def test_a_search_is_that_of_the_estimator_and_goes_on_where_it_stopped(
    request_of: Callable[..., Request], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--tune N``: the settings of CTRRanker(tune=N) around those of the data set, each encoding its own."""
    out, given = tmp_path / "out", {"learning_rate": 3.3e-3, "embedding_regularizer": 1e-4, "epochs": 8}
    request = request_of(tune=4, params=given)
    assert run(replace(request, dry_run=True), train_by_rate) == 0
    planned = capsys.readouterr().out
    assert "2 cells" not in planned
    assert "× 2 seeds = 4 runs after 12 trials of 4 settings per row" in planned
    assert "for 16 runs" in planned
    assert [line.split()[1:4] for line in planned.splitlines() if line.startswith("DIN ")][:2] == [
        ["2", "none", "4"],
        ["4", "none", "2"],
    ]
    assert not (out / "trials" / "runs").exists()

    assert run(request, train_by_rate) == 0
    capsys.readouterr()
    trials, found = Store(out / "trials").read(), Store(out).read()
    assert Counter((key.pe, result.params["epochs"]) for key, result in trials.items()) == {
        (pe, epochs): count for pe in ("none", "cape") for epochs, count in ((2, 4), (4, 2))
    }
    tried = {result.params["learning_rate"] for result in trials.values()}
    assert tried == {one["learning_rate"] for one in halving.settings(given, 4)}
    assert {(key.pe, run.params["learning_rate"], run.params["epochs"]) for key, run in found.items()} == {
        ("none", 9.9e-3, 8),
        ("cape", 3.3e-3, 8),
    }
    table = {row["pe"]: (row["learning_rate"], row["embedding_regularizer"]) for row in rows(out / "suite.csv")}
    assert table == {"none": ("0.0099", "0.0001"), "cape": ("0.0033", "0.0001")}
    listed = rows(out / "trials" / "table.csv")
    assert [(row["encoding"], row["epochs"]) for row in listed if row["chosen"] == "True"] == [
        ("none", "4"),
        ("cape", "4"),
    ]
    assert "4 of 2 epochs, 2 of 4 epochs" in (out / "suite.md").read_text()

    for key in list(trials)[1:]:  # as if it had been stopped in the first rung
        (out / "trials" / "runs" / f"{key.name}.json").unlink()
    assert run(request, train_by_rate) == 0
    assert "all 4 runs are there already" in capsys.readouterr().err
    assert Store(out / "trials").read().keys() == trials.keys()


def test_a_search_that_a_suite_contradicts_is_refused(request_of: Callable[..., Request], tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    for part in ("vary", "tune"):
        file.write_text(yaml.dump({**SUITE, "grids": [SUITE["grids"][0] | {"tune": {}, part: {"learning_rate": [1]}}]}))
        with pytest.raises(UserError, match="--tune quick: the suite has values of 'learning_rate' of its own"):
            run(request_of(tune="quick", suite=str(file)), train_by_rate)


def test_budgets_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for given, message in (
        (["1"], "--tune 1: how many settings to try, at least 2, or 'quick' for 6"),
        (["quick", "learning_rate=[1]"], "--tune quick: it stands alone, beside no other --tune"),
        (["fast"], "--tune fast: write key=value"),
    ):
        assert main(["benchmark", *(part for one in given for part in ("--tune", one))]) == 2
        assert message in capsys.readouterr().err
