"""Load on ``ctr-pe serve``: capacity, what is left of it when twice as much is asked, and what slow clients may hold.

    python -m benchmark.service_load --model DIR --cores 0,1 [--seconds 20] [--candidates 20] [-- --max-wait 50 …]

The service runs on the first core, the client, this process, on the second. Connections are kept. Stages:

- unloaded: one connection, one request after the other;
- capacity: 64 connections, each with one request after the other;
- overload: requests at twice that rate, each at its time whatever became of the others, on 256 connections;
- retries: 400 connections, of which each asks again at once, whatever the answer was;
- drips: 100 connections that send a byte a second, while one asks as usual.

Useful are answers with status 200, scores for exactly the candidates that were asked for, and the request's own
``x-request-id``; a second answer to a request, or none, is counted. ``--seconds`` holds for each stage without its own
(``--stages capacity:60,overload:300,capacity:60``).

``--against PATH`` has the service of another checkout do each stage, too, in turn: a machine's speed drifts, so two
versions can be compared no other way. The line at the end is of all windows: ``--stages capacity:5,overload:8,…``.

``--spin`` keeps the client's core busy in all stages. Where the two cores are threads of one, that of the service is
faster while the client waits, which is longer at capacity than at twice that: their ratio would tell of the processor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ctr_pe.serving.model_folder import read_model
from ctr_pe.utils.files import replacing

LEAD = 3.0  # seconds of overload before it is measured, in which connections are opened
LATEST = 15.0  # seconds after the end of a stage: what has no answer then is lost


@dataclass
class Outcome:
    """Statuses of answers; milliseconds of useful ones; requests that were lost, answered wrongly."""

    statuses: Counter[int] = field(default_factory=Counter)
    ms: list[float] = field(default_factory=list)
    sent: int = 0
    lost: int = 0
    wrong: int = 0
    seconds: float = 0.0

    def facts(self) -> dict[str, Any]:
        found = {
            "useful_per_s": len(self.ms) / self.seconds,
            "seconds": self.seconds,
            "sent": self.sent,
            "lost": self.lost,
            "wrong": self.wrong,
        }
        p50, p99 = np.percentile(self.ms, [50, 99]).tolist() if self.ms else (None, None)
        return found | {"statuses": dict(self.statuses), "p50_ms": p50, "p99_ms": p99}


class Connection(asyncio.Protocol):
    """One kept connection: answers come in the order of requests, one at a time."""

    def __init__(self) -> None:
        self.buffer = b""
        self.transport: asyncio.WriteTransport | None = None
        self.answer: asyncio.Future[tuple[int, bytes, bytes]] | None = None
        self.refused: tuple[int, bytes, bytes] | None = None  # the connection itself, before a request

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, end, rest = self.buffer.partition(b"\r\n\r\n")
        if not end:
            return
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = int(fields[b"content-length"])
        if len(rest) < length:
            return
        self.buffer = rest[length:]
        name, status = fields.get(b"x-request-id", b""), int(head.split(b" ", 2)[1])
        if fields.get(b"connection") == b"close":
            self.transport = None
        if self.answer is None and status == 503:
            self.refused = status, name, rest[:length]
        elif self.answer is None or self.answer.done():
            raise RuntimeError("an answer to no request, or after it was given up")
        else:
            self.answer.set_result((status, name, rest[:length]))

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(ConnectionError())

    async def ask(self, request: bytes) -> tuple[int, bytes, bytes]:
        if self.refused is not None:
            return self.refused
        if self.transport is None:
            raise ConnectionError
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self.answer


class Client:
    """Asks the service of ``port``: a pool of connections and the requests in turn."""

    def __init__(self, port: int, bodies: Sequence[tuple[bytes, set[Any]]]) -> None:
        self.port, self.bodies, self.number = port, bodies, 0
        self.opened: list[Connection] = []

    async def connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        self.opened.append((await loop.create_connection(Connection, "127.0.0.1", self.port))[1])
        return self.opened[-1]

    def close(self) -> None:
        """End all connections: those that a stage leaves open would count against the next one's."""
        for connection in self.opened:
            if connection.transport is not None:
                connection.transport.abort()
        self.opened.clear()

    async def ask(self, connection: Connection | None, outcome: Outcome, since: float) -> Connection | None:
        """One request; the connection, or None if it is closed. Milliseconds count from ``since``."""
        self.number += 1
        outcome.sent += 1
        name = b"r%d" % self.number
        body, candidates = self.bodies[self.number % len(self.bodies)]
        head = b"POST /rank HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nx-request-id: %b\r\n" % name
        try:
            if connection is None or connection.transport is None:
                connection = await self.connect()
            sent = b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)
            async with asyncio.timeout(LATEST):
                status, echo, content = await connection.ask(sent)
        except (OSError, TimeoutError):
            outcome.lost += 1
            return None
        outcome.statuses[status] += 1
        if status == 200:
            outcome.ms.append(1000 * (time.perf_counter() - since))
            same = {one["item"] for one in json.loads(content)["ranked"]} == candidates
            outcome.wrong += not same or echo not in (name, b"")  # services without ids of requests give none
        return connection

    async def closed(self, connections: int, seconds: float) -> Outcome:
        """Each connection asks as soon as it has an answer."""
        outcome, end = Outcome(), time.perf_counter() + seconds

        async def one() -> None:
            connection: Connection | None = None
            while time.perf_counter() < end:
                connection = await self.ask(connection, outcome, time.perf_counter())
                await asyncio.sleep(0)

        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(connections)))
        outcome.seconds = time.perf_counter() - began
        return outcome

    async def open(self, rate: float, connections: int, seconds: float) -> Outcome:
        """``rate`` requests per second at random times. Milliseconds count from the time that a request was due."""
        outcome, draw = Outcome(), np.random.default_rng(0)
        free: deque[Connection | None] = deque([None] * connections)
        began = due = time.perf_counter()
        running: set[asyncio.Task[None]] = set()

        async def one(due: float) -> None:
            connection = free.popleft() if free else None
            free.append(await self.ask(connection, outcome, due))

        while due < began + seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            running.add(task := asyncio.create_task(one(due)))
            task.add_done_callback(running.discard)
            due += draw.exponential(1 / rate)
        outcome.seconds = time.perf_counter() - began
        await asyncio.gather(*running)
        return outcome

    async def drips(self, connections: int, seconds: float) -> dict[str, Any]:
        """How many connections that send a byte a second are open at the end, and how another one fares."""

        async def drip() -> bool:
            connection = await self.connect()
            end = time.perf_counter() + seconds
            for byte in b"POST /rank HTTP/1.1\r\ncontent-type: " + b"x" * 10**4:
                if connection.transport is None or time.perf_counter() > end:
                    break
                connection.transport.write(bytes([byte]))
                await asyncio.sleep(1)
            return connection.transport is not None

        dripping = asyncio.gather(*(drip() for _ in range(connections)))
        beside = await self.closed(1, seconds)
        return {"open_at_the_end": sum(await dripping), "of": connections, "beside": beside.facts()}


def bodies(model: Path, candidates: int, history: int = 100, count: int = 200) -> list[tuple[bytes, set[Any]]]:
    """Random requests of the model's catalogue, and the candidates of each."""
    catalogue = read_model(model).encoder.catalogue
    assert catalogue is not None
    ids = catalogue.sorted
    found = []
    for number in range(count):
        wanted = ids.sample(candidates, seed=2 * number).to_list()
        request = {"history": ids.sample(history, seed=2 * number + 1).to_list(), "candidates": wanted}
        found.append((json.dumps(request).encode(), set(wanted)))
    return found


def cpu(pid: int) -> float:
    """Seconds that the process has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(pid: int) -> float:
    """MB that the process has for itself."""
    return float(re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1000  # type: ignore[index]


class Service:
    """A running service: its process, a client, and its capacity, useful answers a second, when that was measured."""

    def __init__(self, name: str, process: subprocess.Popen[str], bodies: Sequence[tuple[bytes, set[Any]]]) -> None:
        assert process.stderr is not None
        address = next(match for line in process.stderr if (match := re.search(r"http://\S+:(\d+)", line)))
        self.name, self.pid, self.client, self.capacity = name, process.pid, Client(int(address[1]), bodies), 0.0

    async def stage(self, name: str, seconds: float) -> dict[str, Any]:
        client = self.client
        if name == "overload":  # which opens connections first
            await client.open(2 * self.capacity, 256, LEAD)
        before, computed = memory(self.pid), cpu(self.pid)
        if name == "unloaded":
            facts = (await client.closed(1, seconds)).facts()
        elif name == "capacity":
            facts = (await client.closed(64, seconds)).facts()
            self.capacity = facts["useful_per_s"]
        elif name == "overload":
            facts = (await client.open(2 * self.capacity, 256, seconds)).facts()
            facts["share_of_capacity"] = facts["useful_per_s"] / self.capacity
        elif name == "retries":
            facts = (await client.closed(400, seconds)).facts()
        else:
            facts = await client.drips(100, seconds)
        computed = cpu(self.pid) - computed
        if facts.get("useful_per_s"):
            facts["useful_per_cpu_s"] = facts["useful_per_s"] * facts["seconds"] / computed
        client.close()
        return {"stage": name, "service": self.name} | facts | {"memory_mb": [round(before), round(memory(self.pid))]}


async def run(services: Sequence[Service], stages: Sequence[tuple[str, float]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for service in services:
        await service.client.closed(8, 3)  # what is made at first use
        service.client.close()
    for name, seconds in stages:
        for service in services:
            found.append(await service.stage(name, seconds))
            print(json.dumps(found[-1]), flush=True)
            await asyncio.sleep(1)
    return found


def shares(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of each service the mean useful answers a second at capacity and at twice that, and their ratio, in a line."""
    lines = []
    for name in dict.fromkeys(one["service"] for one in found):
        of = {
            stage: [one["useful_per_s"] for one in found if (one["service"], one["stage"]) == (name, stage)]
            for stage in ("capacity", "overload")
        }
        if all(of.values()):
            capacity, overload = (statistics.fmean(of[stage]) for stage in ("capacity", "overload"))
            lines.append(f"{name}: {overload:.0f} a second of {capacity:.0f}: {overload / capacity:.2f}")
    return lines


STAGES = ("unloaded", "capacity", "overload", "retries", "drips")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--cores", default="0,1", help="of the service and of the client")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--candidates", type=int, default=20)
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--spin", action="store_true", help="keep the client's core busy in all stages")
    parser.add_argument("--python", default=sys.executable, help="of the service: another environment's")
    parser.add_argument("--path", help="PYTHONPATH of the service: another checkout")
    parser.add_argument("--against", help="PYTHONPATH of a service to compare with, in turn")
    parser.add_argument("--json", type=Path)
    parser.add_argument("options", nargs="*", help="of ctr-pe serve")
    args = parser.parse_args(argv)
    of_service, of_client = args.cores.split(",")
    given = bodies(args.model, args.candidates)
    stages = [
        (name, float(own or args.seconds)) for name, _, own in (one.partition(":") for one in args.stages.split(","))
    ]
    if unknown := {name for name, _ in stages} - set(STAGES):
        parser.error(f"--stages: {sorted(unknown)[0]} is none of {', '.join(STAGES)}")
    names = [name for name, _ in stages]
    if "overload" in names and "capacity" not in names[: names.index("overload")]:
        parser.error("--stages: overload is twice the capacity, which is measured before it: capacity,overload")
    os.sched_setaffinity(0, {int(of_client)})
    with ExitStack() as stack:
        if args.spin:
            spin = [sys.executable, "-c", "import os\nos.nice(19)\nwhile True: pass"]
            stack.callback(subprocess.Popen(spin).kill)
        services = []
        for name, path in (("service", args.path), ("against", args.against)):
            if name == "against" and path is None:
                continue
            command = ["taskset", "-c", of_service.replace("+", ","), args.python, "-m", "ctr_pe.cli", "serve"]
            running = subprocess.Popen(
                [*command, "--model", str(args.model), "--port", "0", *args.options],
                stderr=subprocess.PIPE, text=True, env=os.environ | ({"PYTHONPATH": path} if path else {}),
                cwd=path and path.split(":")[0],
            )  # fmt: skip
            stack.callback(running.wait)
            stack.callback(running.terminate)
            services.append(Service(name, running, given))
        results = asyncio.run(run(services, stages))
    print("\n".join(shares(results)))
    if args.json:
        with replacing(args.json) as file:
            file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
