"""A benchmark that is killed at random instants, with all its workers, and repeated, until it has ended.

``python killed.py DATA_ROOT OUT KILLS``. Each life is a fork of this process, which has imported all there is: a start
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

import ctr_pe.model_zoo.din  # noqa: F401  imported once, not in each life
from ctr_pe import training
from ctr_pe.study import benchmark
from ctr_pe.study.store import Store
from ctr_pe.training import Outcome, Run

PARAMS: dict[str, Any] = {
    "embedding_dim": 4,
    "attention_hidden_units": [4],
    "dnn_hidden_units": [8],
    "net_dropout": 0.2,
    "batch_size": 32,
    "epochs": 4,
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


def lived(root: Path, out: Path, jobs: int, seconds: float | None = None) -> float:
    """One life, which ends after so many seconds at the latest; how long it was."""
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.setsid()
        try:
            os._exit(live(root, out, jobs))
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    if seconds is not None:
        time.sleep(seconds)
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert seconds is not None or status == 0, status
    return time.monotonic() - began


def main(root: Path, out: Path, kills: int) -> None:
    context = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: context  # type: ignore[assignment]
    draw, whole = random.Random(0), out.with_name("whole")
    os.environ[LOG] = os.devnull
    in_all = lived(root, whole, 1)
    to_start = lived(root, whole, 1)
    os.environ[LOG] = str(out.with_name(f"{out.name}.log"))
    instants = []
    for kill in range(kills):
        share = 2 * (in_all - to_start) / kills  # of the work: about so much is done between two kills
        instants.append(draw.uniform(0.3 * to_start, to_start + share))
        lived(root, out, 1 + kill % 2, instants[-1])
        instants[-1] = len(Store(out).read())
    print(f"runs stored after each kill: {instants}")
    lived(root, out, 2)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
