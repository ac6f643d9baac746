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
        ("item, numeric, splitter=;", "'splitter' belongs to type sequence or embedding, not to numeric"),
        ("item, bucket=3", "key 'bucket' is unknown"),
        ({"source": "item", "num_buckets": 0, "type": "numeric"}, "'num_buckets'"),
        (3, "columns: x"),
        ("user, embedding", "an embedding is a vector of an item"),
        ("event, numeric, afterwards, normalizer=MinMaxScaler", "enters histories, in buckets: leave 'normalizer' out"),
        ("item, numeric, normalizer=MinMaxScaler", "a number of the item enters histories"),
        ("user, numeric, normalizer=MinMaxScaler, num_buckets=3", "'normalizer' leaves no choice of 'num_buckets'"),
        ("user, share=x, hash_buckets=3", "'share_embedding' leaves no choice of 'hash_buckets'"),
        ("user, numeric, normalizer=Robust", "'normalizer'"),
        ("user, freeze_emb=false", "'freeze_emb' belongs to type embedding"),
    ],
)
def test_a_mistake_is_named(given: Any, message: str) -> None:
    with pytest.raises(UserError, match="columns: x: ") as found:
        declared({"x": given})
    assert message in str(found.value)
    assert "\n" not in str(found.value)
