"""On a GPU, where there is one: kernels, every model and encoding, requests that are recorded."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmark.speed.cases import ENCODED
from ctr_pe.pe import available_pes
from ctr_pe.sequence import filled
from ctr_pe.serving.request_graph import CUDAGraphs, inputs_from
from ctr_pe.training import load, save, step_graphs
from ctr_pe.training.deterministic import deterministic
from ctr_pe.training.step_graphs import StepGraphs
from tests.support.models import SMALL, Rows, batch, build, randomised, requested

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
TESTS = Path(__file__).parent
MODELS = tuple(SMALL)
ENCODINGS = available_pes()
BATCH = batch([3, 0, 6, 1])


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's GRU takes products in TF32 unless it is told not to."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("cases", ["support/on_triton.py", "support/on_triton_recurrence.py"])
def test_kernels_give_what_torch_gives_in_float64(cases: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(TESTS / cases)]
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("pe", ENCODINGS)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_has_the_loss_and_the_gradients_of_the_cpu(name: str, pe: str, tmp_path: Path) -> None:
    here = randomised(build(name, tmp_path, position_encoding=pe)).train()
    there = build(name, tmp_path, position_encoding=pe, gpu=0).train()
    there.load_state_dict(here.state_dict())
    losses, gradients = [], []
    for model in (here, there):
        model._max_gradient_norm = 10.0
        losses.append(model.train_step(BATCH).item())
        gradients.append({key: p.grad.cpu() for key, p in model.named_parameters() if p.grad is not None})
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert gradients[0].keys() == gradients[1].keys()
    for key, want in gradients[0].items():
        assert torch.allclose(gradients[1][key], want, rtol=1e-3, atol=1e-5), key


@pytest.mark.parametrize("pe", ENCODINGS)
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_waits_for_nothing(name: str, pe: str, tmp_path: Path) -> None:
    model = build(name, tmp_path, position_encoding=pe, gpu=0).train()
    model._max_gradient_norm = 10.0
    for _ in range(2):
        model.train_step(BATCH)
    with no_waiting():
        model.train_step(BATCH)


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("pe", ["none", "cape"])
@pytest.mark.parametrize("name", MODELS)
def test_twenty_steps_as_graphs_are_those_that_are_launched_one_by_one(name: str, pe: str, tmp_path: Path) -> None:
    """Of 20 batches, with dropout; all but the first of a size wait for nothing."""
    draw, found = random.Random(0), []
    rows = [batch([draw.randint(0, 6) for _ in range(6)], seed, slots=6) for seed in range(20)]
    for most in (0, step_graphs.MOST):
        with mock.patch.object(step_graphs, "MOST", most), mock.patch.object(filled, "SHARE", 1):
            model = build(name, tmp_path, position_encoding=pe, gpu=0, net_dropout=0.2).train()
            graphs, losses = StepGraphs(model), []
            for one in rows:
                again = len(losses) > 12
                with no_waiting() if again else nullcontext():
                    losses.append(graphs(one, 0.5))
        assert graphs.works
        assert len(graphs._graphs) == (3 if most else 0)
        found.append(([float(loss) for loss in losses], {key: x.cpu() for key, x in model.state_dict().items()}))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4)
    for key, want in found[0][1].items():
        assert torch.allclose(found[1][1][key], want, rtol=1e-3, atol=1e-4), key


@pytest.mark.parametrize("pe", ["none", "cape"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_evaluates_is_saved_and_loaded(name: str, pe: str, tmp_path: Path) -> None:
    model = build(name, tmp_path, position_encoding=pe, gpu=0)
    model.fit(Rows(), 1, Rows())
    model.eval()
    scores = model.predict(Rows())
    save(model, tmp_path / "weights")
    for gpu in (0, -1):
        again = build(name, tmp_path, position_encoding=pe, gpu=gpu)
        load(again, tmp_path / "weights")
        assert again.predict(Rows()) == pytest.approx(scores, rel=1e-5)


@pytest.mark.parametrize("pe", ["none", "rope", "cope", "cape"])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_again(name: str, pe: str, tmp_path: Path) -> None:
    found: list[dict[str, Tensor]] = []
    with deterministic(True):
        for _ in range(2):
            model = build(name, tmp_path, position_encoding=pe, gpu=0).train()
            model.fit(Rows(), 3, Rows())
            found.append({key: x.cpu() for key, x in model.state_dict().items()})
    assert all(torch.equal(x, found[1][key]) for key, x in found[0].items())


@pytest.mark.parametrize("pe", ["none", "cape"])
@pytest.mark.parametrize("name", MODELS)
def test_mixed_precision(name: str, pe: str, tmp_path: Path) -> None:
    model = build(name, tmp_path, position_encoding=pe, gpu=0, amp=True).train()
    model._max_gradient_norm = 10.0
    losses = [model.train_step(BATCH).item() for _ in range(30)]
    assert losses[-1] < losses[0]
    assert all(x.isfinite().all() for x in model.state_dict().values())


@pytest.mark.parametrize("pe", ENCODINGS)
@pytest.mark.parametrize("name", ENCODED)
def test_requests_of_like_size_are_one_recording(name: str, pe: str, tmp_path: Path) -> None:
    assert_records(name, pe, tmp_path)


@pytest.mark.parametrize("pe", ["none", "cape"])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ENCODED])
def test_so_they_are_in_the_other_models(name: str, pe: str, tmp_path: Path) -> None:
    assert_records(name, pe, tmp_path)


def assert_records(name: str, pe: str, folder: Path) -> None:
    """Kernels that were recorded with one request score others as the model does."""
    model = randomised(build(name, folder, position_encoding=pe)).eval()
    requests = [requested(model, *size, seed) for seed, size in enumerate([(2, 5, 3), (2, 3, 4), (1, 1, 1), (2, 6, 3)])]
    wanted = [model.score_candidates(model.encode(histories), others).detach() for histories, others in requests]
    inputs = [inputs_from(model, *one) for one in requests]
    there = build(name, folder, position_encoding=pe, gpu=0)
    there.load_state_dict(model.state_dict())
    cuda_graphs = CUDAGraphs(there.eval())
    for _ in range(2):
        for given, want in zip(inputs, wanted, strict=True):
            assert torch.allclose(cuda_graphs(given), want, atol=1e-5)
    assert set(cuda_graphs._graphs) == {(2, 6, 4), (2, 4, 4), (1, 1, 1)}
