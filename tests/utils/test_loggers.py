"""Trackers are told what training itself reports, change nothing, and cost nothing when off."""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from ctr_pe.cli import main
from ctr_pe.commands import run_expid
from ctr_pe.config.yaml import model_params
from ctr_pe.data.synthetic.bursts import generate
from ctr_pe.study.benchmark import run_params
from ctr_pe.training import Run, train
from ctr_pe.utils import loggers
from ctr_pe.utils.errors import UserError

SMALL = {"embedding_dim": 4, "dnn_hidden_units": [8], "batch_size": 64, "epochs": 2, "learning_rate": 0.01}
Row = tuple[dict[str, float], int]


class Recorder:
    """Keeps all that it is told."""

    made: list[Recorder]

    def __init__(self, name: str, where: str) -> None:
        self.name, self.where, self.ended = name, where, list[bool]()
        self.given: dict[str, Any] = {}
        self.rows: list[Row] = []
        self.made.append(self)

    def params(self, params: Mapping[str, Any]) -> None:
        self.given |= params

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self.rows.append((dict(values), step))

    def close(self, finished: bool) -> None:
        self.ended.append(finished)

    def values(self, name: str) -> list[float]:
        return [values[name] for values, _ in self.rows if name in values]


def test_names_of_metrics_are_ones_that_every_tracker_takes() -> None:
    Recorder.made = []
    loggers.Watch(Recorder("one", "")).evaluated("valid", {"NDCG(k=5)": 0.5, "NDCG@5": 0.25, "gAUC": 1.0}, epoch=1)
    [told] = Recorder.made[0].rows
    assert told == ({"valid/NDCG_k_5": 0.5, "valid/NDCG_5": 0.25, "valid/gAUC": 1.0, "epoch": 1}, 0)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    generate(folder / "synthetic", users=60, valid_users=30, test_users=30, items=100, categories=10)
    return folder


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    Recorder.made = []
    monkeypatch.setitem(loggers.TRACKERS, "tensorboard", Recorder)
    return Recorder.made


def a_run(root: Path, pe: str = "none", track: str | None = "tensorboard:here", **params: Any) -> Run:
    given = run_params("DIN", "synthetic", {**SMALL, **params})
    return Run("DIN", root / "synthetic", pe, 3, params=given, threads=1, track=track)


def test_what_is_told_is_what_training_reports(root: Path, recorders: list[Recorder]) -> None:
    outcome = train(a_run(root, "pdm", pdm_contrast=0.1, learning_rate_schedule="constant"))
    (told,) = recorders
    assert told.where == "here"
    assert told.name.startswith("DIN-pdm-3-")
    assert told.given["learning_rate"] == 0.01
    assert (told.given["model"], told.given["position_encoding"], told.given["seed"]) == ("DIN", "pdm", 3)
    steps = outcome.history[0].steps
    for number, epoch in enumerate(outcome.history):
        of_epoch = [
            row for row in told.rows if number * steps < row[1] <= (number + 1) * steps and "train/loss" in row[0]
        ]
        assert [step for _, step in of_epoch] == list(range(number * steps + 1, (number + 1) * steps + 1))
        assert sum(values["train/loss"] for values, _ in of_epoch) / steps == pytest.approx(epoch.loss)
        assert epoch.auxiliary
        for name, value in epoch.auxiliary.items():
            found = [values[f"train/{name}"] for values, _ in of_epoch]
            assert sum(found) / steps == pytest.approx(value, rel=1e-5)
    valid = [row for row in told.rows if "epoch" in row[0]]
    assert [step for _, step in valid] == [epoch.steps for epoch in outcome.history]
    for (values, _), epoch in zip(valid, outcome.history, strict=True):
        assert values == {f"valid/{name}": value for name, value in epoch.metrics.items()} | {"epoch": epoch.number}
    assert told.rows[-1][0] == {f"test/{name}": value for name, value in outcome.metrics.items()}
    assert set(told.values("learning_rate")) == {0.01}
    assert min(told.values("rows_per_second")) > 0
    assert told.ended == [True]


def test_reports_come_about_every_hundredth_of_an_epoch(root: Path, recorders: list[Recorder]) -> None:
    outcome = train(a_run(root, batch_size=2, epochs=1))
    losses = recorders[0].values("train/loss")
    steps = outcome.history[0].steps
    assert steps > 150
    assert 100 <= len(losses) < 205
    assert len(losses) < steps


def test_tracking_changes_no_result(root: Path, recorders: list[Recorder]) -> None:
    assert train(a_run(root)).metrics == train(a_run(root, track=None)).metrics


def test_off_means_off(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(loggers, "Watch", refuse)
    monkeypatch.setattr(loggers, "find_spec", refuse)
    for name in ("tensorboard", "mlflow", "wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    assert train(a_run(root, track=None, epochs=1)).epoch == 1


def test_a_run_that_fails_is_closed_as_such(root: Path, recorders: list[Recorder]) -> None:
    with pytest.raises(UserError):
        train(a_run(root, monitor="no such metric"))

    def stop(state: Mapping[str, Any]) -> None:
        if "valid" in state:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(a_run(root), stop)
    assert [told.ended for told in recorders] == [[False], [False]]


@pytest.mark.parametrize(
    ("track", "message"),
    [("tensorbord", "did you mean 'tensorboard'?"), ("wandb:mine", "wandb is not installed: pip install wandb")],
)
def test_mistakes(
    root: Path, track: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "find_spec", lambda name: None if name == "wandb" else object())
    with pytest.raises(UserError) as error:
        train(a_run(root, track=track))
    assert message in str(error.value)
    for command in ("benchmark", "tune"):
        assert main([command, "--track", track, "--dataset", "synthetic", "--data-root", str(root)]) == 2
        assert message in capsys.readouterr().err


def scalars(folder: Path) -> dict[str, list[Any]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_files_read_back(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    outcome = train(a_run(root, track=f"tensorboard:{tmp_path}"))
    (folder,) = tmp_path.iterdir()
    found = scalars(folder)
    for name, value in outcome.metrics.items():
        assert found[f"test/{name}"][0] == (outcome.history[-1].steps, pytest.approx(value))
    assert found["valid/gAUC"] == [(epoch.steps, pytest.approx(epoch.metrics["gAUC"])) for epoch in outcome.history]
    assert len(found["train/loss"]) == len(found["rows_per_second"]) == outcome.history[-1].steps
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    (text,) = events.Tensors("parameters/text_summary")
    assert "| learning_rate | 0.01 |" in text.tensor_proto.string_val[0].decode()
    assert "_hparams_/session_start_info" in events.summary_metadata

    train(a_run(root, track=f"tensorboard:{tmp_path}"))
    assert sorted(one.name for one in tmp_path.iterdir()) == [folder.name, f"{folder.name}-2"]


@pytest.mark.slow
def test_the_commands_and_configs_track(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each where its results are; and a benchmark's runs are the same runs with and without."""
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    small = [f"--set={key}={json.dumps(value)}" for key, value in {**SMALL, "epochs": 1}.items()]
    common = [*small, "--dataset", "synthetic", "--data-root", str(root), "--track", "tensorboard"]
    argv = ["benchmark", "--pe", "none", "--repeats", "1", "--jobs", "1", "--out", "bench", *common]
    assert main(argv) == 0
    assert main(argv[:-2]) == 0  # nothing is missing
    (folder,) = Path("bench/tensorboard").iterdir()
    (row,) = [json.loads(line) for line in Path("bench/results.jsonl").read_text().splitlines()]
    assert scalars(folder)["test/AUC"][0][1] == pytest.approx(row["metrics"]["AUC"])
    assert "track" not in row["params"]
    assert main(["tune", "--trials", "2", "--out", "tuned", *common]) == 0
    assert len(list(Path("tuned/tensorboard").iterdir())) == 2
    section = {
        **model_params("DIN", "synthetic", {**SMALL, "epochs": 1}),
        "data_root": str(root),
        "track": "tensorboard",
    }
    Path("model.yaml").write_text(yaml.safe_dump({"mine": section, "typo": {**section, "track": "tensorbord"}}))
    assert run_expid.main(["--config", "model.yaml", "--expid", "mine"]) == 0
    assert len(list(Path("checkpoints/tensorboard").iterdir())) == 1
    assert main(["validate", "model.yaml", "--data-root", str(root)]) == 2


def test_mlflow(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    uri = (tmp_path / "runs").as_uri()
    outcomes = [train(a_run(root, pe, track=f"mlflow:{uri}")) for pe in ("none", "cape")]
    client = mlflow.MlflowClient(uri)
    runs = client.search_runs([client.get_experiment_by_name("mine").experiment_id], order_by=["start_time"])
    for outcome, run in zip(outcomes, runs, strict=True):
        assert run.data.metrics["test/gAUC"] == pytest.approx(outcome.metrics["gAUC"])
        assert run.data.params["learning_rate"] == "0.01"
        assert run.data.params["dnn_hidden_units"] == "[8]"
        history = client.get_metric_history(run.info.run_id, "valid/AUC")
        assert [(one.step, one.value) for one in history] == [(e.steps, e.metrics["AUC"]) for e in outcome.history]
        assert run.info.status == "FINISHED"
    assert [run.data.params["position_encoding"] for run in runs] == ["none", "cape"]


def test_wandb(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in with W&B's calls."""
    calls: list[tuple[str, Any]] = []

    class Made:
        config = types.SimpleNamespace(update=lambda values: calls.append(("config", values)))

        def log(self, values: dict[str, float], step: int) -> None:
            calls.append(("log", (values, step)))

        def finish(self, exit_code: int) -> None:
            calls.append(("finish", exit_code))

    def init(**given: Any) -> Made:
        calls.append(("init", given))
        return Made()

    wandb = types.ModuleType("wandb")
    wandb.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    vars(wandb).update(init=init, Error=OSError)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    outcome = train(a_run(root, track="wandb:project"))
    assert [calls[0][0], calls[1][0], calls[-1]] == ["init", "config", ("finish", 0)]
    assert calls[0][1]["project"] == "project"
    assert calls[1][1]["learning_rate"] == 0.01
    logged = [content for kind, content in calls if kind == "log"]
    assert [step for _, step in logged] == sorted(step for _, step in logged)  # W&B drops values of earlier steps
    assert logged[-1] == ({f"test/{k}": v for k, v in outcome.metrics.items()}, outcome.history[-1].steps)
