"""``deterministic``: torch refuses what varies from run to run, in one line."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from ctr_pe.training.deterministic import deterministic
from ctr_pe.utils.errors import UserError
from tests.support.models import Rows, build


def test_an_operation_without_such_a_form_is_named(tmp_path: Path) -> None:
    model = build("DIN", tmp_path)
    interest = model.interest

    def varying(*given: Any) -> tuple[torch.Tensor, Any]:
        found, losses = interest(*given)
        return found.put(torch.tensor([0]), torch.zeros(1)), losses  # where an index comes twice, either value may stay

    model.interest = varying
    model.fit(Rows(), 1, Rows())
    line = r"^deterministic: put_ has no deterministic form here: leave it out$"
    with pytest.raises(UserError, match=line), deterministic(True):
        model.fit(Rows(), 1, Rows())


@pytest.mark.parametrize("before", [False, True])
def test_afterwards_all_is_as_before(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    torch.use_deterministic_algorithms(before)
    try:
        for wanted in (False, True):
            with contextlib.suppress(KeyError), deterministic(wanted):
                assert torch.are_deterministic_algorithms_enabled() is (before or wanted)
                raise KeyError
            assert torch.are_deterministic_algorithms_enabled() is before
    finally:
        torch.use_deterministic_algorithms(False)
