"""Ids of a table: by frequency, 0 for padding, one more than the known for everything else."""

from __future__ import annotations

import numpy as np
import polars as pl

from ctr_pe.data.id_map import Vocabulary


def test_numbers_go_by_falling_count_and_ties_by_number() -> None:
    counts = np.array([2, 0, 5, 2, 0, 1])
    vocabulary = Vocabulary.by_frequency(counts)
    assert list(vocabulary.originals) == [2, 0, 3, 5]
    assert (len(vocabulary), vocabulary.unseen) == (4, 5)
    assert vocabulary.table(6).tolist() == [2, 5, 1, 3, 5, 4]


def test_what_else_is_known_comes_last() -> None:
    vocabulary = Vocabulary.by_frequency(np.array([0, 3]), more=np.array([4, 1, 2]))
    assert list(vocabulary.originals) == [1, 2, 4]
    assert Vocabulary.by_frequency(np.zeros(2, np.int64)).table(2).tolist() == [1, 1]


def test_the_type_of_a_table_is_the_smallest_that_holds_its_ids() -> None:
    for known, dtype in ((254, np.uint8), (255, np.uint16)):
        assert Vocabulary.by_frequency(np.ones(known, np.int64)).table(known).dtype == dtype


def test_texts_have_the_same_ids() -> None:
    frame = pl.DataFrame({"text": ["b", "a", "z", None, ""]})
    assert frame.select(Vocabulary(["a", "b"]).ids(pl.col("text")))["text"].to_list() == [2, 1, 3, 3, 3]
