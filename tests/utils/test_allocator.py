"""Memory is kept between steps, where the C library can."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ctr_pe.utils.allocator import SWITCH

FREED = """
import ctypes, resource
from ctr_pe.utils.allocator import keep_memory
print(keep_memory())
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def use():
    block = bytearray(64 * 2**20)
    block[::4096] = bytes(len(block[::4096]))
use()
before = faults()
for _ in range(10):
    use()
print(faults() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's")
def test_freed_memory_is_used_again() -> None:
    said, faults = [], []
    for switch in ("1", "0"):
        output = subprocess.run(
            [sys.executable, "-c", FREED], capture_output=True, text=True, check=True, env={SWITCH: switch}
        ).stdout.split()
        said.append(output[0])
        faults.append(int(output[1]))
    if said[0] == "False":
        pytest.skip("the C library is not glibc")
    assert said == ["True", "False"]
    assert faults[0] < 100 < 100_000 < faults[1]


GIVEN_BACK = """
import re
from pathlib import Path
from ctr_pe.utils.allocator import (give_back, keep_memory)
print(keep_memory())
def resident():
    return int(re.search(r"VmRSS:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024
blocks = [bytearray(b"x" * 2**20) for _ in range(256)]
end = bytearray(2**20)
del blocks
print(resident())
give_back()
print(resident())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's")
def test_kept_memory_can_be_given_back() -> None:
    output = subprocess.run([sys.executable, "-c", GIVEN_BACK], capture_output=True, text=True, check=True, env={})
    kept, before, after = output.stdout.split()
    if kept == "False":
        pytest.skip("the C library is not glibc")
    assert int(after) < 100 < 256 < int(before)
