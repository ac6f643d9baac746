"""Every encoding × every unit passes the public battery, and the battery catches what it should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from ctr_pe.ops.contextual.reference import interpolate
from ctr_pe.pe.base import PositionEncoding, Target
from ctr_pe.pe.cape import CAPE
from ctr_pe.pe.vectors import Vectors
from ctr_pe.sequence.positions import Pairs, Positions
from ctr_pe.testing import CHECKS, UNITS, UNITS_OF, check_pe, checks
from tests.support.encoding_cases import CASES, NAMES, factory

PAIRS = [(unit, check) for check in CHECKS for unit in UNITS_OF.get(check, UNITS)]
UNITS_FIRST = sorted(CHECKS, key=UNITS_OF.__contains__)  # checks of all units first: each encoding meets each unit
CELLS = [
    pytest.param(case, unit, check, marks=[] if unit == units[(row + column) % len(units)] else pytest.mark.slow)
    for row, case in enumerate(CASES)
    for column, check in enumerate(UNITS_FIRST)
    for units in [UNITS_OF.get(check, UNITS)]
    for unit in units
]
"""By default every two of encoding (or variant of one), check and unit; the other cells are slow: they are many."""


@pytest.mark.parametrize(("case", "unit", "check"), CELLS)
def test_contract(case: str, unit: str, check: str) -> None:
    CHECKS[check](factory(case), unit)


class IsNoNumber(PositionEncoding):
    """NaN, wherever one looks."""

    def embed(self, target: Target, history: Tensor, positions: Positions) -> tuple[Target, Tensor]:
        return None if target is None else target * torch.nan, history * torch.nan


@pytest.mark.parametrize(("unit", "check"), PAIRS)
def test_no_check_ends_without_having_checked(unit: str, check: str) -> None:
    with pytest.raises(AssertionError):
        CHECKS[check](IsNoNumber, unit)


def test_every_two_of_encoding_check_and_unit_meet_in_fast_tests() -> None:
    fast = [cell.values for cell in CELLS if not cell.marks]
    assert {(case, check) for case, _, check in fast} == {(case, check) for case in CASES for check in CHECKS}
    assert {(case, unit) for case, unit, _ in fast} == {(case, unit) for case in CASES for unit in UNITS}
    assert {(unit, check) for case, unit, check in fast if case in NAMES} == set(PAIRS)
    assert {(unit, check) for case, unit, check in fast if case not in NAMES} == set(PAIRS)
    assert {cell.values for cell in CELLS} == {(case, *pair) for case in CASES for pair in PAIRS}


def test_every_check_and_every_unit_is_asked_for() -> None:
    asked = [(unit, check) for check, unit, _ in checks(IsNoNumber)]
    assert asked == PAIRS
    assert {check for _, check in PAIRS} == set(CHECKS)
    assert {unit for unit, _ in PAIRS} == set(UNITS)


class FutureHasGates(CAPE):
    """The released CAPE code: gates of forbidden keys are not zero, so items to come push those before them away."""

    def bias(self, logits: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
        pairs = replace(pairs, allowed=torch.ones_like(pairs.allowed))
        return super().bias(logits, vectors, pairs)


class CountsSlots(PositionEncoding):
    """Positions from the array index."""

    def __init__(self, dim: int, max_len: int, num_heads: int = 1) -> None:
        super().__init__(dim, max_len, num_heads)
        self.table = nn.Parameter(torch.zeros(10 * max_len, dim))

    def embed(self, target: Target, history: Tensor, positions: Positions) -> tuple[Target, Tensor]:
        return target, history + self.table[: history.shape[1]]


class NoClamp(CAPE):
    """A table lookup that only works for histories that fit."""

    def bias(self, logits: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
        if logits.shape[-1] > self.max_len + 1:
            raise AssertionError("index out of range")
        return super().bias(logits, vectors, pairs)


class MixesRows(PositionEncoding):
    """Statistics over the batch."""

    def embed(self, target: Target, history: Tensor, positions: Positions) -> tuple[Target, Tensor]:
        return target, history * (1 + positions.lengths.double().mean())


class SeesTheFuture(PositionEncoding):
    """A bias made of all logits of the row, the forbidden ones too."""

    def bias(self, logits: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
        # One number per query and key, so that softmax cannot cancel it.
        return logits * (1 + logits.sum(-1, keepdim=True).tanh())


class SeesLaterTimes(PositionEncoding):
    """A bias by the share of the history's time, which later items stretch."""

    def bias(self, logits: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
        assert pairs.key.age is not None
        age = pairs.key.age.unsqueeze(-2) * pairs.block.mask[:, None, None]
        return logits - age / age.sum(-1, keepdim=True).clamp(min=1)


class CountsQueries(PositionEncoding):
    """Offsets from the number of the query, as if there were as many as keys."""

    def bias(self, logits: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
        queries, keys_seen = logits.shape[-2:]
        if not pairs.self_attention:
            return logits
        return logits - 0.3 * (torch.arange(queries).unsqueeze(1) - torch.arange(keys_seen)).clamp(min=0)


class WrongGradient(PositionEncoding):
    """A value whose gradient is cut."""

    def bias(self, logits: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
        return logits + logits.detach() ** 2


class WrongInOneEntry(PositionEncoding):
    """One parameter of many teaches the wrong way."""

    def __init__(self, dim: int, max_len: int, num_heads: int = 1) -> None:
        super().__init__(dim, max_len, num_heads)
        self.table = nn.Parameter(torch.zeros(8, dim))

    def embed(self, target: Target, history: Tensor, positions: Positions) -> tuple[Target, Tensor]:
        cut = torch.zeros_like(self.table, dtype=torch.bool).index_put(
            (torch.tensor(5), torch.tensor(3)), torch.tensor(True)
        )
        return target, history * (1 + 0.1 * torch.where(cut, self.table.detach(), self.table).mean(0))


class CeilNaN(PositionEncoding):
    """0 / 0 where a history is empty."""

    def embed(self, target: Target, history: Tensor, positions: Positions) -> tuple[Target, Tensor]:
        share = positions.lengths / positions.lengths
        return None if target is None else target * share.unsqueeze(1), history


@pytest.mark.parametrize(
    ("broken", "check", "message"),
    [
        (FutureHasGates, "causality", "causality"),
        (CountsSlots, "padding", "padding"),
        (NoClamp, "history longer than the table", "out of range"),
        (MixesRows, "batch", "batch"),
        (SeesTheFuture, "causality", "causality"),
        (SeesLaterTimes, "causality", "causality"),
        (CountsQueries, "newest item alone", "newest item alone"),
        (WrongGradient, "gradients", "gradients"),
        (WrongInOneEntry, "gradients", "gradients"),
        (CeilNaN, "empty history", "empty"),
    ],
)
def test_battery_catches(broken: Callable[[int, int, int], PositionEncoding], check: str, message: str) -> None:
    calls = [call for name, _, call in checks(broken) if name == check]
    with pytest.raises(AssertionError, match=message):
        [call() for call in calls]


def test_check_pe_runs_all_checks_and_stops_at_the_first_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, str]] = []
    for name in CHECKS:
        monkeypatch.setitem(CHECKS, name, partial(lambda name, _, unit: ran.append((unit, name)), name))
    check_pe(IsNoNumber)
    assert ran == PAIRS
    monkeypatch.undo()
    with pytest.raises(AssertionError, match="padding"):
        check_pe(CountsSlots)


def test_battery_asks_for_an_encoding() -> None:
    with pytest.raises(AssertionError, match="not a PositionEncoding"):
        check_pe(lambda dim, max_len, heads: nn.Linear(dim, dim))  # type: ignore[arg-type, return-value]


def test_interpolation_is_exact_at_rows_linear_between_and_clamped() -> None:
    table = torch.randn(1, 1, 1, 4, dtype=torch.float64)
    at = torch.tensor([[[[0.0, 1.0, 2.5, 3.0, 7.3]]]], dtype=torch.float64)
    got, rows = interpolate(table, at)[0, 0, 0], table[0, 0, 0]
    want = torch.stack([rows[0], rows[1], (rows[2] + rows[3]) / 2, rows[3], rows[3]])
    assert torch.allclose(got, want, atol=1e-15)
