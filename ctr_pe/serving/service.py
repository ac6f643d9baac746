"""A trained model as a service: ``POST /rank`` of a click model, ``POST /recommend`` of a next-item model, and what
operators ask for: ``/health``, ``/ready``, ``/live``, ``/metrics``.

A request has its place before its body is read, and is checked before it reaches the model. Requests that wait at the
same time are scored together (:mod:`ctr_pe.serving.micro_batches`), in threads of their own, so that the loop that
accepts requests is never busy. The model folder is watched (:mod:`ctr_pe.serving.model_watcher`).
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import json
import logging
import math
import multiprocessing
import os
import re
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

try:
    import uvicorn.config
    from fastapi import FastAPI, HTTPException, Request, Response
    from prometheus_client import (
        CONTENT_TYPE_LATEST,
        CollectorRegistry,
        Counter,
        Gauge,
        Histogram,
        generate_latest,
        multiprocess,
    )  # fmt: skip
    from starlette.requests import ClientDisconnect

    from ctr_pe.serving import server
except ImportError as error:
    from ctr_pe.utils.errors import UserError

    raise UserError(f"serve needs {error.name}: pip install 'ctr_pe[serve]'") from None

from pydantic import BaseModel

from ctr_pe import __version__
from ctr_pe.data.requests import EncodedRequests
from ctr_pe.serving.micro_batches import SURE, MicroBatches, Overloaded
from ctr_pe.serving.model_watcher import ModelWatcher, WatchedModel
from ctr_pe.serving.rank_request import (
    BadRequest,
    RankRequest,
    RankResponse,
    RecommendRequest,
    RecommendResponse,
    Wanted,
    check,
    parsed,
    problem,
)
from ctr_pe.serving.service_options import ServiceOptions
from ctr_pe.utils.errors import UserError

log = logging.getLogger("ctr_pe.service")
requests_log = logging.getLogger("ctr_pe.service.requests")
SHARED_METRICS = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client's: a folder for the metrics of several processes
DEFAULT = ServiceOptions()
ANSWERED = {
    "/rank": ("click", "this model finds the items that come next by itself: POST /recommend"),
    "/recommend": ("next-item", "this model scores the candidates that it gets: POST /rank"),
}
"""What models are asked: the task of those that answer, and what others say."""
OF_ITEMS = ("requests", "unknown items", "unknown history items")  # counts that have fields of their own
RETRY = 1  # seconds, of Retry-After
TOGETHER = 0.05  # seconds: refusals that wait are answered together so often, not each in a turn of the loop
YOUNG = 10_000  # objects that are made between two searches for unreachable ones
SWITCH = 0.0005  # seconds that the loop may keep the thread that scores from the interpreter, which it asks for often
WAIT = re.compile(r"\d{1,9}", re.ASCII)  # milliseconds
REQUEST_ID = re.compile(rb"[\w.:-]{1,128}")
TEXT = "%(asctime)s %(levelname)s %(message)s"
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]


class ServiceMetrics:
    """Counters, gauges and histograms of ``GET /metrics``; of all processes, where there are several."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, histogram = partial(Counter, registry=self.registry), partial(Histogram, registry=self.registry)
        self.requests = counter("ctr_pe_requests", "requests to /rank and /recommend by status", ["status"])
        bounds = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
        self.seconds = histogram(
            "ctr_pe_request_seconds", "from request to response of /rank and /recommend", buckets=bounds
        )
        self.waited = histogram("ctr_pe_wait_seconds", "until a batch was scored, of its first request", buckets=bounds)
        self.scoring = histogram("ctr_pe_scoring_seconds", "of a batch", buckets=bounds)
        sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256)
        self.batch = histogram("ctr_pe_batch_requests", "requests that were scored together", buckets=sizes)
        self.candidates = counter("ctr_pe_candidates", "candidates scored")
        self.recommended = counter("ctr_pe_recommended_items", "items recommended")
        self.unknown = counter("ctr_pe_unknown_ids", "raw ids that the model does not know", ["of"])
        self.reloads = counter("ctr_pe_reloads", "times the model folder was loaded or refused", ["outcome"])
        self.open = Gauge(
            "ctr_pe_open_requests", "requests being scored or waiting", registry=self.registry,
            multiprocess_mode="livesum",
        )  # fmt: skip
        for of, outcome in (("candidates", "loaded"), ("history", "refused")):  # which are there from the start
            self.unknown.labels(of)
            self.reloads.labels(outcome)

    def of_batch(self, requests: int, waited: float, seconds: float) -> None:
        self.batch.observe(requests)
        self.waited.observe(waited)
        self.scoring.observe(seconds)

    def text(self) -> bytes:
        """In the format of Prometheus."""
        registry = self.registry
        if os.environ.get(SHARED_METRICS):
            registry = CollectorRegistry()
            multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)


def application(folder: str | Path, options: ServiceOptions = DEFAULT) -> FastAPI:
    """The service of a model folder as an ASGI application; ``app.state.watcher`` has the model.

    Raises:
        UserError: a folder that cannot be read, or a model that needs more than a history and candidates.
    """
    metrics = ServiceMetrics()
    watcher = ModelWatcher(
        Path(folder), options.poll, lambda outcome: metrics.reloads.labels(outcome).inc(), options.gpu
    )
    pool = ThreadPoolExecutor(options.workers, "scoring", torch.set_num_threads, (options.threads,))
    batches = MicroBatches(_answers, pool, options.workers, options.queueing, metrics.of_batch)
    admission = Admission(watcher, batches, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        with watcher.watching():
            yield {"refuse": admission.refusal, "connected": batches.no_rest}
        pool.shutdown()

    # No pages for browsers, which load their scripts from elsewhere; /openapi.json describes the requests.
    app = FastAPI(title="ctr_pe", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.watcher, app.state.metrics = watcher, metrics
    app.add_middleware(Door, admission=admission)

    async def answer_of(request: Request, kind: type[Wanted], size: Callable[[Wanted], int]) -> tuple[Wanted, Any]:
        wait = _patience(request.headers.get("x-wait-ms"))
        body, model = await _body(request, options.limits.body), watcher.model
        task, instead = ANSWERED[request.url.path]
        if model.scorer.task != task:
            raise problem((), instead, "path")
        batches.check(wait)  # again: the body may have been long in coming
        wanted = parsed(body, kind)
        check(wanted, model.scorer, options.limits)
        with metrics.open.track_inprogress():
            answer = await batches(model, wanted, size(wanted), wait)
        metrics.unknown.labels("history").inc(answer["unknown_history"])
        return wanted, answer

    @app.post("/rank", response_model=RankResponse, openapi_extra=_body_of(RankRequest))
    async def rank(request: Request) -> Response:
        """The candidates of a request with their click probabilities, the best first."""
        wanted, answer = await answer_of(request, RankRequest, lambda wanted: len(wanted.candidates))
        metrics.candidates.inc(len(wanted.candidates))
        metrics.unknown.labels("candidates").inc(answer["unknown_candidates"])
        return _json(answer, headers={"x-model": answer["model"]})

    @app.post("/recommend", response_model=RecommendResponse, openapi_extra=_body_of(RecommendRequest))
    async def recommend(request: Request) -> Response:
        """The items that come next after a history, the best first, of a next-item model."""
        _, answer = await answer_of(request, RecommendRequest, lambda wanted: wanted.k)
        metrics.recommended.inc(len(answer["recommended"]))
        return _json(answer, headers={"x-model": answer["model"]})

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """``status`` is ``ok``, or ``stale`` if the folder's present content was refused: ``refused`` says why."""
        model = watcher.model
        status = "ok" if watcher.refused is None else "stale"
        return {"status": status, "refused": watcher.refused, "model": model.facts, "version": __version__}

    @app.get("/live")
    async def alive() -> dict[str, str]:
        """The process answers; if not, start another."""
        return {"status": "live"}

    @app.get("/ready")
    async def ready() -> Response:
        """503 while another request would be turned away: send them elsewhere."""
        try:
            batches.check()
        except Overloaded as error:
            return _json({"status": str(error)}, 503, {"Retry-After": str(RETRY)})
        return _json({"status": "ready"})

    @app.get("/metrics")
    async def export_metrics() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return app


class Admission:
    """Whether a request has a place, what those that have none are told, and the count, time and log line of each."""

    def __init__(self, watcher: ModelWatcher, batches: MicroBatches, metrics: ServiceMetrics) -> None:
        self.watcher, self.batches, self.metrics = watcher, batches, metrics
        self.of_status = cache(lambda status: metrics.requests.labels(str(status)))

    def refusal(self, path: str, fields: Mapping[bytes, bytes], connection: dict[str, Any]) -> server.Refusal | None:
        """What the server answers a POST without reading it; None if there is a place for it."""
        if path not in ANSWERED:
            return None
        wait = fields.get(b"x-wait-ms", b"").decode("latin-1")
        problem = self.batches.problem(int(wait) / 1000 if WAIT.fullmatch(wait) else None, SURE)
        if problem is None:
            self.batches.expect()
            return None
        self.batches.rest()
        same, body = _unavailable(problem)
        began = time.perf_counter()
        name, model = request_id(fields.get(b"x-request-id", b"")), self.watcher.model.name
        answer = b"%bx-request-id: %b\r\nx-model: %b\r\n\r\n%b" % (same, name, model.encode(), body)
        return server.Refusal(
            answer, retry_due(connection), lambda status: self.note(began, name, "POST", path, status, model)
        )

    def note(self, began: float, name: bytes, method: str, path: str, status: int, model: str) -> None:
        """Count, time and log a request that is answered, of ``time.perf_counter()`` and the id ``name``."""
        seconds = time.perf_counter() - began
        if path in ANSWERED:
            self.of_status(status).inc()
            self.metrics.seconds.observe(seconds)
        if requests_log.isEnabledFor(logging.INFO):
            facts = {"request_id": name.decode(), "method": method, "path": path, "status": status,
                     "ms": round(1000 * seconds, 2), "model": model}  # fmt: skip
            requests_log.info(" ".join(map(str, facts.values())), extra={"facts": facts})


class Door:
    """ASGI middleware: turns ``/rank`` and ``/recommend`` away before the body is read where there is no place for it
    (503) and the server has not done so, and says what is wrong with a request (422). Each answer says its
    ``x-request-id``, that of the request if it has one, and the ``x-model``."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], admission: Admission) -> None:
        self.app, self.admission = app, admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        began, status = time.perf_counter(), 500
        name = request_id(next((value for name, value in scope["headers"] if name == b"x-request-id"), b""))
        model = self.admission.watcher.model.name.encode()

        async def noted(message: Scope) -> None:
            nonlocal status, model
            if message["type"] == "http.response.start":
                status = message["status"]
                model = dict(message["headers"]).get(b"x-model", model)
                others = [header for header in message["headers"] if header[0] != b"x-model"]
                message["headers"] = [*others, (b"x-request-id", name), (b"x-model", model)]
            await send(message)

        try:
            if scope["path"] in ANSWERED:
                self.admission.batches.check()
            await self.app(scope, receive, noted)
        except BadRequest as error:
            await _json({"detail": error.problems}, 422)(scope, receive, noted)
        except Overloaded as error:
            due = retry_due(scope.get("state", {}).get("connection", {}))
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await _json({"detail": str(error)}, 503, {"Retry-After": str(RETRY)})(scope, receive, noted)
        except ClientDisconnect:
            status = 499  # as proxies call it: nobody is there to be answered
        finally:
            self.admission.note(began, name, scope["method"], scope["path"], status, model.decode())


@cache
def _unavailable(detail: str) -> tuple[bytes, bytes]:
    """Fields and body that refusals with the same ``detail`` share."""
    body = json.dumps({"detail": detail}).encode()
    fields = b"retry-after: %d\r\ncontent-length: %d\r\ncontent-type: application/json\r\n" % (RETRY, len(body))
    return fields, body


def request_id(given: bytes) -> bytes:
    """The id that a request brought, or a new one if it is none."""
    return given if REQUEST_ID.fullmatch(given) else secrets.token_hex(8).encode()


def retry_due(connection: dict[str, Any]) -> float:
    """When a refused request is answered, of ``time.monotonic()``. A connection that asks again before it should is
    answered when it should have: clients that retry at once would take the time that useful answers need."""
    now = time.monotonic()
    due: float = connection.get("retry", now)
    due = now if due <= now else TOGETHER * math.ceil(due / TOGETHER)
    connection["retry"] = due + RETRY
    return due


class JSONLines(logging.Formatter):
    """A line of JSON per message: time, level, message, and the facts of a request."""

    def format(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "facts", None) or {"message": record.getMessage()}
        if record.exc_info:
            facts["exception"] = self.formatException(record.exc_info)
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z"
        return json.dumps({"time": at, "level": record.levelname, "process": record.process, **facts})


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """In ASCII: an error may name half a surrogate pair."""
    return Response(json.dumps(content, allow_nan=False), status, headers, "application/json")


def _body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """Of OpenAPI, for a body that the endpoint reads itself."""
    return {"requestBody": {"content": {"application/json": {"schema": kind.model_json_schema()}}, "required": True}}


def _patience(header: str | None) -> float | None:
    """Seconds, of the header x-wait-ms."""
    if header is None:
        return None
    if not WAIT.fullmatch(header):
        raise problem((), f"a whole number of milliseconds, not '{header}'", "header", "x-wait-ms")
    return int(header) / 1000


async def _body(request: Request, most: int) -> bytes:
    """Raises HTTPException for a body that is too large (413), before more of it is read."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise HTTPException(413, f"body: at most {most:,} bytes", {"Connection": "close"})
        parts.append(part)
    return b"".join(parts)


def _answers(model: WatchedModel, requests: Sequence[Any]) -> list[dict[str, Any] | Exception]:
    """What RankResponse or RecommendResponse describes. What one request lacks does not touch the others."""
    answers = [_encoded(model, request) for request in requests]
    (_rank if model.scorer.task == "click" else _recommend)(model, requests, answers)
    return answers


def _rank(model: WatchedModel, requests: Sequence[RankRequest], answers: list[Any]) -> None:
    """An answer in the place of each encoded request."""
    places = [place for place, encoded in enumerate(answers) if not isinstance(encoded, Exception)]
    if places:
        together = model.scorer.score_together([answers[place] for place in places])
        for place, scores in zip(places, together, strict=True):
            answers[place] = _answer(model, requests[place], answers[place].counts, scores)


def _recommend(model: WatchedModel, requests: Sequence[RecommendRequest], answers: list[Any]) -> None:
    """An answer in the place of each encoded request."""
    for filter_seen in (True, False):
        places = [
            place
            for place, (request, encoded) in enumerate(zip(requests, answers, strict=True))
            if request.filter_seen == filter_seen and not isinstance(encoded, Exception)
        ]
        if not places:
            continue
        together = EncodedRequests.joined([answers[place] for place in places])
        found = model.scorer.recommend(together, max(requests[place].k for place in places), filter_seen)
        items, scores, ranks = found.items.to_list(), found.scores.tolist(), found.ranks.tolist()
        ends = np.searchsorted(found.rows, np.arange(len(places) + 1))
        for row, place in enumerate(places):
            best = range(ends[row], min(ends[row] + requests[place].k, ends[row + 1]))
            answers[place] = {
                "recommended": [{"item": items[at], "score": scores[at], "rank": ranks[at]} for at in best],
                **_counts(answers[place].counts),
                "model": model.name,
            }


def _encoded(model: WatchedModel, request: RankRequest | RecommendRequest) -> Any:
    encoder = model.scorer.encoder
    try:
        if isinstance(request, RecommendRequest):
            if request.user is not None:
                assert model.scorer.stored is not None
                return encoder.of_user(request.user, model.scorer.stored, request.now)
            return encoder.one(
                request.history or [], None, request.times, request.now, history_context=request.history_context
            )
        return encoder.one(
            request.history, request.candidates, request.times, request.now,
            user=request.user, context=request.context, history_context=request.history_context,
            candidate_context=request.candidate_context,
        )  # fmt: skip
    except (UserError, UnicodeError) as error:
        return problem((), str(error))
    except Exception as error:
        return error


def _answer(model: WatchedModel, request: RankRequest, counts: Any, scores: Any) -> dict[str, Any]:
    best = np.argsort(-scores, kind="stable")[: request.k].tolist()
    values = scores.tolist()
    return {
        "ranked": [{"item": request.candidates[place], "score": values[place]} for place in best],
        "unknown_candidates": counts["unknown items"],
        **_counts(counts),
        "model": model.name,
    }


def _counts(counts: Any) -> dict[str, Any]:
    others = {name: count for name, count in counts.items() if name not in OF_ITEMS and count}
    return {"unknown_history": counts["unknown history items"], **({"counts": others} if others else {})}


def serve(
    folder: Path,
    port: int,
    host: str = "127.0.0.1",
    options: ServiceOptions = DEFAULT,
    processes: int = 1,
    log_format: str = "text",
    log_requests: bool = False,
) -> None:
    """Serve a model folder until SIGTERM or Ctrl-C; open requests are finished. SIGHUP loads the folder again.

    Raises:
        UserError: an address that cannot be used; as :func:`application`.
    """
    start = partial(_start, folder, options, log_format, log_requests)
    if processes == 1:
        app = start()
        listening, address = server.listen(host, port)
        with listening:
            log.info("%s: model %s on %s", folder, app.state.watcher.model.name, address)
            server.run(lambda: app, listening, options.connections)
    else:
        set_up_logs(log_format, log_requests)
        listening, address = server.listen(host, port)
        with listening, tempfile.TemporaryDirectory(prefix="ctr-pe-metrics-") as metrics:
            os.environ[SHARED_METRICS] = metrics
            log.info("%s: %d processes on %s", folder, processes, address)
            server.run(partial(_or_exit, start), listening, options.connections, processes)
    log.info("stopped")


def _start(folder: Path, options: ServiceOptions, log_format: str, log_requests: bool) -> FastAPI:
    set_up_logs(log_format, log_requests)
    sys.setswitchinterval(SWITCH)
    gc.set_threshold(YOUNG)
    app = application(folder, options)
    watcher: ModelWatcher = app.state.watcher
    count = watcher.on_reload

    def reloaded(outcome: str) -> None:
        count(outcome)
        _keep()

    watcher.on_reload = reloaded
    _keep()
    atexit.register(gc.unfreeze)  # so that Python ends what it would have
    signal.signal(signal.SIGHUP, lambda *_: app.state.watcher.wake.set())
    return app


def _keep() -> None:
    """Take what there is now, code and model, out of the search for unreachable objects, which otherwise takes a fifth
    of the time under load and stops all answers for up to a third of a second."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _or_exit(start: Callable[[], FastAPI]) -> FastAPI:
    """Of one of several processes, which are not started again if the first start fails, and end with their parent."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
    try:
        return start()
    except UserError as error:
        log.error("%s", error)
        sys.exit(uvicorn.config.STARTUP_FAILURE)


def _end_after(parent: Any) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def set_up_logs(log_format: str, log_requests: bool) -> None:
    """``text`` or ``json`` lines on stderr; a line per request only if wanted for."""
    handler = logging.StreamHandler()
    handler.setFormatter(JSONLines() if log_format == "json" else logging.Formatter(TEXT))
    logging.basicConfig(handlers=[handler])
    log.setLevel(logging.INFO)
    requests_log.setLevel(logging.INFO if log_requests else logging.WARNING)
