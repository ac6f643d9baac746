"""Runs a grid of training runs side by side in worker processes and stores each as it finishes.

Every run trains in a worker with its own fixed number of threads, even when there is only one worker, so that results
do not depend on how many run at once.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import multiprocessing
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache, partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tqdm import tqdm

import ctr_pe
from ctr_pe.study.rendering import duration
from ctr_pe.study.store import Result, RunKey, Store
from ctr_pe.utils import plugins
from ctr_pe.utils.allocator import keep_memory
from ctr_pe.utils.errors import Diverged, UserError
from ctr_pe.utils.files import remove_abandoned

if TYPE_CHECKING:
    from ctr_pe.training import Outcome, Run

Train = Callable[["Run", Callable[[Mapping[str, Any]], None]], "Outcome"]
Figures = Callable[[Result], Mapping[str, float]]
GRACE = 10.0  # seconds that a worker has to remove its temporary files


@dataclass(frozen=True)
class Job:
    """A run and its key in the store; ``varied``: values that tell cells of a suite apart, such as ``max_len=10``."""

    run: Run
    key: RunKey
    varied: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, [self.key.model, self.key.pe, self.varied, f"seed {self.key.seed}"]))


def run_all(
    jobs: Sequence[Job],
    store: Store,
    train: Train,
    workers: int,
    stream: TextIO | None = None,
    figures: Figures = attrgetter("metrics"),
) -> int:
    """Train what the store does not have yet.

    Args:
        jobs: in the order in which they start.
        store: each result is appended when its run ends.
        train: ``ctr_pe.training.train`` or a picklable stand-in.
        workers: processes at once.
        stream: for progress, stderr by default: bars on a terminal, else a line per finished run.
        figures: of a finished run, for its line.

    Returns:
        The number of runs that failed; each has printed one line.

    Raises:
        KeyboardInterrupt: Ctrl-C, after all workers have ended; finished runs are in the store.
    """
    stream = stream or sys.stderr
    already = store.read().keys()
    remove_abandoned()
    store.tidy(already)
    missing = [job for job in jobs if job.key not in already]
    if not missing:
        print(f"all {len(jobs)} runs are there already", file=stream)
        return 0
    waiting, failed = iter(missing), 0
    pool: dict[Connection, _Worker] = {}

    def next_job() -> Job | None:
        """The next run that no other process has finished meanwhile."""
        done = store.read()
        return next((job for job in waiting if job.key not in done), None)

    progress = _Progress(len(jobs), len(jobs) - len(missing), stream, figures)
    try:
        while True:
            while len(pool) < workers and (job := next_job()):
                worker = _Worker(train, job)
                pool[worker.connection] = worker
                progress.begin(job)
            if not pool:
                return failed
            for connection in wait(list(pool)):
                assert isinstance(connection, Connection)
                worker = pool[connection]
                kind, content = worker.receive()
                if kind == "progress":
                    progress.update(worker.job, content)
                    continue
                if kind == "done":
                    names = ("metrics", "epoch", "parameters", "auxiliary", "processor")
                    found = {name: getattr(content, name) for name in names}
                    history = [asdict(epoch) for epoch in content.history]
                    result = _result(worker.job, seconds=round(content.seconds, 3), history=history, **found)
                    store.append(result, content.scores)
                    progress.finish(worker.job, result)
                else:
                    failed += 1
                    progress.fail(worker.job, _explain(worker.job, store.path, *content))
                if kind == "diverged":
                    without: dict[str, Any] = {"metrics": {}, "epoch": 0, "seconds": 0.0, "parameters": 0}
                    store.append(_result(worker.job, failed=content[0], **without), None)
                if kind in ("done", "diverged"):
                    store.tidy([worker.job.key])
                if kind != "died" and (job := next_job()):
                    worker.start(job)
                    progress.begin(job)
                else:
                    del pool[connection]
                    worker.stop()
    finally:
        for worker in pool.values():
            worker.terminate()
        progress.close()


def revision() -> str | None:
    """Git commit of the checkout this package is in, with ``-dirty`` if its code differs; None outside a checkout."""
    here = Path(ctr_pe.__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # fails for a package installed below another checkout
        commit = git("rev-parse", "HEAD")
        code = [here, here.parent / "model_zoo", here.parent / "config"]
        changed = git("status", "--porcelain", "--", *[str(folder) for folder in code if folder.exists()])
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}-dirty" if changed else commit


def versions() -> dict[str, str]:
    """Versions of the packages that results depend on."""
    packages = {name: importlib.metadata.version(name) for name in ("torch", "fuxictr", "numpy", "polars")}
    return {"ctr_pe": ctr_pe.__version__, "python": platform.python_version(), **packages}


@cache
def made_by() -> dict[str, Any]:
    """Code that results depend on: the package's revision, and versions, as they are when the process first asks."""
    return {"revision": revision(), "versions": versions()}


def _result(job: Job, **found: Any) -> Result:
    """The record of a run: of its outcome, or of why its training diverged."""
    from ctr_pe.models.sections import origins

    return Result(
        **job.key._asdict(),
        threads=job.run.threads,
        gpu=job.run.gpu,
        params=dict(job.run.params),
        origins=origins(job.key.model, job.key.pe),
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        **made_by(),
        **found,
    )


def _explain(job: Job, folder: Path, line: str, trace: str) -> str:
    """The line about a run that failed; the traceback of an error that is not the user's goes to a file."""
    if not trace:
        return line
    file = folder / "failed" / f"{job.key.name}.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(trace, encoding="utf-8")
    return f"{line} (traceback in {file})"


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
    last = 0.0

    def progress(state: Mapping[str, Any]) -> None:
        nonlocal last
        if "batch" not in state or time.monotonic() - last > 0.1:
            last = time.monotonic()
            connection.send(("progress", dict(state)))

    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            run: Run = connection.recv()
            try:
                connection.send(("done", train(run, progress)))
            except (BrokenPipeError, ConnectionResetError):
                return
            except Diverged as error:
                connection.send(("diverged", (str(error), "")))
            except Exception as error:
                trace = "" if isinstance(error, UserError) else traceback.format_exc()
                connection.send(("failed", (in_a_line(error), trace)))


def in_a_line(error: Exception) -> str:
    """An error on one line, with its type where it is not the user's."""
    name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return " ".join(f"{name}{error}".split())


def _end_with_parent() -> None:
    """End this process when its parent has ended, however that was: a long epoch would go on for nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(128 + signal.SIGTERM)


class _Progress:
    """A bar over the runs and a line per worker on a terminal, else one plain line per finished run."""

    def __init__(self, total: int, done: int, stream: TextIO, figures: Figures) -> None:
        self.total, self.done, self.stream, self.figures = total, done, stream, figures
        self.waiting, self.began, self.took = total - done, dict[RunKey, float](), list[float]()
        self.states: dict[str, str] = {}
        # 80 × 24 if the terminal does not report its size: tqdm shows nothing then
        columns, lines = shutil.get_terminal_size()
        self.new = partial(tqdm, file=stream, ncols=columns, nrows=lines, disable=not stream.isatty())
        self.bar = self.new(total=total, initial=done, unit="run")
        self.lines: list[tqdm[Any]] = []
        if done:
            self.bar.write(f"{done} of {total} runs are there already", stream)

    def close(self) -> None:
        for bar in [*self.lines, self.bar]:
            bar.close()

    def begin(self, job: Job) -> None:
        self.waiting -= 1
        self.began[job.key] = time.monotonic()

    def update(self, job: Job, state: Mapping[str, Any]) -> None:
        at = f"batch {state['batch'] + 1}/{state['batches']}" if "batch" in state else "validated"
        self._draw(job, f"{job}: epoch {state['epoch']}, {at}")

    def finish(self, job: Job, result: Result) -> None:
        self.done += 1
        # The seconds of a run that was resumed count those of before, too.
        self.took.append(max(time.monotonic() - self.began.pop(job.key), result.seconds))
        self.bar.update()
        if self.bar.disable:
            values = " ".join(f"{name} {value:.4f}" for name, value in self.figures(result).items())
            line = f"[{self.done}/{self.total}] {job}: {values} (epoch {result.epoch}, {result.seconds:.0f} s)"
            line += self._left()
            self.bar.write(line, self.stream)
        self._draw(job)

    def _left(self) -> str:
        """As if runs that wait took as long as finished ones, and runs under way the rest of that: a run's time depends
        on what else the machine does."""
        each, now = statistics.mean(self.took), time.monotonic()
        rest = sum(max(each - (now - began), 0.0) for began in self.began.values())
        at_once = len(self.began) + (self.waiting > 0)  # another one starts where this one ended
        left = (each * self.waiting + rest) / max(at_once, 1)
        return f", {duration(left)} left" if left >= 60 else ""

    def fail(self, job: Job, error: str) -> None:
        del self.began[job.key]
        self.bar.write(f"{job} failed: {error}", self.stream)
        self._draw(job)

    def _draw(self, job: Job, state: str = "") -> None:
        """A line per run that is under way, below the bar; a run without a state has ended."""
        self.states = {name: text for name, text in {**self.states, str(job): state}.items() if text}
        while len(self.lines) < len(self.states):
            self.lines.append(self.new(bar_format="  {desc}", position=len(self.lines) + 1, leave=False))
        texts = [*self.states.values(), *[""] * len(self.lines)]
        for line, text in zip(self.lines, texts, strict=False):
            line.set_description_str(text)
