"""benchmark/speed/pairs.py: what it calls slower, and that both sides take turns."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmark.speed import pairs


class FakeSide:
    """Takes ``seconds`` for every row, and a tenth more or less in turn."""

    def __init__(self, seconds: float, log: list[float]) -> None:
        self.took, self.log, self.calls = seconds, log, 0

    def answer(self) -> Any:
        return ["step, DIN none", "data build"]

    def seconds(self, row: str, times: int) -> float:
        self.calls += 1
        self.log.append(self.took)
        return self.took * (1.1 if self.calls % 2 else 0.9)


def test_the_interval_is_of_the_ratios_and_symmetric_for_old_and_new() -> None:
    mean, low, high = pairs.interval([1.1, 0.9, 1.05, 1.0])
    assert low < mean < high
    assert mean == pytest.approx(math.prod([1.1, 0.9, 1.05, 1.0]) ** 0.25)
    turned = pairs.interval([1 / 1.1, 1 / 0.9, 1 / 1.05, 1.0])
    assert turned == pytest.approx((1 / mean, 1 / high, 1 / low))
    assert pairs.interval([1.2])[1:] == (0.0, math.inf)


@pytest.mark.parametrize(("new", "slower"), [(0.2, ["step, DIN none"]), (0.1, []), (0.05, [])])
def test_a_row_is_slower_if_its_whole_interval_is(new: float, slower: list[str]) -> None:
    log: list[float] = []
    ours: Any = FakeSide(new, log)
    old: Any = FakeSide(0.1, log)
    assert pairs.compare(ours, old, "step", repeats=6, most=1.03) == slower
    assert len(log) == 1 + 2 * 6  # one call to find how often a repeat calls
    if new != 0.1:
        turns = [log[1 + 2 * k : 3 + 2 * k] for k in range(6)]
        assert all(set(turn) == {new, 0.1} for turn in turns)
        assert turns[0] == turns[1][::-1]
