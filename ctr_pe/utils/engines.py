"""Clusters that do work in parts: Ray and Spark.

A function is called elsewhere for each part, and again, for that part alone, where a worker or its machine has died. So
a part may be made twice: a function that writes does it by atomic replacement, into a folder that all machines see.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeVar

from ctr_pe.utils import plugins
from ctr_pe.utils.allocator import keep_memory
from ctr_pe.utils.errors import UserError, counted, nearest, option, reason

RETRIES = 3
"""How often a cluster begins work again whose worker or machine has died."""
AHEAD = 1000  # parts that Ray knows of at once
PIECE = tuple[int, bytes]
T = TypeVar("T")
R = TypeVar("R")


class Engine(Protocol):
    def map(self, call: Callable[[T], R], parts: Sequence[T]) -> Iterator[R]:
        """What ``call`` gives for each part, in any order.

        Raises:
            UserError: that of a call, in its words; another error of one; a worker that died again and again.
        """

    def shuffle(
        self, split: Callable[[int], Iterable[PIECE]], parts: int, gather: Callable[[int, list[bytes]], None]
    ) -> None:
        """Call ``split`` for 0 … ``parts`` - 1, which yields pieces of numbered groups, and ``gather`` for each group,
        with its pieces in the order of the parts. Raises UserError as :meth:`map`."""

    def close(self) -> None:
        """End what this process has begun on its own."""


def open_engine(name: str, threads: int = 1, gpu: int = -1) -> Engine:
    """``ray``, ``ray://HOST:PORT``, ``spark``, or the address of a Spark master, such as ``spark://HOST:PORT``.

    ``threads``: of each part, on Ray, and whether it needs a GPU, which is -1 where it does not.

    Raises:
        UserError: it is unknown, not installed, or does not answer.
    """
    kind, _, rest = name.partition(":")
    if kind not in ("ray", "spark") or (rest and not rest.startswith("//")):
        choices = ("ray", "ray://HOST:PORT", "spark", "spark://HOST:PORT")
        raise UserError(f"{option('engine', name)}: {nearest(name, choices)}")
    if kind == "ray":
        return RayEngine(name if rest else None, threads, gpu >= 0)
    if gpu >= 0:
        raise UserError(f"{option('engine', name)} computes on CPUs: {option('gpu', -1)}")
    return SparkEngine(name if rest else None)


class RayEngine:
    """Tasks of a Ray cluster; groups are made by Ray Data's shuffle."""

    def __init__(self, address: str | None = None, threads: int = 1, gpu: bool = False) -> None:
        self.ray, self.ours = connect_ray(address, option("engine", address or "ray"))
        self.needs: dict[str, Any] = {"num_cpus": threads, "num_gpus": int(gpu)}
        self.running: set[Any] = set()

    def map(self, call: Callable[[T], R], parts: Sequence[T]) -> Iterator[R]:
        given, task = self.ray.put((call, Surroundings())), self.ray.remote(max_retries=RETRIES, **self.needs)(_answer)
        coming, running = iter(parts), list[Any]()
        try:
            while True:
                running += [task.remote(given, part) for part in islice(coming, AHEAD - len(running))]
                self.running.update(running)
                if not running:
                    return
                ended, running = self.ray.wait(running)
                self.running.difference_update(ended)
                for one in ended:
                    with self._failures():
                        answer = self.ray.get(one)
                    yield _result(answer)
        finally:
            self._cancel(running)

    def shuffle(
        self, split: Callable[[int], Iterable[PIECE]], parts: int, gather: Callable[[int, list[bytes]], None]
    ) -> None:
        from ray.data import DataContext
        from ray.data import range as numbers

        context, surroundings = DataContext.get_current(), Surroundings()
        context.enable_progress_bars = False
        for name in ("ray.data", "ray.data._internal"):
            logging.getLogger(name).setLevel(logging.ERROR)
        pieces = numbers(parts, override_num_blocks=parts).flat_map(partial(_rows, split, surroundings))
        with self._failures():
            pieces.groupby("group").map_groups(partial(_group, gather, surroundings), batch_format="pyarrow").count()

    def close(self) -> None:
        self._cancel([*self.running])
        if self.ours and self.ray.is_initialized():
            self.ray.shutdown()

    def _cancel(self, tasks: Iterable[Any]) -> None:
        """End those of ``tasks`` that are under way. A call that is dropped after :meth:`close` has none left."""
        for task in self.running.intersection(tasks):
            self.running.discard(task)
            self.ray.cancel(task, force=True)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        errors = self.ray.exceptions
        try:
            yield
        except errors.RayTaskError as error:
            raise UserError(f"{option('engine', 'ray')}: {in_a_line(error.cause)}") from error
        except errors.RayError as error:
            died = f"a part's worker ended {counted(1 + RETRIES, 'time')}"
            raise UserError(f"{option('engine', 'ray')}: {died} ({reason(error)})") from None


class SparkEngine:
    """Tasks of Spark; groups are made by its shuffle."""

    def __init__(self, master: str | None = None) -> None:
        self.spark, self.ours = connect_spark(master)

    def map(self, call: Callable[[T], R], parts: Sequence[T]) -> Iterator[R]:
        rows = self.spark.sparkContext.parallelize(list(parts), max(len(parts), 1))
        with self._failures():
            answers = rows.map(partial(_answer, (call, Surroundings()))).collect()
        yield from map(_result, answers)

    def shuffle(
        self, split: Callable[[int], Iterable[PIECE]], parts: int, gather: Callable[[int, list[bytes]], None]
    ) -> None:
        surroundings = Surroundings()

        def pieces(part: int) -> Iterator[tuple[int, PIECE]]:
            surroundings.enter()
            return ((group, (part, piece)) for group, piece in split(part))

        def gathered(group: tuple[int, Iterable[PIECE]]) -> None:
            surroundings.enter()
            gather(group[0], [piece for _, piece in sorted(group[1], key=lambda one: one[0])])

        with self._failures():
            self.spark.sparkContext.range(parts, numSlices=parts).flatMap(pieces).groupByKey(parts).foreach(gathered)

    def close(self) -> None:
        if self.ours:
            self.spark.stop()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        try:
            yield
        except (Py4JError, PySparkException) as error:
            lines = [line for line in str(error).splitlines() if ": " in line and not line.startswith((" ", "\t"))]
            own = [line for line in lines if line.split(":")[0].replace(".", "").isidentifier()]
            raise UserError(f"{option('engine', 'spark')}: {(own or lines or [reason(error)])[-1][:200]}") from error


def connect_ray(address: str | None, named: str) -> tuple[Any, bool]:
    """The package ray, connected to the cluster at ``address``, and whether this call has done it.

    Without an address it is the cluster of $RAY_ADDRESS, that which runs on this machine, or a new one on this machine.
    A cluster that is connected already stays so. ``named``: the option, in errors.

    Raises:
        UserError: Ray is not installed, or the cluster does not answer.
    """
    # Else a thread of Ray that outlives the connection would begin another Ray on this machine.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    try:
        import ray
    except ImportError:
        raise UserError(f"{named} needs Ray: pip install 'ctr_pe[ray]'") from None
    if ray.is_initialized():
        return ray, False
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(f"{named}: no Ray cluster answers: {reason(error)}") from None
    return ray, True


def connect_spark(master: str | None = None) -> tuple[Any, bool]:
    """The Spark session of this process, and whether this call has begun it: on ``master``, on that of spark-submit, or
    on this machine's cores.

    Raises:
        UserError: Spark or Java is not installed, or the master does not answer.
    """
    named = option("engine", master or "spark")
    try:
        from pyspark.conf import SparkConf
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession
    except ImportError:
        raise UserError(f"{named} needs Spark: pip install 'ctr_pe[spark]'") from None
    if session := SparkSession.getActiveSession():
        return session, False
    if not (os.environ.get("JAVA_HOME") or shutil.which("java")):
        raise UserError(f"{named} needs Java: no java on the path, and no $JAVA_HOME")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName("ctr-pe").config("spark.ui.enabled", "false")
    if master or not SparkConf().contains("spark.master"):
        builder = builder.master(master or f"local[*,{1 + RETRIES}]")
    try:
        session = builder.getOrCreate()
        session.sparkContext.setLogLevel("OFF")
    except (PySparkException, OSError) as error:
        raise UserError(f"{named}: {reason(error)}") from None
    return session, True


@dataclass(frozen=True)
class Surroundings:
    """What a process elsewhere takes over from this one: folder, import path, plugins."""

    folder: str = field(default_factory=os.getcwd)
    path: list[str] = field(default_factory=lambda: list(sys.path))
    plugins: Mapping[str, list[str]] = field(default_factory=plugins.state)

    def enter(self) -> None:
        keep_memory()
        with suppress(OSError):  # a machine without the folder: relative paths are then wrong, and say so
            os.chdir(self.folder)
        sys.path += [place for place in self.path if place not in sys.path]
        plugins.restore(self.plugins)


def in_a_line(error: BaseException) -> str:
    """An error on one line, with its type where it is not the user's."""
    name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return " ".join(f"{name}{error}".split())


def _answer(given: tuple[Callable[[Any], Any], Surroundings], part: Any) -> tuple[str | None, Any]:
    """What a call gives, or the line of its UserError, which is not tried again."""
    call, surroundings = given
    surroundings.enter()
    try:
        return None, call(part)
    except UserError as error:
        return str(error), None


def _result(answer: tuple[str | None, Any]) -> Any:
    wrong, result = answer
    if wrong is not None:
        raise UserError(wrong)
    return result


def _rows(
    split: Callable[[int], Iterable[PIECE]], surroundings: Surroundings, row: Mapping[str, int]
) -> list[dict[str, Any]]:
    surroundings.enter()
    return [{"group": group, "part": row["id"], "piece": piece} for group, piece in split(int(row["id"]))]


def _group(gather: Callable[[int, list[bytes]], None], surroundings: Surroundings, rows: Any) -> dict[str, list[int]]:
    surroundings.enter()
    group = rows["group"][0].as_py()
    gather(group, rows.sort_by("part")["piece"].to_pylist())
    return {"group": [group]}
