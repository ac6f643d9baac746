"""The speed suite: it asks for everything that was promised, times fairly, and its baselines compute the same thing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmark.speed import cases, data, growth, memory, models, run, training_steps
from benchmark.speed.cases import CASES, Case, Settings
from benchmark.speed.timing import Figure, alternate, alternate_all
from ctr_pe.data.dataset import Dataset
from ctr_pe.pe import available_pes
from tests.support.processes import PATIENCE

MODELS = ("DIN", "DIEN", "BST", "DMIN", "TIN", "SASRec")
SMALL = {"embedding_dim": 8, "dnn_hidden_units": [16]}
PROMISED = {  # by issue 5
    "step.DIN.default-allocator": ("≥", 15),
    "step.DIN.tuned-allocator": ("≥", 8),
    "step.DIN.full": ("≥", 2),
    **{f"step.{model}": ("≥", 6) for model in MODELS[1:]},
    **{f"tables.{name}.{size}": ("≥", 4) for name in ("lazy_adam", "rowwise_adagrad") for size in ("64k", "1m", "4m")},
    "loader.rows": ("≥", 30),
    "loader.bytes.disk": ("≥", 10),
    "loader.bytes.resident": ("≥", 10),
    "loader.beyond-memory": ("≤", 2),
    "evaluation.seconds": ("≤", 0.5),
    "evaluation.fuxictr": ("≥", 1000),
    "build.rows": ("≥", 500_000),
    "build.memory": ("≤", 1.2),
    "build.csv": ("≥", 20),
    "limit.DIN.default-allocator": ("≤", 2),
    "limit.DIN.tuned-allocator": ("≤", 2),
    "growth.seconds": ("≤", 1.2),
    "growth.memory": ("≤", 1.2),
    "growth.tensor": ("≤", 2),
    "seeds.five": ("≤", 1),
}
PROMISED |= {  # of one user with many candidates
    "request.DIN.cape.fuxictr": ("≥", 10),
    **{f"request.{model}.cape.repeated": ("≥", 4 if model == "DIN" else 1) for model in MODELS},
    **{f"request.{model}.cape.p99.{count}": ("≤", 100) for model in ("DIN", "SASRec") for count in (100, 1000)},
    **{f"request.DIN.cape.onnx.{count}": ("≤", 100) for count in (100, 1000)},
    **{f"request.{model}.cape.memory": ("≤", 300) for model in MODELS},
}
PROMISED |= {  # of the service
    "service.throughput": ("≤", 2),
    "service.p99.100": ("≤", 100),
    "service.p99.1000": ("≤", 100),
}
BASELINE = {"DIN": 314, "TIN": 240, "BST": 235, "SASRec": 390, "DMIN": 600, "DIEN": 500}
PROMISED |= {"build.csv.columns": ("≥", 15), **{f"columns.{model}": ("≤", 1.3) for model in ("DIN", "BST", "SASRec")}}
PROMISED |= {  # of accelerators
    **{f"waits.{model}": ("≤", 0) for model in MODELS},
    **{f"launches.{model}.none": ("≤", most) for model, most in BASELINE.items()},
    "launches.DIN.cape": ("≤", 324),
    "launches.DIEN.cape": ("≤", 510),
    "launches.BST.cape": ("≤", 245),
    "launches.DMIN.cape": ("≤", 660),
    "launches.TIN.cape": ("≤", 250),
    "launches.SASRec.cape": ("≤", 410),
    **{
        f"launches.{model}.{pe}": ("≤", BASELINE[model] + 15 * layers)
        for model, layers in (("DIN", 1), ("BST", 1), ("SASRec", 2))
        for pe in available_pes()
        if pe not in ("none", "cape")
    },
}


def test_every_promise_has_a_case() -> None:
    found = {case.name: (case.sense, case.goal) for case in CASES}
    assert len(found) == len(CASES)
    encodings = {name: goal for name, goal in found.items() if name.startswith("encoding.")}
    next_item = {
        f"next.{pe}": ("≤", None if pe in cases.BY_ARITHMETIC else 1.1) for pe in available_pes() if pe != "none"
    }
    assert {name: goal for name, goal in found.items() if name not in encodings} == PROMISED | next_item
    models_of = [(model, shape) for model in ("DIN", "BST", "SASRec") for shape in ("amazon", "full")]
    names = [f"encoding.{pe}.{model}.{shape}" for model, shape in models_of for pe in available_pes() if pe != "none"]
    assert list(encodings) == names
    for model, shape in models_of:
        assert found[f"encoding.cape.{model}.{shape}"] == ("≤", 1.05 if shape == "amazon" else 1.08)
        assert found[f"encoding.naive.{model}.{shape}"] == ("≤", 1.15)
    assert [cases.overhead(pe, full=False) for pe in ("kernel", "pdm")] == [1.5, 1.5]
    assert {pe for pe in available_pes() if cases.overhead(pe, full=False) is None} == {
        *("dif", "dape", "fire", "cape_cosine", "likeness")
    }
    assert cases.ON_GPU.keys() <= {case.name for case in cases.CASES}
    assert (cases.ON_GPU["seeds.five"], cases.ON_GPU["step.DIEN"]) == (0.7, 10)


@pytest.mark.parametrize(
    ("only", "chosen", "quick", "names"),
    [
        (["loader"], None, False, ["rows", "bytes.disk", "bytes.resident", "beyond-memory"]),
        (["loader"], None, True, ["rows", "bytes.disk", "bytes.resident"]),
        (["step.DIN.f", "limit.DIN.t"], None, False, ["DIN.full", "DIN.tuned-allocator"]),
        (["step", "seeds"], ["TIN", "BST"], False, ["BST", "TIN", "five"]),
        (["nothing"], None, False, []),
    ],
)
def test_cases_are_chosen_by_the_beginning_of_their_name_and_by_model(
    only: list[str], chosen: list[str] | None, quick: bool, names: list[str]
) -> None:
    assert [case.name.partition(".")[2] for case in run.select(only, chosen, quick)] == names


class Clock:
    """Time passes only in the two things that are timed."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, list[tuple[str, int]]()

    def takes(self, name: str, seconds: list[float]) -> Any:
        def call(number: int) -> None:
            self.calls.append((name, number))
            self.now += seconds[number]

        return call


def test_both_are_timed_in_turn_on_the_same_input() -> None:
    clock = Clock()
    ours, theirs = clock.takes("ours", [1, 2, 1, 100]), clock.takes("theirs", [10, 10, 30, 900])
    timed = alternate(ours, theirs, repeats=3, warm_up=1, clock=lambda: clock.now)
    assert [number for _, number in clock.calls] == [-1, -1, 0, 0, 1, 1, 2, 2]
    assert [name for name, _ in clock.calls[2:]] == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert (timed.ours, timed.baseline) == ([1, 2, 1], [10, 10, 30])  # without the warm-up, which took 100 and 900
    faster, slower = timed.speedup("theirs", rows=3), timed.overhead("theirs", goal=4.0)
    assert list(faster.values) == [10, 5, 30]
    assert faster.median == 10
    assert faster.quartiles == (7.5, 20)
    assert (faster.ours, faster.baseline, faster.against, faster.details) == (1, 10, "theirs", {"rows": 3})
    assert slower.median == pytest.approx(0.1)
    assert slower.goal == 4.0


def test_short_calls_are_timed_more_often() -> None:
    clock = Clock()
    call = clock.takes("either", [0.25] * 50)
    assert len(alternate(call, call, 2, 0, least_seconds=10, clock=lambda: clock.now).ours) == 20
    assert len(alternate(call, call, 2, 0, least_seconds=0.1, clock=lambda: clock.now).ours) == 2


def test_several_things_each_have_a_baseline_beside_them() -> None:
    clock = Clock()
    names = ["a", "b", "c"]
    several = [clock.takes(name, [1.0 + index] * 3) for index, name in enumerate(names)]
    timed = alternate_all(several, clock.takes("none", [1, 2, 4]), repeats=2, warm_up=1, clock=lambda: clock.now)
    order = [name for name, number in clock.calls if number >= 0]
    assert order == ["a", "none", "b", "c", "none", "a", "none", "b", "none", "c"]
    assert [times.ours for times in timed] == [[1, 1], [2, 2], [3, 3]]
    assert all(times.baseline == [1, 2] for times in timed)


def test_a_commands_own_memory_is_apart_from_the_files_that_it_maps(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(200_000_000))
    lines: tuple[str, ...] = "import mmap, sys, time", "own = b'x' * 100_000_000", "file = open(sys.argv[1], 'rb')"
    lines += (
        "mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)",
        "mapped.find(b'x')",
        "time.sleep(0.3)",
        "exit(3)",
    )
    code, own, resident = memory.peak_of([sys.executable, "-c", "\n".join(lines), str(tmp_path / "file")])
    assert code == 3
    assert 100e6 < own < 150e6
    assert resident > own + 150e6


def test_waiting_for_the_device_belongs_to_the_time() -> None:
    clock, pending = Clock(), [0.0]

    def launch(_: int) -> None:
        pending[0] += 2.0

    def wait() -> None:
        clock.now += pending[0]
        pending[0] = 0.0

    timed = alternate(launch, launch, 2, 1, wait=wait, clock=lambda: clock.now)
    assert timed.ours == timed.baseline == [2.0, 2.0]


def test_results_and_table(tmp_path: Path) -> None:
    settings = Settings(quick=False, folder=tmp_path)
    at_least, at_most = Case("step.X", "", "≥", 15), Case("seeds.five", "", "≤", 1.0, allocator="tuned")
    figure = Figure([14.0, 16.0, 15.5], 0.25, 4.0, against="X of others", details={"batch_size": 2})
    result = run.as_result(at_least, figure, settings)
    assert [result[key] for key in ("name", "ratio", "goal", "ok")] == ["step.X", 15.5, 15, True]
    assert result["spread"] == pytest.approx(1.0)
    assert result["repeats"] == 3
    assert result["machine"]["cores"] >= 1
    assert result["machine"]["allocator"] == "default"
    slow = run.as_result(at_most, replace(figure, values=[0.8], unit="GB"), settings)
    assert (slow["ok"], slow["spread"], slow["machine"]["allocator"]) == (True, 0, "tuned")
    depends = Case("encoding.dif", "", "≤", None)
    assert not run.as_result(depends, replace(figure, goal=15.0), settings)["ok"]
    run._write(tmp_path / "speed.json", [result])
    assert json.loads((tmp_path / "speed.json").read_text()) == [result]
    lines = run.table([result, slow, {"name": "loader.rows", "error": "no Ray", "ok": False}]).splitlines()
    assert lines[0].split() == list(run.HEAD)
    assert lines[1].split("  ")[0] == "step.X"
    assert "0.25 s" in lines[1]
    assert "≥ 15×" in lines[1]
    assert "X of others" in lines[1]
    assert "0.8 GB" in lines[2]
    assert lines[3].split()[1:] == ["failed", "no", "no", "Ray"]


def test_the_allocator_of_a_child_is_the_case_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    default, tuned = (run.environment(Case("x", "", "≥", 1, allocator=which), "/tmp") for which in ("default", "tuned"))
    assert not [name for name in default if name.startswith("MALLOC_")]
    assert {name: value for name, value in tuned.items() if name.startswith("MALLOC_")} == cases.TUNED


def command(*options: str) -> list[str]:
    return [sys.executable, str(Path(run.__file__)), "--quick", *options]


def test_it_runs_from_any_directory_and_without_a_path(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command("--list"), cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "evaluation.fuxictr" in done.stdout


@pytest.mark.slow
def test_a_quick_run(tmp_path: Path) -> None:
    """Cases in processes of their own, those of encodings in one together, with every promised key."""
    file = tmp_path / "speed.json"
    names = ["encoding.rope.DIN.amazon", "encoding.dif.DIN.amazon", "next.fire", "evaluation.fuxictr"]
    done = subprocess.run(
        command("--only", ",".join(names), "--json", str(file)), capture_output=True, text=True, check=True
    )
    results = json.loads(file.read_text())
    assert [result["name"] for result in results] == names
    rope, dif, fire, ratio = results
    assert dif["goal"] == pytest.approx(1.2 * dif["details"]["multiply_adds"])
    assert fire["goal"] == pytest.approx(1.1 * fire["details"]["multiply_adds"])
    assert dif["details"]["multiply_adds"] > 1 == rope["details"]["multiply_adds"]
    assert all(0.2 < result["ratio"] < 5 for result in (dif, rope))
    assert "encoding.rope.DIN.amazon and 1 more" in done.stderr
    assert ratio["ratio"] > 20  # several hundred; the machine may be busy
    assert ratio["ratio"] == pytest.approx(ratio["baseline"] / ratio["ours"], rel=3)
    assert ratio["repeats"] == 3
    assert ratio["quick"]
    assert [line.split()[0] for line in done.stdout.splitlines()[:5]] == ["name", *names]
    assert "repeat 3 of 3" in done.stderr


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished(tmp_path: Path) -> None:
    file = tmp_path / "speed.json"
    running = subprocess.Popen(
        command("--only", "evaluation.s,growth.s", "--json", str(file)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stderr is not None
    for line in running.stderr:
        if line.startswith("[2/2]"):
            running.send_signal(signal.SIGINT)
            break
    out, err = running.communicate(timeout=PATIENCE)
    assert running.returncode == 130
    assert "1 of 2" in err
    assert "evaluation.seconds" in out
    assert [result["name"] for result in json.loads(file.read_text())] == ["evaluation.seconds"]


def test_a_case_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Case("broken", "nowhere:nothing", "≥", 1)
    monkeypatch.setattr(run, "CASES", [broken])
    args = run._parser().parse_args(["--quick"])
    (result,) = run._in_a_process([broken], args)
    assert (result["name"], result["ok"]) == ("broken", False)
    assert result["error"]


def test_an_unknown_name_says_which_is_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--only", "loader,stepp"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'stepp': did you mean 'step." in line
    assert run.main(["--only", "step.TIN", "--models", "DIN"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--list" in line


@pytest.fixture(scope="module")
def amazon(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return data.write(tmp_path_factory.mktemp("data") / "amazon", data.draw(96), ages=True)


def test_histories_are_as_in_amazon_s_logs() -> None:
    rows = data.draw(20_000, seed=1)
    length = np.diff(rows.offsets)
    assert length.mean() == pytest.approx(9, abs=0.5)
    assert (length.min(), length.max()) == (1, 100)
    assert np.median(length) == 5
    assert np.percentile(length, 90) == pytest.approx(19, abs=1.5)
    ages = np.split(rows.ages, rows.offsets[1:-1])
    assert all((np.diff(age) < 0).all() and age[-1] > 0 for age in ages)
    assert len(set(rows.items.tolist())) > 10_000
    assert (data.draw(100, seed=1).items == data.draw(100, seed=1).items).all()
    assert set(np.diff(data.draw(50, full=True).offsets)) == {100}


def test_both_sides_get_the_same_rows(amazon: Dataset) -> None:
    (trimmed, padded), (_, second) = data.batches(amazon, amazon.feature_map(8), 48, 2)
    assert padded["item_history"].shape == second["item_history"].shape == (48, 100)
    width = trimmed["item_history"].shape[1]
    assert width == (trimmed["item_history"] != 0).sum(1).max() < 100
    for name in data.HISTORY:
        assert torch.equal(trimmed[name], padded[name][:, :width])
        assert not padded[name][:, width:].any()
    assert all(torch.equal(trimmed[name], padded[name]) for name in ("label", *data.TARGET))
    assert data.AGE not in padded


@pytest.mark.parametrize("model", MODELS)
def test_the_padded_model_gives_our_scores_and_gradients(model: str, amazon: Dataset) -> None:
    """With the same weights: the baseline leaves nothing out. The interests are compared too, for a tower hides much.

    In evaluation, where there is no dropout and batch norm sees no padding.
    """
    ours = models.ours(model, amazon, **SMALL)
    padded, name = models.baseline(model, amazon, **SMALL)
    assert name == f"padded {model}"
    random = torch.Generator().manual_seed(0)
    for key, tensor in ours.state_dict().items():
        if tensor.is_floating_point() and "running_var" not in key:
            scale = 1.0 if "embedding" in key else tensor.shape[-1] ** -0.5
            tensor.copy_(torch.randn(tensor.shape, generator=random) * scale)
    padded.load_state_dict(ours.state_dict())
    ((trimmed, wide),) = data.batches(amazon, ours.feature_map, 96, 1)
    interests, scores = list[torch.Tensor](), list[torch.Tensor]()
    for side, batch in ((ours, trimmed), (padded, wide)):
        side.dnn.register_forward_pre_hook(lambda _, args: interests.append(args[0][:, 16:].detach()))
        scores.append(side.eval()(batch)["y_pred"])
        (scores[-1] * torch.linspace(-1, 1, 96).unsqueeze(1)).sum().backward()
    assert torch.allclose(scores[0], scores[1], rtol=0, atol=1e-5)
    assert torch.allclose(interests[0], interests[1], rtol=1e-5, atol=1e-5)
    assert interests[0].std(0).median() > 0.05
    theirs = dict(padded.named_parameters())
    largest = max(float(weight.grad.abs().max()) for weight in theirs.values())
    for key, weight in ours.named_parameters():
        assert torch.allclose(weight.grad, theirs[key].grad, rtol=1e-3, atol=1e-5 * largest), key


def test_multiply_adds_of_din_are_those_of_its_formula(amazon: Dataset) -> None:
    """N pairs of target and item, B rows, D wide items: a product with the target and the item per pair, the target's
    own terms per row; each product once forward and twice backward."""
    units, tower, dim = [32, 24], [16], 16
    model = models.ours("DIN", amazon, **{**SMALL, "attention_hidden_units": units, "dnn_hidden_units": tower})
    ((batch, _),) = data.batches(amazon, model.feature_map, 96, 1)
    pairs, rows = int((batch["item_history"] != 0).sum()), 96
    per_pair = 2 * dim * units[0] + units[0] * units[1] + units[1]
    per_row = dim * units[0] + 2 * dim * tower[0] + tower[0]
    assert training_steps.multiply_adds(model, batch) == pytest.approx(
        3 * (pairs * per_pair + rows * per_row), rel=0.02
    )


def test_a_square_of_the_history_would_be_seen() -> None:
    history = torch.ones(2, 50, 4, requires_grad=True)

    def square() -> None:
        (history @ history.transpose(1, 2)).sum().backward()

    assert growth.largest_tensor(square) == 2 * 50 * 50
    assert growth.largest_tensor(lambda: history.unsqueeze(1).expand(2, 50, 50, 4)) == 2 * 50 * 4  # a view is free
    assert growth.largest_tensor(growth._attention(2 * 500, 500, -1)) == 2 * 500 * growth.DIM


def test_encodings_that_want_times_get_them() -> None:
    assert not models.needs_age("cape")
    for pe in available_pes():
        assert models.needs_age(pe) == pe.startswith(("time_", "cape_time"))
