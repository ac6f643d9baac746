"""A server with the limits of ``ctr-pe serve``, in a thread."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn

from ctr_pe.serving.server import Config, listen
from ctr_pe.serving.service_options import Connections
from tests.support.processes import PATIENCE


@contextlib.contextmanager
def served(app: Any, **limits: Any) -> Iterator[partial[socket.socket]]:
    """A server of ``app``: a function that connects."""
    listening, _ = listen("127.0.0.1", 0)
    server = uvicorn.Server(Config(lambda: app, Connections(**limits)))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield partial(socket.create_connection, listening.getsockname(), timeout=PATIENCE)
    finally:
        server.should_exit = True
        thread.join()
