"""Tests compute with one thread, whichever of their folders is run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys

import pytest

class Threads:
    def pytest_collection_finish(self):
        import torch

        print("threads:", torch.get_num_threads())

sys.exit(pytest.main(["-q", "-n", "0", "--collect-only", "-p", "no:cacheprovider", sys.argv[1]], plugins=[Threads()]))
"""


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core")
def test_a_folder_whose_conftest_imports_torch_has_one_thread(checkout: Path) -> None:
    """torch reads the number of threads when it is imported, and tests/ops/conftest.py imports it."""
    without = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    command = [sys.executable, "-c", PROGRAM, "tests/ops/test_dropout.py"]
    shown = subprocess.check_output(command, text=True, cwd=checkout, env=without)
    assert "threads: 1\n" in shown
