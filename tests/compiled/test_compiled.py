"""Whether there is compiled code, and how to leave it alone."""

from __future__ import annotations

import shutil
import sys

import pytest
import torch
from comparing import needs_code

from ctr_pe import compiled


def test_it_is_compiled_where_a_compiler_is() -> None:
    if sys.platform == "linux" and shutil.which("cc") is not None:
        assert compiled.library() is not None, "pip install -e . compiles it"


def test_it_can_be_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled.library.cache_clear()
    monkeypatch.setenv(compiled.SWITCH, "0")
    assert compiled.library() is None
    assert not compiled.suits(torch.ones(1))
    monkeypatch.delenv(compiled.SWITCH)
    compiled.library.cache_clear()


@needs_code
def test_what_it_can_take() -> None:
    x = torch.ones(3)
    assert compiled.suits()
    assert compiled.suits(x, torch.nn.Parameter(x))
    assert not compiled.suits(x, x.double())
    assert not compiled.suits(x.to("meta"))
    assert not compiled.suits(x, type("Own", (torch.Tensor,), {})())
