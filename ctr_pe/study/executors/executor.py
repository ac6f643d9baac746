"""What executors have in common: their interface, and what a process does that trains a run."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ctr_pe.utils.engines import in_a_line
from ctr_pe.utils.errors import Diverged, UserError

if TYPE_CHECKING:
    from ctr_pe.study.runner import Job, Train
    from ctr_pe.training import Run

Progress = Callable[[Mapping[str, Any]], None]


class Message(NamedTuple):
    """What is known of a run: ``kind`` is ``progress``, with its state, ``done``, with its outcome, or ``diverged``,
    ``failed`` or ``died``, with a line and the traceback, empty where it says nothing. All but ``progress`` end it."""

    job: Job
    kind: str
    content: Any


class Executor(Protocol):
    """``workers``: how many runs it trains at once; the caller submits no more. It may change."""

    @property
    def workers(self) -> int: ...

    def submit(self, job: Job) -> None:
        """Begin a run."""

    def messages(self) -> Iterable[Message]:
        """Wait for something to be known of the runs that have begun: one message at least."""

    def close(self) -> None:
        """End those that are under way. It may be called again."""


@dataclass(frozen=True)
class Resources:
    """``jobs``: runs at once, None for as many as there is room for; ``threads`` and GPU (-1 for the CPU) of each."""

    jobs: int | None = None
    threads: int = 1
    gpu: int = -1

    def at_once(self) -> int:
        """On this machine."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.jobs or (1 if self.gpu >= 0 else max(1, cores // self.threads))


def attempt(train: Train, run: Run, progress: Progress) -> tuple[str, Any]:
    """Train a run: kind and content of the message that ends it."""
    last = 0.0

    def now_and_then(state: Mapping[str, Any]) -> None:
        nonlocal last
        if "batch" not in state or time.monotonic() - last > 0.1:
            last = time.monotonic()
            progress(dict(state))

    try:
        return "done", train(run, now_and_then)
    except Diverged as error:
        return "diverged", (str(error), "")
    except (BrokenPipeError, ConnectionResetError):  # nobody waits for it any more
        raise
    except Exception as error:
        return "failed", (in_a_line(error), "" if isinstance(error, UserError) else traceback.format_exc())
