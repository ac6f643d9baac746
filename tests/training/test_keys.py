"""One training path: every key of training changes something or is refused, whichever way a run comes in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ctr_pe import cli, training
from ctr_pe.commands import run_expid
from ctr_pe.config.schema import TrainingSection
from ctr_pe.config.yaml import model_params, parse_overrides
from ctr_pe.data.dataset import open_dataset
from ctr_pe.data.loader import BatchLoader
from ctr_pe.data.synthetic.bursts import generate
from ctr_pe.models.sections import check_params
from ctr_pe.sequence.batch import JaggedBatch
from ctr_pe.training import Outcome, Run
from ctr_pe.utils.errors import UserError

BASE = {
    "attention_hidden_units": "[4]",
    "batch_size": "32",
    "dnn_hidden_units": "[4]",
    "early_stop_patience": "3",
    "embedding_dim": "4",
    "epochs": "4",
    "embedding_init": "1e-4",
    "learning_rate": "0.01",
    "learning_rate_schedule": "constant",
    "monitor": "AUC",
    "weight_average": "null",
}
CHANGES = {
    "accumulation_steps": "4",
    "amp": "true",
    "batch_size": "48",
    "class_weight": "{1: 3}",
    "deterministic": "true",
    "early_stop_patience": "1",
    "embedding_init": "0.1",
    "embedding_regularizer": "0.01",
    "epochs": "1",
    "eval_steps": "2",
    "gpu": "7",
    "learning_rate": "0.1",
    "learning_rate_schedule": "linear",
    "like_length": "4",
    "linear_init": "0.02",
    "loss": "mse_loss",
    "max_gradient_norm": "0.01",
    "metrics": "[logloss]",
    "min_batches": "12",
    "monitor": "gAUC",
    "monitor_mode": "min",
    "net_regularizer": "0.01",
    "num_workers": "2",
    "optimizer": "SGD",
    "reduce_lr_on_plateau": "false",
    "save_best_only": "false",
    "seed": "5",
    "shuffle": "false",
    "table_optimizer": "rowwise_adagrad",
    "task": "regression",
    "verbose": "1",
    "weight_average": "0.5",
    "weighted_metrics": "true",
}


class Seen(NamedTuple):
    """What there is to see of a run."""

    code: int
    error: str = ""
    history: Sequence[Any] = ()
    outcome: Sequence[Any] = ()
    made_ahead: bool = False
    bar: bool = False
    deterministic: bool = False

    def of(self, outcome: Outcome) -> Seen:
        history = [(e.number, e.steps, e.loss, *e.metrics.items()) for e in outcome.history]
        found = (outcome.epoch, *outcome.metrics.items(), outcome.scores.tobytes())
        return self._replace(history=history, outcome=found)


class Trained(NamedTuple):
    """A run's outcome, the states of its progress and what there was to see."""

    outcome: Outcome
    states: Sequence[Mapping[str, Any]]
    seen: Seen


Way = Callable[..., Seen]
SAID_BY_THE_RUN = {"model", "dataset_id", "position_encoding", "seed", "track", "debug_mode", "model_root", "model_id"}
SAID_BY_THE_DATA = {"data_root", "data_format", "train_data", "valid_data", "test_data", "group_id"}
SAID_BY_THE_DATA |= {"target_field", "sequence_field", "age_field"}


def what_decides(run: Run) -> str:
    """All that the outcome of a run depends on, whichever way it came in."""
    said = SAID_BY_THE_RUN | SAID_BY_THE_DATA
    params = {key: value for key, value in run.params.items() if key not in said}
    model = run.model if isinstance(run.model, str) else run.model.__name__
    data = open_dataset(str(run.dataset)) if isinstance(run.dataset, Path) else run.dataset.dataset
    assert data is not None
    return repr((model, data.data_hash, run.pe, run.seed, run.protocol, sorted(params.items()), run.gpu, run.start))


@pytest.fixture(scope="module")
def trained() -> dict[str, Trained]:
    """Outcomes by what decides them: equal runs give equal results, so that each is trained once."""
    return {}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    generate(folder / "synthetic", users=20, valid_users=10, test_users=10, items=50, categories=5)
    return folder


def benchmark(pairs: Sequence[str], data: Path, out: Path, checkout: Path) -> int:
    given = ["--model", "DIN", "--pe", "cape", "--repeats", "1", "--out", str(out), "--data-root", str(data)]
    return cli.main(["benchmark", "--dataset", "synthetic", *given, *pairs])


def tune(pairs: Sequence[str], data: Path, out: Path, checkout: Path) -> int:
    space = ["net_dropout=[0]", "attention_dropout=null", "position_dim=null"]
    given = ["--dataset", "synthetic", "--pe", "cape", "--trials", "1", "--out", str(out), "--data-root", str(data)]
    return cli.main(["tune", *given, *(part for one in space for part in ("--space", one)), *pairs])


def experiment(pairs: Sequence[str], data: Path, out: Path, checkout: Path) -> int:
    (out / "data").symlink_to(data)
    given = ["--config", str(checkout / "config"), "--expid", "DIN_synthetic", "--set", "position_encoding=cape"]
    return run_expid.main([*given, *(["--set", "seed=0"] if "seed=5" not in pairs else []), *pairs])


WAYS = [benchmark, tune, experiment]
KEYS = sorted(CHANGES)
KEYS_OF_WAYS = [
    pytest.param(
        way, key, marks=[pytest.mark.slow] if (KEYS.index(key) + 2 * turn) % 6 else [], id=f"{way.__name__}-{key}"
    )
    for turn, way in enumerate(WAYS)
    for key in KEYS
]
"""By default each way meets a sixth of the keys, all of them others."""


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def way(
    request: pytest.FixtureRequest,
    trained: dict[str, Trained],
    data: Path,
    tmp_path: Path,
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Way:
    """Trains with BASE and what is given, in this process, unless it was ``trained``."""
    runs: list[str] = []
    new: list[str] = []
    made_by: set[bool] = set()
    held: set[bool] = set()
    train, batches = training.train, BatchLoader.__iter__

    def recording(run: Run, progress: Any = None) -> Outcome:
        runs.append(what_decides(run))
        if runs[-1] not in trained:
            new.append(runs[-1])
            states: list[Mapping[str, Any]] = []
            outcome = train(run, lambda state: states.append({**state}))
            trained[runs[-1]] = Trained(outcome, states, Seen(0))
        for state in trained[runs[-1]].states if progress else ():
            progress(state)
        return trained[runs[-1]].outcome

    def iterate(self: BatchLoader) -> Iterator[JaggedBatch]:
        for made in batches(self):
            made_by.add(threading.current_thread() is threading.main_thread())
            held.add(torch.are_deterministic_algorithms_enabled())
            yield made

    def run_all(jobs: Sequence[Any], *_: Any) -> int:
        recording(jobs[0].run)
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ctr_pe.data.loader.SMALLEST_BATCH", 2)
    monkeypatch.setattr(training, "train", recording)
    monkeypatch.setattr("ctr_pe.study.runner.run_all", run_all)
    monkeypatch.setattr(BatchLoader, "__iter__", iterate)

    def run(*options: str, **changes: str) -> Seen:
        pairs = [part for key, value in {**BASE, **changes}.items() for part in ("--set", f"{key}={value}")]
        code = request.param([*pairs, *options], data, tmp_path, checkout)
        shown = capsys.readouterr()
        if code:
            return Seen(code, shown.err)
        (run,) = runs
        if new:  # tune makes batches also to time its steps
            seen = Seen(code, made_ahead=False in made_by, bar="it/s" in shown.out, deterministic=True in held)
            trained[run] = trained[run]._replace(seen=seen.of(trained[run].outcome))
        return trained[run].seen

    return run


@pytest.fixture(scope="module")
def baseline(data: Path) -> Seen:
    """The run with BASE, by a script of one's own."""
    given = parse_overrides(f"{key}={value}" for key, value in BASE.items())
    params = model_params("DIN", "synthetic", given) | {"net_dropout": 0}
    own = ("position_encoding", "model_root", "seed")
    params = {key: value for key, value in params.items() if key not in own}
    return Seen(0).of(training.train(Run("DIN", data / "synthetic", "cape", 0, params=params)))


def test_every_key_of_training_is_tried() -> None:
    assert CHANGES.keys() == TrainingSection.model_fields.keys()


def test_all_ways_in_give_the_same_run(baseline: Seen, way: Way, trained: dict[str, Trained]) -> None:
    trained.clear()
    assert way() == baseline
    assert 1 < len(baseline.history) <= 4


@pytest.mark.parametrize(("way", "key"), KEYS_OF_WAYS, indirect=["way"])
def test_every_key_changes_something_or_is_refused(key: str, baseline: Seen, way: Way) -> None:
    found = way(**{key: CHANGES[key]})
    if found.code:
        assert key in found.error
        assert found.code == 2
    else:
        assert found != baseline
    if key == "num_workers":  # who makes the batches, and nothing else
        assert found == baseline._replace(made_ahead=True)
    if key == "deterministic":  # a CPU is so anyway
        assert found == baseline._replace(deterministic=True)
        assert not torch.are_deterministic_algorithms_enabled()
    if key == "verbose":
        assert found == baseline._replace(bar=True)


def test_a_gpu_that_is_not_there_is_refused(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    found = way("--gpu", "0")
    assert found.code == 2
    assert "error: gpu 0: there is no GPU here (--gpu -1 for the CPU)" in found.error


def test_a_script_of_ones_own_is_refused_too(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    with pytest.raises(UserError, match="gpu 0: there is no GPU here"):
        training.train(Run("DIN", data / "synthetic", "cape", 0, gpu=0))


@pytest.mark.parametrize("key", ["train_data", "data_format", "min_categr_count"])
def test_keys_of_data_are_refused_for_data_that_are_built(key: str) -> None:
    with pytest.raises(UserError, match=f"{key}: the data set decides it"):
        check_params("DIN", {key: 1})
