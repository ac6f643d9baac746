"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ctr_pe.ops import native

SOURCES = sorted(str(file) for file in (Path(native.__file__).parent / "csrc").glob("*.c"))
FLAGS = [
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
]


@pytest.fixture(autouse=True)
def _vectors() -> None:
    """The script tries all kinds of vectors."""


@pytest.mark.slow
def test_no_kernel_reads_or_writes_where_it_must_not(tmp_path: Path) -> None:
    if sys.platform != "linux" or shutil.which("gcc") is None:
        pytest.skip("no gcc")
    library, script = tmp_path / "kernels.so", Path(__file__).parents[1] / "support" / "random_shapes.py"
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    built = subprocess.run(
        ["gcc", *FLAGS, *sanitize, "-o", str(library), *SOURCES], capture_output=True, text=True, check=False
    )
    if built.returncode != 0:
        pytest.skip(f"gcc has no sanitizers: {built.stderr.splitlines()[-1:]}")
    found = [
        subprocess.check_output(["gcc", f"-print-file-name={name}.so"], text=True).strip()
        for name in ("libasan", "libubsan")
    ]
    if not all(Path(file).is_absolute() for file in found):
        pytest.skip("no libasan or libubsan")
    env = {**os.environ, "LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, str(script), str(library)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["done"]


@pytest.mark.slow
def test_the_sanitizers_would_see_it(tmp_path: Path) -> None:
    """One float too many is written: the library is run, and the sanitizer stops it."""
    if sys.platform != "linux" or shutil.which("gcc") is None:
        pytest.skip("no gcc")
    program = tmp_path / "wrong.c"
    program.write_text(
        "#include <stdlib.h>\nint main(int n, char **a) { float *x = malloc(4); x[n] = 1; return x[n] > 2; }"
    )
    out = tmp_path / "wrong"
    built = subprocess.run(
        ["gcc", "-fsanitize=address", "-o", str(out), str(program)], capture_output=True, check=False
    )
    if built.returncode != 0:
        pytest.skip("gcc has no sanitizers")
    assert subprocess.run([str(out)], capture_output=True, check=False).returncode != 0
