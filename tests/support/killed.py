"""A benchmark that is killed at random instants, with all its workers, and repeated, until it has ended.

``python -m tests.support.killed DATA_ROOT OUT KILLS``. Each life is a fork of this process, which has imported all
there is: a start
takes a fraction of a second. A line of ``OUT.log`` is an epoch that begins.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  so is what an optimiser needs

import ctr_pe.model_zoo.din  # noqa: F401  imported once, not in each life
from ctr_pe import training
from ctr_pe.study import benchmark
from ctr_pe.study.executors import local
from ctr_pe.study.store import Store
from ctr_pe.training import Outcome, Run
from tests.support.processes import wait_for

PARAMS: dict[str, Any] = {
    "embedding_dim": 4,
    "attention_hidden_units": [4],
    "dnn_hidden_units": [8],
    "net_dropout": 0.2,
    "batch_size": 32,
    "epochs": 3,
    "learning_rate": 0.01,
    "table_optimizer": "lazy_adam",
    "learning_rate_schedule": "linear",
    "weight_average": 0.2,
    "num_workers": 1,
}
LOG = "CTR_PE_KILLED_LOG"


def train(run: Run, progress: Callable[[Mapping[str, Any]], None]) -> Outcome:
    """Training, whose epochs are noted."""

    def noting(state: Mapping[str, Any]) -> None:
        if state.get("batch") == 0:
            with open(os.environ[LOG], "a") as log:
                log.write(f"{run.pe} {run.seed} {state['epoch']}\n")
        progress(state)

    return training.train(run, noting)


def live(root: Path, out: Path, jobs: int) -> int:
    """One life, in this process: the exit code."""
    request = benchmark.Request(
        encodings=["none", "rope", "cape"], dataset="tiny", data_root=root, out=out, jobs=jobs, params=PARAMS
    )
    return benchmark.run(request, train)


def apart(function: Callable[..., None]) -> Callable[..., None]:
    """In a process of its own: polars' threads do not survive a fork, and the workers are forks of who calls it."""

    def run(*given: Any) -> None:
        if (child := os.fork()) == 0:
            try:
                function(*given)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0

    return run


def born(root: Path, out: Path, jobs: int) -> int:
    """A life of its own session begins: its process."""
    child = os.fork()
    if child == 0:
        os.setsid()
        try:
            os._exit(live(root, out, jobs))
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return child


def sure(child: int, condition: Callable[[], object]) -> None:
    """Waits for what a life does; without it none of its processes is left behind."""
    try:
        wait_for(condition, 300)
    except BaseException:
        os.killpg(child, signal.SIGKILL)
        raise


def main(root: Path, out: Path, kills: int) -> None:
    context = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: context  # type: ignore[assignment]
    local._Worker.stop = local._Worker.terminate  # type: ignore[method-assign]  # a fork holds its pipe open itself
    for name in ("keep_rows", "_refuse_what_cannot_be_monitored"):
        setattr(benchmark, name, apart(getattr(benchmark, name)))
    log, whole, draw = out.with_name(f"{out.name}.log"), out.with_name("whole"), random.Random(0)
    os.environ[LOG] = str(whole.with_name("whole.log"))
    began = time.monotonic()
    child = born(root, whole, 1)
    sure(child, Path(os.environ[LOG]).exists)
    to_start = time.monotonic() - began
    sure(child, lambda: len(Store(whole).read()) == 15)
    work = time.monotonic() - began - to_start
    assert os.waitpid(child, 0)[1] == 0
    os.environ[LOG] = str(log)
    log.touch()
    stored = [0]
    while len(stored) <= kills and stored[-1] < 15:
        begun = log.stat().st_size
        child = born(root, out, 1 + len(stored) % 2)
        if len(stored) % 4:  # in an epoch, in an evaluation, while a state, a row or scores are written
            sure(child, lambda: log.stat().st_size > begun)  # noqa: B023
            time.sleep(draw.uniform(0, 1.5 * work / kills))
        else:  # before there is anything to lose
            time.sleep(draw.uniform(0, to_start))
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        stored.append(len(Store(out).read()))
    print(
        f"{to_start:.1f} s to start, {work:.1f} s of work; runs stored after each kill: {stored[1:]}", file=sys.stderr
    )
    assert os.waitpid(born(root, out, 2), 0)[1] == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
