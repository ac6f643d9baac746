"""Runs in worker processes of this machine, side by side.

Every run trains in a worker with its own fixed number of threads, even when there is only one worker, so that results
do not depend on how many run at once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from ctr_pe.study.executors.executor import Message, attempt
from ctr_pe.utils import plugins
from ctr_pe.utils.allocator import keep_memory

if TYPE_CHECKING:
    from ctr_pe.study.runner import Job, Train
    from ctr_pe.training import Run

GRACE = 10.0  # seconds that a worker has to remove its temporary files


class LocalExecutor:
    """``workers`` processes at most; one that has ended its run takes the next."""

    def __init__(self, train: Train, workers: int) -> None:
        self.train, self.workers = train, workers
        self.busy: dict[Connection, _Worker] = {}
        self.idle: list[_Worker] = []

    def submit(self, job: Job) -> None:
        if self.idle:
            worker = self.idle.pop()
            worker.start(job)
        else:
            worker = _Worker(self.train, job)
        self.busy[worker.connection] = worker

    def messages(self) -> Iterator[Message]:
        self._dismiss()
        for connection in wait(list(self.busy)):
            assert isinstance(connection, Connection)
            worker = self.busy[connection]
            kind, content = worker.receive()
            if kind != "progress":
                del self.busy[connection]
                if kind == "died":
                    worker.stop()
                else:
                    self.idle.append(worker)
            yield Message(worker.job, kind, content)

    def close(self) -> None:
        self._dismiss()
        while self.busy:
            self.busy.popitem()[1].terminate()

    def _dismiss(self) -> None:
        """Let those without a run end."""
        while self.idle:
            self.idle.pop().stop()


@contextlib.contextmanager
def _interrupted_later() -> Iterator[None]:
    """Ctrl-C within is raised at the end: a worker that has half of what it needs to start would print a traceback.

    Processes that are started within never react to it: the mask is inherited. It is of this thread alone, and the
    system may interrupt another one, such as torch has, hence the handler.
    """
    came: list[int] = []
    here = threading.current_thread() is threading.main_thread()  # no other thread is interrupted, or may set a handler
    handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number)) if here else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if here:
            signal.signal(signal.SIGINT, handler)
    if came:
        raise KeyboardInterrupt


class _Worker:
    """A process that trains one run after another, and the parent's end of its pipe."""

    def __init__(self, train: Train, job: Job) -> None:
        context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, train, plugins.state()), daemon=True)
        resource_tracker.ensure_running()  # else the first process start starts it, which lets Ctrl-C through again
        with _interrupted_later():
            self.process.start()
        theirs.close()
        self.start(job)

    def start(self, job: Job) -> None:
        self.job = job
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has died: receive() says so
            self.connection.send(job.run)

    def receive(self) -> tuple[str, Any]:
        """("progress", state), ("done", outcome), or ("diverged" | "failed" | "died", (line, traceback, "" if it needs
        none))."""
        try:
            message: tuple[str, Any] = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            code = self.process.exitcode
            why = "killed, perhaps out of memory: try fewer --jobs" if code == -signal.SIGKILL else f"exit code {code}"
            return "died", (f"the worker process ended ({why})", "")
        return message

    def stop(self) -> None:
        """Let an idle worker end by itself."""
        self.connection.close()
        self.process.join()

    def terminate(self) -> None:
        self.process.terminate()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.connection.close()


def _work(connection: Connection, train: Train, known: Mapping[str, list[str]]) -> None:
    """A worker process."""
    keep_memory()
    plugins.restore(known)
    # An exception, so that temporary files are removed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _train_each(connection, train)


def _train_each(connection: Connection, train: Train) -> None:
    """The loop of a worker: receives runs, sends progress and outcomes, ends when the pipe is closed."""
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            run: Run = connection.recv()
            connection.send(attempt(train, run, lambda state: connection.send(("progress", state))))


def _end_with_parent() -> None:
    """End this process when its parent has ended, however that was: a long epoch would go on for nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(128 + signal.SIGTERM)
