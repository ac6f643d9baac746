"""Work on clusters whose workers die, and small clusters on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class DyingOnce:
    """A call whose process is killed the first time that it comes to ``part``; ``folder`` gets a file for each call."""

    call: Callable[[Any], Any]
    folder: Path
    part: Any

    def __call__(self, part: Any) -> Any:
        earlier = list(self.folder.glob(f"{part}.*"))
        (self.folder / f"{part}.{len(earlier)}.{os.getpid()}").touch()
        if part == self.part and not earlier:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.call(part)

    @staticmethod
    def calls(folder: Path) -> list[int]:
        return sorted(int(file.name.partition(".")[0]) for file in folder.iterdir())


@contextmanager
def ray_cluster() -> Iterator[None]:
    """A Ray on this machine, with two CPUs."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        environment.delenv("RAY_ADDRESS", raising=False)
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)  # whatever else runs here
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def spark_cluster() -> Iterator[None]:
    """A Spark on this machine, with two executors of a core each, processes of their own."""
    sql = pytest.importorskip("pyspark.sql", reason="pyspark is not installed: the extra spark")
    if not (os.environ.get("JAVA_HOME") or shutil.which("java")):
        pytest.skip("no JVM")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYSPARK_PYTHON", sys.executable)
        environment.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        builder = sql.SparkSession.builder.master("local-cluster[2,1,1024]").config("spark.ui.enabled", "false")
        session = builder.config("spark.executor.memory", "512m").getOrCreate()
        try:
            session.sparkContext.setLogLevel("OFF")
            yield
        finally:
            session.stop()


CLUSTERS = {"ray": ray_cluster, "spark": spark_cluster}
