"""Connections: answers are sent at once, slow clients are cut off, and there are not too many."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from typing import Any

import pytest

from ctr_pe.serving import server
from ctr_pe.serving.server import listen
from ctr_pe.serving.service_options import Connections
from tests.support.http_server import served

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
PUT = b"PUT / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """The body, after as many tenths of a second as it has bytes."""
    import asyncio

    if scope["type"] == "lifespan":
        for done in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{done}.complete"})
        return
    body = b""
    while (message := await receive()).get("more_body"):
        body += message["body"]
    body += message.get("body", b"")
    await asyncio.sleep(len(body) / 10)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def drip(client: socket.socket, text: bytes) -> float:
    """Seconds until the connection is closed, on which a byte is sent now and then."""
    began = time.monotonic()
    with contextlib.suppress(OSError):
        for byte in text:
            client.send(bytes([byte]))
            time.sleep(0.05)
    return time.monotonic() - began


def test_accepted_connections_send_without_delay() -> None:
    listening, _ = listen("127.0.0.1", 0)
    with listening, socket.create_connection(listening.getsockname()), listening.accept()[0] as accepted:
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("before", [b"", GET], ids=["first", "second"])
@pytest.mark.parametrize(
    "head", [b"GET / HTTP/1.1\r\nx: ", b"PUT / HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n"]
)
def test_a_request_that_does_not_arrive_in_time_ends_its_connection(head: bytes, before: bytes) -> None:
    with served(echo, read=0.3, keep=0) as connect, connect() as client:
        if before:
            client.sendall(before)
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
        client.sendall(head)
        assert drip(client, b"x" * 200) < 3


def test_a_request_may_take_longer_than_it_may_take_to_arrive_and_so_may_those_behind_it() -> None:
    with served(echo, read=0.2, keep=0) as connect, connect() as client:
        client.sendall(2 * (PUT + b"long"))
        found = b""
        while found.count(b"long") < 2:
            found += (more := client.recv(1000))
            assert more


def test_a_connection_is_kept_for_later_requests() -> None:
    """Longer than a request may take to arrive."""
    with served(echo, read=0.2, keep=5) as connect, connect() as client:
        for _ in range(2):
            client.sendall(GET)
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
            time.sleep(0.5)
        client.sendall(GET)
        assert client.recv(1000).startswith(b"HTTP/1.1 200")


def test_connections_above_the_limit_are_refused_and_then_there_is_room_again() -> None:
    with served(echo, most=2) as connect:
        with connect() as first, connect() as second:
            for client in (first, second):  # which are open for sure
                client.sendall(GET)
                assert client.recv(1000).startswith(b"HTTP/1.1 200")
            with connect() as third:
                third.sendall(GET)
                answer = third.recv(1000)
                assert answer.startswith(b"HTTP/1.1 503")
                assert b"retry-after: 1" in answer
        time.sleep(0.1)
        with connect() as client:
            client.sendall(GET)
            assert client.recv(1000).startswith(b"HTTP/1.1 200")


@pytest.mark.skipif(sys.platform == "win32", reason="no such limits there")
@pytest.mark.parametrize(
    ("limits", "want"),
    [
        ((1024, 4096), (2304, 4096)),
        ((1024, 2000), (2000, 2000)),
        ((4000, 4096), None),
        ((1024, -1), (2304, -1)),
        ((-1, -1), None),
    ],
)
def test_a_process_may_open_as_many_files_as_its_connections_need(
    limits: tuple[int, int], want: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr("resource.getrlimit", lambda _: limits)
    monkeypatch.setattr("resource.setrlimit", lambda _, both: given.append(both))
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with listen("127.0.0.1", 0)[0] as listening:
        server.run(lambda: echo, listening, Connections(most=2048))
    assert given == ([] if want is None else [want])
