"""A trained model as a service: ``POST /rank``, ``GET /health``, ``GET /metrics``.

Requests are checked before they reach the model, and scored in threads of their own, so that the loop that accepts
requests is never busy. The model folder is watched: what replaces it is loaded and tried beside the old model, which
answers until the new one does, and goes on if the new one cannot be used.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
import torch

try:
    import uvicorn
    from fastapi import FastAPI, HTTPException, Request, Response
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
except ImportError as error:
    from ctr_pe.utils.errors import UserError

    raise UserError(f"serve needs {error.name}: pip install 'ctr_pe[serve]'") from None

import polars as pl
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ctr_pe import __version__
from ctr_pe.data.id_map import EXACT
from ctr_pe.serving.model_folder import MANIFEST, read_model
from ctr_pe.serving.scorer import Scorer
from ctr_pe.utils.errors import UserError

log = logging.getLogger("ctr_pe.service")
LARGEST = 2**63 - 1
MOST_PROBLEMS = 20  # of a request that are named
OF_ITEMS = ("requests", "unknown items", "unknown history items")  # counts that have fields of their own
TRIES = 5  # to read a folder that is replaced again and again
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]


@dataclass(frozen=True)
class Limits:
    """``history``, ``candidates``: items of a request; ``body``: bytes; ``waiting``: requests that are scored or wait
    for it, more are turned away (503)."""

    history: int = 1000
    candidates: int = 5000
    body: int = 2**20
    waiting: int = 256


def _item(value: Any) -> Any:
    if isinstance(value, float) and value % 1 == 0 and abs(value) < EXACT:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError("an item's raw id is a whole number or a string")
    if isinstance(value, int) and not -LARGEST <= value <= LARGEST:
        raise ValueError("larger than 64 bits")
    if isinstance(value, str):
        value.encode()  # half a surrogate pair is a ValueError
    return value


def _time(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("a time is a number or a date as text")
    if isinstance(value, (int, float)) and not -LARGEST <= value <= LARGEST:
        raise ValueError("larger than 64 bits")
    return value


Item = Annotated[int | str, BeforeValidator(_item)]
Value = int | float | str | list[int | float | str] | None
Time = Annotated[int | float | str, BeforeValidator(_time)]


class WatchedModel:
    """A model folder, loaded and tried: ``scorer``; ``name``, which changes with the content of the folder; ``facts``
    for readers."""

    def __init__(self, folder: Path, gpu: int = -1) -> None:
        """Raises UserError for a folder that cannot be read, or a model that cannot score one user's candidates."""
        self.scorer: Scorer = read_model(folder, gpu)
        config = self.scorer.config
        self.name = hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=6).hexdigest()
        facts = {key: config.get(key) for key in ("model", "position_encoding", "dataset_id", "created")}
        self.facts = {"name": self.name, "loaded": time.time(), **facts}
        # The first request pays for what is made at first use; and what fails here would fail for every request.
        catalogue = self.scorer.encoder.catalogue
        some: list[Any] = ["0"] if catalogue is None else catalogue.sorted.head(2).to_list()
        try:
            kinds = self.scorer.encoder.behaviours
            given = {kinds.column: [kinds.values[0]] * len(some)} if kinds else {}
            scores = self.scorer.score_one(some, some, times=list(range(len(some))), history_context=given)
        except UserError as error:
            raise UserError(f"{folder}: cannot be served: {error}") from None
        if not np.isfinite(scores).all():
            raise UserError(f"{folder}: cannot be served: its scores are not numbers")


class ModelWatcher:
    """The model of a folder, replaced when the folder is.

    Attributes:
        model: the one that answers now.
        refused: why the present content of the folder is not loaded, or None.
        wake: set it to load the folder now.
    """

    def __init__(
        self, folder: Path, poll: float = 2.0, on_reload: Callable[[str], object] = str, gpu: int = -1
    ) -> None:
        """Raises UserError as ``WatchedModel``.

        ``poll``: seconds between looks at the folder; ``on_reload``: called after each, ``loaded`` or ``refused``."""
        self.folder, self.poll, self.on_reload, self.gpu = folder, poll, on_reload, gpu
        self.wake, self._over = threading.Event(), False
        self.refused: str | None = None
        self._seen = self._content()
        self.model = self._load()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at the folder from a thread."""
        self._over = False
        thread = threading.Thread(target=self._watch, name="model folder", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over = True
            self.wake.set()
            thread.join()

    def reload(self) -> None:
        """Load the folder; its model answers from now on, or is refused."""
        try:
            model = self._load()
        except Exception as error:  # whatever is wrong with it, the old model goes on
            self.refused = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            log.error("%s; the model %s goes on", self.refused, self.model.name)
        else:
            self.model, self.refused = model, None
            log.info("%s: now the model %s", self.folder, model.name)
        self.on_reload("refused" if self.refused else "loaded")

    def _load(self) -> WatchedModel:
        """The folder's model; once more if it was replaced meanwhile, because old and new files may have met."""
        for _ in range(TRIES):
            before, error = self._content(), None
            try:
                model = WatchedModel(self.folder, self.gpu)
            except UserError as found:
                error = found
            if self._content() == before:
                break
        if error is not None:
            raise error
        return model

    def _watch(self) -> None:
        before = self._seen
        while not self._over:
            woken = self.wake.wait(self.poll)
            self.wake.clear()
            if self._over:
                return
            now = self._content()
            # a folder that is still being copied changes from one look to the next
            if woken or (now and now != self._seen and now == before):
                self._seen = now
                self.reload()
            before = now

    def _content(self) -> list[tuple[str, int, int, int]]:
        """Names and facts of the files, which change with them; none without a manifest."""
        try:
            files = sorted(self.folder.iterdir())
            facts = [(file.name, file.stat()) for file in files]
        except OSError:  # just now being replaced
            return []
        found = [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in facts]
        return found if any(name == MANIFEST for name, *_ in found) else []


class RankRequest(BaseModel):
    """One user's candidates. ``times``: of the history, as ``now``: numbers in the unit of the log, or dates as text;
    only encodings that read ages need them."""

    model_config = ConfigDict(extra="forbid")
    history: list[Item] = Field(default=[], description="raw ids of the items that the user chose, the oldest first")
    candidates: list[Item] = Field(min_length=1, description="raw ids of the items to rank")
    times: list[Time] | None = Field(None, description="when each item of the history was chosen, rising")
    now: Time | None = Field(None, description="time of the request; by default that of the newest item")
    k: int | None = Field(None, strict=True, ge=1, description="how many of the best to return; by default all")
    user: Item | None = Field(None, description="raw id of the user, by which the model's own fields are looked up")
    context: dict[str, Value] = Field({}, description="field of the request, or of the user -> raw value")
    history_context: dict[str, list[Value]] = Field(
        {}, description="field of the event, or the column of behaviours -> raw value of each history item"
    )
    candidate_context: dict[str, list[Value]] = Field({}, description="field -> raw value of each candidate")


class RankedItem(BaseModel):
    item: int | str
    score: float = Field(description="click probability")


class RankResponse(BaseModel):
    """``ranked``: the best first, of equal scores the one that was asked for first; ``model``: which one scored.
    ``counts`` is left out where there is nothing to count."""

    ranked: list[RankedItem]
    unknown_candidates: int = Field(description="candidates of the request that the model does not know")
    unknown_history: int
    counts: dict[str, int] = Field({}, description="what else was not as in the log, such as fields without a value")
    model: str


class ServiceMetrics:
    """Counters, gauges and histograms of ``GET /metrics``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        self.requests = counter("ctr_pe_requests", "requests to /rank by status", ["status"])
        bounds = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
        self.seconds = Histogram(
            "ctr_pe_request_seconds", "from request to response of /rank", buckets=bounds, registry=self.registry
        )
        self.candidates = counter("ctr_pe_candidates", "candidates scored")
        self.unknown = counter("ctr_pe_unknown_ids", "raw ids that the model does not know", ["of"])
        self.reloads = counter("ctr_pe_reloads", "times the model folder was loaded or refused", ["outcome"])
        self.open = Gauge("ctr_pe_open_requests", "requests being scored or waiting", registry=self.registry)
        for of, outcome in (("candidates", "loaded"), ("history", "refused")):  # which are there from the start
            self.unknown.labels(of)
            self.reloads.labels(outcome)


def application(
    folder: str | Path,
    limits: Limits = Limits(),
    *,
    poll: float = 2.0,
    workers: int = 1,
    threads: int = 1,
    gpu: int = -1,
) -> FastAPI:
    """The service of a model folder as an ASGI application; ``app.state.watcher`` has the model.

    Args:
        poll: seconds between looks at the folder.
        workers: requests scored at once.
        threads: torch's, of each.
        gpu: -1 for the CPU.

    Raises:
        UserError: a folder that cannot be read, or a model that needs more than a history and candidates.
    """
    metrics = ServiceMetrics()
    watcher = ModelWatcher(Path(folder), poll, lambda outcome: metrics.reloads.labels(outcome).inc(), gpu)
    pool = ThreadPoolExecutor(workers, "scoring", torch.set_num_threads, (threads,))
    waiting: set[int] = set()
    metrics.open.set_function(lambda: len(waiting))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with watcher.watching():
            yield
        pool.shutdown()

    # No pages for browsers, which load their scripts from elsewhere; /openapi.json describes the requests.
    app = FastAPI(title="ctr_pe", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.watcher, app.state.metrics = watcher, metrics
    app.add_middleware(RequestMeter, limits=limits, metrics=metrics)

    @app.exception_handler(RequestValidationError)
    async def explain(request: Request, error: RequestValidationError) -> JSONResponse:
        """Paths and messages, without the values that were sent."""
        problems = [
            {"loc": problem["loc"], "msg": problem["msg"].removeprefix("Value error, "), "type": problem["type"]}
            for problem in error.errors()[:MOST_PROBLEMS]
        ]
        return JSONResponse({"detail": problems}, 422)

    @app.post("/rank", response_model_exclude_defaults=True)
    async def rank(request: RankRequest) -> RankResponse:
        model, loop = watcher.model, asyncio.get_running_loop()
        _check(request, model, limits)
        if len(waiting) >= limits.waiting:
            raise HTTPException(503, "too many requests are waiting", {"Retry-After": "1"})
        waiting.add(id(request))
        try:
            found = await loop.run_in_executor(pool, _rank, model, request)
        finally:
            waiting.discard(id(request))
        metrics.candidates.inc(len(request.candidates))
        metrics.unknown.labels("candidates").inc(found.unknown_candidates)
        metrics.unknown.labels("history").inc(found.unknown_history)
        return found

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """``status`` is ``ok``, or ``stale`` if the folder's present content was refused: ``refused`` says why."""
        model = watcher.model
        status = "ok" if watcher.refused is None else "stale"
        return {"status": status, "refused": watcher.refused, "model": model.facts, "version": __version__}

    @app.get("/metrics")
    async def export_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app


class RequestMeter:
    """ASGI middleware: refuses bodies that are too large (413), before more of them is read, and measures ``/rank``."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], limits: Limits, metrics: ServiceMetrics):
        self.app, self.limits, self.metrics = app, limits, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        began, status, size = time.perf_counter(), 500, 0

        async def counted() -> Scope:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.limits.body:
                raise HTTPException(413, f"body: at most {self.limits.body:,} bytes", {"Connection": "close"})
            return message

        async def noted(message: Scope) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, counted, noted)
        finally:
            if scope["path"] == "/rank":
                self.metrics.requests.labels(str(status)).inc()
                self.metrics.seconds.observe(time.perf_counter() - began)


def _rank(model: WatchedModel, request: RankRequest) -> RankResponse:
    try:
        encoded = model.scorer.encoder.one(
            request.history, request.candidates, request.times, request.now,
            user=request.user, context=request.context, history_context=request.history_context,
            candidate_context=request.candidate_context,
        )  # fmt: skip
    except UserError as error:
        _wrong((), str(error))
    scores = model.scorer.score(encoded)
    best = np.argsort(-scores, kind="stable")[: request.k].tolist()
    return RankResponse(
        ranked=[RankedItem(item=request.candidates[place], score=float(scores[place])) for place in best],
        unknown_candidates=encoded.counts["unknown items"],
        unknown_history=encoded.counts["unknown history items"],
        counts={name: count for name, count in encoded.counts.items() if name not in OF_ITEMS and count},
        model=model.name,
    )


def _check(request: RankRequest, model: WatchedModel, limits: Limits) -> None:
    """Raises RequestValidationError (422) with the path of the first field that cannot be used."""
    catalogue = model.scorer.encoder.catalogue
    numbers = catalogue is not None and catalogue.dtype == pl.Int64
    for field in ("history", "candidates"):
        values, most = getattr(request, field), getattr(limits, field)
        if len(values) > most:
            _wrong((field,), f"at most {most:,} items, not {len(values):,}")
        for place, value in enumerate(values):
            if catalogue is not None and isinstance(value, int) != numbers:
                kind = "whole numbers" if numbers else "strings"
                _wrong((field, place), f"the raw ids of this model's items are {kind}")
    times = request.times
    if times is None:
        if model.scorer.encoder.needs_age and request.history:
            _wrong(("times",), "this model reads the age of events: give the time of each item of the history")
        return
    if len(times) != len(request.history):
        _wrong(("times",), f"{len(times)} for {len(request.history)} items of the history")
    at = _moments("times", times, model)
    for place, (before, after) in enumerate(pairwise(at), 1):
        if after < before:
            _wrong(("times", place), "before the time of the item that precedes it: the oldest comes first")
    if request.now is not None and times and _moments("now", [request.now], model)[0] < at[-1]:
        _wrong(("now",), "before the newest item of the history")


def _moments(field: str, times: Sequence[Any], model: WatchedModel) -> list[int]:
    """In nanoseconds."""
    try:
        return [int(at) for at in model.scorer.encoder.moments(times, field)]
    except UserError as error:
        _wrong((field,), str(error))


def _wrong(path: tuple[str | int, ...], message: str) -> NoReturn:
    raise RequestValidationError([{"type": "value_error", "loc": ("body", *path), "msg": message}])


def serve(app: FastAPI, port: int, host: str = "127.0.0.1") -> None:
    """Serve an :func:`application` until SIGTERM or Ctrl-C; open requests are finished. SIGHUP loads the folder again.

    Raises:
        UserError: an address that cannot be used.
    """
    watcher: ModelWatcher = app.state.watcher
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        number = getattr(error, "errno", None) or 0
        raise UserError(f"{host}:{port}: {os.strerror(number).lower() if number > 0 else error}") from None
    with listening:
        shown = f"[{host}]" if family == socket.AF_INET6 else host
        signal.signal(signal.SIGHUP, lambda *_: watcher.wake.set())
        signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again when it has finished
        config = uvicorn.Config(
            app, log_config=None, log_level="warning", access_log=False, timeout_graceful_shutdown=60, lifespan="on"
        )
        log.info("%s: model %s on http://%s:%d", watcher.folder, watcher.model.name, shown, listening.getsockname()[1])
        uvicorn.Server(config).run(sockets=[listening])
    log.info("stopped")
