"""benchmark/kernels.py, which on_triton.py runs: it wants a GPU, or Triton's interpreter."""

from __future__ import annotations

import pytest

from benchmark import kernels


@pytest.mark.parametrize("gpu", ["-1", "99"])
def test_no_device_is_one_line(gpu: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main(["--gpu", gpu]) == 2
    assert capsys.readouterr().err.startswith(f"kernels.py: error: --gpu {gpu}: no device of Triton's here")
