"""Requests that have no place are refused without being parsed: once each, and never one that is another's body."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from types import ModuleType
from typing import Any

import pytest
import uvicorn.protocols.http.auto
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from ctr_pe.serving import server
from ctr_pe.serving.micro_batches import SURE, MicroBatches, Overloaded
from ctr_pe.serving.service import Admission, ServiceMetrics
from ctr_pe.serving.service_options import Connections, Queueing


async def said(scope: Any, receive: Any, send: Any) -> None:
    """The body, as the answer."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.closed, self.paused = b"", False, False

    def write(self, data: Any) -> None:
        assert not self.closed
        self.written += data

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


class Talk:
    """A connection to a server whose application refuses what it is asked about while it is ``full``."""

    def __init__(self, module: ModuleType) -> None:
        self.full, self.wait = True, 0.0
        self.asked: list[tuple[str, Mapping[bytes, bytes]]] = []
        self.done: list[int] = []
        self.connected = 0
        config = module.Config(lambda: said, Connections())
        config.load()
        self.transport = Transport()
        self.protocol = module.LimitedProtocol(
            config, ServerState(), {"refuse": self.refuse, "connected": self.connect}
        )
        self.protocol.connection_made(self.transport)

        def refusal(name: bytes) -> Any:
            answer = b"content-length: 4\r\nx-request-id: %b\r\n\r\nfull" % name
            return module.Refusal(answer, time.monotonic() + self.wait, self.done.append)

        self.refusal: Callable[[bytes], Any] = refusal

    def connect(self) -> None:
        self.connected += 1

    def refuse(self, path: str, fields: Mapping[bytes, bytes], connection: dict[str, Any]) -> Any:
        self.asked.append((path, fields))
        return self.refusal(fields.get(b"x-request-id", b"")) if self.full else None

    async def send(self, *chunks: bytes) -> None:
        for chunk in chunks:
            assert not self.transport.paused
            self.protocol.data_received(chunk)
            for _ in range(5):  # turns of the loop, in which the application answers
                await asyncio.sleep(0)

    def answers(self) -> list[tuple[int, bytes]]:
        """Status and body of each answer there is."""
        found, rest = [], self.transport.written
        while rest:
            head, _, rest = rest.partition(b"\r\n\r\n")
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
            length = int(fields.get(b"content-length", len(rest)))
            found.append((int(head[9:12]), rest[:length]))
            rest = rest[length:]
        return found


def post(body: bytes, *fields: bytes, length: bool = True) -> tuple[bytes, bytes]:
    """Head and body of a request."""
    more = (b"content-length: %d" % len(body),) if length else ()
    return b"\r\n".join([b"POST /rank HTTP/1.1", b"Host: x", *fields, *more, b"", b""]), body


@pytest.fixture(params=["h11", "httptools"])
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The server on each parser."""
    if request.param == "httptools":
        pytest.importorskip("httptools", reason="httptools is not installed")
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as parser
    else:
        parser = H11Protocol  # type: ignore[assignment, misc]
    monkeypatch.setattr(uvicorn.protocols.http.auto, "AutoHTTPProtocol", parser)
    spec = importlib.util.spec_from_file_location("server_on_another_parser", server.__file__)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    assert issubclass(found.LimitedProtocol, parser)
    return found


def talk(module: ModuleType, script: Callable[[Talk], Awaitable[None]]) -> None:
    async def main() -> None:
        talk = Talk(module)
        await script(talk)
        talk.protocol.connection_lost(None)

    asyncio.run(main())


def cut(head: bytes, body: bytes, after: int, size: int) -> list[bytes]:
    """A request in chunks: the head with ``after`` bytes of the body, then ``size`` of it each."""
    rest = body[after:]
    return [head + body[:after], *(rest[at : at + size] for at in range(0, len(rest), size))]


@pytest.mark.parametrize(("after", "size"), [(40, 1), (0, 40), (0, 1), (7, 6)])
def test_after_a_refused_request_however_its_body_comes_the_next_one_is_read(
    module: ModuleType, after: int, size: int
) -> None:
    body = b"POST /rank HTTP/1.1\r\nhost: inside\r\n\r\n...."  # which looks like a request

    async def script(talk: Talk) -> None:
        for number in range(3):
            talk.full = True
            await talk.send(*cut(*post(body, b"X-Request-Id: Mine%d" % number), after, size))
            talk.full = False
            await talk.send(*cut(*post(b"good" * 10), after, size))
        assert talk.answers() == [(503, b"full"), (200, b"good" * 10)] * 3
        assert [path for path, _ in talk.asked] == ["/rank"] * 6
        assert talk.transport.written.count(b"x-request-id: Mine1\r\n") == 1
        assert talk.done == [503] * 3
        assert talk.protocol.server_state.total_requests == 6

    talk(module, script)


def test_the_end_of_a_body_and_the_next_request_may_come_as_one(module: ModuleType) -> None:
    async def script(talk: Talk) -> None:
        head, body = post(b"first")
        await talk.send(head + body[:2], body[2:] + b"".join(post(b"second")))
        talk.full = False
        await talk.send(b"".join(post(b"third")))
        assert talk.answers() == [(503, b"full"), (503, b"full"), (200, b"third")]

    talk(module, script)


def test_requests_that_do_not_wait_for_answers_are_all_read_by_the_application(module: ModuleType) -> None:
    async def script(talk: Talk) -> None:
        await talk.send(b"".join([*post(b"one"), *post(b"two")]))
        await talk.send(b"".join(post(b"three")))
        assert talk.answers() == [(200, b"one"), (200, b"two"), (200, b"three")]
        assert talk.asked == []

    talk(module, script)


def test_a_request_behind_one_that_is_not_answered_yet_is_read_by_the_application(module: ModuleType) -> None:
    async def script(talk: Talk) -> None:
        talk.full = False
        talk.protocol.data_received(b"".join(post(b"one")))
        talk.full = True
        await talk.send(b"".join(post(b"two")))
        assert talk.answers() == [(200, b"one"), (200, b"two")]
        assert len(talk.asked) == 1

    talk(module, script)


@pytest.mark.parametrize(
    "chunks",
    [
        [b"".join(post(b"four", b"Content-Length: 4"))],
        [b"".join(post(b"four", b"content-length: 5"))],
        [b"".join(post(b"4\r\nfour\r\n0\r\n\r\n", b"Transfer-Encoding: chunked", length=False))],
        [b"".join(post(b"four", b"Transfer-Encoding: identity"))],
        [b"".join(post(b"four", b"Expect: 100-continue"))],
        [b"".join(post(b"four", b"Connection: upgrade", b"Upgrade: websocket"))],
        [b"".join(post(b"four", b"Connection: close"))],
        [b"".join(post(b"four", b"Connection: keep-alive", b"Connection: close"))],
        [b"".join(post(b"four")).replace(b"HTTP/1.1", b"HTTP/1.0")],
        [b"".join(post(b"four")).replace(b"length: 4", b"length: +4")],
        [b"".join(post(b"four")).replace(b"length:", b"length :")],
        [b"".join(post(b"four", b"X: folded", b" Content-Length: 0"))],
        [b"".join(post(b"four", b"X: a\nContent-Length: 0"))],
        [b"".join(post(b"four", b"X: a\rContent-Length: 0"))],
        [b"".join(post(b"four")).replace(b"\r\n", b"\n")],
        [b"\r\n" + b"".join(post(b"four"))],
        [bytes([one]) for one in b"".join(post(b"four"))],
        [b"CONNECT /rank HTTP/1.1\r\nhost: x\r\n\r\n"],
    ],
    ids=str,
)
def test_what_is_unusual_is_left_to_the_parser(module: ModuleType, chunks: list[bytes]) -> None:
    async def script(talk: Talk) -> None:
        for chunk in chunks:
            if not talk.transport.closed:
                await talk.send(chunk)
        if not talk.transport.closed:
            await talk.send(b"".join(post(b"later")))
        assert talk.asked == []

    talk(module, script)


@pytest.mark.parametrize("before", [b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n", post(b"", length=False)[0]])
def test_after_a_request_without_a_body_the_next_one_may_be_refused(module: ModuleType, before: bytes) -> None:
    async def script(talk: Talk) -> None:
        talk.full = b"GET" in before
        await talk.send(before)
        talk.full = True
        await talk.send(b"".join(post(b"more", b"Connection: Keep-Alive")))
        assert talk.answers() == [(200, b""), (503, b"full")]

    talk(module, script)


def test_an_answer_that_waits_comes_in_its_turn(module: ModuleType) -> None:
    async def script(talk: Talk) -> None:
        talk.wait = 0.05
        head, body = post(b"refused")
        await talk.send(head, body)
        assert talk.answers() == []
        talk.protocol._expire()  # of the time for a request to arrive
        talk.full = False
        await talk.send(b"".join(post(b"behind")))
        assert talk.transport.paused
        await asyncio.sleep(0.1)
        assert talk.answers() == [(503, b"full"), (200, b"behind")]
        assert not talk.transport.paused
        assert not talk.transport.closed
        assert talk.done == [503]

    talk(module, script)


def test_a_server_that_stops_answers_at_once_what_waits(module: ModuleType) -> None:
    async def script(talk: Talk) -> None:
        talk.wait = 60
        await talk.send(b"".join(post(b"refused")))
        talk.protocol.shutdown()
        assert talk.answers() == [(503, b"full")]
        assert talk.transport.closed

    talk(module, script)


def test_a_client_that_leaves_before_it_is_answered_is_counted_once(module: ModuleType) -> None:
    async def script(talk: Talk) -> None:
        talk.wait = 0.01
        await talk.send(b"".join(post(b"refused")))
        talk.protocol.connection_lost(None)
        await asyncio.sleep(0.05)
        assert talk.done == [499]
        assert talk.answers() == []

    talk(module, script)


def test_refusals_that_are_due_together_are_each_answered_once(module: ModuleType) -> None:
    """Also where one of their clients has gone, and where another refusal is due later."""

    async def main() -> None:
        talks = [Talk(module) for _ in range(4)]
        first, due = talks[0], time.monotonic() + 0.05
        for number, one in enumerate(talks):
            one.protocol.config = first.protocol.config  # of one server
            answer = module.Refusal(b"content-length: 4\r\n\r\nfull", due + 60 * (number == 3), one.done.append)
            one.refusal = {b"": answer}.__getitem__
            await one.send(b"".join(post(b"refused")))
        assert {at: len(held) for at, held in first.protocol.config.held.items()} == {due: 3, due + 60: 1}
        talks[1].protocol.connection_lost(None)
        await asyncio.sleep(0.1)
        assert [one.done for one in talks] == [[503], [499], [503], []]
        assert [one.answers() for one in talks] == [[(503, b"full")], [], [(503, b"full")], []]
        assert list(first.protocol.config.held) == [due + 60]

    asyncio.run(main())


def test_the_application_is_told_of_a_connection_once(module: ModuleType) -> None:
    async def script(talk: Talk) -> None:
        await talk.send(b"".join(post(b"refused")), b"".join(post(b"refused")))
        assert talk.connected == 1

    talk(module, script)


def test_an_idle_connection_is_closed_after_a_refusal_too(module: ModuleType) -> None:
    async def script(talk: Talk) -> None:
        await talk.send(b"".join(post(b"refused")))
        assert talk.protocol.timeout_keep_alive_task is not None
        talk.protocol.timeout_keep_alive_handler()
        assert talk.transport.closed

    talk(module, script)


def test_a_refusal_is_counted_logged_and_answered_after_a_second_if_it_is_asked_for_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Batches:
        full = True
        expected = rests = 0

        def rest(self) -> None:
            self.rests += 1

        def problem(self, wait: float | None, sure: float) -> str | None:
            assert sure == SURE
            return "no place" if self.full or wait == 0.02 else None

        def expect(self) -> None:
            self.expected += 1

    class Watcher:
        class model:
            name = "m1"

    metrics, batches, connection = ServiceMetrics(), Batches(), dict[str, Any]()
    admission = Admission(Watcher(), batches, metrics)  # type: ignore[arg-type]
    assert admission.refusal("/live", {}, connection) is None
    with caplog.at_level(logging.INFO, "ctr_pe.service.requests"):
        first = admission.refusal("/rank", {b"x-request-id": b"mine.7"}, connection)
        assert first is not None
        assert first.due <= time.monotonic()
        head, _, body = first.answer.partition(b"\r\n\r\n")
        assert body == b'{"detail": "no place"}'
        assert set(head.split(b"\r\n")) == {
            b"retry-after: 1", b"content-length: 22", b"content-type: application/json", b"x-request-id: mine.7",
            b"x-model: m1",
        }  # fmt: skip
        first.done(503)
    assert caplog.records[-1].facts["status"] == 503  # type: ignore[attr-defined]
    again = admission.refusal("/recommend", {b"x-request-id": b"no word"}, connection)
    assert again is not None
    assert again.due - time.monotonic() == pytest.approx(1, abs=0.1)
    assert batches.rests == 2
    assert b"no word" not in again.answer
    again.done(499)
    text = metrics.text()
    assert b'ctr_pe_requests_total{status="503"} 1.0' in text
    assert b'ctr_pe_requests_total{status="499"} 1.0' in text
    batches.full = False
    assert admission.refusal("/rank", {b"x-wait-ms": b"20"}, connection) is not None
    for wait in (b"", b"30", b"soon"):
        assert admission.refusal("/rank", {b"x-wait-ms": wait}, connection) is None
    assert batches.expected == 3


def test_requests_that_come_in_one_turn_of_the_loop_do_not_share_a_place() -> None:
    async def main() -> list[bool]:
        batches = MicroBatches(lambda model, requests: requests, None, 1, Queueing(waiting=2))  # type: ignore[arg-type]
        found = []
        for _ in range(4):
            try:
                batches.check()
            except Overloaded:
                found.append(False)
            else:
                found.append(True)
                batches.expect()
        await asyncio.sleep(0)
        batches.check()
        return found

    assert asyncio.run(main()) == [True, True, False, False]


def test_random_requests_in_random_chunks_are_answered_once_each_in_order(module: ModuleType) -> None:
    import random

    draw = random.Random(0)

    async def script(talk: Talk) -> None:
        want = []
        for number in itertools.count():
            if number == 60:
                break
            head, body = post(b"%d" % number * draw.randrange(1, 30))
            talk.full, talk.wait = draw.random() < 0.5, draw.choice([0, 0, 0.001])
            await talk.send(*cut(head, body, draw.randrange(len(body) + 1), draw.randrange(1, 9)))
            want.append((503, b"full") if talk.full else (200, body))
            while len(talk.answers()) < len(want):
                await asyncio.sleep(0.001)
        assert talk.answers() == want

    talk(module, script)
