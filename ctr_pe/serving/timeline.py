"""Who has chosen what, before when: the encoded log that requests are scored with.

Legend: n requests, U users, E events of one field group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ctr_pe.serving.tables import Index, Ints

Codes = npt.NDArray[Any]  # whole numbers in the smallest type that holds them: logs are large


@dataclass(frozen=True)
class Timeline:
    """The events of one field group: those of user u are ``first[u]:first[u + 1]``, the oldest first.

    ``first`` (U + 1,); ``ids``: target field -> (E,). (E,) or None: ``time``; ``by_time``, the newest time up to each
    event, which differs where an order column contradicts the times; ``order``.
    """

    first: Ints
    ids: Mapping[str, Codes]
    time: Ints | None
    by_time: Ints | None
    order: Ints | None

    def newest(self, user: Ints, clock: Ints | None, asked: Ints | None, count: int) -> tuple[Ints, Ints]:
        """Where the last ``count`` events of each request's user begin and end, (n,) both; of an empty history 0.

        ``user``: numbers, -1 for unknown ones. ``asked``: only events strictly before it on the ``clock``.
        """
        known = user >= 0
        first, end = (np.where(known, self.first[user + after], 0) for after in (0, 1))
        if clock is not None and asked is not None:
            end = _before(clock, first, end, asked)
        begin = np.maximum(first, end - count)
        empty = begin == end
        return np.where(empty, 0, begin), np.where(empty, 0, end)


@dataclass(frozen=True)
class Events:
    """An encoded log, a timeline per field group, because some hold the chosen items and others those that were not.

    ``users``: raw ids, in the order of their numbers; ``newest``: the largest time, or None; ``unknown``: events of
    items that have the reserved id.
    """

    users: Index
    groups: Sequence[Timeline]
    newest: int | None
    unknown: int

    @property
    def ordered(self) -> bool:
        """Whether the log has a column of the order."""
        return any(group.order is not None for group in self.groups)


def timelines(
    users: int,
    user: Codes,
    ids: Mapping[str, Codes],
    time: Ints | None,
    order: Ints | None,
    tie: Codes | None,
    listed: Sequence[npt.NDArray[np.bool_] | None],
) -> list[Timeline]:
    """Sort a log by user, then order, time and ``tie``, as far as it has them; else later rows are later.

    Args:
        users: how many there are.
        user, time, order, tie: of all events (E,); ids: target field -> (E,).
        listed: per field group, which events belong to it (E,), or None for all.
    """
    clocks = [clock for clock in (time, order) if clock is not None]
    by = [clock for clock in (tie, *clocks) if clock is not None] if clocks else []
    sort = np.lexsort([*by, user])
    return [
        _timeline(users, sort if chosen is None else sort[chosen[sort]], user, ids, time, order) for chosen in listed
    ]


def _timeline(
    users: int, rows: Ints, user: Codes, ids: Mapping[str, Codes], time: Ints | None, order: Ints | None
) -> Timeline:
    owner = user[rows]
    time, order = (None if clock is None else clock[rows] for clock in (time, order))
    by_time = time
    if time is not None and order is not None:
        ticks, place = np.unique(time, return_inverse=True)
        newest: Ints = np.maximum.accumulate(owner.astype(np.int64) * len(ticks) + place)
        by_time = ticks[newest % max(1, len(ticks))]
    first = np.searchsorted(owner, np.arange(users + 1))
    return Timeline(first, {name: of_field[rows] for name, of_field in ids.items()}, time, by_time, order)


def _before(clock: Ints, first: Ints, last: Ints, asked: Ints) -> Ints:
    """(n,) the first place in ``first:last`` at which the rising ``clock`` has reached ``asked``, else ``last``."""
    low, high = first, last
    while (open_ := low < high).any():
        middle = (low + high) // 2
        earlier = open_ & (clock[np.where(open_, middle, 0)] < asked)
        low, high = np.where(earlier, middle + 1, low), np.where(open_ & ~earlier, middle, high)
    return low
