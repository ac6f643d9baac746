"""Whether there are kernels, what they take, and how to leave them alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ctr_pe.ops
from ctr_pe.ops import native
from tests.support.comparing import needs_kernels

SOURCES = sorted((Path(native.__file__).parent / "csrc").glob("*.c"))


def test_they_are_compiled_where_a_compiler_is() -> None:
    if sys.platform == "linux" and shutil.which("cc") is not None:
        assert native.LIBRARY is not None, "pip install -e . compiles them"


def test_they_can_be_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "0")
    assert native.load() is None
    monkeypatch.setattr(native, "LIBRARY", None)
    assert not native.takes(torch.ones(1))
    assert native.compiler() is None
    assert set(ctr_pe.ops.kernels().values()) == {"torch"}


@needs_kernels
def test_who_runs_can_be_asked(request: pytest.FixtureRequest) -> None:
    kinds = {16: "compiled (avx512)", 8: "compiled (avx2)", 4: "compiled"}
    lanes = request.node.callspec.params["_vectors"]
    found = ctr_pe.ops.kernels()
    assert set(found) == {"contextual_attention", "contextual_bias", "dice", "dropout", "time_decay"}
    assert set(found.values()) <= {kinds[size] for size in kinds if size <= lanes}
    compiler = native.compiler()
    assert compiler is not None
    assert compiler.startswith(("gcc ", "clang "))


@needs_kernels
def test_what_they_take() -> None:
    x = torch.ones(3)
    assert native.takes(x, None, torch.nn.Parameter(x))
    assert not native.takes(x, x.double())
    assert not native.takes(x.to("meta"))


@needs_kernels
def test_only_contiguous_memory_is_passed_on() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        native.call("keep_mask", torch.zeros(2, 2).T, 0, 0, None)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_each_compiler_takes_them_without_a_warning(compiler: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    for source in SOURCES:
        flags = ["-Wall", "-Wextra", "-Werror", "-O3", "-fopenmp", "-fPIC", "-c", "-o", str(tmp_path / "out.o")]
        done = subprocess.run([compiler, *flags, str(source)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
