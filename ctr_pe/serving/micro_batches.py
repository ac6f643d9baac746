"""Micro-batches: requests that wait at the same time are scored together.

A batch starts as soon as a thread is free, with all that waits then: a request alone is not delayed, and batches grow
with the load. All bookkeeping is done in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ctr_pe.serving.service_options import Queueing

REST = 0.02  # seconds of a rest at most, by which an answer to anything else is late then
SURE = 0.8  # of its patience is what a request that is not read yet may have to wait: later, all of it
Score = Callable[[Any, Sequence[Any]], Sequence[Any]]
Scoring = concurrent.futures.Future[Sequence[Any]]


class Overloaded(Exception):
    """There is no place for a request, or its turn did not come in time."""


@dataclass(eq=False)
class _Job:
    model: Any
    request: Any
    candidates: int
    since: float
    patience: float
    answer: asyncio.Future[Any]


class MicroBatches:
    """The queue before the threads that score.

    Attributes:
        open: requests that wait or are scored.
    """

    def __init__(
        self,
        score: Score,
        threads: concurrent.futures.Executor,
        workers: int,
        limits: Queueing,
        on_batch: Callable[[int, float, float], object] = lambda requests, waited, seconds: None,
    ) -> None:
        """``score(model, requests)``, in one of ``threads``, which are ``workers``, gives an answer or an exception for
        each request. ``on_batch`` is called after each batch: how many requests it had, the seconds that the first one
        waited, and those that scoring took."""
        self._score, self._threads, self._free, self._limits, self._on_batch = score, threads, workers, limits, on_batch
        self._workers, self._queue = workers, deque[_Job]()
        self._timer: asyncio.TimerHandle | None = None
        self._pace = 0.0  # seconds per request in the last batches
        self._running: dict[Scoring, float] = {}  # batches, and when they should be scored
        self._coming = 0
        self._rest: asyncio.Handle | None = None
        self.open = 0

    def patience(self, wait: float | None) -> float:
        """Seconds that a request waits for its turn, of ``wait`` that it would."""
        return self._limits.wait if wait is None else min(wait, self._limits.wait)

    def check(self, wait: float | None = None) -> None:
        """Raises Overloaded if a request that is here has no place, or would not be scored within the time that it
        waits."""
        if (problem := self.problem(wait)) is not None:
            raise Overloaded(problem)

    def problem(self, wait: float | None = None, sure: float = 1.0) -> str | None:
        """Why there is no place for a request that comes now: one that would not be scored within ``sure`` of the time
        that it waits has none. None if there is."""
        if self.open + self._coming >= self._limits.waiting:
            return "too many requests are waiting"
        seconds = (len(self._queue) + self._coming) * self._pace
        if not self._free:
            now = time.monotonic()
            seconds += sum(max(0.0, end - now) for end in self._running.values())
        if seconds / self._workers > sure * self.patience(wait):
            return "too many requests are waiting for this one to have its turn in time"
        return None

    def expect(self) -> None:
        """A request that has a place is on its way: others that come in the same turn of the loop are behind it."""
        self._coming += 1
        asyncio.get_running_loop().call_soon(self._come)

    def _come(self) -> None:
        self._coming -= 1

    def rest(self) -> None:
        """After a refusal: leave the processor to the threads until one has scored its batch, or for REST seconds. What
        comes meanwhile is refused together. A refusal alone costs a change of threads and a turn of the loop, which is
        several times what it costs among others."""
        if self._rest is None:
            self._rest = asyncio.get_running_loop().call_soon(self._wait)

    def no_rest(self) -> None:
        """In this turn of the loop: a connection was accepted, and loops accept one per turn, or few."""
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None

    def _wait(self) -> None:
        self._rest = None
        if not self._free:
            concurrent.futures.wait(self._running, REST, concurrent.futures.FIRST_COMPLETED)

    async def __call__(self, model: Any, request: Any, candidates: int, wait: float | None = None) -> Any:
        """The answer to a request with so many candidates. Raises Overloaded, or what scoring raised."""
        self.check(wait)
        loop = asyncio.get_running_loop()
        job = _Job(model, request, candidates, time.monotonic(), self.patience(wait), loop.create_future())
        self._queue.append(job)
        self.open += 1
        if self._timer is None:  # without a window too, after the requests that have come in this turn of the loop
            self._timer = loop.call_later(self._limits.window, self._start)
        elif len(self._queue) >= self._limits.batch:
            self._start()
        try:
            return await job.answer
        finally:
            self.open -= 1

    def _start(self) -> None:
        """Give what waits to the threads that are free."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._free and (batch := self._next()):
            self._free -= 1
            began, requests = time.monotonic(), [job.request for job in batch]
            running = self._threads.submit(self._score, batch[0].model, requests)
            self._running[running] = began + len(batch) * self._pace
            asyncio.wrap_future(running).add_done_callback(partial(self._answer, batch, running, began))

    def _next(self) -> list[_Job]:
        """The oldest requests for one batch, without those whose time is over or whose caller has gone."""
        batch: list[_Job] = []
        now, candidates = time.monotonic(), 0
        while self._queue and len(batch) < self._limits.batch:
            job = self._queue[0]
            candidates += job.candidates
            if batch and (job.model is not batch[0].model or candidates > self._limits.candidates):
                break
            self._queue.popleft()
            if now - job.since > job.patience and not job.answer.done():
                job.answer.set_exception(Overloaded("the time to wait was over before this request had its turn"))
            if not job.answer.done():
                batch.append(job)
        return batch

    def _answer(self, batch: list[_Job], running: Scoring, began: float, scored: asyncio.Future[Sequence[Any]]) -> None:
        del self._running[running]
        seconds, error = time.monotonic() - began, scored.exception()
        self._pace += 0.1 * (seconds / len(batch) - self._pace)
        for job, answer in zip(batch, scored.result() if error is None else [error] * len(batch), strict=True):
            if job.answer.done():
                continue
            if isinstance(answer, BaseException):
                job.answer.set_exception(answer)
            else:
                job.answer.set_result(answer)
        self._on_batch(len(batch), began - batch[0].since, seconds)
        self._free += 1
        self._start()
