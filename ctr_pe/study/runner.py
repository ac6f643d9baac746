"""Runs a grid of training runs side by side, by an executor, and stores each as it finishes."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tqdm.auto import tqdm
from tqdm.notebook import tqdm_notebook

import ctr_pe
from ctr_pe.study.rendering import duration
from ctr_pe.study.store import Result, RunKey, Store
from ctr_pe.utils.errors import quiet
from ctr_pe.utils.files import remove_abandoned

if TYPE_CHECKING:
    from ctr_pe.study.executors.executor import Executor
    from ctr_pe.training import Outcome, Run

Train = Callable[["Run", Callable[[Mapping[str, Any]], None]], "Outcome"]
Figures = Callable[[Result], Mapping[str, float]]


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
    executor: Executor,
    stream: TextIO | None = None,
    figures: Figures = attrgetter("metrics"),
) -> int:
    """Train what the store does not have yet.

    Args:
        jobs: in the order in which they start.
        store: each result is appended when its run ends.
        executor: where they are trained; it is closed if something goes wrong here, else left as it is.
        stream: for progress, stderr by default: bars on a terminal, else a line per finished run, and one a minute.
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
        if not quiet():
            print(f"all {len(jobs)} runs are there already", file=stream)
        return 0
    waiting, failed, under_way = iter(missing), 0, 0

    def next_job() -> Job | None:
        """The next run that no other process has finished meanwhile."""
        done = store.read()
        return next((job for job in waiting if job.key not in done), None)

    progress = _Progress(len(jobs), len(jobs) - len(missing), stream, figures)
    try:
        while True:
            while under_way < executor.workers and (job := next_job()):
                executor.submit(job)
                under_way += 1
                progress.begin(job)
            if not under_way:
                return failed
            for job, kind, content in executor.messages():
                if kind == "progress":
                    progress.update(job, content)
                    continue
                under_way -= 1
                if kind == "done":
                    names = ("metrics", "epoch", "parameters", "auxiliary", "processor")
                    found = {name: getattr(content, name) for name in names}
                    history = [asdict(epoch) for epoch in content.history]
                    result = _result(job, seconds=round(content.seconds, 3), history=history, **found)
                    store.append(result, content.scores)
                    progress.finish(job, result)
                else:
                    failed += 1
                    progress.fail(job, explained(job, store.path, *content))
                if kind == "diverged":
                    without: dict[str, Any] = {"metrics": {}, "epoch": 0, "seconds": 0.0, "parameters": 0}
                    store.append(_result(job, failed=content[0], **without), None)
                if kind in ("done", "diverged"):
                    store.tidy([job.key])
    except BaseException:  # nobody waits for those that are under way
        executor.close()
        raise
    finally:
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


def explained(job: Job, folder: Path, line: str, trace: str) -> str:
    """The line about a run that failed; the traceback of an error that is not the user's goes to a file."""
    if not trace:
        return line
    file = folder / "failed" / f"{job.key.name}.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(trace, encoding="utf-8")
    return f"{line} (traceback in {file})"


class _Progress:
    """A bar over the runs and a line per worker on a terminal and in a notebook; else a plain line per finished run,
    and in between, once in ``MINUTE`` at most, where a run that is under way has got to."""

    MINUTE = 60.0

    def __init__(self, total: int, done: int, stream: TextIO, figures: Figures) -> None:
        self.total, self.done, self.stream, self.figures = total, done, stream, figures
        self.waiting, self.began, self.took = total - done, dict[RunKey, float](), list[float]()
        self.states: dict[str, str] = {}
        self.said = time.monotonic()
        if issubclass(tqdm, tqdm_notebook):  # widgets, as wide as the page
            self.stream = sys.stdout  # lines on stderr are red there
            self.new = partial(tqdm, disable=quiet())
        else:
            # 80 × 24 if the terminal does not report its size: tqdm shows nothing then
            columns, lines = shutil.get_terminal_size()
            self.new = partial(tqdm, file=stream, ncols=columns, nrows=lines, disable=quiet() or not stream.isatty())
        self.bar = self.new(total=total, initial=done, unit="run")
        self.lines: list[tqdm[Any]] = []
        if done and not quiet():
            self.bar.write(f"{done} of {total} runs are there already", self.stream)

    def close(self) -> None:
        for bar in [*self.lines, self.bar]:
            bar.close()

    def begin(self, job: Job) -> None:
        self.waiting -= 1
        self.began[job.key] = time.monotonic()

    def update(self, job: Job, state: Mapping[str, Any]) -> None:
        if "batch" in state:
            at = f"batch {state['batch'] + 1}/{state['batches']}"
        else:
            at = f"validated, {_written(state['valid'])}"
        text = f"{job}: epoch {state['epoch']}, {at}"
        if self.bar.disable and not quiet() and time.monotonic() - self.said >= self.MINUTE:
            self._say(text)
        self._draw(job, text)

    def finish(self, job: Job, result: Result) -> None:
        self.done += 1
        # The seconds of a run that was resumed count those of before, too.
        self.took.append(max(time.monotonic() - self.began.pop(job.key), result.seconds))
        self.bar.update()
        if self.bar.disable and not quiet():
            line = f"[{self.done}/{self.total}] {job}: {_written(self.figures(result))}"
            self._say(f"{line} (epoch {result.epoch}, {result.seconds:.0f} s){self._left()}")
        self._draw(job)

    def _say(self, line: str) -> None:
        self.said = time.monotonic()
        self.bar.write(line, self.stream)

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


def _written(metrics: Mapping[str, float]) -> str:
    return " ".join(f"{name} {value:.4f}" for name, value in metrics.items())
