"""Two processes, started by torchrun, train as one does on the same batches. Each test starts processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ctr_pe.data.synthetic.bursts import generate
from ctr_pe.utils import distributed
from ctr_pe.utils.errors import UserError
from tests.support import of_processes
from tests.support.processes import wait_for

pytestmark = pytest.mark.slow
CHECKOUT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LIMIT = 120  # seconds: processes that wait for each other would do so for half an hour


def torchrun(*command: object, **options: Any) -> subprocess.CompletedProcess[str]:
    given = {"capture_output": True, "text": True, "timeout": LIMIT, **options}
    return subprocess.run([*TORCHRUN, *map(str, command)], **given)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate(tmp_path_factory.mktemp("data") / "small", users=40, valid_users=15, test_users=15).path


@pytest.fixture(scope="module")
def found(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What each of two processes has found."""
    out = tmp_path_factory.mktemp("found")
    run = torchrun("-m", "tests.support.of_processes", data, out)
    assert run.returncode == 0, run.stderr
    return [out / "0", out / "1"]


@pytest.mark.parametrize("counts", of_processes.COUNTS)
@pytest.mark.parametrize("name", of_processes.STEPS)
def test_a_step_has_the_gradients_of_one_process(name: str, counts: str, found: list[Path], tmp_path: Path) -> None:
    wanted = of_processes.step(name, counts, tmp_path)
    for of_process in found:
        own: dict[str, Tensor] = torch.load(of_process / "gradients.pt")[f"{name}, {counts}"]
        assert own.keys() == wanted.keys()
        for key in wanted:
            torch.testing.assert_close(own[key], wanted[key], rtol=1e-4, atol=1e-5, msg=lambda text: f"{key}: {text}")  # noqa: B023


@pytest.mark.parametrize("name", of_processes.TRAININGS)
def test_a_training_has_the_metrics_of_one_process(name: str, found: list[Path], data: Path) -> None:
    wanted = of_processes.facts(of_processes.training(name, data))
    first, second = (json.loads((of_process / "outcomes.json").read_text())[name] for of_process in found)
    assert first == second
    assert first[0] == wanted[0]
    for ours, theirs in zip(first[1:], wanted[1:], strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=1e-5)


def experiment(data: Path, *more: str) -> list[object]:
    """The command of an experiment of many epochs."""
    given = ["embedding_dim=4", "attention_hidden_units=[4]", "dnn_hidden_units=[4]", "batch_size=61", "verbose=0"]
    given += [
        "attention_dropout=0",
        "save_best_only=false",
        "epochs=30",
        "early_stop_patience=99",
        f"data_root={data.parent}",
    ]
    script = [CHECKOUT / "model_zoo" / "run_expid.py", "--config", CHECKOUT / "config"]
    pairs = [part for pair in (*given, "dataset_id=small", *more) for part in ("--set", pair)]
    return [*script, "--expid", "DIN_synthetic", "--gpu", "-1", *pairs]


def processes_of(parent: int) -> dict[int, int]:
    """Rank -> process."""
    found = {}
    for child in map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split()):
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        found |= {int(one[5:]): child for one in variables if one.startswith(b"RANK=")}
    return found


def result(folder: Path) -> str:
    """Metrics on valid and test, from the one line of the results."""
    [line] = (folder / "config.csv").read_text().splitlines()
    return line.partition("[val]")[2]


def with_dropout(data: Path) -> list[str]:
    """Each process draws from a stream of its own."""
    return [*map(str, experiment(data, "net_dropout=0.3"))]


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing stops."""
    folder = tmp_path_factory.mktemp("whole")
    run = torchrun(*with_dropout(data), cwd=folder)
    assert run.returncode == 0, run.stderr
    return folder


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_run_with_one_line_and_it_goes_on(
    rank: int, whole: Path, data: Path, tmp_path: Path
) -> None:
    """To the digit as two processes that nothing stops: one process adds up in another order, and in 30 epochs on few
    rows that can grow to another rank of a row."""
    arguments = with_dropout(data)
    command = [*TORCHRUN, *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as run:
        wait_for(lambda: any(tmp_path.rglob("*.unfinished")))
        os.kill(processes_of(run.pid)[rank], signal.SIGKILL)
        _, said = run.communicate(timeout=LIMIT)
    assert run.returncode
    lines = [line for line in said.splitlines() if "run_expid: error" in line]
    assert lines == ["run_expid: error: one of 2 processes has ended: the same command goes on from the last epoch"]
    assert said.count("Traceback") == 1, said  # torchrun's own
    assert not (tmp_path / "config.csv").exists()
    again = torchrun(*arguments, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("Going on after epoch") == 1
    assert not any(tmp_path.rglob("*.unfinished"))
    assert result(tmp_path) == result(whole)


def test_there_is_a_gpu_for_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_group", object())
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert distributed.rank_gpu(-1) == -1
    with pytest.raises(UserError, match=r"^gpu 0: 3 processes and 2 GPUs \(torchrun --nproc-per-node 2\)$"):
        distributed.rank_gpu(0)
    chosen: list[int] = []
    monkeypatch.setattr(torch, "get_device_module", lambda: SimpleNamespace(set_device=chosen.append))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert [distributed.rank_gpu(0), *chosen] == [1, 1]


def test_a_mistake_is_one_line(data: Path, tmp_path: Path) -> None:
    for mistake, line in {
        "learning_rate=0": "run_expid: error: learning_rate must be a positive number, got 0",
        "batch_size=1": "run_expid: error: 1 row in a batch (batch_size) for 2 processes",
    }.items():
        run = torchrun(*experiment(data, mistake), cwd=tmp_path)
        assert run.returncode
        assert [found for found in run.stderr.splitlines() if "error: " in found] == [line]
    run = torchrun("-m", "ctr_pe.cli", "benchmark", "--dry-run", cwd=tmp_path)
    assert run.stderr.count("ctr-pe: error: benchmark: torchrun is for model_zoo/run_expid.py and scripts") == 1
