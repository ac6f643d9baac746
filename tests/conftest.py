"""What all tests share."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]


# Set before any conftest of a folder imports torch, which reads the number of threads once. One thread per worker:
# pytest-xdist already uses the cores, and sums in one order do not vary. Processes that tests start inherit all.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # else what outlives a test's Ray begins another, and later tests use it
os.environ.pop("CTR_PE_DATA", None)


class Signature:
    """Of a function: arguments that are all given need no binding."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.whole = inspect.signature(function)

    def bind(self, *given: Any, **named: Any) -> Any:
        if named or len(given) != len(self.whole.parameters):
            return self.whole.bind(*given, **named)
        return SimpleNamespace(args=given, kwargs={}, apply_defaults=bool)


def pytest_collection_finish() -> None:
    """What is there by now stays, so that no collection of garbage looks at it. Where there is no GPU, every
    ``torch.manual_seed`` would keep a formatted stack, a tenth of the tests' time. Each call of an autograd function
    would read its signature and bind its arguments anew, a tenth too."""
    gc.collect()
    gc.freeze()
    torch = sys.modules.get("torch")
    if torch is None:
        return
    torch.autograd.function.inspect = SimpleNamespace(**{**vars(inspect), "signature": cache(Signature)})
    if not torch.accelerator.is_available():
        for device in (torch.cuda, torch.mtia, torch.xpu):
            device.manual_seed_all = lambda seed: None


@pytest.fixture(autouse=True)
def root_logger_as_before() -> Iterator[None]:
    """A command that a test runs in this process may log to the stream of that test, which is closed after it."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.fixture(autouse=True, scope="module")
def no_ray_stays_connected() -> Iterator[None]:
    """Tests of another module would take a Ray that is connected for the one that they asked for."""
    yield
    ray: Any = sys.modules.get("ray")
    if ray is not None and getattr(ray, "is_initialized", bool)():
        ray.shutdown()
        pytest.fail("a Ray was still connected after the tests of this module")


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of the checkout: files that are not installed, such as README.md."""
    return CHECKOUT


@pytest.fixture
def worker_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are trained in threads of this process: each process would import torch for three seconds. Runs and outcomes
    go through the same pipes; ``tests/study/test_runner.py`` holds what only processes do."""
    from tests.support.worker_threads import WorkerThread

    monkeypatch.setattr("ctr_pe.study.executors.local._Worker", WorkerThread)


@pytest.fixture
def small_built_in_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Built-in sets that are generated have few users."""
    from ctr_pe.data.synthetic import bursts, context

    for generate in (bursts.generate, context.generate):
        small = {**(generate.__kwdefaults__ or {}), "users": 20, "valid_users": 10, "test_users": 10}
        monkeypatch.setattr(generate, "__kwdefaults__", small)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Directory of the real logs (amazon_sports, …): $CTR_PE_SHARED_DATA, or shared/data beside the checkout."""
    given = os.environ.get("CTR_PE_SHARED_DATA")
    folder = Path(given) if given else CHECKOUT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real logs: {folder} is not there; $CTR_PE_SHARED_DATA can name another directory")
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from tests.support.browser import chromium

    with chromium(tmp_path_factory.mktemp("chromium")) as driven:
        yield driven


@pytest.fixture
def my_pkg_forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several tests write a package ``my_pkg`` and have it imported: none is known before and after the test."""
    from ctr_pe import pe
    from ctr_pe.utils import plugins

    def forget() -> None:
        for module in [module for module in sys.modules if module.partition(".")[0] == "my_pkg"]:
            del sys.modules[module]

    forget()
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(plugins, "_allowed", set())
    monkeypatch.setattr(plugins, "_used", {kind: {} for kind in plugins.GROUPS})
    monkeypatch.setattr(pe, "_broken", set())
    yield
    forget()
