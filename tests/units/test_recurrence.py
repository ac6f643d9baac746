"""DIEN's recurrences as an accelerator runs them: in torch here, by Triton in a process that interprets it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ctr_pe.ops import accelerator
from ctr_pe.ops.recurrence import Recurrence, gpu
from ctr_pe.ops.recurrence.reference import attention_step
from tests.support.comparing import outcome
from tests.support.recurrences import CASES, Case

needs_triton = pytest.mark.skipif(not accelerator.USABLE, reason="triton is not installed")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_derivatives_of_all_steps_together_are_those_of_one_after_the_other(case: Case) -> None:
    def together(of_items: Tensor, weights: Tensor, weight_hh: Tensor, bias_hh: Tensor) -> Tensor:
        found: Tensor = Recurrence.apply(
            attention_step(weight_hh), of_items, weights, [*case.sizes], weight_hh, bias_hh
        )
        return found

    given = case.operands(torch.float64)
    for got, want in zip(outcome(together, *given), outcome(case.by_loop, *given), strict=True):
        assert torch.allclose(got, want, rtol=0, atol=1e-12)


def test_states_keep_their_precision_under_autocast() -> None:
    of_items, weights, weight_hh, bias_hh = CASES[-1].operands(torch.float32)
    given = attention_step(weight_hh), of_items, weights, [*CASES[-1].sizes], weight_hh, bias_hh
    with torch.autocast("cpu", torch.bfloat16):
        half = Recurrence.apply(*given)
    assert torch.equal(half, Recurrence.apply(*given))


def test_on_the_cpu_it_is_the_plain_loop() -> None:
    given = CASES[0].operands(torch.float32)
    for got, want in zip(outcome(CASES[0].whole, *given), outcome(CASES[0].by_loop, *given), strict=True):
        assert torch.equal(got, want)
    assert "Recurrence" not in str(CASES[0].whole(*(x.requires_grad_() for x in given)).grad_fn)


def test_what_the_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "takes", lambda *given: all(x.is_floating_point() for x in given))
    of_items = torch.ones(3, 2)
    assert gpu.takes(of_items, torch.ones(3 * gpu.LARGEST, gpu.LARGEST))
    assert not gpu.takes(of_items, torch.ones(3 * gpu.LARGEST + 3, gpu.LARGEST + 1))
    assert not gpu.takes(of_items.long(), torch.ones(6, 2))


@pytest.mark.slow
@needs_triton
def test_kernels_give_what_torch_gives() -> None:
    cases = Path(__file__).parents[1] / "support" / "on_triton_recurrence.py"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(cases)]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert run.returncode == 0, run.stdout


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    ("name", "width", "capability"),
    [
        *(("advance", 16, 80), ("advance", 128, 90), ("advance", 256, 80)),
        *(("carry_back", 16, 90), ("carry_back", 128, 80), ("carry_back", 256, 90)),
    ],
)
def test_kernels_compile_for_a_gpu_that_is_not_there(
    name: str, width: int, capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They add in a fixed order, and fit what every GPU has."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compiled

    from ctr_pe.ops.triton import recurrence

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(recurrence, name)
    options = gpu.options(torch.empty(3 * width, width))
    constants = {key: value for key, value in options.items() if key.isupper()}
    types = dict.fromkeys(kernel.arg_names, "*fp32") | {"sizes": "*i64", "S": "i32", "shared": "i32"}
    types = {key: "constexpr" if key in constants else types[key] for key in kernel.arg_names}
    how = {key: value for key, value in options.items() if not key.isupper()}
    made = compiled(ASTSource(kernel, types, constants), target=GPUTarget("cuda", capability, 32), options=how)
    assert made.asm["cubin"]
    assert not re.search(r"\b(atom|red)\.", made.asm["ptx"])
    assert made.metadata.shared < 48 * 1024
