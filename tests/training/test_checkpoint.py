"""A training that was interrupted goes on from its last epoch and ends as if nothing had happened, bit for bit."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ctr_pe.config.schema import OPTIMIZERS
from ctr_pe.data.dataset import Dataset
from ctr_pe.data.synthetic.bursts import generate
from ctr_pe.training import Outcome, Run, train
from ctr_pe.training.checkpoint import Checkpoint, random_state, set_random_state
from ctr_pe.training.loop import _Training
from ctr_pe.utils.errors import UserError
from tests.support.models import Rows, batch, build

PARAMS: dict[str, Any] = {
    "embedding_dim": 4,
    "attention_hidden_units": [4],
    "attention_dropout": 0.2,
    "dnn_hidden_units": [4],
    "net_dropout": 0.2,
    "batch_norm": True,
    "batch_size": 60,
    "epochs": 3,
    "early_stop_patience": 9,
    "learning_rate": 0.01,
    "monitor": "AUC",
}


class Interruption(Exception):
    """As a kill: nothing is caught and nothing is tidied up."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return generate(tmp_path_factory.mktemp("data") / "small", users=40, valid_users=15, test_users=15)


@pytest.fixture
def run(dataset: Dataset) -> Run:
    return Run("DIN", dataset.path, "cape", seed=3, params=PARAMS)


def interrupting(epoch: int, batch: int = 1) -> Callable[[Mapping[str, Any]], None]:
    def progress(state: Mapping[str, Any]) -> None:
        if state["epoch"] == epoch and state.get("batch") == batch:
            raise Interruption

    return progress


def disturb() -> None:
    """Another process has other random numbers."""
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    torch.manual_seed(7)


def facts(outcome: Outcome) -> Any:
    epochs = [replace(epoch, seconds=0.0) for epoch in outcome.history]
    return outcome.metrics, outcome.epoch, outcome.scores.tolist(), outcome.valid, outcome.auxiliary, epochs


CPU = torch.device("cpu")
QUICK = [
    {"eval_steps": 3},
    {"table_optimizer": "lazy_adam", "learning_rate_schedule": "cosine", "weight_average": 0.3},
    {"table_optimizer": "rowwise_adagrad", "optimizer": "adagrad", "num_workers": 2},
    {"early_stop_patience": 1, "save_best_only": False, "learning_rate": 0.1, "optimizer": "sgd", "epochs": 4},
]
SLOW = [
    *({"optimizer": name} for name in OPTIMIZERS),
    {"eval_steps": 14},
    {"shuffle": False, "embedding_regularizer": 0.01, "weight_average": 0.3},
    {"learning_rate_schedule": "linear", "eval_steps": 5},
]


@pytest.mark.parametrize(
    "changes",
    [*QUICK, *(pytest.param(changes, marks=pytest.mark.slow) for changes in SLOW)],
    ids=lambda changes: " ".join(f"{key}={value}" for key, value in changes.items()),
)
def test_an_interrupted_training_ends_as_another(changes: dict[str, Any], run: Run, tmp_path: Path) -> None:
    run = replace(run, params=PARAMS | changes)
    whole = train(run)
    kept = replace(run, resume=tmp_path / "state.safetensors")
    trained: list[tuple[int, int]] = []

    def progress(state: Mapping[str, Any]) -> None:
        trained.append((state["epoch"], state.get("batch", -1)))
        interrupting(len(interrupted) + 2)(state)

    interrupted: list[int] = []
    for _ in range(whole.history[-1].number - 1):
        disturb()
        with pytest.raises(Interruption):
            train(kept, progress)
        interrupted.append(1)
    disturb()
    outcome = train(kept, lambda state: trained.append((state["epoch"], state.get("batch", -1))))
    assert facts(outcome) == facts(whole)
    assert [file.name for file in tmp_path.iterdir()] == ["state.safetensors"]


@pytest.mark.parametrize(
    ("model", "pe", "params"),
    [
        ("DIEN", "none", {"aux_loss_alpha": 1.0}),
        ("SASRec", "euler", {"euler_contrast": 0.1}),
        pytest.param("SASRec", "pdm", {"pdm_contrast": 0.1}, marks=pytest.mark.slow),
    ],
)
def test_numbers_that_modules_draw_themselves_go_on(
    model: str, pe: str, params: dict[str, Any], dataset: Dataset, tmp_path: Path
) -> None:
    small = {"embedding_dim": 4, "dnn_hidden_units": [4], "batch_size": 60, "epochs": 2, "monitor": "AUC"}
    run = Run(model, dataset.path, pe, seed=3, params={**small, **params})
    kept = replace(run, resume=tmp_path / "state")
    with pytest.raises(Interruption):
        train(kept, interrupting(2))
    assert facts(train(kept)) == facts(train(run))


def test_no_epoch_is_trained_twice(run: Run, tmp_path: Path) -> None:
    kept, steps = replace(run, resume=tmp_path / "state"), list[tuple[int, int]]()
    with pytest.raises(Interruption):
        train(kept, interrupting(3))
    train(kept, lambda state: steps.append((state["epoch"], state.get("batch", -1))))
    assert steps[0] == (3, 0)
    steps.clear()
    train(kept, lambda state: steps.append((state["epoch"], 0)))  # killed before its result was stored
    assert steps == []


class Kept(NamedTuple):
    """A training of one epoch, what it gave and the state that it left."""

    run: Run
    facts: Any
    state: bytes

    def placed(self, file: Path, content: bytes | None = None) -> Run:
        """The run with its state in ``file``, or with other content."""
        file.write_bytes(self.state if content is None else content)
        return replace(self.run, resume=file)


@pytest.fixture(scope="module")
def kept(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    run = Run("DIN", dataset.path, "cape", seed=3, params=PARAMS | {"epochs": 1})
    file = tmp_path_factory.mktemp("kept") / "state"
    return Kept(run, facts(train(replace(run, resume=file))), file.read_bytes())


@pytest.mark.parametrize(
    "change",
    [{"seed": 4}, {"pe": "none"}, {"params": PARAMS | {"epochs": 1, "learning_rate": 0.02}}, {"protocol": "paper"}],
)
def test_the_state_of_another_run_is_as_none(change: dict[str, Any], kept: Kept, tmp_path: Path) -> None:
    other = replace(kept.placed(tmp_path / "state"), **change)
    assert facts(train(other)) == facts(train(replace(other, resume=None))) != kept.facts


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_damaged_state_is_as_none(keep: int, kept: Kept, tmp_path: Path) -> None:
    assert facts(train(kept.placed(tmp_path / "state", kept.state[:keep]))) == kept.facts


@pytest.mark.parametrize("key", ["epoch", "history", "model", "optimizer", "divergence", "random", "kept_weights"])
def test_a_state_of_another_content_is_one_line(key: str, kept: Kept, tmp_path: Path) -> None:
    run = kept.placed(tmp_path / "state")
    assert run.resume is not None
    checkpoint = Checkpoint(run.resume, header(run.resume)["run"])
    state = checkpoint.read()
    first = next(iter(state[key])) if isinstance(state[key], dict) else None
    for wrong in (
        {**state, key: {first: torch.zeros(1, 2, 3)}},
        {name: of for name, of in state.items() if name != key},
    ):
        checkpoint.write(wrong)
        with pytest.raises(UserError, match=r"state: not the state of this training \([^\n]{1,150}\): remove it$"):
            train(run)


def header(file: Path) -> dict[str, str]:
    content = file.read_bytes()
    metadata: dict[str, str] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    return metadata


def test_a_state_is_values_and_no_code(kept: Kept, tmp_path: Path) -> None:
    file = tmp_path / "state"
    kept.placed(file)
    assert header(file).keys() == {"run", "state"}
    json.loads(header(file)["state"])


def test_a_state_of_an_earlier_version_is_one_line(kept: Kept, tmp_path: Path) -> None:
    """Its parts have other names."""
    file = tmp_path / "state"
    run = kept.placed(file)
    checkpoint = Checkpoint(file, header(file)["run"])
    state = checkpoint.read()
    checkpoint.write({"guard" if name == "divergence" else name: part for name, part in state.items()})
    with pytest.raises(UserError, match=r"state: not the state .*\(KeyError: 'divergence'\): remove it$"):
        train(run)


@pytest.mark.parametrize(("content", "problem"), [(b"half", "damaged (SafetensorError)"), (None, "another run")])
def test_a_state_that_is_passed_over_is_logged(
    content: bytes | None, problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "state"
    Checkpoint(file, "one").write({"weights": torch.zeros(1)})
    if content is not None:
        file.write_bytes(content)
    assert Checkpoint(file, "two").read() is None
    [line] = caplog.messages
    assert problem in line
    assert line.endswith("training starts at its beginning")


def test_every_part_of_a_state_comes_back(tmp_path: Path) -> None:
    """Also those that make a difference in few trainings only."""
    rows: Any = Rows(*(batch([3, 2, 5], seed=seed) for seed in range(4)))
    rows.epoch = 1

    def training() -> _Training:
        how = {"weight_average": 0.3, "learning_rate_schedule": "cosine", "eval_steps": 3}
        watch = SimpleNamespace(steps=0, step=lambda *_: None, report=lambda *_: None, evaluated=lambda *_, **__: None)
        model = build("DIN", tmp_path, **how)
        return _Training(model, rows, Rows(), 3, None, watch)  # type: ignore[arg-type]

    one = training()
    one.train_epoch()
    assert float(one.loss) > 0  # of the step since the evaluation
    one.stale, one.best, one.divergence.above = 1, 0.25, 7
    one.parts = {"smallness": [torch.tensor(1.0), torch.tensor(2.0)]}
    random.gauss(0, 1), np.random.randn()  # noqa: NPY002  each leaves a second number for the next call
    Checkpoint(tmp_path / "state", "one").write(one.state())
    state = Checkpoint(tmp_path / "state", "one").read()
    assert state.keys() > {"model", "optimizer", "schedule", "average", "divergence", "random", "kept_weights"}
    disturb()
    other, rows.epoch = training(), 0
    other.restore(state)
    assert plain(other.state()) == plain(state)
    assert other.watch is not None
    assert other.watch.steps == other.steps == 4


def plain(value: Any) -> Any:
    """Lists for tuples and tensors."""
    if isinstance(value, Tensor):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def test_tensors_and_values_come_back(tmp_path: Path) -> None:
    table = nn.Parameter(torch.arange(6.0).view(2, 3))
    state = {
        "shared": [table, table.detach(), {1: table[1], "column": table[:, 1]}],
        "kinds": [torch.tensor(True), torch.tensor(3), torch.rand(2).double(), torch.rand(0, 4), torch.rand(2).half()],
        "values": [None, True, 3, 0.1, float("inf"), "text", {}, []],
    }
    checkpoint = Checkpoint(tmp_path / "state", "one")
    assert checkpoint.read() is None
    checkpoint.write(state)
    assert replace(checkpoint, run="another").read() is None
    found = checkpoint.read()
    assert found["values"] == state["values"]
    assert found["shared"][2].keys() == {1, "column"}

    def tensors(value: Any) -> list[Tensor]:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        return [value] if isinstance(value, Tensor) else [one for part in parts for one in tensors(part)]

    for ours, theirs in zip(tensors(found), tensors(state), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert (tmp_path / "state").stat().st_size < 4096


def test_random_streams_go_on() -> None:
    def drawn() -> list[float]:
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]  # noqa: NPY002

    random.gauss(0, 1), np.random.randn()  # noqa: NPY002  each leaves a second number for the next call
    state = json.loads(json.dumps({**random_state(CPU), "torch": None}))
    state["torch"] = torch.get_rng_state()
    wanted = drawn()
    disturb()
    set_random_state(state, CPU)
    assert drawn() == wanted


def test_a_state_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    with pytest.raises(UserError, match=r"state: [^\n]+$"):
        Checkpoint(tmp_path / "state", "one").write({})
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
