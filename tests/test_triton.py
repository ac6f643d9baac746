"""The kernels for GPUs without a GPU: through Triton's interpreter, and compiled for two kinds of them."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ctr_pe.ops import accelerator, native

needs_triton = pytest.mark.skipif(not accelerator.USABLE, reason="triton is not installed")


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    ("cases", "chosen"), [("support/on_triton.py", ""), ("contract/test_battery.py", "cape or cope")]
)
def test_they_give_what_torch_gives(cases: str, chosen: str) -> None:
    """The second: what holds for every encoding holds for theirs by the kernels."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", chosen]
    command += ["-W", "ignore::RuntimeWarning", str(Path(__file__).parent / cases)]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert run.returncode == 0, run.stdout


@pytest.mark.slow
def test_without_it_all_is_computed_in_torch() -> None:
    script = """
import sys
sys.modules["triton"] = None
import torch
from ctr_pe import (Positions, build_pe)
from ctr_pe.ops import (accelerator, native)
from ctr_pe.units import SelfAttention
assert not accelerator.USABLE and not accelerator.runs_on(torch.device("cuda"))
layer = SelfAttention(8, 2, build_pe("cape", dim=8, max_len=5, num_heads=2), dropout=0.5)
layer(torch.randn(2, 5, 8), Positions.from_mask(torch.ones(2, 5, dtype=torch.bool))).sum().backward()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_they_take_what_is_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "USABLE", True)
    monkeypatch.setattr(accelerator, "INTERPRETED", False)
    cuda, x = torch.device("cuda"), torch.ones(3)
    assert accelerator.runs_on(cuda)
    assert not accelerator.runs_on(x.device)
    assert not accelerator.takes(x)
    with native.portable():
        assert not accelerator.runs_on(cuda)
    monkeypatch.setattr(accelerator, "INTERPRETED", True)
    assert accelerator.takes(x, None, x.half(), x.bfloat16())
    assert not accelerator.takes(x, x.double())
    assert not accelerator.takes(x, x[:0])
    assert not accelerator.takes(x.long())


def test_products_are_as_exact_as_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3)
    assert (accelerator.precision(x), accelerator.precision(x.half())) == ("ieee", "tf32")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert accelerator.precision(x) == "tf32"


POINTERS = {"allowed": "*u8", "seed": "*i64", "kept": "*i16"}
NUMBERS = dict.fromkeys("sign scale product factor".split(), "fp32")
NUMBERS |= dict.fromkeys("rows H N Q L D P R T least programs table_size weight_size size count".split(), "i32")
CONSTANTS = {name: getattr(accelerator, name) for name in "QUERIES KEYS ROWS ENTRIES".split()}
CONSTANTS |= {"PRECISION": "ieee"}
OPTIONS = "GATED STEPPED DROPS AMONG SEPARATE".split()
KERNELS = (
    *("attention.attend", "attention.attend_backward", "bias.add_bias", "bias.add_bias_backward"),
    *("tiles.total", "mask.keep_mask"),
)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    ("name", "width", "places", "all_forms", "capability"),
    [
        (name, *shape, (80, 90)[(row + column) % 2])
        for row, name in enumerate(KERNELS)
        for column, shape in enumerate([(16, 16, True), (32, 32, False), (32, 64, True)])
    ],
)
def test_they_compile_and_add_in_a_fixed_order(
    name: str,
    width: int,
    places: int,
    all_forms: bool,
    capability: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A GPU of the kind need not be there: each shape for one kind, in turn. Widths are those of the tiles or not, with
    all options or none."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compiled

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    module, _, function = name.rpartition(".")
    kernel = getattr(importlib.import_module(f"ctr_pe.ops.triton.{module}"), function)
    own = {"WIDTH": width, "PLACES": places, **dict.fromkeys(OPTIONS, all_forms)}
    constants = {key: value for key, value in (CONSTANTS | own).items() if key in kernel.arg_names}
    types = {key: POINTERS.get(key, NUMBERS.get(key, "*fp32")) for key in kernel.arg_names}
    types |= dict.fromkeys(constants, "constexpr")
    made = compiled(
        ASTSource(kernel, types, constants), target=GPUTarget("cuda", capability, 32), options=accelerator.OPTIONS
    )
    assert made.asm["cubin"]
    assert not re.search(r"\b(atom|red)\.", made.asm["ptx"])
    assert made.metadata.shared < 48 * 1024  # what every GPU has for a program
