"""Two processes, started by torchrun, train as one does on the same batches. Each test starts processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import of_ranks
import pytest
import torch
from torch import Tensor

from ctr_pe.data.synthetic import generate

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
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
    helpers = os.pathsep.join([str(HERE.parent / "model_zoo"), *filter(None, sys.path)])
    run = torchrun(HERE / "of_ranks.py", data, out, env={**os.environ, "PYTHONPATH": helpers})
    assert run.returncode == 0, run.stderr
    return [out / "0", out / "1"]


@pytest.mark.parametrize("counts", of_ranks.COUNTS)
@pytest.mark.parametrize("name", of_ranks.STEPS)
def test_a_step_has_the_gradients_of_one_process(name: str, counts: str, found: list[Path], tmp_path: Path) -> None:
    wanted = of_ranks.step(name, counts, tmp_path)
    for of_process in found:
        own: dict[str, Tensor] = torch.load(of_process / "gradients.pt")[f"{name}, {counts}"]
        assert own.keys() == wanted.keys()
        for key in wanted:
            torch.testing.assert_close(own[key], wanted[key], rtol=1e-4, atol=1e-5, msg=lambda text: f"{key}: {text}")  # noqa: B023


@pytest.mark.parametrize("name", of_ranks.TRAININGS)
def test_a_training_has_the_metrics_of_one_process(name: str, found: list[Path], data: Path) -> None:
    wanted = of_ranks.facts(of_ranks.training(name, data))
    first, second = (json.loads((of_process / "outcomes.json").read_text())[name] for of_process in found)
    assert first == second
    assert first[0] == wanted[0]
    for ours, theirs in zip(first[1:], wanted[1:], strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=1e-5)
