"""The declaration of columns: words and mappings mean the same, a mistake is one line with the nearest word."""

from __future__ import annotations

from typing import Any

import pytest

from ctr_pe.config.columns import declared
from ctr_pe.utils.errors import UserError


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("event", {"source": "event"}),
        ("context", {"source": "event"}),
        ("item, sequence, splitter=;", {"source": "item", "type": "sequence", "splitter": ";"}),
        ("event,numeric,afterwards,num_buckets=7",
         {"source": "event", "type": "numeric", "known": "afterwards", "num_buckets": 7}),
        ("user,hash_buckets=100", {"source": "user", "hash_buckets": 100}),
    ],
)  # fmt: skip
def test_words_stand_for_keys(words: str, keys: dict[str, Any]) -> None:
    assert declared({"x": words}) == declared({"x": keys})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("evnt", "columns: x: 'evnt' is no word of a column: did you mean 'event'?"),
        ("numeric", "columns: x: 'source' is missing"),
        ("user, afterwards", "a column of the user is not known: afterwards"),
        ("item, numeric, splitter=;", "'splitter' belongs to type sequence, not to numeric"),
        ("item, bucket=3", "key 'bucket' is unknown"),
        ({"source": "item", "num_buckets": 0, "type": "numeric"}, "'num_buckets'"),
        (3, "columns: x"),
    ],
)
def test_a_mistake_is_named(given: Any, message: str) -> None:
    with pytest.raises(UserError, match="columns: x: ") as found:
        declared({"x": given})
    assert message in str(found.value)
    assert "\n" not in str(found.value)
