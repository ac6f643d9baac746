"""Workers of a benchmark without processes."""

from __future__ import annotations

import multiprocessing
import threading

from ctr_pe.study import runner
from ctr_pe.study.executors import local


class WorkerThread(local._Worker):
    def __init__(self, train: runner.Train, job: runner.Job) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self.thread = threading.Thread(target=local._train_each, args=(theirs, train), daemon=True)
        self.thread.start()
        self.start(job)

    def stop(self) -> None:
        self.connection.close()
        self.thread.join()

    terminate = stop
