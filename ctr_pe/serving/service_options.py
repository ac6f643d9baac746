"""What bounds a service."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """``history``, ``candidates``: items of a request; ``body``: bytes."""

    history: int = 1000
    candidates: int = 5000
    body: int = 2**20


@dataclass(frozen=True)
class Queueing:
    """``batch``: requests that are scored together at most, and ``candidates`` of all of them, but one request at
    least; ``window``: seconds that a batch waits for more requests while a thread is free; ``waiting``: requests that
    are scored or wait for it; ``wait``: seconds that a request may wait for its turn."""

    batch: int = 32
    candidates: int = 4096
    window: float = 0.0
    waiting: int = 256
    wait: float = 0.25


@dataclass(frozen=True)
class Connections:
    """Of a process: ``most`` that are open; seconds: ``read`` for a whole request to arrive, ``keep`` that a connection
    is kept between requests, ``finish`` for open requests after SIGTERM."""

    most: int = 2048
    read: float = 10.0
    keep: float = 5.0
    finish: int = 60


@dataclass(frozen=True)
class ServiceOptions:
    """``limits`` of a request; ``queueing`` of requests; ``connections``; ``poll``: seconds between looks at the model
    folder; ``workers``: batches scored at once; ``threads``: torch's, of each; ``gpu``: -1 for the CPU."""

    limits: Limits = Limits()
    queueing: Queueing = Queueing()
    connections: Connections = Connections()
    poll: float = 2.0
    workers: int = 1
    threads: int = 1
    gpu: int = -1
