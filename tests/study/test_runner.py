"""The runner: the same results however many workers, nothing trained twice, faults stay with their run."""

from __future__ import annotations

import dataclasses
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import ctr_pe
from ctr_pe.study.executors.local import LocalExecutor, _interrupted_later
from ctr_pe.study.runner import Job, _Progress, revision, run_all, versions
from ctr_pe.study.store import Store
from ctr_pe.utils.errors import UserError
from ctr_pe.utils.files import LOCK
from tests.support.fake_training import jobs_of, result_of, run_in_background, scores_of, train
from tests.support.processes import PATIENCE, alive, wait_for, workers_of


def run(jobs: list[Job], folder: Path, workers: int = 1, stream: io.StringIO | None = None) -> tuple[int, Store]:
    store = Store(folder)
    with closing(LocalExecutor(train, workers)) as executor:  # type: ignore[arg-type]
        return run_all(jobs, store, executor, stream or io.StringIO()), store


def test_results_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    jobs = jobs_of(["none", "rope", "cape"], seeds=2)
    stores = [run(jobs, tmp_path / str(workers), workers)[1] for workers in (1, 2)]
    one, two = (store.read() for store in stores)
    assert one.keys() == two.keys() == {job.key for job in jobs}
    for key, result in one.items():
        assert dataclasses.replace(result, finished="") == dataclasses.replace(two[key], finished="")
        for store in stores:
            saved = store.scores(key)
            assert saved is not None
            np.testing.assert_array_equal(saved, scores_of(key.pe, key.seed))


@pytest.mark.usefixtures("worker_threads")
def test_only_what_is_missing_runs(tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    run(jobs_of(["none"], seeds=2, log=str(log)), out)
    stream = io.StringIO()
    failed, store = run(jobs_of(["none", "cape"], seeds=3, log=str(log)), out, stream=stream)
    assert failed == 0
    assert len(store.read()) == 6
    assert log.read_text().split("\n") == ["none 1", "none 2", "cape 1", "cape 2", "none 3", "cape 3", ""]
    lines = stream.getvalue().splitlines()
    assert lines[0] == "2 of 6 runs are there already"
    assert lines[1].startswith("[3/6] DIN cape seed 1: gAUC 0.")
    assert len(lines) == 5
    run(jobs_of(["none", "cape"], seeds=3, log=str(log)), out)
    assert len(log.read_text().splitlines()) == 6


def test_a_killed_benchmark_goes_on(tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "out.log"
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=run_in_background, args=(str(out), 4, 2))
    process.start()
    wait_for(lambda: len(Store(out).read()) >= 2)
    assert process.pid is not None
    workers = workers_of(process.pid)
    assert len(workers) == 2
    process.kill()
    process.join()
    wait_for(lambda: not any(alive(pid) for pid in workers))  # orphans end by themselves
    stored = len(Store(out).read())
    assert 2 <= stored < 8
    log.write_text("")
    failed, store = run(jobs_of(seeds=4, sleep=0.3, log=str(log)), out, workers=4)
    assert failed == 0
    assert len(store.read()) == 8
    assert len(log.read_text().splitlines()) == 8 - stored


@pytest.mark.slow
def test_workers_in_a_long_epoch_end_when_the_benchmark_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = multiprocessing.get_context("spawn").Process(target=run_in_background, args=(str(out), 2, 2, 600.0))
    process.start()
    assert process.pid is not None
    log = out.with_suffix(".log")
    wait_for(lambda: log.exists() and len(log.read_text().splitlines()) == 2)  # both have begun
    workers = workers_of(process.pid)
    assert len(workers) == 2
    process.kill()
    process.join()
    wait_for(lambda: not any(alive(pid) for pid in workers))


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_failing_run_does_not_stop_the_others(tmp_path: Path, workers: int) -> None:
    stream = io.StringIO()
    faults = {"naive": "user", "rope": "error", "cope": "die"}
    jobs = jobs_of(["naive", "rope", "cope", "none", "cape"], seeds=2, fail=faults)
    failed, store = run(jobs, tmp_path, workers, stream)
    assert failed == 6
    assert {key.pe for key in store.read()} == {"none", "cape"}
    assert len(store.read()) == 4
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10
    assert lines.count("DIN naive seed 1 failed: no such column") == 1
    assert (
        sum("cope seed" in line and "the worker process ended (killed, perhaps out of memory" in line for line in lines)
        == 2
    )
    (of_rope,) = [line for line in lines if line.startswith("DIN rope seed 2")]
    assert of_rope.startswith("DIN rope seed 2 failed: RuntimeError: first line second line (traceback in ")
    trace = Path(of_rope.split("(traceback in ")[1].rstrip(")"))
    assert "fake_training.py" in trace.read_text()
    assert len(list((tmp_path / "failed").iterdir())) == 2  # of the unexpected errors only


@pytest.mark.usefixtures("worker_threads")
def test_a_training_that_diverges_is_stored_as_failed_and_tried_again(tmp_path: Path) -> None:
    stream = io.StringIO()
    jobs = jobs_of(["none", "cape"], seeds=1, fail={"cape": "diverge"})
    for _ in range(2):
        failed, store = run(jobs, tmp_path, stream=stream)
        assert failed == 1
    assert {key.pe for key in store.read()} == {"none"}
    ((key, result),) = store.failures().items()
    assert (key.pe, result.metrics, result.failed) == (
        "cape",
        {},
        "diverged in epoch 1, batch 2: the loss is nan",
    )
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 2
    assert stream.getvalue().count("DIN cape seed 1 failed: diverged in epoch 1, batch 2: the loss is nan") == 2
    assert not (tmp_path / "failed").exists()


@pytest.mark.usefixtures("worker_threads")
def test_states_of_stored_runs_and_what_killed_runs_left_are_removed(tmp_path: Path) -> None:
    jobs = jobs_of(["none", "cape"], seeds=2)
    store = run(jobs[:1], tmp_path)[1]
    other = jobs_of(["rope"], seeds=1)[0]
    files = [store.state(job.key, made_by) for job in [*jobs, other] for made_by in ("this", "that")]
    abandoned = tmp_path / "unfinished" / "ctr-pe-abcdefgh"
    abandoned.mkdir(parents=True)
    abandoned.with_suffix(LOCK).touch()
    for file in files:
        file.touch()
    run(jobs[:1], tmp_path)
    assert {file.name for file in files if file.exists()} == {file.name for file in files[2:]}
    assert not abandoned.exists()
    run(jobs, tmp_path)
    assert [file.exists() for file in files] == [False] * 8 + [True] * 2
    run([*jobs, other], tmp_path)
    assert not (tmp_path / "unfinished").exists()


def test_a_worker_that_cannot_start_is_a_failed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> None: ...

    train.__module__, train.__qualname__ = "only_in_the_parent", "train"
    monkeypatch.setitem(sys.modules, "only_in_the_parent", SimpleNamespace(train=train))
    store, stream = Store(tmp_path), io.StringIO()
    assert run_all(jobs_of(), store, LocalExecutor(train, 2), stream) == 4  # type: ignore[arg-type]
    assert store.read() == {}
    assert stream.getvalue().count("failed: the worker process ended (exit code 1)") == 4


def test_no_worker_stays_behind_when_the_store_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise UserError("the disk is full")

    monkeypatch.setattr(Store, "append", full)
    with pytest.raises(UserError, match="disk is full"):
        run(jobs_of(sleep=0.5), tmp_path, 2)
    assert multiprocessing.active_children() == []


CTRL_C = """
import argparse, sys
from pathlib import Path
from tests.support.fake_training import (jobs_of, train)
from ctr_pe.study.executors.local import LocalExecutor
from ctr_pe.study.runner import run_all
from ctr_pe.study.store import Store
if __name__ == "__main__":
    try:
        run_all(jobs_of(seeds=4, sleep=0.4), Store(Path(sys.argv[1])), LocalExecutor(train, 2))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
"""


@pytest.mark.slow
def test_ctrl_c_ends_the_workers_and_leaves_a_valid_store(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CTRL_C)
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "out")],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: len(Store(tmp_path / "out").read()) >= 1)
    workers = workers_of(process.pid)
    assert len(workers) == 2
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert error.splitlines()[-1] == "interrupted"
    assert "Traceback" not in error
    assert not any(alive(pid) for pid in workers)
    assert 1 <= len(Store(tmp_path / "out").read()) < 8
    assert Store(tmp_path / "out").notices == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_ctrl_c_while_a_worker_starts_waits_until_it_has_started() -> None:
    """Whichever thread the system interrupts: the mask is that of the main thread alone, and torch has others."""
    other = threading.Thread(target=(ended := threading.Event()).wait)
    other.start()
    reached: list[bool] = []

    def start() -> None:
        with _interrupted_later():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            reached.append(True)

    try:
        with pytest.raises(KeyboardInterrupt):
            start()
        assert reached
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        ended.set()
        other.join()


@pytest.mark.usefixtures("worker_threads")
def test_a_terminal_sees_one_bar_and_each_worker(tmp_path: Path) -> None:
    stream = Terminal()
    failed, _ = run(jobs_of(["none", "naive", "cape"], sleep=0.4, fail={"naive": "user"}), tmp_path, 2, stream)
    shown = stream.getvalue()
    assert failed == 2
    assert "4/6" in shown
    assert "DIN none seed 1: epoch 1, batch 1/2" in shown
    assert "DIN cape seed 2: epoch 1, batch 2/2" in shown
    assert "DIN naive seed 1 failed: no such column\n" in shown
    assert "[1/6]" not in shown


def test_a_line_says_how_long_is_left_by_the_runs_that_this_call_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    assert left(monkeypatch, seeds=3, workers=1, there=2) == ["4 min", "2 min", ""]


def test_what_is_left_counts_what_runs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert left(monkeypatch, seeds=8, workers=2) == ["6 min", "6 min", "4 min", "4 min", "2 min", "2 min", "", ""]


def test_what_is_left_does_not_count_failed_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert left(monkeypatch, seeds=4, workers=1, failed=[1]) == ["6 min", "2 min", ""]


def test_what_is_left_counts_a_resumed_run_in_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first took two minutes in this call and eight in an earlier one, so the other will take ten."""
    assert left(monkeypatch, seeds=2, workers=1, seconds=599.6) == ["10 min", ""]


def left(
    monkeypatch: pytest.MonkeyPatch,
    seeds: int,
    workers: int,
    there: int = 0,
    failed: Sequence[int] = (),
    seconds: float = 119.6,
) -> list[str]:
    """What the line of each run that finishes says is left, where each takes two minutes of this call; ``failed``:
    those that do; ``seconds``: that each took in all."""
    now, stream = 1000.0, io.StringIO()
    monkeypatch.setattr("ctr_pe.study.runner.time.monotonic", lambda: now)
    progress = _Progress(seeds + there, there, stream, lambda result: result.metrics)
    jobs = jobs_of(["none"], seeds=seeds)
    for job in jobs[:workers]:
        progress.begin(job)
    for at, job in enumerate(jobs):
        now += 120 * (at % workers == 0)
        if at in failed:
            progress.fail(job, "no such column")
        else:
            progress.finish(job, result_of(job.key, seconds=seconds))
        for waiting in jobs[at + workers : at + workers + 1]:
            progress.begin(waiting)
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("[")]
    assert all(f"(epoch 2, {seconds:.0f} s)" in line for line in lines)
    assert (f"{there} of {seeds + there} runs are there already" in stream.getvalue()) == (there > 0)
    return [line.partition("s), ")[2].removesuffix(" left") for line in lines]


def test_a_log_file_says_once_a_minute_where_a_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now, stream = 1000.0, io.StringIO()
    monkeypatch.setattr("ctr_pe.study.runner.time.monotonic", lambda: now)
    progress = _Progress(1, 0, stream, lambda result: result.metrics)
    (job,) = jobs_of(["none"], seeds=1)
    progress.begin(job)
    for epoch in (1, 2, 3, 4):
        now += 20
        progress.update(job, {"epoch": epoch, "batch": 5, "batches": 9})
        now += 1
        progress.update(job, {"epoch": epoch, "valid": {"gAUC": 0.5 + epoch / 10}})
    progress.finish(job, result_of(job.key))
    lines = stream.getvalue().splitlines()
    assert lines[0] == f"{job}: epoch 3, batch 6/9"  # 62 s after the beginning
    assert len(lines) == 2
    assert lines[1].startswith("[1/1]")
    now += 60
    progress.begin(job)
    progress.update(job, {"epoch": 5, "valid": {"gAUC": 0.75}})
    assert stream.getvalue().splitlines()[-1] == f"{job}: epoch 5, validated, gAUC 0.7500"


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_revision_is_that_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "ctr_pe"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(ctr_pe, "__file__", str(package / "__init__.py"))
    assert revision() is None
    git(tmp_path, "init", "-q")
    (tmp_path / "other.txt").write_text("a")
    git(tmp_path, "add", "other.txt")
    git(tmp_path, "commit", "-q", "-m", "a")
    assert revision() is None  # lies in a checkout, of which it is no part
    git(tmp_path, "add", "ctr_pe")
    git(tmp_path, "commit", "-q", "-m", "b")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "other.txt").write_text("b")
    assert revision() == commit
    (package / "new.py").write_text("")
    assert revision() == f"{commit}-dirty"


def test_versions() -> None:
    assert versions().keys() == {"ctr_pe", "python", "torch", "fuxictr", "numpy", "polars"}
