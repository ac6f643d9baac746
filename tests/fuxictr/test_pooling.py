"""Several categories of one field as one vector."""

from __future__ import annotations

import torch

from ctr_pe.fuxictr.pooling import AttentionPooling, Pooling


def test_attention_begins_as_the_mean_and_never_reads_padding() -> None:
    embedded = torch.randn(3, 2, 4, 5)
    embedded[0, 0, 2:], embedded[1, 1] = 0, 0
    pooled = AttentionPooling(5)
    torch.testing.assert_close(pooled(embedded), Pooling(mean=True)(embedded))
    with torch.no_grad():
        pooled.query.copy_(torch.randn(5))
    weights = (embedded[0, 0, :2] @ pooled.query).softmax(0)
    torch.testing.assert_close(pooled(embedded)[0, 0], weights @ embedded[0, 0, :2])
    assert not pooled(embedded)[1, 1].any()
