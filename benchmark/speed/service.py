"""The service under load: several clients on loopback, each with one connection, against calls of the scorer."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

import polars as pl

from benchmark.speed import data
from benchmark.speed.cases import Settings
from benchmark.speed.timing import Figure, say
from ctr_pe.serving.model_folder import read_model

CLIENTS = 4
BODY = {"content-type": "application/json"}


def throughput(settings: Settings, candidates: int) -> Figure:
    """How many times as long a request takes under load as a call of the scorer that answers it; requests per second
    in the details."""
    with _running(settings, candidates) as (port, scorer, requests):
        taken, direct = [], []
        for repeat in range(settings.repeats):
            began = time.perf_counter()
            _load(port, requests)
            taken.append((time.perf_counter() - began) / len(requests))
            began = time.perf_counter()
            for request in requests:
                scorer.score_one(request["history"], request["candidates"])
            direct.append((time.perf_counter() - began) / len(requests))
            say(f"repeat {repeat + 1} of {settings.repeats}: {1 / taken[-1]:,.0f} requests/s")
    ours, baseline = statistics.median(taken), statistics.median(direct)
    ratios = [mine / theirs for mine, theirs in zip(taken, direct, strict=True)]
    details = {"requests per second": 1 / ours, "candidates": candidates, "clients": CLIENTS}
    return Figure(ratios, ours, baseline, against="Scorer.score_one", details=details)


def slowest(settings: Settings, candidates: int) -> Figure:
    """Milliseconds of one request in a hundred (p99) of one client; half of them (p50) in the details."""
    with _running(settings, candidates) as (port, _, requests):
        _ask(port, requests[:20])
        seconds = _ask(port, requests * settings.size(5, 1))
    percentiles = statistics.quantiles([1000 * one for one in seconds], n=100)
    say(f"{candidates} candidates: p50 {percentiles[49]:.3g} ms, p99 {percentiles[98]:.3g} ms")
    return Figure([percentiles[98]], unit="ms", against="p50 in the details", details={"p50": percentiles[49]})


@contextmanager
def _running(settings: Settings, candidates: int) -> Iterator[tuple[int, Any, list[dict[str, Any]]]]:
    """A service of DIN with CAPE in this process: its port, its scorer, and requests with full histories."""
    import uvicorn

    from ctr_pe import CTRRanker
    from ctr_pe.serving.service import application

    log, items = data.interactions(settings.size(2000, 200))
    how: dict[str, Any] = {"epochs": 1, "embedding_dim": 64, "batch_size": 1024, "attention_hidden_units": [64]}
    CTRRanker("DIN", "cape", **how).fit(log, items=items).save(settings.folder / "model")
    ids = pl.Series(items["item_id"].to_pylist())
    requests = [
        {
            "history": ids.sample(data.MAX_LEN, seed=number).to_list(),
            "candidates": ids.sample(candidates, seed=-number - 1 & 0xFFFF).to_list(),
        }
        for number in range(settings.size(200, 40))
    ]
    app = application(settings.folder / "model")
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1], read_model(settings.folder / "model"), requests
    finally:
        server.should_exit = True
        thread.join()


def _load(port: int, requests: list[dict[str, Any]]) -> None:
    with ThreadPoolExecutor(CLIENTS) as pool:
        for one in [pool.submit(_ask, port, requests[client::CLIENTS]) for client in range(CLIENTS)]:
            one.result()


def _ask(port: int, requests: list[dict[str, Any]]) -> list[float]:
    """Seconds of each request, one after the other on one connection."""
    connection, seconds = HTTPConnection("127.0.0.1", port, timeout=60), []
    for request in requests:
        body = json.dumps(request)
        began = time.perf_counter()
        connection.request("POST", "/rank", body, BODY)
        answer = connection.getresponse()
        answer.read()
        seconds.append(time.perf_counter() - began)
        if answer.status != 200:
            raise RuntimeError(f"the service answered {answer.status}")
    connection.close()
    return seconds
