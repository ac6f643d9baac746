"""Times two calls alternately, so that other load on the machine affects both."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST = 101
"""Repeats of quick calls: more would not narrow the quartiles any further."""

Call = Callable[[int], object]


@dataclass(frozen=True)
class Figure:
    """What a case measured.

    ``values``: the figure, once per repeat; the result is their median. ``unit`` is × for a ratio of two things.
    ``ours``, ``baseline``: medians of the two, in ``of`` (s, bytes, …). ``against``: what the baseline was.
    ``goal``: where it depends on what was measured; else the registry has it.
    """

    values: Sequence[float]
    ours: float | None = None
    baseline: float | None = None
    of: str = "s"
    against: str = ""
    unit: str = "×"
    goal: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.values) < 2:
            return self.values[0], self.values[0]
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high


@dataclass(frozen=True)
class Timed:
    """Seconds of both, repeat by repeat."""

    ours: list[float]
    baseline: list[float]

    def speedup(self, against: str, **details: Any) -> Figure:
        """How many times as long the baseline takes."""
        return self._figure([theirs / mine for mine, theirs in self._pairs()], against, details)

    def overhead(self, against: str, goal: float | None = None, **details: Any) -> Figure:
        """How many times as long ours takes."""
        return self._figure([mine / theirs for mine, theirs in self._pairs()], against, details, goal)

    def _pairs(self) -> list[tuple[float, float]]:
        return list(zip(self.ours, self.baseline, strict=True))

    def _figure(
        self, ratios: list[float], against: str, details: Mapping[str, Any], goal: float | None = None
    ) -> Figure:
        ours, baseline = statistics.median(self.ours), statistics.median(self.baseline)
        return Figure(ratios, ours, baseline, against=against, goal=goal, details=details)


def alternate(
    ours: Call,
    baseline: Call,
    repeats: int,
    warm_up: int = 1,
    least_seconds: float = 0.0,
    wait: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timed:
    """Time both in turn, ``repeats`` times each and on until ``least_seconds`` have been measured.

    Args:
        ours, baseline: called with the number of the repeat, so that both can take the same input; negative in warm-up.
            Which of them comes first changes from repeat to repeat.
        wait: called before the clock is read: until a GPU has finished.
    """
    (timed,) = alternate_all([ours], baseline, repeats, warm_up, least_seconds, wait, clock)
    return timed


def alternate_all(
    several: Sequence[Call],
    baseline: Call,
    repeats: int,
    warm_up: int = 1,
    least_seconds: float = 0.0,
    wait: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Timed]:
    """As :func:`alternate`, for several calls: they run in pairs with the baseline between the two, to which both are
    compared."""
    for number in range(-warm_up, 0):
        say(f"warm-up {number + warm_up + 1} of {warm_up}")
        for call in (*several, baseline):
            call(number)
    timed = [Timed([], []) for _ in several]
    total = 0.0
    while (done := len(timed[0].ours)) < repeats or (total < least_seconds and done < MOST):
        for first in range(0, len(several), 2):
            pair = list(zip(several, timed, strict=True))[first : first + 2]
            mine = [_seconds(pair[0][0], done, wait, clock)] if done % 2 == 0 or len(pair) == 2 else []
            theirs = _seconds(baseline, done, wait, clock)
            mine += [_seconds(call, done, wait, clock) for call, _ in pair[len(mine) :]]
            for (_, of), taken in zip(pair, mine, strict=True):
                of.ours.append(taken)
                of.baseline.append(theirs)
            total += theirs + sum(mine)
        if done < repeats:
            last = timed[0]
            say(f"repeat {done + 1} of {repeats}: {last.ours[-1]:.3g} s, baseline {last.baseline[-1]:.3g} s")
    return timed


def _seconds(call: Call, number: int, wait: Callable[[], object] | None, clock: Callable[[], float]) -> float:
    if wait is not None:
        wait()
    start = clock()
    call(number)
    if wait is not None:
        wait()
    return clock() - start


def say(text: str) -> None:
    """A line of progress."""
    print(f"    {text}", file=sys.stdout, flush=True)
