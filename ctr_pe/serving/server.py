"""The HTTP server: uvicorn with limits on connections and on slow clients, in one process or several.

An application that yields ``{"refuse": function}`` from its lifespan is asked about each request, from its head alone,
before anything is parsed (:class:`Refusal`): under overload a refusal must cost a small part of a useful answer. One
that yields ``{"connected": function}``, too, is told of each connection that is accepted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import uvicorn
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from ctr_pe.serving.service_options import Connections
from ctr_pe.utils.errors import UserError

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as HTTPProtocol
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as HTTPProtocol  # httptools, where it is installed

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

log = logging.getLogger("ctr_pe.service")
FILES = 256  # that a process has open besides its connections, at most
LINGER = 1.0  # seconds for the answer to a refused connection to arrive
UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\n"
BUSY = UNAVAILABLE + b"retry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
HEAD = re.compile(
    rb"(GET|POST) (/[!-~]*) HTTP/1\.1\r\n((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\x00-\x08\x0a-\x1f\x7f]*\r\n)*)\r\n"
)
FRAMING = {b"content-length", b"connection", b"transfer-encoding", b"expect", b"upgrade"}
"""Fields that say where a request ends and what follows."""


class Refusal(NamedTuple):
    """503 for a request that is not read. ``answer``: its fields and body as they are sent; ``due``: when, of
    ``time.monotonic()``, at once if that is over, and all with the same ``due`` in one turn of the loop; ``done`` is
    called with the status in the end: 503, or 499 where the client has gone."""

    answer: bytes
    due: float
    done: Callable[[int], object]


Refuse = Callable[[str, Mapping[bytes, bytes], dict[str, Any]], Refusal | None]
"""From the path and the fields of a POST, names in lower case, and what is kept of its connection."""


class Head(NamedTuple):
    """Of a request as nearly all are: where it ends is beyond doubt. ``size``: bytes up to the body, which has
    ``length``."""

    method: bytes
    path: str
    fields: Mapping[bytes, bytes]
    size: int
    length: int

    @classmethod
    def of(cls, data: bytes) -> Head | None:
        """The head that ``data`` begins with; None if it is unusual or not complete."""
        found = HEAD.match(data)
        if found is None:
            return None
        fields: dict[bytes, bytes] = {}
        for line in found[3].split(b"\r\n")[:-1]:
            name, _, value = line.partition(b":")
            name = name.lower()
            if name in fields and name in FRAMING:
                return None
            fields.setdefault(name, value.strip(b" \t"))
        length = fields.get(b"content-length", b"0")
        usual = length.isdigit() and len(length) < 10 and fields.get(b"connection", b"").lower() in (b"", b"keep-alive")
        if not usual or b"transfer-encoding" in fields or b"expect" in fields or b"upgrade" in fields:
            return None
        return cls(found[1], found[2].partition(b"?")[0].decode(), fields, found.end(), int(length))


class Config(uvicorn.Config):
    """uvicorn's, with ``limits`` on connections. ``make`` gives the application, in the process that serves it."""

    def __init__(self, make: Callable[[], Any], limits: Connections, processes: int = 1) -> None:
        super().__init__(
            make, factory=True, http=LimitedProtocol, workers=processes, lifespan="on", log_config=None,
            ws="none", log_level="warning", access_log=False, timeout_keep_alive=int(limits.keep),
            timeout_graceful_shutdown=limits.finish, timeout_worker_healthcheck=20,
        )  # fmt: skip
        self.limits = limits
        self.held: dict[float, list[LimitedProtocol]] = {}  # whose refusals wait, by when they are due


class LimitedProtocol(HTTPProtocol):
    """Refuses a connection above the limit (503), and ends one on which no whole request has come in time: ``read``
    seconds after it was opened, or after its last answer and the time that it is kept.

    Refuses a request that the application has no place for without parsing it, and skips its body. For that it counts
    the bytes of each request. Where it cannot say for sure that one begins, because a head is unusual or in parts, or
    requests do not wait for answers, the application reads and refuses all later ones of the connection itself."""

    config: Config
    _patience: asyncio.TimerHandle | None = None
    _until = 0.0  # of the loop's time: when patience ends
    _closed_at_once = False
    _left: int | None = 0  # bytes of the present request that are still to come, if that is known
    _refusal: Refusal | None = None  # of the present request
    _held = False  # until it is answered
    _behind = b""  # came before that

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        limits = self.config.limits
        self.app_state.get("connected", lambda: None)()
        if len(self.connections) >= limits.most:
            self._closed_at_once = True
            transport.write(BUSY)
            transport.write_eof()  # closed later, because closing with bytes unread would lose the answer
            self.loop.call_later(LINGER, transport.abort)
            return
        self.app_state = {**self.app_state, "connection": {}}  # what the application keeps of a connection
        super().connection_made(transport)
        self._wait(limits.read)

    def data_received(self, data: bytes) -> None:
        if self._closed_at_once:
            return
        if self._refusal is not None:
            data = self._skipped(data)
        if data and not self._refuses(data):
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
        if self._held and self._refusal is not None:
            self._held = False
            self._refusal.done(499)
        if not self._closed_at_once:
            super().connection_lost(exc)

    def shutdown(self) -> None:
        if self._held:
            self._answer()
        super().shutdown()

    def on_response_complete(self) -> None:
        self._wait(self.config.limits.keep + self.config.limits.read)
        super().on_response_complete()

    def _refuses(self, data: bytes) -> bool:
        """Whether a request begins with ``data`` that the application refuses, which is answered now or later."""
        left, self._left = self._left, None
        if left is None:
            return False
        if left:  # the body of a request that the application reads
            self._left = left - len(data) if len(data) <= left else None
            return False
        answered = self.cycle is None or self.cycle.response_complete
        if not answered or self.flow.write_paused or self.transport.is_closing():
            return False
        head = Head.of(data)
        if head is None or head.size + head.length < len(data):
            return False
        self._left = head.size + head.length - len(data)
        refuse: Refuse | None = self.app_state.get("refuse")
        if refuse is None or head.method != b"POST":
            return False
        self._refusal = refuse(head.path, head.fields, self.app_state["connection"])
        if self._refusal is None:
            return False
        self._unset_keepalive_if_required()
        if (wait := self._refusal.due - time.monotonic()) > 0:
            self._hold(self._refusal.due, wait)
        else:
            self._answer()
        return True

    def _hold(self, due: float, wait: float) -> None:
        """Answer when it is due. A timer of its own would be a fifth of what a refusal takes."""
        self._held = True
        together = self.config.held.get(due)
        if together is None:
            together = self.config.held[due] = []
            self.loop.call_later(wait, self._answer_all, due)
        together.append(self)

    def _answer_all(self, due: float) -> None:
        for protocol in self.config.held.pop(due):
            if protocol._held:
                protocol._answer()

    def _skipped(self, data: bytes) -> bytes:
        """What follows on the body of the refused request, if that is answered; it is kept until then."""
        self._unset_keepalive_if_required()
        assert self._left is not None
        rest, self._left = data[self._left :], max(0, self._left - len(data))
        if self._held:
            if rest:
                self._behind += rest
                self.flow.pause_reading()
            return b""
        if not self._left:
            self._refusal = None
        return rest

    def _answer(self) -> None:
        refusal, self._held = self._refusal, False
        assert refusal is not None
        if not self._left:
            self._refusal = None
        defaults = b"".join([b"%b: %b\r\n" % field for field in self.server_state.default_headers])
        self.transport.write(UNAVAILABLE + defaults + refusal.answer)
        refusal.done(503)
        self.on_response_complete()
        behind, self._behind = self._behind, b""
        if behind:
            self.data_received(behind)

    def _wait(self, seconds: float) -> None:
        """Not less than before: the timer is not set anew for each request."""
        self._until = self.loop.time() + seconds
        if self._patience is None:
            self._patience = self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        self._patience = None
        if (rest := self._until - self.loop.time()) > 0:
            self._wait(rest)
            return
        read = self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete
        if not read and not self._held:
            self.transport.abort()


class Processes(Multiprocess):
    """uvicorn's, which here has its processes load the model folder again at SIGHUP, instead of starting others."""

    def handle_hup(self) -> None:
        for process in self.processes:
            if process.pid is not None:
                os.kill(process.pid, signal.SIGHUP)


def run(make: Callable[[], Any], listening: socket.socket, limits: Connections, processes: int = 1) -> None:
    """Serve what ``make`` gives, a function that can be pickled where there are several processes, until SIGTERM or
    Ctrl-C; open requests are finished.

    Raises:
        UserError: a process could not start, as its log says.
    """
    config = Config(make, limits, processes)
    _allow_files(limits.most + FILES)
    if processes == 1:
        signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again when it has finished
        uvicorn.Server(config).run(sockets=[listening])
        return
    started = Processes(config, [listening])
    started.run()
    if any(process.exitcode == STARTUP_FAILURE for process in started.processes):
        raise UserError("a process could not start")


def _allow_files(wanted: int) -> None:
    """For this process and those that it starts, which often may open 1,024; as many as the system allows."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def listen(host: str, port: int) -> tuple[socket.socket, str]:
    """A listening socket and its address as a URL.

    Raises:
        UserError: an address that cannot be used.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        number = getattr(error, "errno", None) or 0
        raise UserError(f"{host}:{port}: {os.strerror(number).lower() if number > 0 else error}") from None
    # Connections inherit it; without it an answer in two parts waits for the client's delayed acknowledgement.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    shown = f"[{host}]" if family == socket.AF_INET6 else host
    return listening, f"http://{shown}:{listening.getsockname()[1]}"
