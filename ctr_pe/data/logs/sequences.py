"""Which events of a log are rows of a next-item data set: protocols ``leave-one-out`` and ``temporal``.

A row is an event and the events of its user before it. One row for training has several answers: the item after each of
its history's items, the last of which is its target. So the rows of a user are windows of ``max_len`` items over the
training events, which overlap by the item that one begins and the other ends with: every training event but the user's
first is an answer once.

Ties in time are broken as :mod:`ctr_pe.data.timeline` sorts: by item. E events, sorted by user, then time.
"""

from __future__ import annotations

import numpy as np

from ctr_pe.data.id_map import Ints
from ctr_pe.data.timeline import Codes


def leave_one_out(user: Ints) -> Codes:
    """(E,) index into SPLITS: a user's last event is test, the one before it valid, the others train."""
    later = np.searchsorted(user, user, side="right") - 1 - np.arange(len(user))
    split: Codes = np.array([2, 1, 0], np.uint8)[np.minimum(later, 2)]
    return split


def sequence_rows(user: Ints, split: Codes, max_len: int, every_window: bool = True) -> Ints:
    """The events that are the targets of rows, in their order; a user's first event is none.

    ``split`` (E,): does not fall along the events of a user. Every event of valid and test is a row of its own, whose
    history has the valid and test events before it (successive evaluation). ``every_window``: windows over all training
    events, or the newest alone.
    """
    place = np.arange(len(user))
    last = np.searchsorted(user + split / 3, user, side="right") - 1  # training event of the user, if there is one
    back = np.where(split == 0, last - place, 0)
    wanted = (back % max_len == 0) if every_window else (back == 0)
    is_first = np.append(True, user[1:] != user[:-1])[: len(user)]
    return np.flatnonzero(wanted & ~is_first)
