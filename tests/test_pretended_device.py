"""The tests on a device that is not there, in a process of their own: torch takes no new device after a backward."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["not slow", "slow"])
def test_on_a_device_that_is_not_there(chosen: str) -> None:
    cases = Path(__file__).parent / "support" / "on_pretended_device.py"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", chosen, str(cases)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
