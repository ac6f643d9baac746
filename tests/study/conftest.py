"""Workers without processes."""

from __future__ import annotations

import multiprocessing
import threading

import pytest

from ctr_pe.study import runner


class WorkerThread(runner._Worker):
    def __init__(self, train: runner.Train, job: runner.Job) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self.thread = threading.Thread(target=runner._train_each, args=(theirs, train), daemon=True)
        self.thread.start()
        self.start(job)

    def stop(self) -> None:
        self.connection.close()
        self.thread.join()

    terminate = stop


@pytest.fixture
def worker_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are trained in threads of this process: each process would import torch for three seconds. Runs and outcomes
    go through the same pipes; ``test_runner.py`` holds what only processes do."""
    monkeypatch.setattr(runner, "_Worker", WorkerThread)
