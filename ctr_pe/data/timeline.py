"""Who has chosen what, before when: the histories of training rows and of requests.

A request sees the events of its user strictly before it, by the order column where there is one, else by time: events
of the same time are not each other's history. Of events at the same place the one with the smaller item comes first.

Legend: n requests, U users, E events of one field group.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from ctr_pe.data.id_map import Index, Ints

Codes = npt.NDArray[Any]  # whole numbers in the smallest type that holds them: logs are large
CLOCKS = ("order", "time")  # columns that decide what is earlier
STEPS = (10**9, 10**6, 10**3, 1)  # nanoseconds, which the times of most logs are multiples of


def sorted_events(events: pl.LazyFrame, columns: Collection[str]) -> pl.LazyFrame:
    """Events by ``user``, then ``order``, ``time`` and ``tie`` as far as they are among ``columns``; with neither order
    nor time later rows are later."""
    clocks = [name for name in CLOCKS if name in columns]
    ties = ["tie"] if clocks and "tie" in columns else []
    return events.sort("user", *clocks, *ties, maintain_order=True)


@dataclass(frozen=True, eq=False)
class Timeline:
    """The events of one field group: those of user u are ``first[u]:first[u + 1]``, the oldest first.

    ``first`` (U + 1,); ``ids``: field -> (E,); ``time``, in nanoseconds, and ``order`` (E,) or None.
    """

    first: Ints
    ids: Mapping[str, Codes]
    time: Ints | None = None
    order: Ints | None = None

    @classmethod
    def of(cls, events: pl.DataFrame, users: int, fields: Mapping[str, str]) -> Timeline:
        """Of sorted events with users 0 … ``users`` - 1 in the column ``user``; ``fields``: field -> column."""
        clocks = {name: events[name].to_numpy() for name in CLOCKS if name in events.columns}
        first = np.searchsorted(events["user"].to_numpy(), np.arange(users + 1))
        return cls(first, {name: events[column].to_numpy() for name, column in fields.items()}, **clocks)

    def newest(self, user: Ints, before: Ints | None, count: int, by_order: bool = False) -> tuple[Ints, Ints]:
        """Where the last ``count`` events of each request's user begin and end, (n,) both; of an empty history 0.

        ``user``: numbers, -1 for unknown ones. ``before``: only events strictly before this time, or with ``by_order``
        before this place in the order.
        """
        known = user >= 0
        first, end = (np.where(known, self.first[user + after], 0) for after in (0, 1))
        clock = self.order if by_order else self._newest_time
        if clock is not None and before is not None and len(clock):
            end = self._before(clock, user, first, end, before)
        begin = np.maximum(first, end - count)
        empty = begin == end
        return np.where(empty, 0, begin), np.where(empty, 0, end)

    @cached_property
    def _newest_time(self) -> Ints | None:
        """(E,) the newest time of the user up to each event: it rises where an order column contradicts the times."""
        if self.time is None or self.order is None:
            return self.time
        events = pl.DataFrame({"user": self._owner, "time": self.time})
        return events.select(pl.col("time").cum_max().over("user")).to_series().to_numpy()

    @property
    def _owner(self) -> Ints:
        """(E,) the user of each event."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))

    def _before(self, clock: Ints, user: Ints, first: Ints, last: Ints, before: Ints) -> Ints:
        """(n,) the first place in ``first:last`` at which the rising ``clock`` has reached ``before``, else ``last``:
        for few requests by a search of their own each, for many by one over user and clock."""
        if 4 * len(before) >= len(clock):
            low, high = int(clock.min()), int(clock.max())
            since = clock - low
            step = next(step for step in STEPS if step == 1 or not (since % step).any())
            span = (high - low) // step + 2
            if len(self.first) * span < 2**62:
                wanted = user * span - (low - np.clip(before, low, high + 1)) // step  # rounded up
                return np.clip(np.searchsorted(self._owner * span + since // step, wanted), first, last)
        while (open_ := first < last).any():
            middle = (first + last) // 2
            earlier = open_ & (clock[np.where(open_, middle, 0)] < before)
            first, last = np.where(earlier, middle + 1, first), np.where(open_ & ~earlier, middle, last)
        return first


@dataclass(frozen=True, eq=False)
class EncodedLog:
    """An encoded log, a timeline per field group, because some hold the chosen items and others those that were not.

    ``users``: raw ids, in the order of their numbers; ``newest``: the largest time, or None; ``unknown``: events of
    items that have the reserved id; ``unlisted``: events of behaviours that have no history.
    """

    users: Index
    groups: Sequence[Timeline]
    newest: int | None
    unknown: int
    unlisted: int = 0

    @property
    def ordered(self) -> bool:
        """Whether the log has a column of the order."""
        return any(group.order is not None for group in self.groups)
