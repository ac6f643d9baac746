"""Several categories of one field as one vector."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest
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


@pytest.mark.slow
def test_the_mean_of_no_category_is_zeros_in_an_exported_file_too(tmp_path: Path) -> None:
    """ONNX's optimiser took the small number that kept the division from 0 / 0 for 0."""
    embedded = torch.randn(3, 4, 5)
    embedded[0] = 0
    made = torch.onnx.export(Pooling(mean=True).eval(), (embedded,), dynamo=True, verbose=False, optimize=True)
    assert made is not None
    made.save(str(tmp_path / "mean.onnx"))
    session = onnxruntime.InferenceSession(str(tmp_path / "mean.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: embedded.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), Pooling(mean=True)(embedded))
