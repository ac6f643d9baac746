"""``ctr-pe tune``: searches what there is to search, selects on the validation rows, goes on where it stopped."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import yaml

from ctr_pe.cli import main as command
from ctr_pe.commands import run_expid
from ctr_pe.config.validation import check
from ctr_pe.config.yaml import parse_overrides
from ctr_pe.data.synthetic.bursts import generate
from ctr_pe.study import executors
from ctr_pe.study.executors.executor import Message, attempt
from ctr_pe.study.runner import Job, Train
from ctr_pe.study.tune import TrialRun, plan, tune
from ctr_pe.training import Outcome, Run
from ctr_pe.utils.errors import Diverged, UserError


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    generate(folder / "synthetic", users=60, valid_users=30, test_users=30, items=100, categories=10)
    return folder


def main(root: Path, out: Path, trainer: Any = None, trials: int = 4, **changes: Any) -> int:
    """``ctr-pe tune`` with a trainer in place of training."""
    given: dict[str, Any] = {"model": "DIN", "pe": "cape", "dataset": "synthetic", "root": root} | changes
    given |= {"given": parse_overrides(given.pop("space", [])), "overrides": parse_overrides(given.pop("set", []))}
    how = {name: given.pop(name) for name in ("as_json", "executor", "jobs") if name in given}
    return tune(plan(**given), trials, out, trainer, **how)


class Trainer:
    """Stands in for training: valid prefers a large position_dim, test a small one."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.epochs = 0

    def __call__(self, run: Run, progress: Callable[[Mapping[str, Any]], None]) -> Outcome:
        self.runs.append(run)
        good = run.params["position_dim"] / 100 - run.params["net_dropout"]
        for epoch in range(1, 5):
            self.epochs += 1
            progress({"epoch": epoch, "batch": 0, "batches": 1})
            progress({"epoch": epoch, "evaluation": epoch, "valid": {"gAUC": good + epoch / 1000}})
        return Outcome({"gAUC": 1 - good}, 4, 0.1, np.zeros(1, np.float32), 1)


class Diverging(Trainer):
    """The first trainings diverge."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def __call__(self, run: Run, progress: Callable[[Mapping[str, Any]], None]) -> Outcome:
        if len(self.runs) < self.first:
            self.runs.append(run)
            raise Diverged("diverged in epoch 1, batch 3: the loss is nan")
        return super().__call__(run, progress)


@pytest.mark.slow
def test_a_trial_that_diverges_is_pruned(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="the training of every trial diverged"):
        main(root, tmp_path, Diverging(2), trials=2)
    assert "trial 0 diverged in epoch 1, batch 3: the loss is nan" in capsys.readouterr().err
    assert main(root, tmp_path, Diverging(0), trials=3) == 0


def space(root: Path, model: str = "DIN", pe: str = "cape", **overrides: Any) -> dict[str, Any]:
    return dict(plan(model, pe, "synthetic", root, overrides).space)


@pytest.mark.slow
def test_selects_on_valid_and_reports_test_of_the_best(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer()
    small = ["net_dropout=[0.0, 0.3]", "attention_dropout=null"]
    assert main(root, tmp_path / "t", trainer, trials=12, space=small) == 0
    assert len(trainer.runs) == 12
    assert {run.protocol for run in trainer.runs} == {"heldout"}
    text = (tmp_path / "t" / "best.yaml").read_text()
    best = yaml.safe_load(text)["best"]
    assert (best["model"], best["position_encoding"], best["dataset_id"]) == ("DIN", "cape", "synthetic")
    assert best["position_dim"] == 64
    assert best["net_dropout"] == 0.0
    assert "0.644000 on the validation rows; test: gAUC 0.360000" in text
    assert trainer.epochs < 4 * 12  # trials below the median were stopped
    rows = list(csv.DictReader((tmp_path / "t" / "trials.csv").open()))
    assert len(rows) == 12
    assert {row["state"] for row in rows} == {"complete", "pruned"}
    shown = capsys.readouterr()
    assert "test: gAUC 0.36" in shown.out
    assert "--set 'position_dim=64'" in shown.out
    assert "pruned after epoch" in shown.err


@pytest.mark.slow
def test_a_study_goes_on_where_it_stopped(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(run: Run, progress: Callable[[Mapping[str, Any]], None]) -> Outcome:
        if len(trainer.runs) == 2:
            raise KeyboardInterrupt
        return trainer(run, progress)

    trainer = Trainer()
    assert main(root, tmp_path / "t", interrupted) == 130
    assert "stopped: 2 of 4 trials are stored" in capsys.readouterr().err
    assert main(root, tmp_path / "t", trainer) == 0
    assert "2 of 4 trials are there already" in capsys.readouterr().err
    assert len(trainer.runs) == 4
    capsys.readouterr()
    assert main(root, tmp_path / "t", trainer, as_json=True) == 0
    assert len(trainer.runs) == 4
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"trials", "best", "validation", "test", "params", "out"}
    assert found["params"].keys() >= {"position_dim", "net_dropout"}
    with pytest.raises(UserError, match="choose another --out"):
        main(root, tmp_path / "t", trainer, set=["embedding_dim=8"])


def test_the_first_trial_has_the_settings_of_the_data_set(root: Path, tmp_path: Path) -> None:
    trainer = Trainer()
    main(root, tmp_path / "t", trainer, 2, set=["net_dropout=0.2"], space=["learning_rate={low: 1e-4, high: 1e-1}"])
    own = plan("DIN", "cape", "synthetic", root, {"net_dropout": 0.2}).params
    assert {key: trainer.runs[0].params[key] for key in ("net_dropout", "learning_rate")} == {
        "net_dropout": 0.2,
        "learning_rate": own["learning_rate"],
    }
    assert trainer.runs[1].params["learning_rate"] != own["learning_rate"]


class OneAtATime:
    """An executor that trains when it is asked for messages."""

    workers = 1

    def __init__(self, train: Train) -> None:
        self.train, self.jobs, self.closed = train, list[Job](), False

    def submit(self, job: Job) -> None:
        self.jobs.append(job)

    def messages(self) -> Iterator[Message]:
        job = self.jobs.pop(0)
        yield Message(job, "progress", {})
        yield Message(job, *attempt(self.train, job.run, lambda state: None))

    def close(self) -> None:
        self.closed = True


@pytest.mark.slow
def test_an_executor_of_one_worker_searches_as_this_process_does(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is pruned, too; and the study goes on."""
    made: list[OneAtATime] = []
    monkeypatch.setattr(executors, "open_executor", lambda _, train, *__: made.append(OneAtATime(train)) or made[-1])
    small = ["net_dropout=[0.0, 0.3]", "attention_dropout=null"]
    assert main(root, tmp_path / "here", Trainer(), trials=9, space=small) == 0
    for trials in (4, 9):
        assert main(root, tmp_path / "there", Trainer(), trials, space=small, executor="ray") == 0
    for trials in (4, 9):
        assert main(root, tmp_path / "parts", Trainer(), trials, space=small) == 0
    here, there, parts = ((tmp_path / name / "trials.csv").read_text() for name in ("here", "there", "parts"))
    assert there == parts
    assert "pruned" in here
    assert [one.closed for one in made] == [True] * 2
    assert "study.journal" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"its study, study.journal, was begun with --executor or --jobs"):
        main(root, tmp_path / "there", Trainer(), 9, space=small)


def test_a_trial_that_an_executor_gives_up_ends_the_search(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(run: Run, progress: Callable[[Mapping[str, Any]], None]) -> Outcome:
        raise ZeroDivisionError("of the code")

    monkeypatch.setattr(executors, "open_executor", lambda _, train, *__: OneAtATime(train))
    with pytest.raises(UserError, match=r"trial 0 failed: ZeroDivisionError: of the code \(traceback in "):
        main(root, tmp_path, broken, executor="ray")
    assert main(root, tmp_path, Diverging(2), 4, executor="ray") == 0
    assert "diverged in epoch 1, batch 3: the loss is nan" in capsys.readouterr().err


def by_dropout(run: Run, progress: Callable[[Mapping[str, Any]], None]) -> Outcome:
    """A stand-in for other processes; trial 3 dies once."""
    assert isinstance(run, TrialRun)
    assert run.resume is not None
    mark = run.resume.parents[1] / "died"
    if run.trial == 3 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), 9)
    return Trainer()(run, progress)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["local", "ray", "slurm"])
def test_trials_are_trained_elsewhere(
    executor: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at once, in processes, on a real Ray cluster, and as jobs of submitit's local cluster."""
    if executor == "ray":
        cluster = pytest.importorskip("ray.cluster_utils").Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    if executor == "slurm":
        pytest.importorskip("submitit")
        from ctr_pe.study.executors.slurm_cluster import SlurmExecutor

        opened: Any = lambda _, train, resources, out: SlurmExecutor(train, resources, out / "slurm", cluster="local")  # noqa: E731
        monkeypatch.setattr(executors, "open_executor", opened)
    if executor == "local":  # which does not begin a run again
        (tmp_path / "died").touch()
    small = ["net_dropout=[0.0, 0.3]", "attention_dropout=null"]
    try:
        assert main(root, tmp_path, by_dropout, 8, space=small, executor=executor, jobs=2) == 0
    finally:
        if executor == "ray":
            cluster.shutdown()
    rows = list(csv.DictReader((tmp_path / "trials.csv").open()))
    assert sorted(int(row["trial"]) for row in rows) == list(range(8))
    assert {row["state"] for row in rows} <= {"complete", "pruned"}
    assert (tmp_path / "died").exists()
    assert not any((tmp_path / "states").glob("*"))


@pytest.mark.slow
def test_equal_seeds_search_equally(root: Path, tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        trainer = Trainer()
        main(root, tmp_path / name, trainer)
        found.append([dict(run.params) for run in trainer.runs])
    assert found[0] == found[1]


def test_the_space_follows_encoding_and_model(root: Path) -> None:
    assert space(root).keys() == {"position_dim", "attention_dropout", "net_dropout"}
    assert space(root, pe="rope").keys() == {"attention_dropout", "net_dropout"}
    assert "position_dim" in space(root, pe="rope+cape")
    heads = space(root, model="BST")["num_heads"]
    assert heads == [1, 2, 4, 8]


def test_heads_that_do_not_divide_the_items_are_left_out(root: Path) -> None:
    assert space(root, "BST", embedding_dim=2)["num_heads"] == [1, 2, 4]


@pytest.mark.slow
def test_spaces_of_ones_own(root: Path, tmp_path: Path) -> None:
    given = [
        "learning_rate={low: 1e-4, high: 1e-2, log: true}",
        "dnn_hidden_units=[[8], [16, 8]]",
        "batch_size={low: 16, high: 64}",
        "attention_dropout=null",
    ]
    trainer = Trainer()
    assert main(root, tmp_path / "t", trainer, space=given, trials=6) == 0
    for run in trainer.runs:
        assert 1e-4 <= run.params["learning_rate"] <= 1e-2
        assert run.params["dnn_hidden_units"] in ([8], [16, 8])
        assert isinstance(run.params["batch_size"], int)
        assert run.params["attention_dropout"] == 0  # as configured


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"space": ["position_dims=[8]"]}, "did you mean 'position_dim'?"),
        ({"space": ["position_dim=8"]}, "a list of values"),
        (
            {"space": ["position_dim=[8, big]"]},
            "position_dim must be a positive integer, got 'big'",
        ),
        ({"space": ["position_encoding=[cape, rope]"]}, "position_encoding: use --pe"),
        (
            {"space": ["batch_size={low: 64, high: 16}"]},
            "--space batch_size must be {low: 1e-4, high: 1e-2, log: true}",
        ),
        ({"space": ["learning_rate={low: 0, high: 1, log: true}"]}, "low not above high"),
        ({"space": ["loss={low: a, high: b}"]}, "low not above high"),
        (
            {"space": [f"{key}=null" for key in ("position_dim", "attention_dropout", "net_dropout")]},
            "nothing to search",
        ),
        ({"set": ["net_droput=0"]}, "did you mean 'net_dropout'?"),
        ({"pe": "cap"}, "did you mean 'cape'?"),
        ({"model": "DINN"}, "did you mean 'DIN'?"),
        ({"dataset": "nowhere"}, "no data set 'nowhere'"),
    ],
)
def test_mistakes_are_refused_before_anything_is_trained(
    root: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    trainer = Trainer()
    with pytest.raises(UserError) as error:
        main(root, tmp_path / "t", trainer, **changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not trainer.runs


def test_without_optuna_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "ctr_pe.study.tune")
    assert command(["tune"]) == 2
    assert "pip install 'ctr_pe[tune]'" in capsys.readouterr().err


def test_trains_for_real_and_the_best_is_a_config(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is valid, and its run gives the trial's metrics again."""
    monkeypatch.chdir(tmp_path)
    small = ["epochs=2", "embedding_dim=4", "attention_hidden_units=[4]", "dnn_hidden_units=[4]", "batch_size=100"]
    assert main(root, tmp_path / "t", trials=2, set=small, seed=3, space=["net_dropout=[0.3]"]) == 0
    file = tmp_path / "t" / "best.yaml"
    assert check(file, tmp_path / "elsewhere") == ("model config, 1 experiment", [])
    assert run_expid.main(["--config", str(file), "--expid", "best"]) == 0
    found = dict(part.split(": ") for part in Path("best.csv").read_text().partition("[test] ")[2].strip().split(" - "))
    assert set(found) == {"gAUC", "AUC", "logloss"}
    shown = capsys.readouterr()
    assert "estimated time: " in shown.err
    printed = next(line for line in shown.out.splitlines() if line.startswith("test: "))
    assert printed == "test: " + "  ".join(f"{name} {value}" for name, value in found.items())
    study = optuna.load_study(study_name="DIN-cape-synthetic", storage=f"sqlite:///{tmp_path / 't' / 'study.db'}")
    assert len(study.trials) == 2
