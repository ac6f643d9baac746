"""Requests in ids; a training row is a request with a label.

Legend: n requests, E events of all histories, B rows of a batch, N items of a batch's histories.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ctr_pe.data.id_map import Ints
from ctr_pe.data.logs.clock import SECOND
from ctr_pe.data.timeline import Codes

if TYPE_CHECKING:
    from torch import Tensor

    from ctr_pe.sequence.batch import JaggedBatch

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class RequestHistories:
    """Histories of n requests: that of request i is ``begin[i]:end[i]`` of the flat columns, oldest first.

    ``ids``: history field -> (E,). Of ``time`` (E,), in nanoseconds, and ``age`` (E,), in whole seconds, one
    or, where no encoding needs ages, none.
    """

    ids: Mapping[str, Codes]
    begin: Ints
    end: Ints
    age_field: str | None = None
    time: Ints | None = None
    age: Ints | None = None

    def gather(self, rows: Ints, now: Ints | None) -> tuple[Ints, dict[str, Array]]:
        """Lengths (B,) of the histories of these requests, and the values (N,) of their fields, ages last."""
        begin, lengths = self.begin[rows], self.end[rows] - self.begin[rows]
        total = int(lengths.sum())
        source = np.arange(total) + np.repeat(begin - (np.cumsum(lengths) - lengths), lengths)
        values = {name: ids[source] for name, ids in self.ids.items()}
        if self.age_field is not None:
            if self.age is not None:
                values[self.age_field] = self.age[source]
            elif self.time is not None and now is not None:
                values[self.age_field] = (np.repeat(now[rows], lengths) - self.time[source]) // SECOND
            else:
                values[self.age_field] = np.zeros(total, np.int64)
        return lengths, values


@dataclass(frozen=True, eq=False)
class EncodedRequests:
    """n requests as a model takes them.

    ``scalars``: field -> (n,); ``lists``: per field group, then pooled sequences; ``now`` (n,) in nanoseconds;
    ``counts``: what was looked up, and of it unknown.
    """

    rows: int
    scalars: Mapping[str, Array]
    lists: Sequence[RequestHistories]
    now: Ints | None
    counts: Counter[str]

    @classmethod
    def joined(cls, parts: Sequence[EncodedRequests]) -> EncodedRequests:
        """One after the other, requests of one encoder whose histories have ages (``now`` is None)."""
        if len(parts) == 1:
            return parts[0]
        lists = []
        for group in zip(*(part.lists for part in parts), strict=True):
            events = [len(next(iter(one.ids.values()))) for one in group]
            start = np.cumsum([0, *events[:-1]])
            aged = [np.zeros(n, np.int64) if one.age is None else one.age for one, n in zip(group, events, strict=True)]
            ends = ([at + first for at, first in zip(side, start, strict=True)]
                    for side in ([one.begin for one in group], [one.end for one in group]))  # fmt: skip
            begin, end = map(np.concatenate, ends)
            ids = {name: np.concatenate([one.ids[name] for one in group]) for name in group[0].ids}
            lists.append(RequestHistories(ids, begin, end, group[0].age_field, age=np.concatenate(aged)))
        scalars = {name: np.concatenate([part.scalars[name] for part in parts]) for name in parts[0].scalars}
        counts = sum((part.counts for part in parts), Counter[str]())
        return cls(sum(part.rows for part in parts), scalars, lists, None, counts)

    def alone(self) -> EncodedRequests:
        """With the events that the requests see and no others, and ages in place of times."""
        lists = []
        for one in self.lists:
            lengths, values = one.gather(np.arange(self.rows), self.now)
            age, end = values.pop(one.age_field or "", None), np.cumsum(lengths)
            lists.append(RequestHistories(values, end - lengths, end, one.age_field, age=age))
        return replace(self, lists=lists, now=None)

    def batch(self, rows: Ints) -> JaggedBatch:
        """The requests of these numbers (B,)."""
        return replace(self.histories(rows), rows=self.fields(rows))

    def fields(self, rows: Ints) -> dict[str, Tensor]:
        """All but the histories, in the shape of ``rows``."""
        import torch

        return {name: torch.from_numpy(values[rows]) for name, values in self.scalars.items()}

    def histories(self, rows: Ints) -> JaggedBatch:
        """Histories and ages of these requests (B,)."""
        import torch

        from ctr_pe.sequence.batch import JaggedBatch

        batch = JaggedBatch({}, {}, {})
        for lists in self.lists:
            lengths, values = lists.gather(rows, self.now)
            batch.histories.update({name: torch.from_numpy(one.astype(np.int64)) for name, one in values.items()})
            batch.lengths.update(dict.fromkeys(values, torch.from_numpy(lengths)))
        return batch

    def batches(self, rows: Ints, size: int, items: int) -> list[Ints]:
        """``rows`` (n,) in parts of ``size`` at most, each with about ``items`` of their histories at most, so that
        none takes much more memory than the others."""
        length = np.zeros(len(rows), np.int64)
        for lists in self.lists:
            length += lists.end[rows] - lists.begin[rows]
        part = np.maximum(np.arange(len(rows)) // size, np.cumsum(length) // items)
        return np.split(rows, np.flatnonzero(np.diff(part)) + 1) if len(rows) else []

    def tiles(self, ages: bool, size: int, least: int) -> tuple[list[Ints], Ints]:
        """The numbers of requests whose history ``least`` or more of them share, in tiles (H, K) of about ``size``: a
        history per row, its K requests in the columns. And the numbers of all other requests (n,).

        A row with fewer requests than its tile has columns repeats the last one. Requests share a history if they see
        the same events, with ``ages`` at the same time.
        """
        seen = [end for lists in self.lists for end in (lists.begin, lists.end)]
        if ages and self.now is not None:
            seen.append(self.now)
        if not self.rows or not seen:
            return [], np.arange(self.rows)
        order = np.lexsort(seen)
        new = np.ones(self.rows, bool)
        new[1:] = np.logical_or.reduce([values[order[1:]] != values[order[:-1]] for values in seen])
        first = np.flatnonzero(new)
        count = np.diff(np.append(first, self.rows))
        alone = order[np.repeat(count < least, count)]
        largest = np.argsort(-count, kind="stable")[: np.count_nonzero(count >= least)]
        first, count = first[largest], count[largest]
        tiles, start = [], 0
        while start < len(first):
            width = int(count[start])
            end = start + int((2 * count[start : start + max(1, size // width)] > width).sum())  # half is no repetition
            tiles.append(order[first[start:end, None] + np.minimum(np.arange(width), count[start:end, None] - 1)])
            start = end
        return tiles, alone
