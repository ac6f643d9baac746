"""The service answers with the scores of its model, says what is wrong with a request, and never drops one."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import polars as pl
import pytest
from fastapi.testclient import TestClient

from ctr_pe import CTRRanker
from ctr_pe.serving import model_watcher
from ctr_pe.serving.model_folder import read_model
from ctr_pe.serving.model_watcher import ModelWatcher, WatchedModel
from ctr_pe.serving.service import YOUNG, Admission, JSONLines, _start, application
from ctr_pe.serving.service_options import Limits, Queueing, ServiceOptions
from ctr_pe.utils.errors import UserError
from tests.support.addresses import address_of
from tests.support.fuzz.small_log import SMALL
from tests.support.http_server import served
from tests.support.processes import PATIENCE, wait_for

ASKED = [f"item {i}" for i in (3, 44, 7, 3, 20)] + ["nowhere"]
PAST = ["item 5", "item 9", "gone", "item 5"]


@pytest.fixture(scope="module")
def other(clicks: pl.DataFrame, items: pl.DataFrame) -> CTRRanker:
    """Another model of the same log."""
    return CTRRanker("DIN", "cape", **{**SMALL, "random_state": 1}).fit(clicks, items=items)


@pytest.fixture(scope="module")
def timed(clicks: pl.DataFrame, items: pl.DataFrame) -> CTRRanker:
    """One that reads ages."""
    return CTRRanker("DIN", "time_bias", **SMALL).fit(clicks, items=items)


@pytest.fixture
def folder(ranker: CTRRanker, tmp_path: Path) -> Path:
    ranker.save(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def client(folder: Path) -> Iterator[TestClient]:
    limits = Limits(history=120, candidates=50, body=4000)
    with TestClient(application(folder, ServiceOptions(limits, poll=0.02))) as client:
        yield client


def test_candidates_come_back_ranked_with_the_scores_of_the_model(client: TestClient, ranker: CTRRanker) -> None:
    want = ranker.scorer_.score_one(PAST, ASKED)
    answer = client.post("/rank", json={"history": PAST, "candidates": ASKED}).json()
    order = np.argsort(-want, kind="stable")
    assert [one["item"] for one in answer["ranked"]] == [ASKED[i] for i in order]
    np.testing.assert_allclose([one["score"] for one in answer["ranked"]], want[order], atol=1e-6)
    assert (answer["unknown_candidates"], answer["unknown_history"]) == (2, 1)  # item 44 is only in the catalogue
    best = client.post("/rank", json={"history": PAST, "candidates": ASKED, "k": 2}).json()
    assert best["ranked"] == answer["ranked"][:2]


@pytest.mark.parametrize("length", [0, 1, 120])
def test_histories_may_be_empty_or_longer_than_the_model_reads(
    client: TestClient, ranker: CTRRanker, length: int
) -> None:
    past = [f"item {i % 40}" for i in range(length)]
    answer = client.post("/rank", json={"history": past, "candidates": ["item 1"]}).json()
    assert answer["ranked"][0]["score"] == pytest.approx(ranker.scorer_.score_one(past, ["item 1"])[0], abs=1e-6)


@pytest.mark.parametrize(
    ("change", "path", "message"),
    [
        ({"candidates": []}, ["candidates"], "at least 1 item"),
        ({"candidates": ["item 1", None]}, ["candidates", 1], "a whole number or a string"),
        ({"candidates": ["item 1", True]}, ["candidates", 1], "a whole number or a string"),
        ({"candidates": ["item 1", 2]}, ["candidates", 1], "this model's items are strings"),
        ({"candidates": [2**64]}, ["candidates", 0], "larger than 64 bits"),
        ({"candidates": ["\ud800"]}, ["candidates", 0], "surrogates"),
        ({"candidates": ["item 1"] * 51}, ["candidates"], "at most 50 items, not 51"),
        ({"history": ["item 1"] * 121}, ["history"], "at most 120 items, not 121"),
        ({"history": "item 1"}, ["history"], "valid list"),
        ({"k": 0}, ["k"], "greater than or equal to 1"),
        ({"k": 1.0}, ["k"], "valid integer"),
        ({"topk": 3}, ["topk"], "not permitted"),
        ({"times": [1]}, ["times"], "1 for 2 items of the history"),
        ({"times": [2, 1]}, ["times", 1], "the oldest comes first"),
        ({"times": [1, "2"]}, ["times"], "all of one type"),
        ({"times": [1, 2], "now": 1}, ["now"], "before the newest item"),
        ({"times": [1, 2**63]}, ["times", 1], "larger than 64 bits"),
        ({"context": {"hour": [[1]]}}, ["context", "hour"], "or a list of these"),
        ({"history_context": {"hour": [7, {"h": 8}]}}, ["history_context", "hour", 1], "or a list of these"),
    ],
)
def test_what_is_wrong_with_a_request_is_said_with_its_path(
    client: TestClient, change: dict[str, Any], path: list[str | int], message: str
) -> None:
    body = json.dumps({"history": ["item 1", "item 2"], "candidates": ["item 3"], **change})
    answer = client.post("/rank", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    (problem,) = answer.json()["detail"]
    assert problem["loc"] == ["body", *path]
    assert message in problem["msg"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"candidates": ["\xff"]}',
        "{}".encode("utf-16"),
        b"[" * 4000,
        b"[1" + b"0" * 3900 * 2,
    ],
    ids=["empty", "cut off", "list", "null", "no UTF-8", "UTF-16", "deep", "a long number"],
)
def test_a_body_that_is_no_request_is_a_problem_of_the_body(folder: Path, body: bytes) -> None:
    with TestClient(application(folder)) as client:
        answer = client.post("/rank", content=body)
    assert answer.status_code == 422, answer.text
    assert answer.json()["detail"][0]["loc"][0] == "body"


@pytest.mark.parametrize("field", ["context", "history_context", "candidate_context"])
def test_half_a_surrogate_pair_is_a_problem_wherever_it_stands(client: TestClient, field: str) -> None:
    value = r'"\ud800"' if field == "context" else r'["\ud800"]'
    for body in (f'{{"cat": {value}}}', r'{"\ud800": ' + value + "}"):
        content = f'{{"candidates": ["item 1"], "history": ["item 1"], "{field}": {body}}}'
        assert client.post("/rank", content=content).status_code == 422


def test_a_body_that_is_too_large_is_refused_however_it_comes(client: TestClient) -> None:
    large = b'{"candidates": ["' + b"x" * 4000 + b'"]}'
    chunks = (large[start : start + 500] for start in range(0, len(large), 500))
    for content in (large, chunks):  # with its length in the header, and in chunks
        answer = client.post("/rank", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 413
        assert "4,000 bytes" in answer.json()["detail"]
    assert client.post("/rank", content=b"{", headers={"content-type": "application/json"}).status_code == 422


def test_a_model_that_reads_ages_asks_for_times(timed: CTRRanker, tmp_path: Path) -> None:
    timed.save(tmp_path / "m")
    request: dict[str, Any] = {"history": ["item 1", "item 2"], "candidates": ["item 3", "item 4"]}
    with TestClient(application(tmp_path / "m")) as client:
        problem = client.post("/rank", json=request).json()["detail"][0]
        assert problem["loc"] == ["body", "times"]
        for more in ({"times": [0, 90_000]}, {"times": [0, 90_000], "now": 10**6}):
            found = {one["item"]: one["score"] for one in client.post("/rank", json=request | more).json()["ranked"]}
            want = timed.scorer_.score_one(*request.values(), **more)  # type: ignore[arg-type]
            np.testing.assert_allclose([found[item] for item in request["candidates"]], want, atol=1e-6)
        assert client.post("/rank", json={"candidates": ["item 3"]}).status_code == 200


def test_metrics_count_requests_candidates_and_unknown_ids(client: TestClient) -> None:
    for _ in range(3):
        client.post("/rank", json={"history": PAST, "candidates": ASKED})
    client.post("/rank", json={"candidates": []})
    text = client.get("/metrics").text
    for line in (
        'ctr_pe_requests_total{status="200"} 3.0',
        'ctr_pe_requests_total{status="422"} 1.0',
        "ctr_pe_request_seconds_count 4.0",
        f"ctr_pe_candidates_total {3 * len(ASKED)}.0",
        'ctr_pe_unknown_ids_total{of="candidates"} 6.0',
        'ctr_pe_unknown_ids_total{of="history"} 3.0',
        "ctr_pe_open_requests 0.0",
    ):
        assert line in text.splitlines()


def test_a_folder_that_is_replaced_answers_and_a_damaged_one_does_not(
    client: TestClient, folder: Path, ranker: CTRRanker, other: CTRRanker, caplog: pytest.LogCaptureFixture
) -> None:
    request = {"history": PAST, "candidates": ["item 3"]}

    def score() -> float:
        return float(client.post("/rank", json=request).json()["ranked"][0]["score"])

    first, second = (float(one.scorer_.score_one(PAST, ["item 3"])[0]) for one in (ranker, other))
    assert first != pytest.approx(second, abs=1e-6)
    assert score() == pytest.approx(first, abs=1e-6)
    before = client.get("/health").json()
    assert before["status"] == "ok"
    other.save(folder)
    wait_for(lambda: client.get("/health").json()["model"]["name"] != before["model"]["name"])
    assert score() == pytest.approx(second, abs=1e-6)

    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1])
    with caplog.at_level(logging.ERROR, "ctr_pe.service"):
        wait_for(lambda: client.get("/health").json()["status"] == "stale")
    health = client.get("/health").json()
    assert "model.safetensors: damaged" in health["refused"]
    assert "model.safetensors: damaged" in caplog.text
    assert score() == pytest.approx(second, abs=1e-6)
    shutil.rmtree(folder)  # no folder at all is no news
    assert score() == pytest.approx(second, abs=1e-6)
    ranker.save(folder)
    wait_for(lambda: client.get("/health").json()["status"] == "ok")
    assert score() == pytest.approx(first, abs=1e-6)
    text = client.get("/metrics").text.splitlines()
    assert 'ctr_pe_reloads_total{outcome="loaded"} 2.0' in text
    assert 'ctr_pe_reloads_total{outcome="refused"} 1.0' in text


def test_more_requests_than_may_wait_are_turned_away(
    folder: Path, ranker: CTRRanker, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, go = application(folder, ServiceOptions(queueing=Queueing(waiting=2, wait=30))), threading.Event()
    scorer = app.state.watcher.model.scorer
    score = scorer.score_together

    def slow(encoded: Any) -> Any:
        assert go.wait(PATIENCE)
        return score(encoded)

    monkeypatch.setattr(scorer, "score_together", slow)
    with TestClient(app) as client, ThreadPoolExecutor(2) as pool:
        open_ = [pool.submit(client.post, "/rank", json={"candidates": ["item 3"]}) for _ in range(2)]
        wait_for(lambda: "ctr_pe_open_requests 2.0" in client.get("/metrics").text)
        answers = [client.post("/rank", content=b"read by nobody"), client.get("/ready")]
        live = client.get("/live")
        go.set()
        assert [(one.status_code, one.headers["retry-after"]) for one in answers] == [(503, "1")] * 2
        assert live.status_code == 200
        assert [one.result().status_code for one in open_] == [200, 200]
        assert client.get("/ready").status_code == 200


def test_a_connection_that_was_turned_away_unread_is_answered_when_there_is_a_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, go, refused = application(folder, ServiceOptions(queueing=Queueing(waiting=1))), threading.Event(), []
    scorer = app.state.watcher.model.scorer
    score, refusal = scorer.score_together, Admission.refusal

    def slow(encoded: Any) -> Any:
        assert go.wait(PATIENCE)
        return score(encoded)

    def noted(self: Admission, *args: Any) -> Any:
        refused.append(found := refusal(self, *args))
        return found

    monkeypatch.setattr(scorer, "score_together", slow)
    monkeypatch.setattr(Admission, "refusal", noted)
    body = json.dumps({"candidates": ["item 3"]}).encode()
    head = b"POST /rank HTTP/1.1\r\nhost: x\r\nx-request-id: mine.7\r\ncontent-length: %d\r\n\r\n" % len(body)
    with served(app) as connect, connect() as first, connect() as second:
        first.sendall(head + body)
        wait_for(lambda: app.state.metrics.open._value.get() == 1)
        second.sendall(head)
        answer = second.recv(4096)
        assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\ndate: ")
        assert {b"retry-after: 1", b"x-request-id: mine.7"} < set(answer.split(b"\r\n"))
        assert [one is not None for one in refused] == [False, True]
        go.set()
        assert first.recv(4096).startswith(b"HTTP/1.1 200")
        for part in (body[:5], body[5:] + head, body):  # the rest of the request that was turned away, and another
            second.sendall(part)
        assert second.recv(4096).startswith(b"HTTP/1.1 200")
        assert 'ctr_pe_requests_total{status="503"} 1.0' in app.state.metrics.text().decode()


def test_requests_that_wait_together_get_the_scores_that_they_get_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = ServiceOptions(queueing=Queueing(wait=30))
    app, go, calls = application(folder, patient), threading.Event(), []
    scorer = app.state.watcher.model.scorer
    together = scorer.score_together

    def counted(parts: Any) -> Any:
        calls.append(len(parts))
        assert go.wait(PATIENCE)
        return together(parts)

    requests = [{"history": PAST * (i % 4), "candidates": [f"item {(i + j) % 44}" for j in range(1 + 5 * (i % 3))]}
                for i in range(12)] + [{"candidates": ["item 1"], "context": {"nothing": 1}}]  # fmt: skip
    with TestClient(app) as client, ThreadPoolExecutor(14) as pool:
        go.set()
        alone = [client.post("/rank", json=request).json() for request in requests]
        go.clear()
        monkeypatch.setattr(scorer, "score_together", counted)
        first = pool.submit(client.post, "/rank", json=requests[0])
        wait_for(lambda: len(calls) == 1)
        others = [pool.submit(client.post, "/rank", json=request) for request in requests[1:]]
        wait_for(lambda: "ctr_pe_open_requests 13.0" in client.get("/metrics").text)
        busy = pool.submit(client.post, "/rank", json=requests[0], headers={"x-wait-ms": "20"})
        wait_for(lambda: busy.done() or "ctr_pe_open_requests 14.0" in client.get("/metrics").text)
        time.sleep(0.03)  # a service that thought to be in time has been wrong then
        go.set()
        found = [one.result().json() for one in (first, *others)]
        assert "ctr_pe_batch_requests_count 15.0" in client.get("/metrics").text
    assert calls == [1, 11]  # the thirteenth asks for a field that the model lacks
    assert busy.result().status_code == 503
    for mine, own in zip(found, alone, strict=True):
        assert mine.keys() == own.keys()
        if "ranked" in own:
            scores = ({one["item"]: one["score"] for one in answer["ranked"]} for answer in (mine, own))
            assert next(scores) == pytest.approx(next(scores), abs=1e-6)
    assert found[-1] == alone[-1]


def test_answers_and_logs_name_the_request_and_the_model(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    name = client.get("/health").json()["model"]["name"]
    with caplog.at_level(logging.INFO, "ctr_pe.service.requests"):
        for body in ({"candidates": ["item 1"]}, {"candidates": []}):
            answer = client.post("/rank", json=body, headers={"x-request-id": "mine.7"})
            assert (answer.headers["x-request-id"], answer.headers["x-model"]) == ("mine.7", name)
    ids = {client.get("/live", headers={"x-request-id": "no\tword"}).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
    assert all(re.fullmatch("[0-9a-f]{16}", one) for one in ids)
    lines = [json.loads(JSONLines().format(record)) for record in caplog.records if hasattr(record, "facts")]
    assert [(line["request_id"], line["status"], line["model"]) for line in lines] == [
        ("mine.7", 200, name), ("mine.7", 422, name)
    ]  # fmt: skip
    assert {"time", "level", "process", "method", "path", "ms"} <= lines[0].keys()


@pytest.mark.parametrize("wait", ["soon", "-1", "1.5", "9" * 20])
def test_a_wait_that_is_no_number_is_a_problem_of_the_header(client: TestClient, wait: str) -> None:
    answer = client.post("/rank", json={"candidates": ["item 1"]}, headers={"x-wait-ms": wait})
    assert (answer.status_code, answer.json()["detail"][0]["loc"]) == (422, ["header", "x-wait-ms"])


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such model folder"):
        application(tmp_path / "nothing")


def test_without_the_extra_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ctr_pe.serving.service")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(UserError, match=r"serve needs uvicorn: pip install 'ctr_pe\[serve\]'"):
        __import__("ctr_pe.serving.service")


@contextlib.contextmanager
def process(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """The command on a free port: the process, its address, the lines of its log."""
    command = [sys.executable, "-m", "ctr_pe.cli", "serve", "--model", str(folder), "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        try:
            address, lines = address_of(running)
            reader = threading.Thread(target=lambda: lines.extend(running.stderr or ()), daemon=True)
            reader.start()
            yield running, address, lines
            running.wait(PATIENCE)
            reader.join(PATIENCE)
        finally:
            running.kill()


@pytest.mark.slow
def test_a_process_finishes_open_requests_when_it_is_told_to_stop(folder: Path) -> None:
    many = [f"item {i % 40}" for i in range(40_000)]
    with process(folder, "--max-candidates", "40000", "--max-body", "10000000") as (running, address, lines):
        assert address.startswith("http://127.0.0.1:")
        with httpx.Client(base_url=address, timeout=PATIENCE) as client, ThreadPoolExecutor(1) as pool:
            name = client.get("/health").json()["model"]["name"]
            running.send_signal(signal.SIGHUP)
            wait_for(lambda: any("now the model" in line for line in lines))
            body = {"history": PAST * 5, "candidates": many, "k": 1}
            asked = pool.submit(httpx.post, f"{address}/rank", json=body, timeout=PATIENCE)
            wait_for(lambda: "ctr_pe_open_requests 1.0" in client.get("/metrics").text)
            running.send_signal(signal.SIGTERM)
            answer = asked.result()
            assert (answer.status_code, answer.json()["model"]) == (200, name)
    assert running.returncode == 0
    assert "stopped" in lines[-1]


def test_garbage_collection_passes_over_what_a_serving_process_has_and_a_replaced_model_goes(folder: Path) -> None:
    before = gc.get_threshold(), sys.getswitchinterval(), signal.getsignal(signal.SIGHUP)
    try:
        watcher = _start(folder, ServiceOptions(), "text", False).state.watcher
        assert gc.get_threshold()[0] == YOUNG
        watcher.model.itself = watcher.model  # which only a collection can end
        old = weakref.ref(watcher.model)
        assert not any(one is old() for one in gc.get_objects())
        watcher.reload()
        assert old() is None
        assert not any(one is watcher.model for one in gc.get_objects())
    finally:
        gc.set_threshold(*before[0])
        sys.setswitchinterval(before[1])
        signal.signal(signal.SIGHUP, before[2])


def test_a_port_in_use_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    from ctr_pe.cli import main

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--model", str(folder), "--port", str(port)]) == 2
    assert capsys.readouterr().err == f"ctr-pe: error: 127.0.0.1:{port}: address already in use\n"


def test_a_folder_that_is_replaced_while_it_is_read_is_read_again(
    folder: Path, ranker: CTRRanker, other: CTRRanker, monkeypatch: pytest.MonkeyPatch
) -> None:

    calls = []

    def read(path: Path, gpu: int, task: str | None) -> Any:
        found = read_model(path, gpu, task=task)
        if len(calls) == 0:
            other.save(path)  # between reading and use
        calls.append(path)
        return found

    monkeypatch.setattr(model_watcher, "read_model", read)
    watcher = ModelWatcher(folder)
    assert len(calls) == 2
    assert watcher.model.scorer.score_one(PAST, ASKED).tolist() == other.scorer_.score_one(PAST, ASKED).tolist()


@pytest.mark.slow
def test_several_processes_answer_on_one_port(folder: Path, other: CTRRanker) -> None:
    with process(folder, "--processes", "2", "--log", "json", "--log-requests") as (running, address, lines):
        wait_for(lambda: ready(address), 180)
        names: set[str] = set()

        def ask() -> None:
            body = {"candidates": ["item 3"]}
            answer = httpx.post(f"{address}/rank", json=body, timeout=PATIENCE)  # a connection each
            assert answer.status_code == 200
            names.add(answer.json()["model"])

        def seen() -> set[int]:
            logged = [json.loads(line) for line in lines if line.startswith("{")]
            return {line["process"] for line in logged if line.get("path") == "/rank"}

        def both() -> bool:
            for _ in range(8):
                ask()
            return len(seen()) == 2

        wait_for(both)
        metrics = httpx.get(f"{address}/metrics", timeout=PATIENCE).text.splitlines()
        total = sum(float(line.split()[1]) for line in metrics if line.startswith("ctr_pe_requests_total"))
        wait_for(lambda: sum('"path": "/rank"' in line for line in lines) == total)
        other.save(folder)
        running.send_signal(signal.SIGHUP)
        wait_for(lambda: sum("now the model" in line for line in lines) >= 2)
        first, children = min(seen()), Path(f"/proc/{running.pid}/task/{running.pid}/children")
        before = children.read_text().split()
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: not {*children.read_text().split()} <= {*before})  # another one is started
        names.clear()
        ask()
        running.send_signal(signal.SIGTERM)
    assert running.returncode == 0
    assert len(names) == 1


@pytest.mark.slow
def test_a_folder_that_no_process_can_serve_ends_all_of_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ctr_pe.cli", "serve", "--model", str(tmp_path), "--port", "0", "--processes", "2"]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=PATIENCE)
    assert ended.returncode == 2
    assert "not a model folder" in ended.stderr
    assert "Traceback" not in ended.stderr


def ready(address: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{address}/ready").status_code == 200
    return False


@pytest.mark.slow
def test_no_request_is_dropped_under_load_while_models_are_replaced(
    folder: Path, ranker: CTRRanker, other: CTRRanker
) -> None:
    """Four clients, 300 requests each, one connection each; meanwhile the folder is replaced four times, and once by
    a damaged one."""
    asked = [f"item {i}" for i in range(40)]
    want: dict[str, np.ndarray[Any, Any]] = {}
    done = threading.Event()

    def ask(address: str) -> set[str]:
        seen = set()
        with httpx.Client(base_url=address, timeout=PATIENCE) as client:
            for number in range(300):
                answer = client.post("/rank", json={"history": PAST, "candidates": asked})
                assert answer.status_code == 200, answer.text
                found = answer.json()
                scores = {one["item"]: one["score"] for one in found["ranked"]}
                np.testing.assert_allclose([scores[item] for item in asked], want[found["model"]], atol=1e-6)
                seen.add(found["model"])
                if number > 250 and not done.is_set():  # until the last model is there
                    time.sleep(0.05)
        return seen

    with process(folder, "--workers", "2") as (running, address, lines), ThreadPoolExecutor(4) as pool:
        want[WatchedModel(folder).name] = ranker.scorer_.score_one(PAST, asked)
        clients = [pool.submit(ask, address) for _ in range(4)]
        for number, next_ in enumerate((other, ranker, other, ranker)):
            time.sleep(0.3)
            spare = folder.with_name(f"next-{number}")
            next_.save(spare)
            want[WatchedModel(spare).name] = read_model(spare).score_one(PAST, asked)
            next_.save(folder)
            # the folder's own creation time is in its name
            want[WatchedModel(folder).name] = next_.scorer_.score_one(PAST, asked)
            running.send_signal(signal.SIGHUP)
            wait_for(lambda count=number + 1: sum("now the model" in line for line in lines) >= count)  # type: ignore[misc]
        (folder / "model.safetensors").write_bytes(b"")
        running.send_signal(signal.SIGHUP)
        wait_for(lambda: any("goes on" in line for line in lines))
        done.set()
        seen = set().union(*(one.result() for one in clients))
        health = httpx.get(f"{address}/health", timeout=PATIENCE).json()
        metrics = httpx.get(f"{address}/metrics", timeout=PATIENCE).text
        running.send_signal(signal.SIGTERM)
    assert running.returncode == 0
    assert len(seen) > 1
    assert health["status"] == "stale"
    assert 'ctr_pe_requests_total{status="200"} 1200.0' in metrics
    assert len(re.findall(r"^ctr_pe_requests_total", metrics, re.MULTILINE)) == 1  # no other status
