"""The HTTP server: uvicorn with limits on connections and on slow clients, in one process or several."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from ctr_pe.serving.service_options import Connections
from ctr_pe.utils.errors import UserError

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as HTTPProtocol
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as HTTPProtocol  # httptools, where it is installed

log = logging.getLogger("ctr_pe.service")
LINGER = 1.0  # seconds for the answer to a refused connection to arrive
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Config(uvicorn.Config):
    """uvicorn's, with ``limits`` on connections. ``make`` gives the application, in the process that serves it."""

    def __init__(self, make: Callable[[], Any], limits: Connections, processes: int = 1) -> None:
        super().__init__(
            make, factory=True, http=LimitedProtocol, workers=processes, lifespan="on", log_config=None,
            ws="none", log_level="warning", access_log=False, timeout_keep_alive=int(limits.keep),
            timeout_graceful_shutdown=limits.finish, timeout_worker_healthcheck=20,
        )  # fmt: skip
        self.limits = limits


class LimitedProtocol(HTTPProtocol):
    """Refuses a connection above the limit (503), and ends one on which no whole request has come in time: ``read``
    seconds after it was opened, or after its last answer and the time that it is kept."""

    config: Config
    _patience: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        limits = self.config.limits
        if len(self.connections) >= limits.most:
            self._refused = True
            transport.write(BUSY)
            transport.write_eof()  # closed later, because closing with bytes unread would lose the answer
            self.loop.call_later(LINGER, transport.abort)
            return
        self.app_state = {**self.app_state, "connection": {}}  # what the application keeps of a connection
        super().connection_made(transport)
        self._wait(limits.read)

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
        if not self._refused:
            super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._wait(self.config.limits.keep + self.config.limits.read)
        super().on_response_complete()

    def _wait(self, seconds: float) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._patience = self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        being_answered = self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete
        if not being_answered:
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
    if processes == 1:
        signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again when it has finished
        uvicorn.Server(config).run(sockets=[listening])
        return
    started = Processes(config, [listening])
    started.run()
    if any(process.exitcode == STARTUP_FAILURE for process in started.processes):
        raise UserError("a process could not start")


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
